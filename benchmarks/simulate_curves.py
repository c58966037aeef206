"""Simulated learning curves of scheduled training: many tasks in seconds, beside the real ones of make_curves.py.

``python benchmarks/simulate_curves.py OUT_DIR [--tasks 36] [--hard]`` writes OUT_DIR/tNN.npz with ``valid``
[runs, 40]. A task is a noisy quadratic (Zhang et al. 2019, Which Algorithmic Choices Matter at Which Batch Sizes?,
NeurIPS): in each eigendirection of curvature h the mean of the parameter shrinks by 1 - rate · h a step and its
variance grows by rate² · h · noise. So a large learning rate falls fast, stays on a floor of noise, and wins once
it decays. Tasks differ in spectrum, noise, warm-up, generalisation gap, measurement (loss or error rate) and
schedule; runs in learning rate, warm-up and weight decay, and in some tasks in the schedule. What is measured
moves with the weights: as the rate decays, so does the jitter of the curve.

--hard keeps the tasks on which early ranks mislead: those where the run that ends best ranks behind a fifth of
the others after a tenth or a quarter of the run. The curves serve the fitting of
`hpo.search.predicted_loss.promise`, and are not in this repository.
"""

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

POINTS, STEPS, DIRECTIONS = 40, 1600, 120
SCHEDULES = ("cosine", "linear", "steps", "stable, then linear", "inverse root", "quadratic")
_MISLED, _EARLY = 0.2, (0.1, 0.25)


def rates(schedules: Array, warm: Array, stable: float) -> Array:
    """Learning rates relative to their peak; [steps, runs] for schedules given by their place in `SCHEDULES`."""
    at = (np.arange(STEPS) / STEPS)[:, None]
    rest = np.clip((at - warm) / (1 - warm), 0, 1)
    shapes = (
        0.5 * (1 + np.cos(np.pi * rest)),
        1 - rest,
        np.where(rest < 0.5, 1.0, np.where(rest < 0.75, 0.1, 0.01)),
        np.where(rest < stable, 1.0, 1 - (rest - stable) / (1 - stable)),
        1 / np.sqrt(1 + 20 * rest),
        (1 - rest) ** 2,
    )
    chosen: Array = np.choose(schedules.astype(np.intp), shapes)
    return np.minimum(at / warm, 1) * np.maximum(chosen, 1e-3)


def excess(rng: np.random.Generator, peak: Array, relative: Array) -> Array:
    """Expected loss above its minimum, as a share of the first; [runs, points]."""
    curvature = np.arange(1, DIRECTIONS + 1.0) ** -rng.uniform(0.9, 1.6)
    start = np.arange(1, DIRECTIONS + 1.0) ** -rng.uniform(-0.4, 0.6)
    total = float((curvature * start).sum())
    noise = 10 ** rng.uniform(-2.2, -0.2) * total
    decay = 10 ** rng.uniform(-5, -2, len(peak))[:, None]
    mean, variance = np.tile(np.sqrt(start), (len(peak), 1)), np.zeros((len(peak), DIRECTIONS))
    found = np.zeros((len(peak), POINTS))
    for step in range(STEPS):
        rate = (peak * relative[step])[:, None]
        shrink = 1 - rate * curvature
        mean = np.clip(shrink * mean - rate * decay * (mean - np.sqrt(start)), -1e9, 1e9)
        variance = np.minimum(shrink**2 * variance + rate**2 * curvature * noise, 1e18)
        point, left = divmod(step + 1, STEPS // POINTS)
        if left == 0:
            found[:, point - 1] = 0.5 * (curvature * (mean**2 + variance)).sum(axis=1) / total
    return found


def jitter(rng: np.random.Generator, relative: Array) -> Array:
    """The noise that follows the weights: an autoregression that freezes as the rate decays; [runs, points]."""
    fresh = np.sqrt(np.clip(relative[STEPS // POINTS - 1 :: STEPS // POINTS], 0, 1))
    state = rng.normal(size=(relative.shape[1],))
    found = []
    for share in fresh:
        state = (1 - share) * state + np.sqrt(1 - (1 - share) ** 2) * rng.normal(size=state.shape)
        found.append(state)
    return np.array(found).T


def task(seed: int) -> Array:
    """The curves of a task; NaN from where a run has diverged; [60 to 125 runs, points]."""
    rng = np.random.default_rng(seed)
    runs = int(rng.integers(60, 126))
    low, high = ((-3.0, 0.2), (-2.3, 0.2), (-1.8, 0.3))[rng.integers(3)]
    peak = 10 ** rng.uniform(low, high, runs)
    mixed = rng.random() < 0.3
    schedules = rng.integers(len(SCHEDULES), size=runs) if mixed else np.full(runs, rng.integers(len(SCHEDULES)))
    warm = rng.uniform(0.02, rng.choice([0.05, 0.1, 0.25]), runs)
    relative = rates(schedules.astype(np.float64), warm, rng.uniform(0.4, 0.9))
    loss = excess(rng, peak, relative)
    learned = np.clip(1 - 2 * loss, 0, 1)
    scale = 10 ** rng.uniform(-2.5, -1.0)
    gap = scale * (0.5 * rng.normal(size=runs) - 0.5 * rng.uniform() * np.log10(peak))
    overfit = scale * np.clip(rng.normal(-0.5, 1, runs), 0, None) * (rng.random() < 0.4)
    loss = loss + (gap[:, None] + overfit[:, None] * np.linspace(0, 1, POINTS) ** 3) * learned
    measured = loss * (1 + 10 ** rng.uniform(-3.3, -1.7) * jitter(rng, relative)) + rng.uniform(0, 0.3)
    if rng.random() < 0.3:
        measured = 1 - np.exp(-2 * np.clip(measured, 0, 20))  # an error rate
    return np.where(measured > 50, np.nan, measured)


def misleads(curves: Array) -> bool:
    """Whether the best run ranks behind many others at an early point."""
    worst_last = np.where(np.isfinite(curves), curves, np.inf)
    best = int(np.argmin(worst_last[:, -1]))
    ranks = [
        (worst_last[:, int(share * POINTS)] < worst_last[best, int(share * POINTS)]).mean() for share in _EARLY
    ]
    return bool(max(ranks) > _MISLED)


def main() -> None:
    """Write the tasks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", type=int, default=36, help="how many are simulated")
    parser.add_argument("--hard", action="store_true", help="keep those on which early ranks mislead")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for seed in range(arguments.tasks):
        curves = task(seed)
        if not arguments.hard or misleads(curves):
            np.savez_compressed(arguments.out / f"t{seed:02d}.npz", valid=curves.astype(np.float32))
            print(f"t{seed:02d}: {len(curves)} runs, best {np.nanmin(curves[:, -1]):.4f}")


if __name__ == "__main__":
    main()
