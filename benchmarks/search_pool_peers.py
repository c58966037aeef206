"""DyHPO and DPL as strategies of search.py: they choose from a pool of configurations, an epoch at a time.

- DyHPO (Wistuba, Kadra and Grabocka, 2022): a Gaussian process on features that a network makes of the parameters,
  the epoch and the curve so far; it trains what promises most at its own next epoch.
- DPL (Kadra, Janowski, Wistuba and Grabocka, 2023): five networks that give each configuration a power law; it
  trains on what promises most at the end.

Both have the settings of their repositories: a first configuration at random, an epoch a decision, a new fit at
each epoch: from scratch at the first ten, and after a long time without a better value, else a short one. None of
these is left out. What is written anew for speed computes the same, but for its random numbers: DyHPO's expected
improvement, over all candidates at once, and DPL's batches, cut from arrays.

Their repositories leave these open, and here they are so:

- The pool is 2,000 random points, as large as their tables of LCBench; with so many trials, that many. It bounds
  what they can find.
- One configuration trains at a time, however many workers there are: neither takes account of epochs under way.
  Where epochs are counted that is an advantage, as each decision has seen all before it.
- A loss between 0 and 1 is taken as it is. Where the trials so far have had others, the interval from the least of
  them (or 0) to the greatest (or 1) becomes 0 to 1, earlier losses included. DyHPO is shown 1 less the loss.
- A trial that diverges stays at the worst loss so far until its last epoch, so that it isn't chosen again.
"""

import contextlib
import importlib
import logging
import math
import os
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from search_study import Floats, Plan, Running
from search_tasks import Params, Task

from hpo.search.schedulers.freeze_thaw.encoding import Encoding

#: How many configurations a pool has.
_POOL: Final = 2000
#: More decisions than any study has: both peers end the process when their budget is used up.
_DECISIONS: Final = 10**6


def pool_of(task: Task, seed: int, size: int = _POOL) -> tuple[Encoding, Floats]:
    """A task's encoding and the distinct points of a pool in it."""
    encoding = Encoding(task.space, task.conditions)
    drawn = encoding.snap(np.random.default_rng(seed).random((size, len(encoding))))
    return encoding, np.unique(drawn, axis=0)


class Pool(ABC):
    """A peer that chooses a configuration of a pool and an epoch to train it to, and then gets its curve."""

    def __init__(self, task: Task, seed: int, plan: Plan) -> None:
        self._task = task
        self._encoding, self._points = pool_of(task, seed, plan.trials or _POOL)
        self._indices: list[int] = []
        self._curves: dict[int, list[float]] = {}
        self._bounds = (0.0, 1.0)
        self.granted: tuple[int | None, str] = (None, "")
        np.random.seed(seed)  # both draw from NumPy's global generator
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.chdir(folder),
        ):  # they write log files to the current folder
            self._peer = self._made(self._encoding.features(self._points), seed)
            logging.getLogger().handlers.clear()
        logging.disable(logging.INFO)  # a line for each pass of a fit

    def free(self, trials: Sequence[Running], here: int | None) -> tuple[int | None, Params] | None:  # noqa: ARG002
        """See `Strategy`; None while a trial runs, or if all points of the pool are trained to the end."""
        running = any(trial.state == "running" for trial in trials)
        if running or sum(trial.state == "ended" for trial in trials) == len(self._points):
            return None
        index, epoch = self._peer.suggest()
        self.granted = (int(epoch), "")
        if index in self._indices:
            return self._indices.index(index), {}
        self._indices.append(int(index))
        return None, self._encoding.params(self._points[index])

    def report(self, trial: Running, value: float) -> bool:
        """See `Strategy`."""
        horizon = self._task.horizon
        if math.isfinite(value) and trial.done < min(trial.until or 1, horizon):
            return True
        curve = [trial.values[epoch] for epoch in sorted(trial.values)]
        if not math.isfinite(value):
            trial.state = "ended"
            finite = [loss for each in (*self._curves.values(), curve) for loss in each if math.isfinite(loss)]
            worst = max(finite, default=1.0)
            curve = [loss if math.isfinite(loss) else worst for loss in curve]
            curve += [worst] * (horizon - len(curve))
        index = self._indices[trial.number]
        self._curves[index] = curve
        bounds = (min(self._bounds[0], *curve), max(self._bounds[1], *curve))
        if bounds != self._bounds:
            self._bounds = bounds
            self._show_again({other: self._scaled(each) for other, each in self._curves.items() if other != index})
        self._peer.observe(index, len(curve), self._shown(self._scaled(curve)))
        return False

    def _scaled(self, curve: Sequence[float]) -> list[float]:
        low, high = self._bounds
        return [(loss - low) / (high - low) for loss in curve]

    @abstractmethod
    def _made(self, features: Floats, seed: int) -> Any:
        """The peer, for these configurations."""

    @abstractmethod
    def _shown(self, curve: list[float]) -> list[float]:
        """A scaled curve in the peer's format."""

    @abstractmethod
    def _show_again(self, curves: Mapping[int, list[float]]) -> None:
        """Replace the curves that the peer has by curves in a new scale."""


