"""PredictedLossPruner: what it ends, what it lets continue, and that all it knows is in the storage."""

from __future__ import annotations

import math
import pickle
from collections.abc import Sequence
from typing import Any, Literal

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState

from hpo.search.predicted_loss.pruner import PredictedLossPruner
from hpo.storage.attributes import MAX_EPOCHS_ATTR
from tests.support.studies import Studies
from tests.unit.storage.test_reader import statements

EPOCHS = 20
DIRECTIONS: tuple[Literal["minimize", "maximize"], ...] = ("minimize", "maximize")


def falling(end: float, rate: float = 0.3, start: float = 1.0, epochs: int = EPOCHS) -> list[float]:
    return [end + (start - end) * math.exp(-rate * epoch) for epoch in range(epochs)]


def flat(level: float = 1.0, epochs: int = EPOCHS) -> list[float]:
    return [level + 1e-3 * math.sin(7.0 * epoch) for epoch in range(epochs)]


def run(study: optuna.Study, curve: Sequence[float], sign: int = 1) -> int:
    """Train a trial; the step at which it was pruned, 0 if it was not."""
    trial = study.ask()
    for step, value in enumerate(curve, 1):
        trial.report(sign * value, step)
        if trial.should_prune():
            study.tell(trial, state=TrialState.PRUNED)
            return step
    study.tell(trial, sign * curve[-1] if math.isfinite(curve[-1]) else sign * math.inf)
    return 0


def study_of(
    curves: Sequence[Sequence[float]] = (),
    direction: Literal["minimize", "maximize"] = "minimize",
    storage: str | None = None,
    **arguments: Any,
) -> optuna.Study:
    study = optuna.create_study(
        direction=direction, storage=storage, study_name="s", pruner=PredictedLossPruner(**arguments)
    )
    pruner, study.pruner = study.pruner, optuna.pruners.NopPruner()
    for curve in curves:
        run(study, curve, 1 if direction == "minimize" else -1)
    study.pruner = pruner
    return study


SOME = [falling(0.3), falling(0.5), flat(), falling(0.4, 0.2), flat(0.99), falling(0.6), flat(1.01), falling(0.35)]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_hopeless_trial_is_ended_and_a_promising_one_goes_on(direction: Literal["minimize", "maximize"]) -> None:
    study = study_of(SOME, direction)
    sign = 1 if direction == "minimize" else -1
    assert 0 < run(study, flat(1.02), sign) <= EPOCHS // 4
    assert run(study, falling(0.2), sign) == 0


def test_both_directions_give_the_same_probabilities() -> None:
    curve, seen = falling(0.45), []
    for direction, sign in zip(DIRECTIONS, (1, -1), strict=True):
        study = study_of(SOME, direction)
        trial = study.ask()
        for step, value in enumerate(curve[:8], 1):
            trial.report(sign * value, step)
        seen.append(probability(study))
    assert seen[0] == pytest.approx(seen[1], rel=1e-6)
    assert 0 < seen[0] < 1


def probability(study: optuna.Study) -> float:
    assert isinstance(study.pruner, PredictedLossPruner)
    found = study.pruner.probability(study, study.trials[-1])
    assert found is not None
    return found


def test_which_of_a_studys_parts_is_read_first_turns_no_curve() -> None:
    study = study_of(SOME, "maximize")
    trial = study.ask()
    for step, value in enumerate(falling(0.45)[:8], 1):
        trial.report(-value, step)
    expected = probability(study)
    study.pruner = pruner = PredictedLossPruner()
    pruner._memo.written(study, 0)
    assert probability(study) == expected


@given(st.sampled_from([1e-6, 1e-2, 1e3, 1e7, 1e200]))
@settings(max_examples=5, deadline=None)
def test_the_unit_of_the_loss_says_nothing(unit: float) -> None:
    seen = []
    for scale in (1.0, unit):
        study = study_of([[scale * value for value in curve] for curve in SOME])
        trial = study.ask()
        for step, value in enumerate(falling(0.45)[:8], 1):
            trial.report(scale * value, step)
        seen.append(probability(study))
    assert seen[0] == pytest.approx(seen[1], rel=1e-3)


