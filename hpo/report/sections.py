"""The parts of the page that show a study's results; each takes the report and returns its HTML."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

import plotly.graph_objects as go
from markupsafe import Markup
from optuna.trial import FrozenTrial

from hpo.config.yaml_dumper import to_yaml
from hpo.report.data import MOST_TRIALS, StudyReport
from hpo.report.figures import (
    MOST_POINTS,
    history,
    learning_curves,
    predictions_against_outcomes,
    work_by_worker,
)
from hpo.report.grants import story
from hpo.report.looks import sampled
from hpo.report.markup import (
    Section,
    figure,
    folded,
    grid,
    joined,
    note,
    part,
    points,
    steps,
    table,
    unfolding,
    worth_a_look,
)
from hpo.report.snapshot import LARGEST_DRAWN
from hpo.search.auto_sampler import ChosenSampler
from hpo.search.predicted_loss.audit import Condemned
from hpo.storage.attributes import PREDICTION_ATTR, RUN_ATTR
from hpo.study.outcome import UNFINISHED, outcome_of
from hpo.study.ranking import is_feasible, is_outside
from hpo.study.thinning import evenly
from hpo.study.widened import said
from hpo.wording import condemned, count_of, duration, listed, percent, shown, study_progress

_LANE_HEIGHT: Final = 30


def overview(report: StudyReport) -> Markup:
    """The study: what it is after, how far it is, and the best trial with its parameters."""
    status = report.status
    ends = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in status["outcomes"].items() if count)
    goals = "; ".join(f"{metric}, {direction}" for metric, direction in report.goals.items())
    done, of, unit = study_progress(status)
    trials = f"{status['finished']} finished" if unit == "epochs" else f"{done} of {of} finished"
    rows = [
        ("objectives" if report.several else "metric", goals),
        *((f"bound on {metric}", bound) for metric, bound in report.bounds.items()),
        *([("epochs", f"{done} of {of}")] if unit == "epochs" else []),
        ("trials", trials + (f": {ends}" if ends else "")),
        *((name, status[name]) for name in UNFINISHED if status[name]),
        ("sampler", str(ChosenSampler(**status["sampler"]))),
        *(("search space", said(entry)) for entry in report.widened),
        *_best_rows(report),
    ]
    made = f"As of {report.made:%Y-%m-%d %H:%M} UTC"
    if report.too_large:
        made += f". Values beyond ±{LARGEST_DRAWN:g} are drawn at ±{LARGEST_DRAWN:g}."
    return table(rows) + _worth_a_look(report) + note(made)


def _best_rows(report: StudyReport) -> list[tuple[str, Any]]:
    if not report.best:
        if report.complete:
            return [("best", "no complete trial meets the constraints")]
        outside = any(map(is_outside, report.trials))
        return [("best", "no trial meets the constraints" if outside else "no complete trial yet")]
    if report.several:
        return [("best", f"{count_of(len(report.best), 'trial')} on the Pareto front")]
    best = report.best[0]
    return [("best", f"trial {best.number}, {shown(best.values[0])}"), *best.params.items()]


def _worth_a_look(report: StudyReport) -> Markup:
    """Links to what people should know of."""
    edges, failed = len(report.edges), sum(len(each.trials) for each in report.causes if each.is_end)
    links = []
    if edges:
        links.append(("edges", f"{count_of(edges, 'parameter')} at the edge of the range"))
    if failed:
        links.append(("failures", count_of(failed, "failure")))
    return worth_a_look(links) if links else Markup()


def history_section(report: StudyReport) -> Section:
    """The best value so far, by objective, and the best trials."""
    title = "Values by trial" if report.several else "Best value so far"
    kept = report.complete_sample
    if not kept:
        return Section("history", title, note("No trial is complete yet.") + _leaders(report))
    drawn = by_metric(
        (
            metric,
            figure(f"history-{place}", history(report.escaped, kept, report.goals, metric), f"{metric} by trial"),
        )
        for place, metric in enumerate(report.goals)
    )
    remark = "Complete trials by number; one that diverged has no value."
    if any(not is_feasible(trial) for trial in kept):
        remark += " Diamonds are trials outside the bounds, which are never the best."
    remark += sampled(kept, report.complete)
    return Section("history", title, drawn + note(remark) + _leaders(report))


def _leaders(report: StudyReport) -> Markup:
    """The best trials in a table; of a large front some."""
    kept = evenly(report.leaders[::-1], MOST_TRIALS)[::-1]  # so that the first, the best, is always there
    if not kept:
        return Markup()
    names = list(dict.fromkeys(name for trial in kept for name in trial.params))
    rows = [[trial.number, *trial.values, *(trial.params.get(name, "") for name in names)] for trial in kept]
    title = "The Pareto front" if report.several else "The best trials"
    made = grid(title, ["trial", *report.goals, *names], rows)
    if len(kept) < len(report.leaders):
        made += note(f"Of {len(report.leaders)} trials on the front {len(kept)} are listed, an even sample.")
    return part(title, made)


def curves_section(report: StudyReport) -> Section:
    """Every trial's curve."""
    title = "Learning curves"
    curves = report.curves
    if not curves:
        why = "No trial has reported an epoch yet."
        if report.several and report.ranked:
            why = (
                "A study with several objectives stores no curves; `metrics.csv` in each trial's folder has them."
            )
        return Section("curves", title, note(why))
    kept = report.drawn_curves
    drawn_curves = learning_curves(kept, report.metric, report.direction, report.best)
    drawn = figure("curves", drawn_curves, f"{report.metric} by epoch")
    remark = "A mark shows where a curve ends; crosses are pruned trials, triangles diverged ones. "
    remark += "A click in the legend hides a kind of trial."
    remark += sampled(kept, curves, "curves")
    if max(len(trial.intermediate_values) for trial in kept) > MOST_POINTS:
        remark += " Of long curves some epochs are left out."
    return Section("curves", title, drawn + note(remark))


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
        "Each trial's first prediction and the value it ended with; the bars are the prediction's 80 % interval. "
        "Trials that were pruned or stopped early have no such end and are left out, so these are the more "
        "promising ones."
    )
    if every > 1:
        remark += f" Of {len(report.compared)} trials {len(kept)} are drawn, an even sample."
    drawn = figure("predictions", predictions_against_outcomes(kept), f"predicted and final {of}")
    return Section("prediction", title, table(rows) + drawn + note(remark))