class DyHPO(Pool):
    """DyHPO with its defaults."""

    def _made(self, features: Floats, seed: int) -> Any:
        if not hasattr(np, "NINF"):
            np.NINF = -np.inf  # type: ignore[attr-defined]  # it was made for NumPy 1
        module = _imported("hpo_method", "HPO_DYHPO", "releaunifreiburg/DyHPO")
        self._kept = tempfile.TemporaryDirectory(prefix="dyhpo-")
        peer = module.DyHPOAlgorithm(
            features,
            [False] * features.shape[1],
            seed=seed,
            max_benchmark_epochs=self._task.horizon,
            total_budget=_DECISIONS,
            device="cpu",
            output_path=self._kept.name,
            verbose=False,
        )
        peer.find_suggested_config = self._most_promising
        return peer

    def _shown(self, curve: list[float]) -> list[float]:
        return [1 - loss for loss in curve]

    def _show_again(self, curves: Mapping[int, list[float]]) -> None:
        for index, curve in curves.items():
            self._peer.performances[index] = self._shown(curve)
        if curves:
            self._peer.best_value_observed = max(max(self._shown(curve)) for curve in curves.values())

    def _most_promising(self, means: Floats, deviations: Floats, budgets: Floats) -> int:
        """The candidate with the highest expected improvement, over the best value at its own next epoch."""
        from scipy.special import ndtr

        epochs, which = np.unique(budgets.astype(np.int64), return_inverse=True)
        best = np.array([self._peer.calculate_fidelity_ymax(int(epoch)) for epoch in epochs])[which]
        means, deviations = means.astype(np.float64), np.maximum(deviations.astype(np.float64), 1e-12)
        ahead = (means - best) / deviations
        density = np.exp(-0.5 * ahead**2) / math.sqrt(2 * math.pi)
        return int(np.argmax((means - best) * ndtr(ahead) + deviations * density))


class DPL(Pool):
    """Deep power laws with their defaults."""

    def _made(self, features: Floats, seed: int) -> Any:
        module = _imported("surrogate_models.power_law_surrogate", "HPO_DPL", "releaunifreiburg/DPL")
        module.DataLoader = _Batches  # type: ignore[attr-defined]
        low, high = features.min(0), features.max(0)
        return module.PowerLawSurrogate(
            (features - low) / np.where(high > low, high - low, 1.0),
            seed=seed,
            max_benchmark_epochs=self._task.horizon,
            device="cpu",
        )

    def _shown(self, curve: list[float]) -> list[float]:
        return curve

    def _show_again(self, curves: Mapping[int, list[float]]) -> None:
        self._peer.performances.update(curves)
        if curves:
            self._peer.best_value_observed = min(min(curve) for curve in curves.values())


class _Batches:
    """A data set in shuffled batches, as from a `DataLoader`."""

    def __init__(self, dataset: Any, batch_size: int, shuffle: bool) -> None:
        assert shuffle
        columns: Sequence[NDArray[np.float32]] = list(vars(dataset).values())
        self._columns, self._size = columns, batch_size

    def __len__(self) -> int:
        return math.ceil(len(self._columns[0]) / self._size)

    def __iter__(self) -> Iterator[list[Any]]:
        import torch

        columns = [torch.from_numpy(each) for each in self._columns]
        for rows in torch.randperm(len(columns[0])).split(self._size):
            yield [each[rows] for each in columns]


def _imported(name: str, variable: str, repository: str) -> ModuleType:
    """Import a module of a repository's folder, and forget its packages: both repositories use the same names."""
    folder = os.environ.get(variable)
    if folder is None:
        raise SystemExit(f"set {variable} to a clone of {repository}")
    known = set(sys.modules)
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)
        for each in set(sys.modules) - known:
            where = getattr(sys.modules[each], "__file__", None) or next(
                iter(getattr(sys.modules[each], "__path__", [])), ""
            )
            if Path(where).is_relative_to(folder):
                del sys.modules[each]
