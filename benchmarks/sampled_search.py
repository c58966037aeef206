"""Measures what a search loses if its sampler and pruner see a sample of the trials, for `scale.py quality`."""

import argparse
import math
import statistics
import time
from typing import Any

import numpy as np
import optuna
from optuna.trial import TrialState

from hpo.storage.sample import stride, thinned


def branin_like(trial: optuna.Trial) -> float:
    """A function of six parameters, each best near a fifth of the square of the one before, and near 1."""
    x = [trial.suggest_float(f"x{i}", -5, 5) for i in range(6)]
    return sum(100 * (x[i + 1] - x[i] ** 2 / 5) ** 2 / 25 + (1 - x[i]) ** 2 for i in range(5))


class Shown(optuna.storages.InMemoryStorage):
    """A storage that shows a sample of the trials, spread over their numbers, and the best ones."""

    def __init__(self, most: int | None) -> None:
        super().__init__()
        self._most = most

    def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Any = None) -> list[Any]:  # noqa: ARG002
        """The sample."""
        trials = super().get_all_trials(study_id, deepcopy=False, states=states)
        if self._most is None:
            return trials
        count = len(super().get_all_trials(study_id, deepcopy=False))
        return thinned(trials, stride(max(1, count), self._most), maximize=False)


def falling(study: optuna.Study, epochs: int = 50) -> int:
    """Train a trial whose loss falls to a floor set by its parameters, until it is pruned; returns its epochs."""
    trial = study.ask()
    noise = np.random.default_rng((7, trial.number))
    floor = 0.05 + sum((trial.suggest_float(f"x{i}", 0, 1) - 0.5) ** 2 for i in range(6)) / 6
    pace, loss = 1 + epochs * noise.uniform(0.05, 0.2), math.inf
    for epoch in range(1, epochs + 1):
        loss = floor + 1.1 * math.exp(-epoch / pace) + 0.005 * noise.standard_normal()
        trial.report(loss, epoch)
        if trial.should_prune():
            study.tell(trial, state=TrialState.PRUNED)
            return epoch
    study.tell(trial, loss)
    return epochs


def quality(arguments: argparse.Namespace) -> None:
    print("| MedianPruner is shown | seeds | best value, median | epochs of a trial, mean |")
    print("|---|---|---|---|")
    for most in (None, *arguments.most):
        bests, epochs = [], []
        for seed in range(arguments.seeds):
            pruner = optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=5)
            sampler = optuna.samplers.RandomSampler(seed=seed)
            study = optuna.create_study(storage=Shown(most), sampler=sampler, pruner=pruner)
            epochs += [falling(study) for _ in range(arguments.trials)]
            bests.append(study.best_value)
        shown = "all" if most is None else f"at most {most:,}"
        print(f"| {shown} | {arguments.seeds} | {statistics.median(bests):.4f} | {statistics.mean(epochs):.1f} |")
    print("\n| TPE is shown | seeds | best value, median | quartiles | CPU ms a trial at the end |")
    print("|---|---|---|---|---|")
    for most in (None, *arguments.most):
        bests, costs = [], []
        for seed in range(arguments.seeds):
            sampler = optuna.samplers.TPESampler(seed=seed, multivariate=False, constant_liar=False)
            study = optuna.create_study(storage=Shown(most), sampler=sampler)
            study.optimize(branin_like, n_trials=arguments.trials - 20)
            before = time.process_time()
            study.optimize(branin_like, n_trials=20)
            costs.append((time.process_time() - before) / 20)
            bests.append(min(trial.value for trial in study.get_trials(deepcopy=False) if trial.value is not None))
        low, middle, high = np.quantile(bests, [0.25, 0.5, 0.75])
        shown = "all" if most is None else f"at most {most:,}"
        print(
            f"| {shown} | {arguments.seeds} | {middle:.3f} | {low:.3f} to {high:.3f} "
            f"| {statistics.mean(costs) * 1e3:.0f} |",
            flush=True,
        )