def pruning_section(report: StudyReport) -> Section:
    """What pruning saved, and the audit's figures."""
    found = report.status["pruning"]
    rows: list[tuple[str, Any]] = [
        ("trials pruned", f"{found['pruned']} of {found['ended']} ended"),
        ("epochs used", found["epochs_used"]),
    ]
    if found["epochs_unpruned"]:
        share = percent(found["epochs_saved"] / found["epochs_unpruned"])
        of = f"{found['epochs_saved']} of {found['epochs_unpruned']} ({share})"
        rows += [("epochs of a whole trial", found["horizon"]), ("epochs saved, at most", of)]
    if found["alpha"] is not None:
        rows.append(("alpha in force at the last decision", f"{found['alpha']:.2g}"))
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
    """Each trial that ran on as an audit: the decision against it, and what it ended at."""
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
    "prune run on, and so measures how often it is wrong."
)
_AUDIT: Final = (
    "The pruner's `alpha` follows its audit: it falls where audited trials end well, and rises where they do not. "
    "Audited trials were to be pruned and ran on to measure. One was wrongly condemned if it is complete and "
    "among the best of all complete trials; a diverged trial never is. The interval is Wilson's."
)


def grants_section(report: StudyReport) -> Section | None:
    """What the scheduler granted, and why; nothing without one."""
    if not report.grants:
        return None
    by_kind = [(each.kind, each.grants, each.epochs) for each in report.grants]
    first = joined(part(_one(trial, report), _story(trial, report)) for trial in report.leaders)
    every = joined(unfolding(_one(trial, report), _story(trial, report)) for trial in report.sample)
    others = unfolding(count_of(len(report.sample), "trial"), every)
    drawn = grid("Grants by kind", ("kind", "grants", "epochs trained"), by_kind)
    remark = _GRANTS + sampled(report.sample, report.trials, done="listed")
    return Section("grants", "Why each trial trained", drawn + first + others + note(remark))


