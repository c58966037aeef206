"""What a sampler is shown of trials that were stopped: predicted final values, checked by other computations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import FrozenTrial, TrialState, create_trial
from sklearn.gaussian_process.kernels import Matern

from hpo.search.as_predicted import as_predicted
from hpo.search.predicted_ends import predicted_ends
from hpo.search.samplers import SAMPLERS
from hpo.search.schedulers.freeze_thaw import kernel
from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.search.schedulers.freeze_thaw.table import Warp, places
from hpo.search.trial_curves import curves_of_trials
from hpo.storage.attributes import MAX_EPOCHS_ATTR, PAUSED_ATTR
from hpo.storage.optuna_private import all_trials
from tests.support.studies import Studies, ask
from tests.unit.search.test_samplers import CONDITIONAL, EXHAUSTIVE, EXTRA, quiet, sampler

pytestmark = pytest.mark.full

__all__ = ["quiet"]

SPACE = {
    "x": FloatDistribution(0.0, 1.0),
    "kind": CategoricalDistribution(["a", "b"]),
    "y": FloatDistribution(0.1, 10.0, log=True),
}
ENCODING = Encoding(SPACE, {"y": {"kind": ["b"]}})
HORIZON = 20


def study_of(*trials: FrozenTrial, direction: str = "minimize", horizon: int | None = HORIZON) -> optuna.Study:
    study = optuna.create_study(direction=direction)
    if horizon is not None:
        study.set_user_attr(MAX_EPOCHS_ATTR, horizon)
    study.add_trials(trials)
    return study


def trial(
    x: float, *reports: float, state: TrialState = TrialState.PRUNED, y: float | None = None, **more: Any
) -> FrozenTrial:
    """A trial with these reports; a complete one's value is its last."""
    params: dict[str, Any] = {"x": x, "kind": "a"} | ({} if y is None else {"kind": "b", "y": y})
    values = dict(enumerate(reports, 1))
    return create_trial(
        params=params,
        distributions={name: SPACE[name] for name in params},
        intermediate_values=values,
        state=state,
        value=reports[-1] if state == TrialState.COMPLETE else None,
        **more,
    )


def falling(end: float, epochs: int) -> list[float]:
    return [end + 2.0 / epoch for epoch in range(1, epochs + 1)]


def whole(x: float, end: float) -> FrozenTrial:
    return trial(x, *falling(end, HORIZON), state=TrialState.COMPLETE)


def shown(study: optuna.Study) -> list[FrozenTrial]:
    return all_trials(as_predicted(study, ENCODING))


def test_a_predicted_value_is_the_posterior_mean_of_the_model_written_down_by_hand() -> None:
    study = study_of(whole(0.2, 1.0), whole(0.9, 2.0), trial(0.3, 3.0, 2.1, 1.6), trial(0.7, 3.5, 2.9, y=2.0))
    known = curves_of_trials(study, study.trials, bounded=False)
    warp, rows = Warp(known.curves), []
    for curve in known.curves:
        for epoch in sorted({1, 2, 4, 8, 16, curve.done} & set(range(1, curve.done + 1))):
            rows.append((curve.number, epoch, float(warp(np.array([curve.at(epoch)]))[0])))
    x = ENCODING.features(ENCODING.points([curve.seen.params for curve in known.curves]))
    z = np.array([row[2] for row in rows])
    asked = [(2, HORIZON, 0.0), (3, HORIZON, 0.0)]
    covariance = hand_covariance(rows + asked, x)
    seen = covariance[: len(rows), : len(rows)] + (math.exp(-6.0) + 1e-6) * np.eye(len(rows))
    mean = covariance[len(rows) :, : len(rows)] @ np.linalg.solve(seen, z - np.median(z))
    ends = predicted_ends(known.curves, ENCODING, HORIZON)
    assert ends.keys() == {2, 3}
    for number, expected in zip((2, 3), mean, strict=True):
        assert ends[number] == pytest.approx(warp.loss(float(expected) + float(np.median(z))), rel=1e-9)
        assert shown(study)[number].value == ends[number]


