"""What a grant is worth, against SciPy's functions and a numeric integral."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import erfcx
from scipy.stats import norm

from hpo.search.schedulers.freeze_thaw.acquisition import Aim, worth


def at(goal: float, mean: float, std: float, *, expected: bool) -> float:
    return float(worth(Aim(goal, 1, expected=expected), np.array([mean]), np.array([std]))[0])


@pytest.mark.parametrize(("goal", "mean", "std"), [(0.3, 0.5, 0.1), (0.3, 0.2, 0.5), (-1.0, 3.0, 1.0)])
def test_the_expected_improvement_is_its_integral(goal: float, mean: float, std: float) -> None:
    below, _ = quad(lambda x: (goal - x) * norm.pdf(x, mean, std), mean - 12 * std, goal, epsabs=0, epsrel=1e-10)
    assert at(goal, mean, std, expected=True) == pytest.approx(math.log(below), rel=1e-8)


@pytest.mark.parametrize("u", [-4.9999, -5.0001, -6.0, -8.0, -30.0, -1000.0])
def test_far_below_it_goes_on_without_a_step(u: float) -> None:
    std, a = 0.25, -u
    exact = math.log(std) + norm.logpdf(u) + math.log1p(-a * math.sqrt(math.pi / 2) * erfcx(a / math.sqrt(2)))
    assert at(std * u, 0.0, std, expected=True) == pytest.approx(exact, abs=2e-3)


def test_the_chance_of_an_improvement_is_that_of_a_normal_distribution() -> None:
    assert at(0.3, 0.5, 0.1, expected=False) == pytest.approx(norm.logcdf(-2.0))
    assert at(-40.0, 0.0, 1.0, expected=False) == pytest.approx(norm.logcdf(-40.0))