def _story(trial: FrozenTrial, report: StudyReport) -> Markup:
    return steps(story(trial, report.forks.get(trial.number)))


def _one(trial: FrozenTrial, report: StudyReport) -> str:
    """A trial in a line: its best value, and how long it trained."""
    finite = [value for value in trial.intermediate_values.values() if math.isfinite(value)]
    best = (min if report.direction == "minimize" else max)(finite, default=None)
    value = "no value" if best is None else f"{report.metric} {shown(best)}"
    return f"Trial {trial.number}: {value}, {count_of(trial.last_step or 0, 'epoch')}"


_GRANTS: Final = (
    "A grant lets a trial train up to an epoch, where it pauses unless it is granted more. Where a model decided, "
    "it says the value that it expected the trial to end at, with its 80 % interval; `best` is the study's best "
    "value at that moment."
)


def time_section(report: StudyReport) -> Section:
    """Who was at work when, and how busy the workers were."""
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
        "Each bar is an attempt at a trial. A worker is busy while it has a trial: the share counts from the "
        "first trial to the last, pauses of the whole study left out."
    )
    if totals["attempts"] > MOST_TRIALS:
        remark += f" Of {totals['attempts']} attempts the latest {MOST_TRIALS} are drawn."
    by_worker = grid("Work by worker", ("worker", "attempts", "at work", "busy"), lanes)
    return Section("time", title, table(rows) + drawn + note(remark) + by_worker)


def failure_section(report: StudyReport) -> Section:
    """What went wrong, equal causes together."""
    if not report.causes:
        return Section("failures", "Failures", note("None."))
    rows = [
        (each.outcome.replace("_", " "), len(each.trials), listed(each.trials), each.reason)
        for each in report.causes
    ]
    drawn = grid("Failures by cause", ("outcome", "count", "trials", "reason"), rows)
    traces = joined(
        folded(f"Traceback of trial {each.trials[0]}: {each.reason}", each.traceback)
        for each in report.causes
        if each.traceback
    )
    remark = "Reasons that differ in numbers only count as one. `hpo retry --failed` requeues failed trials."
    return Section("failures", "Failures", drawn + traces + note(remark))


def edge_section(report: StudyReport) -> Section:
    """Parameters whose best values lie at an end of their range."""
    title = "Parameters at the edge of their range"
    if not report.edges:
        enough = len(report.unrelated) > 1
        why = "None among the best trials." if enough else "It takes several complete trials to say."
        return Section("edges", title, note(why))
    remark = (
        "The outermost 5 % of a range count (of its logarithm, where it is searched so), or the last of its "
        "values. What is listed would come about by chance in at most 5 % of the cases."
    )
    if report.forks:
        remark += ONE_OF_FORKS
    return Section("edges", title, points(each.said for each in report.edges) + note(remark))


#: Where trials count that were drawn by themselves.
ONE_OF_FORKS: Final = " Of a trial and its forks the best one counts."


def environment_section(report: StudyReport) -> Section:
    """What the study runs on."""
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
            "environment", "Environment", table(rows) + note("From the trials; no versions are stored.")
        )
    return Section("environment", "Environment", table(rows) + note("As it was where the study was created."))


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
    drawn = grid("The study's code", ("code", "since", "what changed", "trials wholly under it"), rows)
    remark = Markup()
    if code["mixed_trials"]:
        remark = note(f"Trials that ran under more than one code: {listed(code['mixed_trials'])}.")
    return Section("code", title, drawn + remark)


def config_section(report: StudyReport) -> Section:
    """The study file as it was started with, defaults filled in."""
    shown_as = "The config with its defaults, as YAML"
    return Section("config", "Study file", folded(shown_as, to_yaml(report.config)))


def several_figures(name: str, drawn: Iterable[tuple[str, go.Figure]]) -> Markup:
    """A figure by metric; headed by it where there are several."""
    return by_metric(
        (metric, figure(f"{name}-{place}", each, f"{name} of {metric}"))
        for place, (metric, each) in enumerate(drawn)
    )


def by_metric(made: Iterable[tuple[str, Markup]]) -> Markup:
    """What is made for each metric, headed by it where there are several."""
    listed = list(made)
    return joined(part(metric, each) if len(listed) > 1 else each for metric, each in listed)