def hand_covariance(rows: list[tuple[int, int, float]], x: np.ndarray) -> np.ndarray:
    """That of `kernel`'s docstring at the prior's means, of scikit-learn's Matérn kernels."""
    of = [number for number, _, _ in rows]
    t = places(np.array([epoch for _, epoch, _ in rows], dtype=float), HORIZON)[:, None]
    theta, _ = kernel.prior(3)
    scales = np.exp(2 * theta)
    kx = Matern(math.sqrt(3), nu=2.5)(x[of])
    kt, ko = (Matern(math.exp(theta[place]), nu=1.5)(t) for place in (kernel.LENGTH_T, kernel.LENGTH_OWN))
    own = np.equal.outer(of, of)
    total = 1 + scales[kernel.TREND] * kt + kx * (scales[kernel.LEVEL] + scales[kernel.SHAPE] * kt)
    return np.asarray(total + own * (scales[kernel.OWN_LEVEL] + scales[kernel.OWN_WALK] * ko))


def test_of_many_trials_each_has_its_own_part_in_its_end() -> None:
    """Trials of one point that the model has no room for are still ranked by their last values."""
    rng = np.random.default_rng(0)
    trials = [trial(0.5, 3.0, 2.0 + float(off)) for off in rng.normal(0, 0.2, size=450)]
    values = [each.value for each in shown(study_of(*trials))]
    lasts = [each.intermediate_values[2] for each in trials]
    assert np.corrcoef(np.argsort(np.argsort(values)), np.argsort(np.argsort(lasts)))[0, 1] > 0.9


reports = st.lists(
    st.one_of(st.floats(-1e3, 1e3), st.sampled_from([math.nan, math.inf, 0.0])), min_size=0, max_size=6
)
some_trials = st.lists(
    st.tuples(st.floats(0, 1), reports, st.booleans(), st.one_of(st.none(), st.floats(0.1, 10))), max_size=12
)


@settings(max_examples=60, deadline=None)
@given(some_trials, st.sampled_from(["minimize", "maximize"]), st.sampled_from([None, 4, HORIZON]))
def test_whatever_was_reported_a_sampler_is_shown_finite_values_and_the_study_stays_as_it_is(
    drawn: list[tuple[float, list[float], bool, float | None]], direction: str, horizon: int | None
) -> None:
    trials = []
    for x, values, complete, y in drawn:
        ends = complete and bool(values) and math.isfinite(values[-1])
        trials.append(trial(x, *values, y=y, state=TrialState.COMPLETE if ends else TrialState.PRUNED))
    study = study_of(*trials, direction=direction, horizon=horizon)
    before = study.trials
    seen_as = as_predicted(study, ENCODING)
    if seen_as is study:  # nothing was stopped, or nothing finite is known
        return
    for own, seen in zip(before, all_trials(seen_as), strict=True):
        assert (seen.number, seen.params) == (own.number, own.params)
        assert str(seen.intermediate_values) == str(own.intermediate_values)
        if own.state == TrialState.COMPLETE or not own.intermediate_values:
            assert (seen.state, seen.value) == (own.state, own.value)
            continue
        assert seen.state == TrialState.COMPLETE
        assert seen.value is not None
        assert math.isfinite(seen.value)
        curve = [own.intermediate_values[epoch] for epoch in sorted(own.intermediate_values)]
        best = (min if direction == "minimize" else max)(filter(math.isfinite, curve), default=seen.value)
        if math.isfinite(curve[-1]):
            assert seen.value <= best if direction == "minimize" else seen.value >= best
    assert [each.state for each in study.trials] == [each.state for each in before]


def test_maximising_is_minimising_the_negative() -> None:
    curves = [falling(1.0, 20), falling(2.0, 3), falling(0.5, 5)]
    states = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.PRUNED]
    found = []
    for sign, direction in ((1, "minimize"), (-1, "maximize")):
        trials = [
            trial(0.1 + 0.3 * index, *(sign * value for value in curve), state=state)
            for index, (curve, state) in enumerate(zip(curves, states, strict=True))
        ]
        found.append([sign * (each.value or 0.0) for each in shown(study_of(*trials, direction=direction))])
    assert found[0] == pytest.approx(found[1])


def test_a_trial_that_diverged_has_the_worst_value_that_is_shown() -> None:
    lost = trial(0.5, 2.0, math.inf, state=TrialState.COMPLETE)
    study = study_of(whole(0.2, 1.0), trial(0.3, 9.0, 8.0), trial(0.6, 2.0, math.nan), lost)
    values = [each.value for each in shown(study)]
    assert values[2] == values[3] == max(value for value in values[:2] if value is not None)


