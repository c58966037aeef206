"""EpochMetrics: records an epoch as sums on the device, read in one transfer, and as metric objects."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.distributed.group import Group
from trainer.metrics.objects import Metric, MetricObjects, check_metrics, is_object
from trainer.recorded import MetricError, number

logger = logging.getLogger(__name__)

Reduce = Literal["mean", "sum", "max"]

#: One recorded value: its name, a copy of it, its weight, and how it is reduced.
Recorded = tuple[str, Tensor, Tensor | float, Reduce]

# Values are appended to a list, which costs a training step nearly nothing; this many are then folded into one.
_FOLD = 512
#: How many of the latest values are kept one by one.
KEPT = 128


@dataclass
class _Accumulator:
    reduce: Reduce
    dtype: torch.dtype
    #: Values with their weights, as one item each, so that an interrupt never leaves one without the other.
    pairs: list[tuple[Tensor, Tensor | float]] = field(default_factory=list)
    total: Tensor | None = None
    weight: Tensor | None = None
    #: The latest result, as a float; None if values were folded since.
    known: float | None = None
    #: The latest of the folded values, with their weights.
    folded: list[tuple[Tensor, Tensor | float]] = field(default_factory=list)

    @property
    def values(self) -> list[Tensor]:
        return [value for value, _ in self.pairs]

    @property
    def weights(self) -> list[Tensor | float]:
        return [weight for _, weight in self.pairs]

    def fold(self) -> None:
        values = torch.stack(self.values).to(self.dtype)
        if self.reduce == "max":
            folded = values.max()
            self.total = folded if self.total is None else self.plus(folded)
        else:
            weights = stacked_weights(self.weights, values.device, self.dtype)
            # A batch of weight 0 counts for nothing, even if its mean is 0 / 0.
            folded = torch.where(weights == 0, 0.0, values * weights).sum()
            self.total = folded if self.total is None else self.plus(folded)
            # An invalid weight makes the sum NaN, which is checked once the sum is on the host.
            folded = torch.where(torch.isfinite(weights) & (weights >= 0), weights, torch.nan).sum()
            self.weight = folded if self.weight is None else self.weight + folded
        self.folded = [*self.folded, *self.pairs][-KEPT:]
        self.pairs, self.known = [], None

    def add(self, other: _Accumulator) -> None:
        """Add what another accumulator has recorded."""
        for one in (self, other):
            if one.pairs:
                one.fold()
        if other.total is not None:
            self.total = other.total if self.total is None else self.plus(other.total)
        if other.weight is not None:
            self.weight = other.weight if self.weight is None else self.weight + other.weight

    def plus(self, value: Tensor) -> Tensor:
        """The total combined with another one."""
        assert self.total is not None
        return torch.maximum(self.total, value) if self.reduce == "max" else self.total + value

    def result(self, device: torch.device) -> Tensor:
        """Total and weight, on the device; without any value, the neutral element of the reduction."""
        if self.pairs:
            self.fold()
        if self.total is None:  # only other processes have recorded values
            nothing = [-math.inf if self.reduce == "max" else 0.0, 0.0]
            return torch.tensor(nothing, dtype=self.dtype, device=device)
        return torch.stack((self.total, self.total if self.weight is None else self.weight))


def stacked_weights(weights: list[Tensor | float], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Weights, each a number or a tensor of one element, as one tensor; nothing is read from the device."""
    tensors = [weight for weight in weights if isinstance(weight, Tensor)]
    if not tensors:
        return torch.tensor(weights, dtype=dtype).to(device, non_blocking=True)
    kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
    if len(tensors) == len(weights) and len(kinds) == 1:  # one conversion costs less than hundreds
        return torch.stack(tensors).to(device, dtype)
    return torch.stack([torch.as_tensor(weight, dtype=dtype, device=device) for weight in weights])


