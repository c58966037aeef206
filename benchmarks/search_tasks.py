"""Tasks for search.py: spaces with learning curves, from LCBench's surrogate, tables of curves, and formulas.

A task's curves are losses: the least is best. Its regret is 0 at the best loss known of any epoch, 1 at the median
of the final losses of configurations drawn evenly.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution

from hpo.search.schedulers.freeze_thaw.encoding import Conditions, Encoding

Floats = NDArray[np.float64]
Params = Mapping[str, Any]

#: Noise of an epoch's loss where the source has none, in distances of the median from the best.
_NOISE = 0.02


@dataclass(frozen=True)
class Trained:
    """The result of training a configuration.

    Attributes:
        seen: The loss reported after each epoch; infinite once it diverged.
        true: The loss without noise.
        seconds: Virtual seconds of an epoch.
    """

    seen: Floats
    true: Floats
    seconds: float


class Task(Protocol):
    """A search space with learning curves."""

    name: str
    space: Mapping[str, BaseDistribution]
    conditions: Conditions
    horizon: int
    best: float
    median: float

    def train(self, params: Params, seed: int) -> Trained:
        """The curve of a configuration; the noise depends on the seed."""


def regret(task: Task, losses: Floats) -> Floats:
    """Losses as regret."""
    return (losses - task.best) / (task.median - task.best)


def named_rng(*parts: Any) -> np.random.Generator:
    """A random generator that is the same for the same parts."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "big"))


def _with_noise(task: Task, true: Floats, params: Params, seed: int) -> Floats:
    noise = named_rng(task.name, seed, sorted(params.items())).normal(size=len(true))
    return true + _NOISE * (task.median - task.best) * noise


# LCBench: https://github.com/automl/LCBench, as the surrogate of YAHPO Gym (Pfisterer et al., 2022).
_LCBENCH: Mapping[str, BaseDistribution] = {  # the order of the surrogate's inputs
    "batch_size": IntDistribution(16, 512, log=True),
    "learning_rate": FloatDistribution(1e-4, 1e-1, log=True),
    "momentum": FloatDistribution(0.1, 0.99),
    "weight_decay": FloatDistribution(1e-5, 1e-1),
    "num_layers": IntDistribution(1, 5),
    "max_units": IntDistribution(64, 1024, log=True),
    "max_dropout": FloatDistribution(0.0, 1.0),
}
_LCBENCH_EPOCHS = 50
#: The positions of the surrogate's outputs.
_SECONDS, _ACCURACY, _CROSS_ENTROPY = 0, 1, 2