def test_the_worst_value_that_is_shown_is_none_of_a_running_trial() -> None:
    lost = trial(0.5, 2.0, math.inf, state=TrialState.COMPLETE)
    study = study_of(whole(0.2, 1.0), trial(0.3, 3.0, 2.0), lost)
    before = [each.value for each in shown(study)]
    running = study.ask(SPACE)
    running.report(900.0, 1)
    values = [each.value for each in shown(study)[:3]]
    assert values[2] == max(value for value in values[:2] if value is not None)
    assert values[2] is not None
    assert before[2] is not None
    assert values[2] < 2 * before[2]


def test_a_trial_that_diverged_is_no_measure_of_how_long_trials_are() -> None:
    lost = trial(0.5, 2.0, 1.0, math.inf, state=TrialState.COMPLETE)
    stopped = trial(0.3, *falling(1.0, 3))
    study = study_of(lost, stopped, horizon=None)
    assert curves_of_trials(study, study.trials, bounded=False).horizon == 9  # three times the longest
    study = study_of(lost, stopped, trial(0.4, *falling(1.0, 5), state=TrialState.COMPLETE), horizon=None)
    assert curves_of_trials(study, study.trials, bounded=False).horizon == 5


def test_a_paused_trial_is_shown_at_its_end_and_a_running_one_as_it_runs() -> None:
    study = study_of(whole(0.2, 1.0))
    numbers = []
    for _ in range(2):
        running = study.ask(SPACE)
        for epoch, value in enumerate(falling(1.5, 3), 1):
            running.report(value, epoch)
        numbers.append(running.number)
    running.set_user_attr(PAUSED_ATTR, 3)
    states = [each.state for each in shown(study)]
    assert states == [TrialState.COMPLETE, TrialState.RUNNING, TrialState.COMPLETE]


def test_a_study_without_stopped_trials_or_with_several_objectives_is_shown_as_it_is() -> None:
    ended = study_of(whole(0.2, 1.0), trial(0.4))
    assert as_predicted(ended, ENCODING) is ended
    several = optuna.create_study(directions=["minimize", "maximize"])
    assert as_predicted(several, ENCODING) is several


def test_a_stopped_trial_that_lacks_a_constraint_stays_stopped() -> None:
    bounded = {"system_attrs": {"constraints:size": -1.0}}
    study = study_of(
        trial(0.2, *falling(1.0, 20), state=TrialState.COMPLETE, **bounded),
        trial(0.3, 3.0, 2.0, **bounded),
        trial(0.4, 3.0, 2.0),
    )
    states = [each.state for each in shown(study)]
    assert states == [TrialState.COMPLETE, TrialState.COMPLETE, TrialState.PRUNED]


def test_the_process_of_optuna_learns_from_stopped_trials_alone(studies: Studies) -> None:
    """Ten trials that were stopped are enough for Optuna's GP: it is no longer random."""
    drawn = []
    for name in ("gp", "random"):
        options = f"{{name: {name}, seed: 3}}"
        with studies.open(*sampler(options), "trainer.max_epochs=8", at=name) as (view,):
            for _ in range(10):
                stop(view, 3)
            drawn.append(ask(view)[1])
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("short", sorted(set(SAMPLERS) - EXHAUSTIVE))
def test_each_sampler_draws_where_every_trial_was_stopped(studies: Studies, short: str) -> None:
    options = f"{{name: {short}, {EXTRA.get(short, '')}}}"
    text = {"text": CONDITIONAL} if short in ("tpe", "cmaes", "qmc", "random") else {}
    with studies.open(*sampler(options), "trainer.max_epochs=8", **text) as (view,):
        for number in range(12):
            stop(view, number % 4)
        assert view.space.contains(ask(view)[1])
        assert {each.state for each in view.study.trials[:12]} == {TrialState.PRUNED}


def stop(view: Any, epochs: int) -> None:
    """A trial that is pruned after so many epochs."""
    asked, params = ask(view)
    for epoch in range(1, epochs + 1):
        asked.report(math.nan if epoch == 3 and asked.number % 2 else params["optimizer.lr"] + 1 / epoch, epoch)
    view.study.tell(asked, state=TrialState.PRUNED)
