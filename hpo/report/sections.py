"""The sections of the page that show a study's results; each takes the report and returns its HTML."""

from __future__ import annotations

from typing import Any, Final

from markupsafe import Markup

from hpo.report.data import MOST_TRIALS, StudyReport
from hpo.report.drawable import LARGEST_DRAWN
from hpo.report.figures import MOST_POINTS, history, learning_curves
from hpo.report.looks import sampled
from hpo.report.markup import (
    Section,
    by_metric,
    figure,
    folded,
    grid,
    joined,
    note,
    points,
    subsection,
    table,
    worth_a_look,
)
from hpo.search.auto_sampler import ChosenSampler
from hpo.study.outcome import UNFINISHED
from hpo.study.ranking import is_feasible, is_outside, is_ranked
from hpo.study.thinning import evenly
from hpo.study.widened import said
from hpo.wording import count_of, listed, shown, study_progress


def overview(report: StudyReport) -> Markup:
    """The study's goals and progress, and the best trial with its parameters."""
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
        *([("scheduler", report.scheduler)] if report.scheduler else []),
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
    """Links to findings that people should know."""
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
        why = "No trial is complete yet." + _undrawn_best(report)
        return Section("history", title, note(why) + _leaders(report))
    drawn = by_metric(
        (
            metric,
            figure(f"history-{place}", history(report.escaped, kept, report.goals, metric), f"{metric} by trial"),
        )
        for place, metric in enumerate(report.goals)
    )
    remark = "The values of the complete trials, by trial number. Diverged trials have no value." + _undrawn_best(
        report
    )
    if any(not is_feasible(trial) for trial in kept):
        remark += " Diamonds are trials outside the bounds, which are never the best."
    remark += sampled(kept, report.complete)
    return Section("history", title, drawn + note(remark) + _leaders(report))


def _undrawn_best(report: StudyReport) -> str:
    """A remark if the best trial is paused: it has no point then, and the line does not reach its value."""
    if report.several or not report.best or is_ranked(report.best[0]):
        return ""
    best = report.best[0]
    return f" The best, trial {best.number} with {shown(best.values[0])}, is not shown here: it is not complete."


def _leaders(report: StudyReport) -> Markup:
    """A table of the best trials; of a large front, a sample."""
    kept = evenly(report.leaders[::-1], MOST_TRIALS)[::-1]  # so that the first, the best, is always kept
    if not kept:
        return Markup()
    names = list(dict.fromkeys(name for trial in kept for name in trial.params))
    rows = [[trial.number, *trial.values, *(trial.params.get(name, "") for name in names)] for trial in kept]
    title = "The Pareto front" if report.several else "The best trials"
    made = grid(title, ["trial", *report.goals, *names], rows)
    if len(kept) < len(report.leaders):
        made += note(f"Of {len(report.leaders)} trials on the front {len(kept)} are listed, an even sample.")
    return subsection(title, made)


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
    remark = "A mark shows where a curve ends: a cross for a pruned trial, a triangle for a diverged one. "
    remark += "Click an entry of the legend to hide its trials."
    remark += sampled(kept, curves, "curves")
    if max(len(trial.intermediate_values) for trial in kept) > MOST_POINTS:
        remark += " Long curves are drawn without some of their epochs."
    return Section("curves", title, drawn + note(remark))


def failure_section(report: StudyReport) -> Section:
    """The failures, grouped by cause."""
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
    remark = (
        "Reasons that differ only in numbers are counted together. `hpo retry --failed` requeues failed trials."
    )
    return Section("failures", "Failures", drawn + traces + note(remark))


def edge_section(report: StudyReport) -> Section:
    """Parameters whose best values are at an end of their range."""
    title = "Parameters at the edge of their range"
    if not report.edges:
        enough = len(report.unrelated) > 1
        needed = "trials on the Pareto front" if report.several else "complete trials"
        why = "None among the best trials." if enough else f"It takes several {needed} to say."
        return Section("edges", title, note(why))
    remark = (
        "The edge is the outermost 5 % of a range (on a logarithmic scale, if it is searched so), or its first or "
        "last value. By chance, a parameter would be listed in at most 5 % of the cases."
    )
    if report.forks:
        remark += ONE_OF_FORKS
    return Section("edges", title, points(each.said for each in report.edges) + note(remark))


#: The remark on results that count one trial of each lineage.
ONE_OF_FORKS: Final = " Of a trial and its forks the best one counts."