@cache
def surrogate(folder: Path) -> tuple[Any, dict[str, Any]]:
    try:
        import onnxruntime
    except ImportError:
        raise SystemExit("LCBench's surrogate needs onnxruntime: pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    instances = json.loads((folder / "instances.json").read_text())
    return onnxruntime.InferenceSession(str(folder / "surrogate.onnx"), options), instances


class LCBench:
    """An instance of LCBench: 50 epochs of a network on tabular data; error (``lc``) or cross-entropy (``ce``)."""

    def __init__(self, folder: Path, instance: str, metric: str) -> None:
        self.name, self.space, self.horizon = f"{metric}-{instance}", _LCBENCH, _LCBENCH_EPOCHS
        self.conditions: Conditions = {}
        self._folder, self._instance, self._metric = folder, instance, metric
        reference = surrogate(folder)[1]["reference"]
        self.best, self.median = reference[f"{instance}/{'error' if metric == 'lc' else 'ce'}"]

    def train(self, params: Params, seed: int) -> Trained:
        """See `Task`."""
        session, instances = surrogate(self._folder)
        inputs = np.empty((_LCBENCH_EPOCHS, 8), np.float32)
        inputs[:, 0] = np.arange(1, _LCBENCH_EPOCHS + 1)
        inputs[:, 1:] = [params[name] for name in _LCBENCH]
        which = np.full((_LCBENCH_EPOCHS, 1), instances["instances"][self._instance], np.int32)
        found = session.run(None, {"x_cat": which, "x_cont": inputs})[0].astype(np.float64)
        true = 1 - found[:, _ACCURACY] / 100 if self._metric == "lc" else found[:, _CROSS_ENTROPY]
        seconds = max(float(found[-1, _SECONDS]) / _LCBENCH_EPOCHS, 1e-3)
        return Trained(_with_noise(self, true, params, seed), true, seconds)


#: TaskSet (Metz et al., 2020): the ranges that its configurations were drawn from.
_TASKSET = {
    "learning_rate": (1e-8, 10.0),
    "beta1": (1e-4, 1.0),  # 1 - beta
    "beta2": (1e-6, 1.0),
    "epsilon": (1e-10, 1e3),
    "l1": (1e-8, 10.0),
    "l2": (1e-8, 10.0),
    "linear_decay": (1e-7, 1e-4),
    "exponential_decay": (1e-6, 1e-3),
}


class Table:
    """A table NAME.npz of configurations `hp` [rows, `hp_names`] and losses `valid` [rows, epochs].

    A proposal is trained as the nearest row: a step function over the space. A parameter weighs by its importance
    to the final loss (a random forest's), so that a row speaks for its neighbourhood.
    """

    def __init__(self, path: Path) -> None:
        with np.load(path, allow_pickle=False) as arrays:
            names = [str(name) for name in arrays["hp_names"]]
            values = arrays["hp"].astype(np.float64)
            valid = arrays["valid"].astype(np.float64)
        prefix = "ts" if set(names) <= set(_TASKSET) else "own"
        self.name, self.horizon = f"{prefix}-{path.stem}", valid.shape[1]
        self.space: dict[str, BaseDistribution] = {}
        self.conditions: Conditions = {}
        for index, name in enumerate(names):
            values[:, index] = 1 - values[:, index] if name in ("beta1", "beta2") else values[:, index]
            self.space[name.partition(":")[0]] = _distribution(name, values[:, index])
        lost = np.maximum.accumulate(~np.isfinite(valid), axis=1)  # a diverged run stays diverged
        self._valid = np.where(lost, np.inf, valid)
        self._encoding = Encoding(self.space, {})
        rows = [dict(zip(self.space, self._as_params(row), strict=True)) for row in values]
        self._rows = self._encoding.features(np.array([self._encoding.point(row) for row in rows]))
        final = self._valid[:, -1]
        self.best, self.median = float(self._valid.min()), float(np.median(final[np.isfinite(final)]))
        self._weights: Floats | None = None

    def train(self, params: Params, seed: int) -> Trained:  # noqa: ARG002 - a table's losses include noise
        """See `Task`."""
        at = self._encoding.features(self._encoding.point(params)[None])
        row = int(np.argmin(((self._rows - at) ** 2) @ self._importance()))
        seconds = float(np.exp(0.4 * named_rng(self.name, row).normal()))
        return Trained(self._valid[row], self._valid[row], seconds)

    def _as_params(self, row: Floats) -> Iterator[Any]:
        for value, distribution in zip(row, self.space.values(), strict=True):
            yield int(value) if isinstance(distribution, CategoricalDistribution) else float(value)

    def _importance(self) -> Floats:
        if self._weights is None:
            from sklearn.ensemble import RandomForestRegressor

            ranks = np.argsort(np.argsort(self._valid[:, -1])) / len(self._valid)
            forest = RandomForestRegressor(100, random_state=0, min_samples_leaf=3).fit(self._rows, ranks)
            self._weights = forest.feature_importances_ + 0.01
        return self._weights


def _distribution(name: str, values: Floats) -> BaseDistribution:
    """As TaskSet has it; else a choice (`name:a/b/c`, by index), or a range, logarithmic where it is wide."""
    if name in _TASKSET:
        return FloatDistribution(*_TASKSET[name], log=True)
    if ":" in name:
        return CategoricalDistribution(list(range(name.count("/") + 1)))
    low, high = float(values.min()), float(values.max())
    return FloatDistribution(low, high, log=low > 0 and high > 20 * low)


class Formula:
    """Curves by formula over eight parameters, two of them categorical: how well early epochs rank is its kind's.

    The final loss is smooth in the parameters, with an optimum drawn for each instance; the curve falls towards it
    as a power of the epoch, with a speed that depends on the parameters, too. ``agree``: what ends well is fast;
    ``silent``: the speed has nothing to do with the end; ``cross``: what ends best is slow, and leads late only;
    ``hidden``: as ``cross``, and the parameters say nothing about either.
    """

    def __init__(self, kind: str, instance: int, horizon: int = 40) -> None:
        self.name, self.horizon, self._kind = f"formula-{kind}-{instance}", horizon, kind
        self.conditions: Conditions = {}
        self.space = {f"x{k}": FloatDistribution(0.0, 1.0) for k in range(6)}
        self.space |= {f"c{k}": CategoricalDistribution(["a", "b", "c"]) for k in range(2)}
        rng = named_rng("formula", instance)
        self._optima, self._weights = rng.random((2, 6)), rng.dirichlet(np.ones(6), size=2)
        self._choices = rng.random((2, 2, 3))
        self._encoding = Encoding(self.space, {})
        even = np.random.default_rng(0).random((4000, 8))
        losses = [self._loss(self._encoding.params(point)) for point in self._encoding.snap(even)]
        ends = np.array([each[-1] for each in losses])
        self.best, self.median = 0.0, float(np.median(ends))
        self.best = float(min(each.min() for each in losses)) * 0.9

    def train(self, params: Params, seed: int) -> Trained:
        """See `Task`."""
        true = self._loss(params)
        seconds = float(np.exp(0.4 * named_rng(self.name, sorted(params.items())).normal()))
        return Trained(_with_noise(self, true, params, seed), true, seconds)

    def _loss(self, params: Params) -> Floats:
        if self._kind == "hidden":
            params = self._encoding.params(
                self._encoding.snap(named_rng(sorted(params.items())).random((1, 8)))[0]
            )
        x = np.array([params[f"x{k}"] for k in range(6)])
        chosen = ["abc".index(params[f"c{k}"]) for k in range(2)]
        parts = [
            float(weights @ np.abs(x - optimum) ** 1.5) + 0.05 * sum(choices[k][c] for k, c in enumerate(chosen))
            for weights, optimum, choices in zip(self._weights, self._optima, self._choices, strict=True)
        ]
        end, other = parts
        slow = {"agree": end, "silent": other}.get(self._kind, 0.5 - end)
        power = math.exp(0.6 - 5.0 * (slow - 0.2))
        epochs = np.arange(1, self.horizon + 1)
        return end + (1 - end) * (1.0 + epochs) ** -min(max(power, 0.2), 3.0)


class Structured:
    """Formulas over spaces that are not smooth numbers: ``choices``, ``branches`` and ``layers``.

    ``choices``: ten categorical parameters of two to five values and two numbers; each value has an effect of its
    own, and so has each pair of values of five pairs of parameters. ``branches``: an optimizer of four, each with
    a learning rate and another parameter that exist for it alone, its own optimum and its own best loss, and three
    parameters that all share. ``layers``: one to four layers, a width for each that there is, and three parameters
    that all share, of which the learning rate's optimum falls with each layer. The curve falls to its end as a
    power of the epoch that the parameters change a little.
    """

    horizon = 30

    def __init__(self, kind: str, instance: int) -> None:
        self.name, self._rng_key = f"{kind}-{instance}", (kind, instance)
        rng = named_rng(*self._rng_key)
        self.space: dict[str, BaseDistribution] = {}
        self.conditions: Conditions = {}
        kinds = {"choices": self._choices, "branches": self._branches, "layers": self._layers}
        self._end = kinds[kind](rng)
        encoding = Encoding(self.space, self.conditions)
        even = encoding.snap(np.random.default_rng(0).random((4000, len(encoding))))
        ends = np.array([self._end(encoding.params(point)) for point in even])
        self._least, self._scale = float(ends.min()), float(np.median(ends) - ends.min())
        self.best, self.median = -0.1, 1.0

    def train(self, params: Params, seed: int) -> Trained:
        """See `Task`."""
        end = (self._end(params) - self._least) / self._scale
        own = named_rng(self._rng_key, sorted(params.items()))
        power = 0.7 + 0.6 * own.random() + 0.3 * min(end, 2.0)
        true = end + 4 * (1.0 + np.arange(self.horizon)) ** -power - 4 * float(self.horizon) ** -power
        return Trained(_with_noise(self, true, params, seed), true, float(np.exp(0.4 * own.normal())))

    def _choices(self, rng: np.random.Generator) -> Callable[[Params], float]:
        counts = [2 + index % 4 for index in range(10)]
        self.space |= {f"c{k}": CategoricalDistribution(list("abcde"[:count])) for k, count in enumerate(counts)}
        self.space |= {f"x{k}": FloatDistribution(0.0, 1.0) for k in range(2)}
        single, optimum = [rng.random(count) for count in counts], rng.random(2)
        pairs = [(int(i), int(j)) for i, j in rng.permutation(10).reshape(5, 2)]
        both = [rng.random((counts[i], counts[j])) for i, j in pairs]

        def end(params: Params) -> float:
            at = ["abcde".index(params[f"c{k}"]) for k in range(10)]
            own = sum(float(single[k][index]) for k, index in enumerate(at))
            paired = sum(float(table[at[i], at[j]]) for (i, j), table in zip(pairs, both, strict=True))
            return own + 2 * paired + 2 * sum((params[f"x{k}"] - optimum[k]) ** 2 for k in range(2))

        return end

    def _branches(self, rng: np.random.Generator) -> Callable[[Params], float]:
        kinds = list("abcd")
        self.space["kind"] = CategoricalDistribution(kinds)
        self.space |= {f"x{k}": FloatDistribution(0.0, 1.0) for k in range(3)}
        for kind in kinds:
            self.space |= {f"rate_{kind}": FloatDistribution(1e-5, 1.0, log=True)}
            self.space |= {f"other_{kind}": FloatDistribution(0.0, 1.0)}
            self.conditions = {
                **self.conditions,
                **{f"{name}_{kind}": {"kind": [kind]} for name in ("rate", "other")},
            }
        optima = {kind: rng.random(5) for kind in kinds}
        base = dict(zip(kinds, 0.4 * rng.permutation(4) / 3, strict=True))

        def end(params: Params) -> float:
            kind = params["kind"]
            rate = 1 + math.log10(params[f"rate_{kind}"]) / 5
            at = np.array([rate, params[f"other_{kind}"], *(params[f"x{k}"] for k in range(3))])
            return float(base[kind] + np.array([3.0, 1.0, 1.0, 0.5, 0.2]) @ (at - optima[kind]) ** 2)

        return end

    def _layers(self, rng: np.random.Generator) -> Callable[[Params], float]:
        counts = [1, 2, 3, 4]
        self.space["layers"] = IntDistribution(1, 4)
        self.space |= {f"x{k}": FloatDistribution(0.0, 1.0) for k in range(3)}
        self.space |= {f"width_{layer}": IntDistribution(8, 512, log=True) for layer in counts}
        self.conditions = {f"width_{layer}": {"layers": counts[layer - 1 :]} for layer in counts[1:]}
        optima, widths, best = rng.random(3), rng.random(4), int(rng.integers(1, 5))

        def end(params: Params) -> float:
            layers = params["layers"]
            at = np.array([params[f"x{k}"] for k in range(3)])
            shared = np.array([3.0, 0.5, 0.2]) @ (at - optima + np.array([0.1 * (layers - 1), 0.0, 0.0])) ** 2
            own = [
                (math.log(params[f"width_{k}"] / 8) / math.log(64) - widths[k - 1]) ** 2 for k in counts[:layers]
            ]
            return float(0.15 * abs(layers - best) + shared + sum(own) / layers)

        return end
