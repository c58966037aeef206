"""The worth of a grant: the expected improvement at the trial's end, or the probability of one soon."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.special import log_ndtr, ndtr

from hpo.search.axes import Floats

#: Range of the improvement whose probability is computed: powers of ten, times the spread of the losses seen.
_NEARER, _FARTHER = -4.0, -1.0
#: Below this many standard deviations the expected improvement's logarithm is taken from its asymptote.
_DEEP: Final = -5.0


@dataclass(frozen=True)
class Aim:
    """What a decision tries to reach.

    Attributes:
        goal: The warped loss to get below.
        ahead: Within how many further epochs of a trial.
        expected: Whether worth is how far below the goal a loss is expected; else, how likely it is below.
    """

    goal: float
    ahead: int
    expected: bool


def drawn_aim(rng: np.random.Generator, horizon: int, incumbent: float, spread: float) -> Aim:
    """Draw an aim: expected improvement at the end, or the probability of a drawn improvement in drawn epochs.

    The second is MFPI-random of Rakotoarison et al., In-Context Freeze-Thaw Bayesian Optimization (2024).
    """
    expected = bool(rng.random() < 0.5)
    ahead = int(rng.integers(1, horizon + 1))
    threshold = 10.0 ** rng.uniform(_NEARER, _FARTHER)
    if expected:
        return Aim(incumbent, horizon, expected=True)
    return Aim(incumbent - threshold * spread, ahead, expected=False)


def worth(aim: Aim, mean: Floats, std: Floats) -> Floats:
    """The logarithm of the expected improvement, or of the probability; comparable within one decision."""
    u = (aim.goal - mean) / std
    if not aim.expected:
        return np.asarray(log_ndtr(u))
    shallow = np.maximum(u, _DEEP)
    density = np.exp(-0.5 * shallow * shallow) / math.sqrt(2 * math.pi)
    expected = np.log(shallow * ndtr(shallow) + density)
    # Far below, E[max(0, u - x)] is the density / u² times 1 - 3/u² + 15/u⁴ - …: Abramowitz and Stegun, 26.2.12.
    deep = np.maximum(-u, -_DEEP)
    rest = np.log1p((-3 + (15 - 105 / deep**2) / deep**2) / deep**2)
    far = -0.5 * u * u - 0.5 * math.log(2 * math.pi) - 2 * np.log(deep) + rest
    return np.asarray(np.log(std) + np.where(u < _DEEP, far, expected))
