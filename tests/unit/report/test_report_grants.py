"""What a report says of a scheduler's grants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import FrozenTrial, TrialState

from hpo.report.data import report_data
from hpo.report.figures import work_by_worker
from hpo.report.grants import Kind, kinds, story
from hpo.report.page import page
from hpo.report.timeline import Timeline
from tests.support.reports import report_of, trial_of, work_of
from tests.unit.report.test_report import Page, small_plotly

__all__ = ["small_plotly"]

pytestmark = pytest.mark.usefixtures("small_plotly")


def granted_trial(
    number: int,
    grants: Sequence[tuple[int | None, dict[str, Any]]],
    epochs: int,
    *,
    state: TrialState = TrialState.COMPLETE,
    paused: bool = False,
) -> FrozenTrial:
    """A trial with these grants, which has trained so many epochs; each epoch is better than the one before."""
    stored = [{"number": 10 * number + k, "until": until, "why": why} for k, (until, why) in enumerate(grants)]
    attrs: dict[str, Any] = {"hpo:grants": stored} | ({"hpo:paused": epochs} if paused else {})
    curve = {epoch: 1 / epoch + number for epoch in range(1, epochs + 1)}
    space = {"x": FloatDistribution(0, 1)}
    return trial_of(number, {"x": 0.1 * number}, space, 1 / epochs + number, curve=curve, state=state, attrs=attrs)


SPACE = {"x": FloatDistribution(0, 1)}
_MODEL = {"kind": "model", "predicted": 0.1234, "low": 0.1, "high": 0.2, "incumbent": 0.15}
WHOLE = granted_trial(0, [(3, {"kind": "initial"}), (9, _MODEL), (None, {"kind": "whole"})], 12)
PAUSED = granted_trial(1, [(3, {"kind": "initial"}), (9, _MODEL)], 5, state=TrialState.PRUNED, paused=True)


def test_a_trials_grants_stand_in_their_order_with_what_became_of_it() -> None:
    assert story(WHOLE) == [
        "to epoch 3: initial",
        "to epoch 9: model, ends at 0.123 (0.1 to 0.2), best 0.15",
        "to its end: whole",
        "complete at epoch 12",
    ]
    assert story(PAUSED)[-1] == "pruned at epoch 5: paused there when the study ended"
    running = granted_trial(2, [(3, {"kind": "initial"})], 2, state=TrialState.RUNNING)
    assert story(running)[-1] == "running at epoch 2"


def test_a_trial_in_whose_place_a_fork_stands_says_so_on_the_page() -> None:
    worst = granted_trial(1, [(3, {"kind": "initial"})], 3, state=TrialState.PRUNED)
    fork = granted_trial(2, [(None, {"kind": "fork", "parent": 0, "epoch": 3, "replaces": 1})], 9)
    fork.user_attrs["hpo:fork"] = {"parent": 0, "epoch": 3, "replaces": 1}
    shown = Page(page(report_of([WHOLE, worst, fork]))).text
    assert shown.count("pruned at epoch 3: trial 2 stands in its place, a fork of trial 0") == 1


def test_kinds_count_what_was_trained() -> None:
    assert kinds([WHOLE, PAUSED]) == [Kind("model", 2, 8), Kind("initial", 2, 6), Kind("whole", 1, 3)]


def test_the_page_and_its_data_have_them() -> None:
    report = report_of([WHOLE, PAUSED])
    shown = Page(page(report)).text
    assert "Why each trial trained" in shown
    assert "Trial 0: val_loss 0.0833333, 12 epochs" in shown
    assert shown.count("to its end: whole") == 2, "among the best, and among all"
    assert shown.count("pruned at epoch 5: paused there when the study ended") == 1
    assert report_data(replace(report, status={**report.status, "best": None}))["grants"][0] == {
        "kind": "model",
        "grants": 2,
        "epochs": 8,
    }


def test_two_parameters_are_drawn_only_where_complete_trials_differ_in_both() -> None:
    """Forks share most parameters; a paused trial that differs is ranked, and not drawn."""
    space = {"x": FloatDistribution(0, 1), "y": FloatDistribution(0, 1)}
    whole = [trial_of(k, {"x": 0.2 * k, "y": 0.5}, space, 1.0 + k, curve={1: 1.0 + k}) for k in range(2)]
    best = {"hpo:paused": 1, "hpo:best": {"epoch": 1, "metrics": {"val_loss": 0.5}, "checkpoint": None}}
    paused = trial_of(2, {"x": 0.9, "y": 0.1}, space, 0.5, curve={1: 0.5}, state=TrialState.PRUNED, attrs=best)
    shown = Page(page(report_of([*whole, paused]))).text
    assert "It takes two parameters with several values each in complete trials." in shown


def paused_at_its_best(number: int) -> FrozenTrial:
    """A trial that was paused when the study ended, and can be the best."""
    best = {"epoch": 1, "metrics": {"val_loss": 0.5 + number}, "checkpoint": None}
    attrs, curve = {"hpo:paused": 1, "hpo:best": best}, {1: 0.5 + number}
    return trial_of(number, {"x": 0.5}, SPACE, 0.5, curve=curve, state=TrialState.PRUNED, attrs=attrs)


def test_paused_trials_are_among_the_best_and_no_points(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of([paused_at_its_best(number) for number in range(3)])
    shown = Page(page(report))
    assert "No trial is complete yet." in shown.text
    assert "The best trials" in shown.text
    assert "history-0" not in shown.figures
    monkeypatch.setattr("hpo.report.data.MOST_TRIALS", 4)
    some = [*report.trials, *(trial_of(k, {"x": 0.1}, SPACE, 9.0, curve={1: 9.0}) for k in range(3, 9))]
    assert {trial.state for trial in report_of(some).complete_sample} == {TrialState.COMPLETE}
    assert len(report_of(some).complete_sample) == 4


def test_a_best_trial_that_is_no_point_is_named_beside_the_figure() -> None:
    """Otherwise the line of the best so far ends at a worse value than the one at the top of the page."""
    undrawn = "The best, trial 0 with 0.5, is not shown here: it is not complete."
    worse = trial_of(1, {"x": 0.1}, SPACE, 9.0, curve={1: 9.0})
    assert undrawn in Page(page(report_of([paused_at_its_best(0)]))).text
    assert undrawn in Page(page(report_of([paused_at_its_best(0), worse]))).text
    better = trial_of(1, {"x": 0.1}, SPACE, 0.1, curve={1: 0.1})
    assert "is not shown here" not in Page(page(report_of([paused_at_its_best(0), better]))).text


def test_a_pruners_audit_is_not_offered_under_a_scheduler() -> None:
    """A study file with both is refused."""
    report = report_of([WHOLE, PAUSED])
    assert "audit_fraction" in Page(page(report)).text
    scheduled = Page(page(replace(report, scheduler="asha"))).text
    assert "What pruning saved" in scheduled
    assert "audit" not in scheduled


def test_without_a_scheduler_there_is_no_such_part() -> None:
    report = report_of([trial_of(0, {"x": 0.5}, {"x": FloatDistribution(0, 1)}, 1.0, curve={1: 1.0})])
    assert "Why each trial trained" not in Page(page(report)).text
    assert report.grants == []


def test_the_timeline_says_where_an_attempt_paused() -> None:
    work = [work_of(0, outcome="paused", reason="after epoch 3"), work_of(0, attempt=2, start=20.0)]
    drawn = work_by_worker(Timeline.of(work)).to_dict()["data"]
    assert {trace["name"]: trace["customdata"][0][2] for trace in drawn} == {
        "paused": "paused after epoch 3",
        "complete": "complete",
    }
