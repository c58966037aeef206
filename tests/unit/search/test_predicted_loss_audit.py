"""The audit of PredictedLossPruner: who runs on, what is stored, and how alpha and the share follow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState, create_trial
from scipy import stats

from hpo.search.predicted_loss.audit import Condemned, in_force, is_drawn
from hpo.search.predicted_loss.pruner import PredictedLossPruner
from hpo.search.pruners import make_pruner
from hpo.storage.attributes import CONDEMNED_ATTR
from tests.support.studies import Studies
from tests.unit.search.test_predicted_loss import SOME, falling, flat, run, study_of

SHARE = 0.05


def complete(final: float, condemned: bool = False) -> optuna.trial.FrozenTrial:
    """A trial that ran to its end; condemned: against a decision to prune it."""
    decision = Condemned(2, 0.01, 0.04, runs_on=True).stored()
    return create_trial(
        value=final,
        intermediate_values={1: 1.0, 2: final},
        system_attrs={CONDEMNED_ATTR: decision} if condemned else {},
    )


def study_with(survivors: Sequence[float], audited: Sequence[float], sign: int = 1) -> optuna.Study:
    study = optuna.create_study(
        study_name="s",
        pruner=PredictedLossPruner(audit_fraction=SHARE),
        direction="minimize" if sign == 1 else "maximize",
    )
    for final in survivors:
        study.add_trial(complete(sign * final))
    for final in audited:
        study.add_trial(complete(sign * final, condemned=True))
    return study


def alpha_of(study: optuna.Study) -> float:
    assert isinstance(study.pruner, PredictedLossPruner)
    return study.pruner.force(study).alpha


@given(st.floats(0.001, 0.3), st.integers(0, 30), st.integers(0, 30))
def test_alpha_follows_the_posterior_of_a_beta_distribution(alpha: float, wrong: int, right: int) -> None:
    prior, posterior = stats.beta(WRONG, RIGHT), stats.beta(WRONG + wrong, RIGHT + right)
    odds = [each.mean() / (1 - each.mean()) for each in (prior, posterior)]
    found = in_force(alpha, SHARE, wrong, wrong + right)
    ratio = min(max(odds[1] / odds[0], 0.25), 4.0)
    assert found.alpha / (1 - found.alpha) == pytest.approx(alpha / (1 - alpha) / ratio)
    highest = [min(each.mean() + each.std(), 0.5) for each in (prior, posterior)]
    assert found.share == pytest.approx(SHARE * highest[1] / highest[0])


WRONG, RIGHT = 1.0, 9.0


def test_errors_tighten_alpha_and_raise_the_share_and_audits_without_one_do_the_opposite() -> None:
    before, clean, wrong = in_force(0.04, SHARE, 0, 0), in_force(0.04, SHARE, 0, 6), in_force(0.04, SHARE, 3, 6)
    assert (before.alpha, before.share) == (0.04, SHARE)
    assert wrong.alpha < before.alpha < clean.alpha
    assert clean.share < before.share < wrong.share
    assert in_force(0.04, SHARE, 40, 40).alpha > 0.04 / 5  # at most by a factor of four in odds
    assert in_force(0.0, SHARE, 0, 6).alpha == 0.0
    assert in_force(0.04, 0.0, 3, 6) == in_force(0.04, 0.0, 0, 0)


@pytest.mark.parametrize("sign", [1, -1], ids=["minimize", "maximize"])
def test_wrong_is_an_audited_trial_that_ends_better_than_the_median_survivor(sign: int) -> None:
    survivors = [0.1, 0.2, 0.3, 0.4, 0.5]
    found = alpha_of(study_with(survivors, [0.15, 0.35, math.inf], sign))
    assert found == in_force(PredictedLossPruner()._alpha, SHARE, 1, 3).alpha
    assert alpha_of(study_with([], [0.1])) == in_force(PredictedLossPruner()._alpha, SHARE, 0, 1).alpha


def test_alpha_does_not_depend_on_the_order_in_which_a_worker_hears_of_the_ends() -> None:
    survivors, audited = [0.1, 0.3, 0.2], [0.15, 0.25, 0.05, 0.4]
    whole = study_with(survivors, audited)
    stepwise = study_with(survivors[:1], [])
    alpha_of(stepwise)
    for final, condemned in ((0.4, True), (0.3, False), (0.05, True), (0.2, False), (0.25, True), (0.15, True)):
        stepwise.add_trial(complete(final, condemned))
        alpha_of(stepwise)
    assert alpha_of(stepwise) == alpha_of(whole) != in_force(PredictedLossPruner()._alpha, SHARE, 0, 4).alpha


@pytest.mark.full
def test_an_audit_run_trains_to_its_end_and_the_decision_against_it_is_stored(tmp_path: Path) -> None:
    ends = run(study_of(SOME, audit_fraction=0.0), flat(1.02))
    study = study_of(SOME, storage=f"sqlite:///{tmp_path / 's.db'}", audit_fraction=1.0, alpha=0.05)
    assert run(study, flat(1.02)) == 0
    decision = Condemned.of(study.trials[-1])
    assert decision is not None
    assert (decision.epoch, decision.alpha, decision.runs_on) == (ends, 0.05, True)
    assert 0 <= decision.probability < 0.05
    assert run(study, falling(0.2)) == 0
    assert Condemned.of(study.trials[-1]) is None


def test_of_a_pruned_trial_the_decision_is_stored_too() -> None:
    study = study_of(SOME, audit_fraction=0.0)
    ends = run(study, flat(1.02))
    decision = Condemned.of(study.trials[-1])
    assert decision is not None
    assert (decision.epoch, decision.runs_on) == (ends, False)


def test_an_audit_run_stays_one_when_the_share_falls() -> None:
    study = study_of(SOME, audit_fraction=1.0)
    trial = study.ask()
    curve = flat(1.02)
    for step, value in enumerate(curve, 1):
        trial.report(value, step)
        assert not trial.should_prune()
        for _ in range(3):
            study.add_trial(complete(2.0, condemned=True))
    assert isinstance(study.pruner, PredictedLossPruner)
    assert study.pruner.force(study).share < 0.3
    study.tell(trial, curve[-1])


def test_the_share_is_drawn_by_seed_and_number() -> None:
    chosen = {number for number in range(4000) if is_drawn(7, number, SHARE)}
    assert 150 < len(chosen) < 250
    assert chosen < {number for number in range(4000) if is_drawn(7, number, 2 * SHARE)}
    assert chosen != {number for number in range(4000) if is_drawn(8, number, SHARE)}
    assert not any(is_drawn("study", number, 0.0) for number in range(1000))
    assert all(is_drawn("study", number, 1.0) for number in range(1000))


def test_the_draw_does_not_look_at_values() -> None:
    """The same numbers run on, whatever the curves are, while the share is the same."""
    kept = []
    for level in (1.02, 1.3):
        study = study_of(SOME, audit_fraction=0.5, seed=3)
        for _ in range(6):
            trial = study.ask()
            for step, value in enumerate(flat(level)[:10], 1):
                trial.report(value, step)
                if trial.should_prune():
                    break
            decision = Condemned.of(study.trials[-1])
            assert decision is not None
            kept.append(decision.runs_on)
            study.tell(trial, state=TrialState.FAIL)
    assert kept[:6] == kept[6:] == [is_drawn(3, len(SOME) + number, 0.5) for number in range(6)]
    assert len(set(kept)) == 2


def test_in_a_study_of_hpo_the_studys_seed_draws(studies: Studies) -> None:
    pruner = make_pruner(studies.spec("study.pruner=predicted_loss", "study.sampler.seed=11"))
    assert isinstance(pruner, PredictedLossPruner)
    assert pruner._seed == 11
    given_one = make_pruner(studies.spec("study.pruner={name: predicted_loss, seed: 4}"))
    assert isinstance(given_one, PredictedLossPruner)
    assert given_one._seed == 4
