"""What pruning saved and how often it was wrong, computed by hand and from studies in a real database."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState
from scipy import stats

from hpo.search.predicted_loss.audit import Condemned
from hpo.search.predicted_loss.pruner import PredictedLossPruner
from hpo.storage.attributes import CONDEMNED_ATTR, FORK_ATTR, OUTCOME_ATTR, PREDICTION_ATTR, SAME_AS_ATTR
from hpo.study.open_study import OpenStudy
from hpo.study.own_trials import outlined, own_trials, ranked_trials
from hpo.study.pruning_summary import (
    ComparedPrediction,
    PredictionSummary,
    best_count,
    compared_predictions,
    summarize_predictions,
    summarize_pruning,
    wilson_interval,
)
from hpo.study.status import study_status
from hpo.study.trial_entries import study_trials
from hpo.wording import condemned
from tests.support.commands import hpo, hpo_json
from tests.support.studies import Studies, ask

MAXIMIZE = ("study.metric=val_mae", "study.direction=maximize")


def play(
    view: OpenStudy,
    values: Sequence[float],
    *,
    audited_at: int | None = None,
    state: TrialState | None = None,
    diverged: bool = False,
) -> None:
    """A trial that reports these values and ends with the last; where it diverged, with the worst there is."""
    trial, _ = ask(view)
    for step, value in enumerate(values, start=1):
        trial.report(value, step)
    if audited_at is not None:
        decision = Condemned(audited_at, 0.012, 0.04, runs_on=True)
        view.study._storage.set_trial_system_attr(trial._trial_id, CONDEMNED_ATTR, decision.stored())
    worst = math.inf if view.spec.study.direction == "minimize" else -math.inf
    if diverged:
        trial.set_user_attr(OUTCOME_ATTR, "diverged")
    if state == TrialState.RUNNING:
        return
    if state is None:
        view.study.tell(trial, worst if diverged else values[-1])
    else:
        view.study.tell(trial, state=state)


def play_all(view: OpenStudy, best: float, good: float, bad: float) -> None:
    """Three audited trials that count: the best, a good one, a diverged one; and what must not be counted."""
    play(view, [bad] * 9 + [good], audited_at=4)
    play(view, [bad] * 9 + [best], audited_at=3)
    play(view, [bad] * 10)
    play(view, [bad] * 2, state=TrialState.PRUNED)
    play(view, [bad] * 5, state=TrialState.PRUNED)
    play(view, [bad, bad, bad, math.nan], audited_at=2, diverged=True)
    play(view, [bad] * 3, audited_at=1, state=TrialState.FAIL)
    play(view, [bad] * 2, audited_at=1, state=TrialState.RUNNING)
    imported = optuna.trial.create_trial(value=best, intermediate_values={10: best})
    view.study.add_trial(imported)


EXPECTED = {
    "ended": 7,
    "pruned": 2,
    "epochs_used": 10 + 10 + 10 + 2 + 5 + 4 + 3,
    "horizon": 12,  # as the study says; no trial ran that long
    "epochs_saved": 10 + 7,
    "epochs_unpruned": 44 + 17,
    "top_k": 1,
    "audited": 3,
    "wrongly_condemned": 1,
    "false_prune_rate": pytest.approx(1 / 3),
    "false_prune_interval": [pytest.approx(0.0615, abs=5e-4), pytest.approx(0.7923, abs=5e-4)],
    "audit_epochs": 7 + 6 + 2 + 2,
    "alpha": 0.04,
}


@pytest.mark.parametrize(
    ("overrides", "values"), [((), (0.5, 1.0, 2.0)), (MAXIMIZE, (2.0, 1.0, 0.5))], ids=["minimize", "maximize"]
)
def test_the_figures_are_those_computed_by_hand(
    studies: Studies, overrides: tuple[str, ...], values: tuple[float, float, float]
) -> None:
    more = ("study.n_trials=20", "trainer.max_epochs=12", *overrides)
    with studies.open(*more) as (view,):
        play_all(view, *values)
    assert hpo_json("status", studies.folder / "study.yaml", *more)["pruning"] == EXPECTED


@pytest.mark.parametrize(
    "pruner",
    [
        "{name: predicted_loss, top_k: 3}",
        "{name: PredictedLossPruner, top_k: 3}",
        "{name: patient, patience: 1, wrapped_pruner: {name: predicted_loss, top_k: 3}}",
    ],
)
def test_the_best_are_as_many_as_the_pruner_takes_them_for(studies: Studies, pruner: str) -> None:
    with studies.open("study.n_trials=20", f"study.pruner={pruner}") as (view,):
        play_all(view, 0.5, 1.0, 2.0)
        found = study_status(view)["pruning"]
    # Of the best three, two were audited; the diverged trial is not among any number of the best.
    assert (found["top_k"], found["wrongly_condemned"], found["audited"]) == (3, 2, 3)


def test_other_pruners_have_one_best() -> None:
    assert best_count("median", {"top_k": 5}) == 1
    assert best_count("patient", {"wrapped_pruner": "predicted_loss"}) == 1
    assert best_count("predicted_loss", {}) == 1


@pytest.mark.parametrize("name", ["predicted_loss", "Predicted_Loss", "PredictedLossPruner"])
def test_predicted_loss_has_its_best_by_each_of_its_names(name: str) -> None:
    assert best_count(name, {"top_k": 5}) == 5
    assert best_count("PatientPruner", {"wrapped_pruner": {"name": name, "top_k": 3}}) == 3


def test_without_a_known_length_the_longest_complete_trial_is_the_horizon(studies: Studies) -> None:
    with studies.open("study.n_trials=20") as (view,):
        play(view, [1.0, 1.0], state=TrialState.PRUNED)
        trials, ranked = own_trials(view), ranked_trials(view)
        found = summarize_pruning(trials, ranked)
        assert (found.horizon, found.epochs_saved, found.epochs_unpruned) == (None, None, None)
        play(view, [1.0] * 7)
        play(view, [1.0] * 9, state=TrialState.PRUNED)  # longer than any complete one: it saved nothing
        found = summarize_pruning(own_trials(view), ranked_trials(view))
    assert (found.horizon, found.epochs_saved, found.epochs_unpruned) == (7, 5, 23)


def test_a_result_that_was_taken_over_used_no_epochs_and_saved_none(studies: Studies) -> None:
    with studies.open("study.n_trials=20") as (view,):
        play(view, [1.0] * 7)
        play(view, [2.0] * 3, state=TrialState.PRUNED)
        for values, state, known in (([1.0] * 7, None, 0), ([2.0] * 3, TrialState.PRUNED, 1)):
            play(view, values, state=TrialState.RUNNING)
            twin = optuna.Trial(view.study, view.study.trials[-1]._trial_id)
            twin.set_user_attr(SAME_AS_ATTR, known)
            view.study.tell(twin, values[-1] if state is None else None, state)
        for found in (
            summarize_pruning(own_trials(view), ranked_trials(view), horizon=7),
            summarize_pruning(outlined(view), ranked_trials(view), horizon=7),
        ):
            assert (found.ended, found.pruned) == (4, 2)
            assert (found.epochs_used, found.epochs_saved, found.epochs_unpruned) == (10, 4, 14)


def test_a_member_that_a_fork_replaced_saved_nothing(studies: Studies) -> None:
    with studies.open("study.n_trials=20") as (view,):
        play(view, [1.0] * 7)
        play(view, [3.0] * 2, state=TrialState.PRUNED)
        play(view, [3.0] * 4, state=TrialState.PRUNED)
        fork, _ = ask(view)
        fork.set_user_attr(FORK_ATTR, {"parent": 0, "epoch": 2, "replaces": 1})
        for epoch in range(3, 8):
            fork.report(1.0, epoch)
        view.study.tell(fork, 1.0)
        for trials in (own_trials(view), outlined(view)):
            found = summarize_pruning(trials, ranked_trials(view), horizon=7)
            assert (found.pruned, found.epochs_used, found.epochs_saved) == (2, 7 + 2 + 4 + 5, 3)


def test_an_audit_by_the_real_pruner_is_found(studies: Studies) -> None:
    """What runs on is counted with its epochs, what is pruned is not."""
    with studies.open("study.n_trials=30", "trainer.max_epochs=8") as (view,):
        view.study.pruner = PredictedLossPruner(audit_fraction=0.5, alpha=0.5, seed=1)
        for number in range(30):
            trial, _ = ask(view)
            for step in range(1, 9):
                trial.report(1.0 + (number * 7 % 10) / 5 + 1 / step, step)
                if pruned := trial.should_prune():
                    break
            end = None if pruned else 1.0 + (number * 7 % 10) / 5 + 1 / 8
            view.study.tell(trial, end, TrialState.PRUNED if pruned else TrialState.COMPLETE)
        found = study_status(view)["pruning"]
        decisions = [decision for trial in own_trials(view) if (decision := Condemned.of(trial)) is not None]
    audits = [decision for decision in decisions if decision.runs_on]
    assert 0 < len(audits) < len(decisions)
    assert found["pruned"] == len(decisions) - len(audits)
    assert found["audited"] == len(audits)
    assert found["audit_epochs"] == sum(8 - decision.epoch for decision in audits)
    assert found["alpha"] == decisions[-1].alpha


@pytest.mark.parametrize(("successes", "trials"), [(0, 1), (1, 1), (0, 7), (1, 6), (3, 40), (20, 20)])
def test_the_interval_is_wilsons(successes: int, trials: int) -> None:
    expected = stats.binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    assert wilson_interval(successes, trials) == pytest.approx((expected.low, expected.high), abs=1e-12)


def rows(study: Path, *overrides: str) -> dict[str, str]:
    lines = hpo("status", study, *overrides).stdout.splitlines()[1:]
    return {line.split()[0]: " ".join(line.split()[1:]) for line in lines}


def test_status_shows_what_was_saved_and_what_the_audit_found(studies: Studies) -> None:
    overrides = ("study.n_trials=20", "trainer.max_epochs=10")
    with studies.open(*overrides) as (view,):
        play_all(view, 0.5, 1.0, 2.0)
    shown = rows(studies.folder / "study.yaml", *overrides)
    assert shown["pruning"] == "2 of 7 pruned, 13 of 57 epochs saved (23 %), alpha 0.04 at last"
    assert shown["audit"] == "1 of 3 audited trials ended among the best (33 %, 95 % interval 6 % to 79 %)"


def test_status_says_nothing_of_what_did_not_happen(studies: Studies) -> None:
    with studies.open("study.n_trials=20") as (view,):
        play(view, [2.0, 1.0])
        found = study_status(view)["pruning"]
    assert (found["audited"], found["false_prune_rate"], found["false_prune_interval"]) == (0, None, None)
    assert not {"pruning", "audit"} & rows(studies.folder / "study.yaml").keys()


def test_a_trial_pruned_without_a_horizon_is_shown_without_epochs(studies: Studies) -> None:
    endless = ("study.n_trials=20", "trainer.max_epochs=null", "trainer.max_steps=100", "lr_scheduler=null")
    with studies.open(*endless, "trainer.validate_every=10") as (view,):
        view.study._storage.set_study_user_attr(view.study_id, "hpo:max_epochs", None)
        play(view, [2.0, 1.0], state=TrialState.PRUNED)
    shown = rows(studies.folder / "study.yaml", *endless, "trainer.validate_every=10")
    assert shown["pruning"] == "1 of 1 pruned"


def predicted(**kept: Any) -> optuna.trial.FrozenTrial:
    whole = {"epoch": 3, "predicted_final_loss": 1.0, "std": 0.1, "final_loss": 1.1, **kept}
    return optuna.trial.create_trial(value=1.0, user_attrs={PREDICTION_ATTR: whole})


def test_only_predictions_with_an_outcome_are_compared() -> None:
    trials = [
        predicted(),
        predicted(final_loss=None),
        predicted(predicted_final_loss=None),
        predicted(std=None),
        optuna.trial.create_trial(value=1.0),
    ]
    found = compared_predictions(trials)
    assert [(each.epoch, each.predicted, each.std, each.actual) for each in found] == [
        (3, 1.0, 0.1, 1.1),
        (3, 1.0, 0.0, 1.1),
    ]


def test_predictions_are_judged_by_hand() -> None:
    def made(predicted: float, std: float) -> ComparedPrediction:
        return ComparedPrediction(0, 3, predicted, std, 1.0)

    # The 80 % interval is 1.2816 standard deviations to either side.
    found = summarize_predictions([made(1.0, 0.0), made(1.128, 0.1), made(1.129, 0.1), made(0.872, 0.1)])
    assert found.compared == 4
    assert found.mean_absolute_error == pytest.approx((0.128 + 0.129 + 0.128) / 4)
    assert found.inside_80 == 0.75
    assert summarize_predictions([]) == PredictionSummary(0, None, None)


def test_trials_say_why_each_was_pruned_or_kept(studies: Studies) -> None:
    with studies.open("study.n_trials=20") as (view,):
        play_all(view, 0.5, 1.0, 2.0)
        entries = study_trials(view)
    reasons = {entry["trial"]: entry["reason"] for entry in entries}
    assert reasons[1] == "kept as an audit run at epoch 3: probability 0.012 to end among the best, alpha is 0.04"
    assert reasons[2] is None
    assert condemned(5, 0.0312, 0.055, runs_on=False).startswith("pruned at epoch 5: probability 0.031 to end")
