"""Writes the page's sections on how the study ran: predictions, pruning, grants, time, environment, code."""

from __future__ import annotations

from typing import Any, Final

from markupsafe import Markup
from optuna.trial import FrozenTrial

from hpo.config.yaml_dumper import to_yaml
from hpo.report.data import MOST_TRIALS, StudyReport
from hpo.report.figures import predictions_against_outcomes, work_by_worker
from hpo.report.grants import story
from hpo.report.looks import sampled
from hpo.report.markup import (
    Section,
    figure,
    folded,
    grid,
    joined,
    note,
    steps,
    subsection,
    table,
    unfolding,
)
from hpo.search.predicted_loss.audit import Condemned
from hpo.storage.attributes import PREDICTION_ATTR, RUN_ATTR
from hpo.study.outcome import outcome_of
from hpo.study.ranking import best_reported
from hpo.wording import condemned, count_of, duration, listed, percent, shown

_LANE_HEIGHT: Final = 30


def prediction_section(report: StudyReport) -> Section:
    """Predicted final losses against the real ones."""
    title, found = "Prediction against outcome", report.predictions
    if found.mean_absolute_error is None or found.inside_80 is None:
        why = "No trial for which a final loss was predicted has run to its end yet."
        return Section("prediction", title, note(why))
    metrics = {trial.user_attrs.get(PREDICTION_ATTR, {}).get("metric") for trial in report.trials}
    of = ", ".join(sorted(str(metric) for metric in metrics if metric))
    rows = [
        ("predicted metric", of),
        ("trials compared", found.compared),
        ("mean absolute error", shown(found.mean_absolute_error)),
        ("outcomes inside the 80 % interval", percent(found.inside_80)),
    ]
    every = -(-len(report.compared) // MOST_TRIALS)
    kept = report.compared[::every]
    remark = (
        "Each trial's first prediction against its final value; the bars are the prediction's 80 % interval. "
        "Trials that were pruned or stopped early have no final value and are left out, so those shown are the "
        "more promising ones."
    )
    if every > 1:
        remark += f" Of {len(report.compared)} trials {len(kept)} are drawn, an even sample."
    drawn = figure("predictions", predictions_against_outcomes(kept), f"predicted and final {of}")
    return Section("prediction", title, table(rows) + drawn + note(remark))


def pruning_section(report: StudyReport) -> Section:
    """The epochs that pruning saved, and the results of the audit."""
    found = report.status["pruning"]
    rows: list[tuple[str, Any]] = [
        ("trials pruned", f"{found['pruned']} of {found['ended']} ended"),
        ("epochs of trials that ended", found["epochs_used"]),
    ]
    if found["epochs_unpruned"]:
        share = percent(found["epochs_saved"] / found["epochs_unpruned"])
        of = f"{found['epochs_saved']} of {found['epochs_unpruned']} ({share})"
        rows += [("epochs of an unpruned trial", found["horizon"]), ("epochs saved, at most", of)]
    if found["alpha"] is not None:
        rows.append(("alpha in force at the last decision", f"{found['alpha']:.2g}"))
    if not found["audited"] and report.scheduler:  # it replaces the pruner, and only a pruner has audits
        return Section("pruning", "What pruning saved", table(rows))
    if not found["audited"]:
        rows.append(("false-prune rate", "not measured: no audited trial has ended"))
        return Section("pruning", "What pruning saved", table(rows) + note(_NO_AUDIT))
    best = "the best" if found["top_k"] == 1 else f"among the best {found['top_k']}"
    low, high = found["false_prune_interval"]
    rate = f"{percent(found['false_prune_rate'])}, 95 % interval {percent(low)} to {percent(high)}"
    rows += [
        ("audited trials that ended", found["audited"]),
        (f"of them {best} of all", found["wrongly_condemned"]),
        ("false-prune rate", rate),
        ("epochs that the audit cost", found["audit_epochs"]),
    ]
    return Section("pruning", "What pruning saved", table(rows) + _audit_runs(report) + note(_AUDIT))


def _audit_runs(report: StudyReport) -> Markup:
    """Each trial that was kept as an audit run: the pruner's decision, and how the trial ended."""
    decisions = ((trial, Condemned.of(trial)) for trial in report.trials)
    runs = [
        (f"trial {trial.number}", f"{condemned(**decision.stored())}; {outcome_of(trial)}{_ended_at(trial)}")
        for trial, decision in decisions
        if decision is not None and decision.runs_on
    ]
    return unfolding(count_of(len(runs), "audit run"), table(runs))


def _ended_at(trial: FrozenTrial) -> str:
    return f" at {shown(trial.values[0])}" if trial.values else ""


_NO_AUDIT: Final = (
    "With `study.pruner.audit_fraction=0.03` the pruner `predicted_loss` lets a share of the trials that it would "
    "prune run to their end, to measure how often pruning is wrong."
)

_AUDIT: Final = (
    "Audited trials are trials that the pruner would have pruned, but let run to their end to measure how often "
    "pruning is wrong. Pruning one would have been wrong if it is complete and among the best of all complete "
    "trials; a diverged trial never is. The pruner's `alpha` falls if audited trials end well, and rises if not. "
    "The interval is Wilson's."
)


def grants_section(report: StudyReport) -> Section | None:
    """The scheduler's grants and their reasons; None without a scheduler."""
    if not report.grants:
        return None
    by_kind = [(each.kind, each.grants, each.epochs) for each in report.grants]
    first = joined(subsection(_one(trial, report), _story(trial, report)) for trial in report.leaders)
    every = joined(unfolding(_one(trial, report), _story(trial, report)) for trial in report.sample)
    others = unfolding(count_of(len(report.sample), "trial"), every)
    drawn = grid("Grants by kind", ("kind", "grants", "epochs trained"), by_kind)
    remark = _GRANTS + sampled(report.sample, report.trials, done="listed")
    return Section("grants", "Why each trial trained", drawn + first + others + note(remark))


def _story(trial: FrozenTrial, report: StudyReport) -> Markup:
    return steps(story(trial, report.forks.get(trial.number)))


def _one(trial: FrozenTrial, report: StudyReport) -> str:
    """A trial on one line: its best value, and how long it trained."""
    best = best_reported(trial, report.direction)
    value = "no value" if best is None else f"{report.metric} {shown(best)}"
    return f"Trial {trial.number}: {value}, {count_of(trial.last_step or 0, 'epoch')}"


_GRANTS: Final = (
    "A grant lets a trial train up to an epoch, where it pauses unless it gets another grant. If a model decided, "
    "its prediction of the trial's final value is shown, with its 80 % interval; `best` is the study's best value "
    "at that time."
)


def time_section(report: StudyReport) -> Section:
    """Which worker worked when, and how busy the workers were."""
    title, timeline = "Time and device use", report.timeline
    if timeline.busy_share is None:
        why = "The first trial has only just begun." if timeline.lanes else "No worker has taken a trial yet."
        return Section("time", title, note(why))
    totals = timeline.totals()
    by_outcome = sorted(totals["seconds_by_outcome"].items(), key=lambda pair: -pair[1])
    rows = [
        ("the study ran", duration(timeline.seconds)),
        ("work of all workers", duration(timeline.worked)),
        ("busy share", percent(timeline.busy_share)),
        (
            "work by outcome",
            ", ".join(f"{name.replace('_', ' ')} {duration(spent)}" for name, spent in by_outcome),
        ),
    ]
    if timeline.pauses:
        rows.append(("pauses, not drawn", duration(timeline.pauses)))
    height = min(900, 150 + _LANE_HEIGHT * len(timeline.lanes))
    latest = timeline.latest(MOST_TRIALS)
    drawn = figure("timeline", work_by_worker(latest), "attempts at trials by worker", height=height)
    lanes = [
        (lane["worker"], lane["attempts"], duration(lane["seconds"]), percent(lane["busy_share"]))
        for lane in totals["workers"]
    ]
    remark = (
        "Each bar is one attempt at a trial. A worker is busy while it has a trial. The busy share is of the time "
        "from the first trial to the last, without pauses of the whole study."
    )
    if totals["attempts"] > MOST_TRIALS:
        remark += f" Of {totals['attempts']} attempts the latest {MOST_TRIALS} are drawn."
    by_worker = grid("Work by worker", ("worker", "attempts", "at work", "busy"), lanes)
    return Section("time", title, table(rows) + drawn + note(remark) + by_worker)


def environment_section(report: StudyReport) -> Section:
    """The study's environment: machine and packages."""
    stored = {name: value for name, value in (report.environment or {}).items() if value not in (None, [], {})}
    rows = [(name, _plain(value)) for name, value in stored.items()]
    hosts = sorted({each.host for each in report.work})
    devices = sorted({each.device for each in report.work})
    runs = (trial.user_attrs.get(RUN_ATTR) or {} for trial in report.trials)
    threads = sorted({run["threads"] for run in runs if "threads" in run})
    seen = (("machines", hosts), ("devices", devices), ("threads of a worker", threads))
    rows += [(name, ", ".join(map(str, found))) for name, found in seen if found]
    if not rows:
        return Section("environment", "Environment", note("Nothing is known before the first trial."))
    if not stored:
        return Section(
            "environment",
            "Environment",
            table(rows) + note("Taken from the trials: no versions are stored."),
        )
    return Section(
        "environment",
        "Environment",
        table(rows) + note("Versions are those of the machine where the study was created."),
    )


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def code_section(report: StudyReport) -> Section:
    """The study's code by hash, and which trials ran under which."""
    title, code = "Code", report.status["code"]
    if not code["versions"]:
        return Section("code", title, note("No code is stored with the study."))
    rows = [
        (
            each["hash"],
            each["since"],
            "; ".join(each["changed"]) or "at the start",
            "all" if each["trials"] is None else listed(each["trials"]) or "none",
        )
        for each in code["versions"]
    ]
    drawn = grid("The study's code", ("code", "since", "what changed", "trials with only this code"), rows)
    remark = Markup()
    if code["mixed_trials"]:
        remark = note(f"Trials that ran under more than one version of the code: {listed(code['mixed_trials'])}.")
    return Section("code", title, drawn + remark)


def config_section(report: StudyReport) -> Section:
    """The study file that the study was started with, with defaults filled in."""
    shown_as = "The config with its defaults, as YAML"
    return Section("config", "Study file", folded(shown_as, to_yaml(report.config)))
