"""Metrics kept on the device and brought over in one transfer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.recorded import MetricError, number

Reduce = Literal["mean", "max"]

# Values wait in a list, because appending costs a training step nothing; this many are then folded into one.
_FOLD = 512


@dataclass
class _Accumulator:
    reduce: Reduce
    dtype: torch.dtype
    values: list[Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    total: Tensor | None = None
    weight: float = 0.0

    def fold(self) -> None:
        values = torch.stack(self.values).to(self.dtype)
        if self.reduce == "max":
            folded = values.max()
            self.total = folded if self.total is None else torch.maximum(self.total, folded)
        else:
            weights = torch.tensor(self.weights, dtype=self.dtype).to(values.device, non_blocking=True)
            folded = torch.dot(values, weights)
            self.total = folded if self.total is None else self.total + folded
            self.weight += sum(self.weights)
        self.values, self.weights = [], []

    def result(self) -> Tensor:
        if self.values:
            self.fold()
        assert self.total is not None
        return self.total / self.weight if self.reduce == "mean" else self.total


class EpochMetrics:
    """Running means and maxima of one epoch, by name.

    Nothing is read back from the device before ``compute``.

    Args:
        device: Where the recorded tensors lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Apple's GPU has no float64.
        self._dtype = torch.float32 if device.type == "mps" else torch.float64
        self._accumulators: dict[str, _Accumulator] = {}

    def record(self, name: str, value: Tensor | float, weight: float = 1.0, reduce: Reduce = "mean") -> None:
        """Add one value; ``weight`` is the number of samples it is the mean of (unused for ``"max"``).

        Raises:
            MetricError: It is no real number, nor a tensor with one element.
        """
        if not isinstance(value, Tensor):
            value = torch.tensor(number(name, value), device=self._device, dtype=self._dtype)
        elif value.is_complex() or (value.dim() and value.numel() != 1):
            raise MetricError.of(name, value)
        accumulator = self._accumulators.get(name)
        if accumulator is None:
            accumulator = self._accumulators[name] = _Accumulator(reduce, self._dtype)
        # A copy: what was handed over may be changed in place before it is looked at.
        copy = value.detach().clone()
        accumulator.values.append(copy.reshape(()) if copy.dim() else copy)
        accumulator.weights.append(weight)
        if len(accumulator.values) >= _FOLD:
            accumulator.fold()

    def compute(self) -> dict[str, float]:
        """The epoch's numbers by name, in the order of first recording; one device-to-host copy."""
        if not self._accumulators:
            return {}
        results = torch.stack([accumulator.result() for accumulator in self._accumulators.values()])
        return dict(zip(self._accumulators, results.tolist(), strict=True))

    def reset(self) -> None:
        """Forget everything recorded."""
        self._accumulators = {}

    def forget(self, prefix: str) -> None:
        """Forget what was recorded under names that begin so."""
        kept = {name: item for name, item in self._accumulators.items() if not name.startswith(prefix)}
        self._accumulators = kept

    def state_dict(self) -> dict[str, Any]:
        """Unfolded, so that a resumed epoch adds in the same order and ends with the same bits."""
        return {
            name: {
                "reduce": item.reduce,
                "values": torch.stack(item.values).cpu() if item.values else None,
                "weights": list(item.weights),
                "total": None if item.total is None else item.total.cpu(),
                "weight": item.weight,
            }
            for name, item in self._accumulators.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` returned."""
        self._accumulators = {
            name: _Accumulator(
                item["reduce"],
                self._dtype,
                [] if item["values"] is None else list(item["values"].to(self._device)),
                list(item["weights"]),
                None if item["total"] is None else item["total"].to(self._device),
                item["weight"],
            )
            for name, item in state.items()
        }