class EpochMetrics:
    """The metrics of one epoch by name: running means, sums and maxima, and metric objects.

    Nothing is read from the device before ``compute``.

    Args:
        device: The device of the recorded tensors.
        metrics: The metrics that ``measure`` updates, by name: functions of (outputs, targets), whose values are
            means over the samples of a batch, and objects with ``update``, ``compute`` and ``reset``.
        group: The processes that record; ``compute`` returns the metrics of all together, in each of them.

    Attributes:
        tap: A list of the listener, to which each value is also appended when it is recorded; None: no listener.

    Raises:
        TypeError: A metric is neither a function nor an object with these methods.
        ValueError: The name of a metric is taken.
    """

    def __init__(
        self,
        device: torch.device,
        metrics: Mapping[str, Metric] = MappingProxyType({}),
        group: Group | None = None,
    ) -> None:
        check_metrics(metrics)
        self._group = group or Group()
        self._device = device
        # Apple's GPU has no float64.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._accumulators: dict[str, _Accumulator] = {}
        self.tap: list[Recorded] | None = None
        self._metrics = metrics
        self._functions: dict[str, Any] = {
            name: metric for name, metric in metrics.items() if not is_object(metric)
        }
        #: The metrics that are objects.
        objects = {name: item for name, item in metrics.items() if is_object(item)}
        self.objects = MetricObjects(objects, device, self._group)

    def fresh(self) -> EpochMetrics:
        """A new recorder for the same metrics, with nothing recorded."""
        return EpochMetrics(self._device, self._metrics, self._group)

    def record(
        self, name: str, value: Tensor | float, weight: Tensor | float = 1.0, reduce: Reduce = "mean"
    ) -> None:
        """Add one value.

        Args:
            name: Its name.
            value: One number.
            weight: What the value is the mean of, such as the number of samples; at least 0; unused for ``"max"``.
                A value of weight 0 counts for nothing. A tensor must not be changed in place afterwards.
            reduce: ``"mean"``, ``"sum"`` or ``"max"`` of the epoch's values.

        Raises:
            MetricError: The value is neither a real number nor a tensor with one element.
        """
        if not isinstance(value, Tensor):
            value = torch.tensor(number(name, value), device=self._device, dtype=self._dtype)
        elif value.is_complex() or (value.dim() and value.numel() != 1):
            raise MetricError.of(name, value)
        elif value.device.type != self._device.type:  # values on different devices can't be stacked
            value = value.to(self._device, self._dtype)
        accumulator = self._accumulators.get(name)
        if accumulator is None:
            accumulator = self._accumulators[name] = _Accumulator(reduce, self._dtype)
        # A copy: the caller may change its tensor in place before it is read.
        copy = value.detach().clone()
        copy = copy.reshape(()) if copy.dim() else copy
        accumulator.pairs.append((copy, weight))
        if self.tap is not None:
            self.tap.append((name, copy, weight, reduce))
        if len(accumulator.pairs) >= _FOLD:
            accumulator.fold()

    def measure(self, prefix: str, outputs: Any, targets: Any, samples: Tensor | float) -> None:
        """Pass one batch of ``samples`` samples to all metrics, with gradients disabled."""
        for name, function in self._functions.items():
            self.record(f"{prefix}_{name}", function(outputs, targets), samples)
        if self.objects:
            self.objects.update(prefix, outputs, targets, counts=isinstance(samples, Tensor) or samples > 0)

    def latest(self, name: str, count: int) -> tuple[list[Tensor], list[Tensor | float]]:
        """The latest values recorded under a name, on the device, and their weights; at most ``count`` (≤ `KEPT`).

        After a resume inside an epoch, earlier values may be missing. Both lists are empty if there are no values.
        """
        item = self._accumulators.get(name)
        if item is None:
            return [], []
        pairs = item.pairs[-count:]
        if missing := count - len(pairs):
            pairs = item.folded[-missing:] + pairs
        return [value for value, _ in pairs], [weight for _, weight in pairs]

    def compute(self) -> dict[str, float]:
        """The epoch's metrics by name, in the order of first recording, those of objects last.

        Each value is transferred and computed only once, even if this is called again.

        Raises:
            ValueError: A weight was negative or not finite.
        """
        new = {name: item for name, item in self._accumulators.items() if item.pairs or item.known is None}
        if self._group.size > 1:
            self._compute_together()
        elif new:
            results = torch.stack([item.result(self._device) for item in new.values()]).tolist()
            for (name, item), result in zip(new.items(), results, strict=True):
                item.known = _quotient(name, *result) if item.reduce == "mean" else result[0]
        values = {name: item.known for name, item in self._accumulators.items() if item.known is not None}
        return values | self.objects.compute()

    def _compute_together(self) -> None:
        """Set ``known`` of each name that any process recorded to the result of all processes, summed by rank."""
        items = self._accumulators
        self._group.arrive()
        own = [item.result(self._device) for item in items.values()]
        local = torch.stack(own).tolist() if own else []
        sums = {name: (item.reduce, *found) for (name, item), found in zip(items.items(), local, strict=True)}
        found = self._group.gather(sums)
        for name in dict.fromkeys(name for of_rank in found for name in of_rank):
            measured = [of_rank[name] for of_rank in found if name in of_rank]
            reduce, total, weight = reduced(measured)
            item = items.setdefault(name, _Accumulator(reduce, self._dtype))
            item.known = _quotient(name, total, weight) if reduce == "mean" else total

    def reset(self) -> None:
        """Forget everything recorded."""
        self._accumulators = {}
        self.objects.forget()

    def forget(self, prefix: str) -> None:
        """Forget what was recorded under names that begin with ``prefix``."""
        kept = {name: item for name, item in self._accumulators.items() if not name.startswith(prefix)}
        self._accumulators = kept
        self.objects.forget(prefix)

    def state_dict(self) -> dict[str, Any]:
        """The recorded values, not folded further, so that a resumed epoch adds them in the same order."""
        sums = {
            name: {
                "reduce": item.reduce,
                "values": torch.stack(item.values).cpu() if item.pairs else None,
                "weights": stacked_weights(item.weights, self._device, self._dtype).cpu() if item.pairs else None,
                "total": None if item.total is None else item.total.cpu(),
                "weight": None if item.weight is None else item.weight.cpu(),
            }
            for name, item in self._accumulators.items()
        }
        return {"sums": sums, "objects": self.objects.state_dict()}

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` returned; the states of several recorders are added."""
        self.reset()
        for state in states:
            self._add(state)

    def _add(self, state: Mapping[str, Any]) -> None:
        loaded = {
            name: _Accumulator(
                item["reduce"],
                self._dtype,
                _pairs(item["values"], item["weights"], self._device),
                None if item["total"] is None else item["total"].to(self._device),
                None if item["weight"] is None else item["weight"].to(self._device),
            )
            for name, item in state["sums"].items()
        }
        for name, item in loaded.items():
            if name in self._accumulators:
                self._accumulators[name].add(item)
            else:
                self._accumulators[name] = item
        self.objects.add(state["objects"])


def _pairs(
    values: Tensor | None, weights: Tensor | None, device: torch.device
) -> list[tuple[Tensor, Tensor | float]]:
    """Values with their weights, from the two tensors of a saved state."""
    if values is None or weights is None:
        return []
    return list(zip(values.to(device), weights.to(device), strict=True))


def reduced(measured: Sequence[tuple[Reduce, float, float]]) -> tuple[Reduce, float, float]:
    """Reduction, total and weight over all processes, from those of each for one name, by rank."""
    reduce, totals = measured[0][0], [total for _, total, _ in measured]
    if reduce == "max":
        return reduce, math.nan if any(map(math.isnan, totals)) else max(totals), 0.0
    return reduce, sum(totals), sum(weight for _, _, weight in measured)


def _quotient(name: str, total: float, weight: float) -> float:
    """The mean; NaN with a warning if the weight is 0."""
    if weight != weight:
        raise ValueError(
            f"{name}: the weight of a batch is negative or not finite; let the step return the number of tokens, "
            "nodes or valid targets, and look at the class weights of the loss"
        )
    if not weight:
        logger.warning(
            "%s is NaN: no batch of the epoch has any weight, as where every target is ignored or a step's weight "
            "is always 0",
            name,
        )
        return float("nan")
    return total / weight