def test_the_best_trial_may_have_had_a_value_that_is_not_finite() -> None:
    curve = falling(0.1)
    curve[4] = math.nan
    study = study_of([flat(), curve])
    trial = study.ask()
    for step, value in enumerate(flat()[:5], 1):
        trial.report(value, step)
    assert 0 < probability(study) < 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_diverged_trial_is_ended_at_once(value: float, direction: Literal["minimize", "maximize"]) -> None:
    study = study_of([], direction, n_startup_trials=10, n_warmup_epochs=10, min_epochs=10)
    trial = study.ask()
    trial.report(value, 1)
    assert trial.should_prune()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_value_that_is_not_finite_is_the_worst_whichever_it_is(
    value: float, direction: Literal["minimize", "maximize"]
) -> None:
    """A training may survive one, where its trial was not asked about then; and a trial may end with one."""
    sign = 1 if direction == "minimize" else -1
    seen = []
    for bad in (value, sign * math.inf):
        study = study_of(SOME, direction)
        trial = study.ask()
        for step, loss in enumerate(flat(2.0)[:3], 1):
            trial.report(sign * loss, step)
        study.tell(trial, sign * math.inf if math.isnan(bad) else bad)
        trial = study.ask()
        found = []
        for step, loss in enumerate(falling(0.45)[:9], 1):
            trial.report(bad if step == 3 else sign * loss, step)
            found += [probability(study)] if step > 1 else []
        seen.append(found)
    assert seen[0] == seen[1]
    assert all(0 < each < 1 for at, each in enumerate(seen[0], 2) if at != 3)
    assert seen[0][1] == 0


def test_nothing_is_pruned_before_a_trial_has_ended_or_a_last_step_is_known() -> None:
    study = study_of()
    trials = [study.ask() for _ in range(6)]
    for step in range(1, 10):
        for trial, curve in zip(
            trials, [falling(0.1), falling(0.2), falling(0.3), flat(), flat(), flat()], strict=True
        ):
            trial.report(curve[step - 1], step)
            assert not trial.should_prune()


@pytest.mark.parametrize("known", ["argument", "attribute"])
def test_with_a_known_last_step_predictions_are_compared_with_predictions(known: str) -> None:
    study = study_of(max_epochs=EPOCHS if known == "argument" else None)
    if known == "attribute":
        study.set_user_attr(MAX_EPOCHS_ATTR, EPOCHS)
    trials = [study.ask() for _ in range(6)]
    curves = [falling(0.1), falling(0.2), falling(0.3), falling(0.15), flat(), flat(1.01)]
    pruned: set[int] = set()
    for step in range(1, 12):
        for number, (trial, curve) in enumerate(zip(trials, curves, strict=True)):
            trial.report(curve[step - 1], step)
            if number not in pruned and trial.should_prune():
                pruned.add(number)
    assert 5 in pruned
    assert 0 not in pruned


def test_the_argument_outranks_the_attribute_and_that_the_longest_trial() -> None:
    curve = falling(0.5, 0.05)[:10]
    seen = {}
    for argument, attribute in ((None, None), (None, 40), (EPOCHS, 40)):
        study = study_of(SOME, max_epochs=argument)
        if attribute:
            study.set_user_attr(MAX_EPOCHS_ATTR, attribute)
        trial = study.ask()
        for step, value in enumerate(curve, 1):
            trial.report(value, step)
        seen[argument, attribute] = probability(study)
    assert seen[None, None] == seen[EPOCHS, 40]
    assert seen[None, 40] != seen[None, None]


