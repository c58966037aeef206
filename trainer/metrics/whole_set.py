"""WholeSet: a metric from a function of all outputs and all targets of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from trainer.data.collected import Collected
from trainer.data.moving import tensors_in

#: Bytes of outputs and targets that one metric may keep of one set.
MAX_BYTES: Final = 2**30


class WholeSet:
    """A metric that is computed once per epoch, from the outputs and targets of the whole data set.

    Use it for metrics that are not a mean over samples, such as AUROC or R². It keeps all outputs and targets on
    the device until the end of the epoch, and in checkpoints inside an epoch. If counts suffice for the metric, an
    object with ``update``, ``compute`` and ``reset`` needs less memory.

    Example::

        Trainer(model, optimizer, loss, metrics={"auc": WholeSet(auc, max_bytes=2**32)})

        metrics: {auc: {_target_: model.auc, over: epoch, max_bytes: 4GiB}}  # in a study file

    Args:
        function: Takes (outputs, targets), each joined from all batches along the first dimension; returns one
            number.
        max_bytes: The most bytes of outputs and targets of one data set that it may keep.

    Attributes:
        name: The name in error messages; the Trainer sets it.

    Raises:
        ValueError: ``max_bytes`` is below 1.
    """

    def __init__(self, function: Callable[[Any, Any], Any], max_bytes: int = MAX_BYTES) -> None:
        if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1:
            raise ValueError(f"max_bytes is {max_bytes!r}: give a number of bytes, at least 1")
        self.function = function
        self.max_bytes = max_bytes
        self.name = str(getattr(function, "__name__", "of the whole set"))
        self.reset()

    def update(self, outputs: Any, targets: Any) -> None:
        """Keep a copy of one batch's outputs and targets.

        Raises:
            TypeError: They are not tensors, nor tuples, lists or dicts of tensors.
            ValueError: More than ``max_bytes`` would be kept.
        """
        pair = (outputs, targets)
        self._check(pair)
        self._bytes += sum(tensor.nbytes for tensor in tensors_in(pair))
        if self._bytes > self.max_bytes:
            raise ValueError(
                f"metric {self.name} (over the whole set) would keep more than max_bytes = {self.max_bytes:,} "
                "bytes of outputs and targets: raise max_bytes, let the step return less as outputs, or give an "
                "object with update, compute and reset that needs only counts"
            )
        self._collected.add(pair)

    def merge_state(self, others: Sequence[WholeSet]) -> None:
        """Take in what objects of other processes keep of the same set, behind its own."""
        for other in others:
            if other._collected:  # noqa: SLF001 - of the same class
                self.update(*other._joined())  # noqa: SLF001

    def compute(self) -> Any:
        """The function's value for all that is kept.

        Raises:
            ValueError: The batches differ in more than their first dimension.
        """
        outputs, targets = self._joined()
        return self.function(outputs, targets)

    def reset(self) -> None:
        """Keep nothing."""
        self._collected = Collected(torch.clone)
        self._bytes = 0

    def state_dict(self) -> dict[str, Any]:
        """What is kept, joined."""
        return {"kept": self._joined() if self._collected else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what ``state_dict`` returned."""
        self.reset()
        if state["kept"] is not None:
            self.update(*state["kept"])

    def _joined(self) -> Any:
        return self._collected.joined(f"metric {self.name} (over the whole set)")

    def _check(self, value: Any) -> None:
        for part in _parts(value):
            raise TypeError(
                f"metric {self.name} (over the whole set) keeps tensors, and tuples, lists and dicts of them, not "
                f"{type(part).__name__}: let the step return such outputs, and the data such targets"
            )


def _parts(value: Any) -> Iterator[Any]:
    """The parts of a value that are no tensors, in plain tuples, lists and dicts."""
    if type(value) in (tuple, list, dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _parts(item)
    elif not isinstance(value, Tensor):
        yield value
