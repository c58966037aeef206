"""The curve model against other computations: finite differences, dense algebra in loops, scikit-learn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.linalg import LinAlgError
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern

from hpo.search.schedulers.freeze_thaw import kernel
from hpo.search.schedulers.freeze_thaw.fitting import fitted, negative_log_posterior
from hpo.search.schedulers.freeze_thaw.kernel import Rows
from hpo.search.schedulers.freeze_thaw.model import CurveModel, Known

GROUPS = np.array([0, 1, 1, 2])  # the second parameter has two columns
PRIOR = kernel.prior(3)
KNOWN = Known((lambda rows: rows.x[rows.of, 0] - rows.t, lambda rows: rows.x[rows.of, 3] ** 2), 0.6, 0.5)


def data(count: int, seed: int = 0) -> tuple[Rows, Any]:
    rng = np.random.default_rng(seed)
    of, trial = (rng.integers(0, count // 2, count) for _ in range(2))
    rows = Rows(rng.random((count // 2, 4)), of, rng.choice(rng.random(5), count), trial)
    return rows, rng.normal(size=count)


def by_hand(theta: Any, a: Rows, b: Rows) -> Any:
    """The covariance, entry by entry, from the formulae of the documentation."""

    def half(order: float, distance: float) -> float:
        if order == 1.5:
            return (1 + math.sqrt(3) * distance) * math.exp(-math.sqrt(3) * distance)
        scaled = math.sqrt(5) * distance
        return (1 + scaled + scaled**2 / 3) * math.exp(-scaled)

    s = [math.exp(each) for each in theta]
    result = np.empty((len(a), len(b)))
    for i in range(len(a)):
        for j in range(len(b)):
            scaled = [(a.x[a.of[i], c] - b.x[b.of[j], c]) / s[8 + GROUPS[c]] for c in range(4)]
            kx = half(2.5, math.sqrt(sum(each**2 for each in scaled)))
            kt, ko = (half(1.5, abs(a.t[i] - b.t[j]) / s[k]) for k in (6, 7))
            own = float(a.trial[i] == b.trial[j] and a.trial[i] >= 0)
            result[i, j] = (
                1 + s[0] ** 2 * kt + kx * (s[1] ** 2 + s[2] ** 2 * kt) + own * (s[3] ** 2 + s[4] ** 2 * ko)
            )
    return result


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_those_of_finite_differences(seed: int, known: bool) -> None:
    rows, z = data(14, seed)
    values = KNOWN.at(rows)
    fixed = KNOWN.covariance(values, values) if known else None
    mean, std = kernel.prior(3)
    theta = mean + 0.7 * std * np.random.default_rng(seed).normal(size=len(mean))
    _, gradient = negative_log_posterior(theta, PRIOR, GROUPS, rows, z, fixed)
    for index in range(len(theta)):
        step = np.zeros_like(theta)
        step[index] = 1e-5
        above, below = (
            negative_log_posterior(theta + sign * step, PRIOR, GROUPS, rows, z, fixed)[0] for sign in (1, -1)
        )
        assert gradient[index] == pytest.approx((above - below) / 2e-5, rel=1e-4, abs=1e-5)


def test_predictions_are_those_of_a_dense_computation() -> None:
    rows, z = data(12)
    at, _ = data(5, seed=1)
    at = Rows(at.x, at.of, at.t, np.array([-1, -1, 0, 1, 99]))
    theta = kernel.prior(3)[0] + 0.3
    inverse = np.linalg.inv(by_hand(theta, rows, rows) + (math.exp(2 * theta[5]) + 1e-6) * np.eye(12))
    across = by_hand(theta, at, rows)
    mean, std = CurveModel(theta, GROUPS, rows, z).predict(at)
    np.testing.assert_allclose(mean, across @ inverse @ z, rtol=1e-8)
    alone = by_hand(theta, at, at).diagonal() + (at.trial < 0) * (math.exp(2 * theta[3]) + math.exp(2 * theta[4]))
    np.testing.assert_allclose(std**2, alone - np.einsum("ij,jk,ik->i", across, inverse, across), rtol=1e-7)


def test_what_is_known_has_a_weight_that_the_rows_move() -> None:
    rows, z = data(12)
    at, _ = data(5, seed=1)
    at = Rows(at.x, at.of, at.t, np.full(5, -1))
    theta = kernel.prior(3)[0] + 0.3
    f, g = (np.stack([each.x[each.of, 0] - each.t, each.x[each.of, 3] ** 2], axis=1) for each in (rows, at))
    noise = (math.exp(2 * theta[5]) + 1e-6) * np.eye(12)
    inverse = np.linalg.inv(by_hand(theta, rows, rows) + 0.25 * f @ f.T + noise)
    across = by_hand(theta, at, rows) + 0.25 * g @ f.T
    model = CurveModel(theta, GROUPS, rows, z, KNOWN)
    mean, std = model.predict(at)
    np.testing.assert_allclose(mean, 0.6 * g.sum(1) + across @ inverse @ (z - 0.6 * f.sum(1)), rtol=1e-8)
    alone = (
        by_hand(theta, at, at).diagonal() + math.exp(2 * theta[3]) + math.exp(2 * theta[4]) + 0.25 * (g**2).sum(1)
    )
    np.testing.assert_allclose(std**2, alone - np.einsum("ij,jk,ik->i", across, inverse, across), rtol=1e-7)
    model.believe(at)
    np.testing.assert_allclose(model.predict(at)[0], mean, rtol=1e-7)


def test_the_part_of_the_parameters_is_that_of_their_kernels() -> None:
    rows, z = data(12)
    at, _ = data(5, seed=1)
    theta = kernel.prior(3)[0] + 0.3
    alpha = np.linalg.solve(by_hand(theta, rows, rows) + (math.exp(2 * theta[5]) + 1e-6) * np.eye(12), z)
    gone = theta.copy()
    gone[[1, 2]] = -np.inf  # neither level(x) nor shape(x, t)
    part = by_hand(theta, at, rows) - by_hand(gone, at, rows)
    np.testing.assert_allclose(CurveModel(theta, GROUPS, rows, z).of_parameters(at), part @ alpha, rtol=1e-8)


def test_it_is_scikit_learns_process_where_the_kernels_agree() -> None:
    rng = np.random.default_rng(3)
    x, z = rng.random((20, 4)), rng.normal(size=20)
    theta = kernel.prior(3)[0]
    theta[[kernel.TREND, kernel.SHAPE, kernel.OWN_LEVEL, kernel.OWN_WALK]] = -20.0  # a constant, a level, noise
    lengths = np.exp(theta[8:])[GROUPS]
    theirs = ConstantKernel(1.0) + ConstantKernel(math.exp(2 * theta[1])) * Matern(lengths, nu=2.5)
    noise = math.exp(2 * theta[5]) + 1e-6
    peer = GaussianProcessRegressor(theirs, alpha=noise, optimizer=None).fit(x, z)
    at = rng.random((6, 4))
    ours = CurveModel(theta, GROUPS, Rows.each(x, np.ones(20), np.arange(20)), z)
    mean, std = ours.predict(Rows.each(at, np.ones(6), np.full(6, -1)))
    expected, spread = peer.predict(at, return_std=True)
    np.testing.assert_allclose(mean, expected, rtol=1e-6)
    np.testing.assert_allclose(std, spread, rtol=1e-6)
    off = (theta - kernel.prior(3)[0]) / kernel.prior(3)[1]
    value, _ = negative_log_posterior(theta, PRIOR, GROUPS, ours.rows, z)
    constant = 0.5 * 20 * math.log(2 * math.pi)
    likelihood = -peer.log_marginal_likelihood_value_
    assert value - 0.5 * off @ off + constant == pytest.approx(likelihood, rel=1e-6)


def test_what_is_believed_is_as_if_it_had_been_seen_where_it_was_predicted() -> None:
    rows, z = data(12)
    theta = kernel.prior(3)[0]
    model = CurveModel(theta, GROUPS, rows, z)
    at = Rows.each(rows.x[:2] + 0.01, np.array([0.9, 1.0]), np.array([50, 51]))
    mean, std = model.predict(at)
    model.believe(at)
    again, narrow = model.predict(at)
    np.testing.assert_allclose(again, mean, atol=1e-6)
    assert (narrow < 0.3 * std).all()
    seen = CurveModel(theta, GROUPS, rows.joined(at), np.concatenate([z, mean]))
    other, _ = data(6, seed=2)
    np.testing.assert_allclose(model.predict(other), seen.predict(other), rtol=1e-9)


def test_a_fit_finds_which_parameter_matters_and_starts_where_the_last_ended() -> None:
    rng = np.random.default_rng(0)
    x = rng.random((60, 4))
    z = np.sin(6 * x[:, 0]) + 0.01 * rng.normal(size=60)
    rows = Rows.each(x, np.ones(60), np.arange(60))
    start = kernel.prior(3)[0]
    theta = fitted(start, PRIOR, GROUPS, rows, z)
    assert theta[8] < min(theta[9], theta[10]) - 0.5
    values = [negative_log_posterior(each, PRIOR, GROUPS, rows, z)[0] for each in (start, theta)]
    again = negative_log_posterior(fitted(theta, PRIOR, GROUPS, rows, z), PRIOR, GROUPS, rows, z)[0]
    assert values[0] > values[1] >= again


def test_a_covariance_that_is_no_such_thing_is_refused() -> None:
    rows, z = data(30)
    huge = kernel.prior(3)[0]
    huge[kernel.LEVEL], huge[8:] = 25.0, 8.0  # beside which the noise is lost
    with pytest.raises(LinAlgError):
        CurveModel(huge, GROUPS, rows, z)
    value, gradient = negative_log_posterior(huge, PRIOR, GROUPS, rows, z)
    assert value > 1e9
    assert not gradient.any()


def test_the_nearest_configuration_is_that_of_a_loop() -> None:
    rows, z = data(12)
    theta = kernel.prior(3)[0] + 0.2
    x = np.random.default_rng(5).random((7, 4))
    lengths = np.exp(theta[8:])[GROUPS]
    expected = [min(np.linalg.norm((one - other) / lengths) for other in rows.x) for one in x]
    np.testing.assert_allclose(CurveModel(theta, GROUPS, rows, z).nearest(x), expected, rtol=1e-7)
    assert CurveModel(theta, GROUPS, rows, z).nearest(rows.x[:1]) == pytest.approx(0, abs=1e-6)
