"""The sections of the page that list every trial: one with its results, one with hpo's internal records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from markupsafe import Markup
from optuna.trial import FrozenTrial

from hpo.report.data import StudyReport
from hpo.report.drawable import drawn_text
from hpo.report.figures import curve_points, is_curve_logarithmic
from hpo.report.looks import FEW, sampled
from hpo.report.markup import HEIGHT, Section, comparison, grid, note, trial_table, unfolding
from hpo.report.timeline import Work
from hpo.storage.attributes import BEST_ATTR, PREDICTION_ATTR, RUN_ATTR
from hpo.storage.lineage import epochs_reached
from hpo.study.internals import parted
from hpo.study.outcome import Outcome, outcome_of
from hpo.study.ranking import best_reported
from hpo.wording import count_of, shown

#: How many trials are compared when the page is opened.
_SIDE_BY_SIDE: Final = 2


def trials_section(report: StudyReport) -> Section:
    """A table of all trials, which the page can sort and filter, and a comparison of the ticked ones."""
    title = "All trials" if len(report.sample) == len(report.trials) else "Trials"
    if not report.trials:
        return Section("trials", title, note("There is no trial yet."))
    params = _names(trial.params for trial in report.sample)
    metrics = [
        name for name in _names(_asked(report, trial) for trial in report.sample) if name not in report.goals
    ]
    columns = ["trial", "outcome", *report.goals, *params, *metrics, "epochs", "seconds"]
    chosen = {trial.number for trial in report.leaders[:_SIDE_BY_SIDE]}
    rows = [
        (trial.number, trial.number in chosen, _cells(report, trial, params, metrics))
        for trial in report.best_first(report.sample)
    ]
    remark = note(" ".join(_remarks(report, params)))
    return Section("trials", title, trial_table(columns, rows) + remark + _comparison(report))


def _cells(report: StudyReport, trial: FrozenTrial, params: Sequence[str], metrics: Sequence[str]) -> list[Any]:
    asked = _asked(report, trial)
    return [
        trial.number,
        outcome_of(trial).replace("_", " "),
        *_values(report, trial),
        *(trial.params.get(name, "") for name in params),
        *(_finite(asked.get(name)) for name in metrics),
        epochs_reached(trial) or "",
        "" if (took := report.took(trial)) is None else round(took, 1),
    ]


def _values(report: StudyReport, trial: FrozenTrial) -> list[Any]:
    """A trial's values by goal: if it is not complete, the best value so far; empty without one."""
    if outcome_of(trial) == Outcome.COMPLETE:  # Optuna's value of a pruned trial is its last one
        return [_finite(value) for value in trial.values]
    return [_finite(best_reported(trial, report.direction)), *[""] * (len(report.goals) - 1)]


def _finite(value: float | None) -> Any:
    return value if value is not None and math.isfinite(value) else ""


def _asked(report: StudyReport, trial: FrozenTrial) -> Mapping[str, Any]:
    return parted(_kept(trial), report.wanted)[0]


def _kept(trial: FrozenTrial) -> Mapping[str, Any]:
    """The metrics of a trial's best epoch."""
    found: Mapping[str, Any] = (trial.user_attrs.get(BEST_ATTR) or {}).get("metrics", {})
    return found


def _names(of: Any) -> list[str]:
    return list(dict.fromkeys(name for each in of for name in each))


def _remarks(report: StudyReport, params: Sequence[str]) -> list[str]:
    remarks = ["The best trials come first."]
    if any(outcome_of(trial) != "complete" and trial.intermediate_values for trial in report.sample):
        remarks.append(f"A trial that is not complete is shown with its best {report.metric} so far.")
    some = [name for name in params if any(name not in trial.params for trial in report.sample)]
    if some:
        remarks.append(f"Not every trial has {', '.join(some)}: its cell is empty.")
    if len(report.sample) < len(report.trials):
        remarks.append(sampled(report.sample, report.trials, done="listed").strip())
        remarks.append("`hpo trials` lists all, and `hpo export` writes them to a table.")
    return remarks


def _comparison(report: StudyReport) -> Markup:
    """The comparison of trials, with the data of the curves that the figure of all curves leaves out."""
    curves = [trial for trial in report.sample if trial.intermediate_values]
    if not curves:
        return comparison(None, None, HEIGHT)
    kind = "log" if is_curve_logarithmic(curves, report.direction) else "linear"
    axes = {"x": "epoch", "y": drawn_text(report.metric), "type": kind, "few": FEW}
    drawn = {trial.number for trial in report.drawn_curves}
    left = [trial for trial in curves if trial.number not in drawn]
    return comparison(axes, _columns(left) if left else None, HEIGHT)


def _columns(trials: Sequence[FrozenTrial]) -> dict[str, list[Any]]:
    """Curves as data for figures: one column each for epochs, values and trials."""
    found: dict[str, list[Any]] = {"x": [], "y": [], "customdata": []}
    for trial in trials:
        for epoch, value in curve_points(trial.intermediate_values):
            found["x"].append(epoch)
            found["y"].append(value)
            found["customdata"].append(trial.number)
    return found


def internals_section(report: StudyReport) -> Section:
    """hpo's internal records of each trial."""
    title = "Kept of each trial"
    if not report.trials:
        return Section("internals", title, note("There is no trial yet."))
    metrics = _names(parted(_kept(trial), report.wanted)[1] for trial in report.sample)
    header = ["trial", "attempts", "worker", "device", "seed", "threads", "first predicted", "at epoch", *metrics]
    rows = [_internal_cells(trial, report.work_at.get(trial.number, []), metrics) for trial in report.sample]
    table = unfolding(count_of(len(rows), "trial"), grid(title, header, rows))
    remark = "Attempts, what ran the last one, and what the default callbacks recorded at the best epoch."
    remark += sampled(report.sample, report.trials, done="listed")
    return Section("internals", title, table + note(remark))


def _internal_cells(trial: FrozenTrial, work: Sequence[Work], metrics: Sequence[str]) -> list[Any]:
    run = trial.user_attrs.get(RUN_ATTR) or {}
    prediction = trial.user_attrs.get(PREDICTION_ATTR) or {}
    kept = _kept(trial)
    last = max(work, key=lambda each: each.attempt, default=None)
    return [
        trial.number,
        len(work),
        "" if last is None else last.worker,
        "" if last is None else last.device,
        run.get("seed", ""),
        run.get("threads", ""),
        shown(prediction["predicted_final_loss"]) if prediction else "",
        prediction.get("epoch", ""),
        *(_finite(kept.get(name)) for name in metrics),
    ]