def test_no_decision_at_the_last_step_or_about_a_single_report() -> None:
    study = study_of(SOME)
    trial = study.ask()
    pruner = study.pruner
    assert isinstance(pruner, PredictedLossPruner)
    assert pruner.probability(study, study.trials[-1]) is None
    assert not trial.should_prune()
    trial.report(1.0, 1)
    assert pruner.probability(study, study.trials[-1]) is None
    for step in range(2, EPOCHS + 1):
        trial.report(1.0, step)
    assert pruner.probability(study, study.trials[-1]) is None


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_no_decision_while_all_trials_have_the_same_value(direction: Literal["minimize", "maximize"]) -> None:
    sign = 1 if direction == "minimize" else -1

    def late(end: float) -> list[float]:
        return [0.9] * (EPOCHS // 2) + falling(end, start=0.9, epochs=EPOCHS // 2 + 1)[1:]

    study = study_of((), direction, max_epochs=EPOCHS)
    ends = [run(study, late(end), sign) for end in (0.5, 0.7, 0.6, 0.4, 0.8, 0.3)]
    assert all(end == 0 or end > EPOCHS // 2 for end in ends)
    assert ends[-1] == 0
    assert any(ends)


def test_start_up_and_warm_up() -> None:
    assert run(study_of(SOME, n_startup_trials=9), flat()) == 0
    assert run(study_of(SOME, n_startup_trials=3), flat()) > 0
    assert run(study_of(SOME, n_warmup_epochs=9), flat()) == 10
    assert run(study_of(SOME, min_epochs=12), flat()) == 12
    study = study_of(n_startup_trials=3)
    assert [run(study, curve) > 0 for curve in (falling(0.1), flat(), flat(), flat(), flat(), flat())][:3] == [
        False
    ] * 3


def test_alpha_is_the_probability_below_which_it_prunes() -> None:
    assert run(study_of(SOME, alpha=0.0), flat()) == 0
    curve = falling(0.5)
    ends = [run(study_of(SOME, alpha=alpha), curve) or EPOCHS + 1 for alpha in (0.01, 0.05, 0.2, 0.8)]
    assert ends == sorted(ends, reverse=True)
    assert ends[-1] < EPOCHS


def test_more_best_ones_are_easier_to_be_among() -> None:
    seen = []
    for top_k in (1, 2, 4):
        study = study_of(SOME, top_k=top_k)
        trial = study.ask()
        for step, value in enumerate(falling(0.5)[:10], 1):
            trial.report(value, step)
        seen.append(probability(study))
    assert seen == sorted(seen)
    assert seen[0] < seen[-1]


@given(
    st.lists(st.tuples(st.floats(0.1, 0.9), st.floats(0.02, 1.0), st.integers(2, EPOCHS)), min_size=2, max_size=8)
)
@settings(max_examples=25, deadline=None)
def test_a_pruner_that_has_seen_all_decides_as_one_that_has_seen_nothing(
    drawn: list[tuple[float, float, int]],
) -> None:
    study = study_of(n_startup_trials=1)
    for end, rate, epochs in drawn:
        trial = study.ask()
        for step, value in enumerate(falling(end, rate)[:epochs], 1):
            trial.report(value, step)
            frozen = study.trials[-1]
            fresh = PredictedLossPruner(n_startup_trials=1)
            assert isinstance(study.pruner, PredictedLossPruner)
            assert study.pruner.probability(study, frozen) == fresh.probability(study, frozen)
        if epochs == EPOCHS or trial.number == 0:
            study.tell(trial, value)
        else:
            study.tell(trial, state=TrialState.PRUNED)


def test_one_pruner_keeps_its_studies_apart() -> None:
    pruner = PredictedLossPruner()
    good, bad = study_of(SOME), study_of([flat(1.5), flat(1.6), flat(1.4), flat(1.55)])
    seen = {}
    for name, study in (("good", good), ("bad", bad), ("good again", good)):
        study.pruner = pruner
        trial = study.ask()
        for step, value in enumerate(falling(0.8)[:6], 1):
            trial.report(value, step)
        found = pruner.probability(study, study.trials[-1])
        assert found is not None
        seen[name] = found
        study.tell(trial, state=TrialState.FAIL)
    assert seen["good"] == seen["good again"] != seen["bad"]


def test_it_can_be_pickled_and_decides_as_before() -> None:
    study = study_of(SOME)
    assert run(study, falling(0.55))
    again: PredictedLossPruner = pickle.loads(pickle.dumps(study.pruner))
    frozen = study.trials[-1]
    assert isinstance(study.pruner, PredictedLossPruner)
    assert again.probability(study, frozen) == study.pruner.probability(study, frozen)


def test_reports_that_are_epochs_apart() -> None:
    study = study_of()
    for curve in SOME:
        trial = study.ask()
        for step in range(5, EPOCHS + 1, 5):
            trial.report(curve[step - 1], step)
        study.tell(trial, curve[-1])
    trial = study.ask()
    pruned = []
    for step in (5, 10, 15):
        trial.report(flat()[step - 1], step)
        pruned.append(trial.should_prune())
    assert any(pruned)


def test_a_trial_that_was_taken_back_no_longer_counts() -> None:
    study = study_of(SOME)
    pruner = study.pruner
    assert isinstance(pruner, PredictedLossPruner)
    trial = study.ask()
    for step, value in enumerate(falling(0.45)[:8], 1):
        trial.report(value, step)
    before = pruner.probability(study, study.trials[-1])
    keep = study.get_trials(deepcopy=False)

    class Fewer(optuna.Study):
        def get_trials(self, deepcopy: bool = True, states: Any = None) -> list[optuna.trial.FrozenTrial]:
            return [each for each in keep[1:] if states is None or each.state in states]

    fewer = Fewer("s", study._storage)
    assert pruner.probability(fewer, study.trials[-1]) != before


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("max_epochs", 0),
        ("alpha", -0.1),
        ("alpha", 1.0),
        ("top_k", 0),
        ("n_startup_trials", -1),
        ("n_warmup_epochs", -1),
        ("min_epochs", 0),
        ("audit_fraction", 1.5),
        ("alpha", math.nan),
    ],
)
def test_arguments_out_of_range_are_refused(argument: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{argument} must be .* but is"):
        PredictedLossPruner(**{argument: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("length", "known"),
    [(("trainer.max_epochs=7",), 7), (("trainer.max_epochs=null", "trainer.max_steps=50"), None)],
    ids=["epochs", "steps"],
)
def test_hpo_writes_how_long_a_trial_is(studies: Studies, length: tuple[str, ...], known: int | None) -> None:
    with studies.open("study.pruner=predicted_loss", *length) as (view,):
        assert view.study.user_attrs.get(MAX_EPOCHS_ATTR) == known


def test_all_workers_decide_alike(studies: Studies) -> None:
    overrides = ("study.pruner=predicted_loss", f"trainer.max_epochs={EPOCHS}", "study.n_trials=20")
    with studies.open(*overrides, views=2) as (one, other):
        for number, curve in enumerate(SOME):
            run((one, other)[number % 2].study, curve)
        for view in (one, other, one):
            assert run(view.study, flat(1.02)) > 0
        assert run(other.study, falling(0.2)) == 0


def test_once_a_trial_is_complete_running_ones_are_not_read(studies: Studies) -> None:
    overrides = ("study.pruner=predicted_loss", f"trainer.max_epochs={EPOCHS}", "study.n_trials=20")
    with studies.open(*overrides) as (view,):
        for curve in SOME[:4]:
            run(view.study, curve)
        others = [view.study.ask() for _ in range(3)]
        for trial in others:
            for step, value in enumerate(falling(0.3)[:5], 1):
                trial.report(value, step)
        trial = view.study.ask()
        for step, value in enumerate((1.0, 0.5, 0.2), 1):  # with a new ended trial the length is looked up again
            if step > 1:
                trial.should_prune()
            trial.report(value, step)
        with statements(view.storage.engine) as seen:
            assert not trial.should_prune()
        assert not [text for text in seen if "trial_intermediate_values" in text]
        assert len(seen) <= 1, seen
