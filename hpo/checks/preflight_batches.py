"""Takes the few batches of validation data that a study is tried out with."""

from __future__ import annotations

from typing import Any, Final

from trainer import Trainer
from trainer.data.batches import known_length
from trainer.data.limits import FirstBatches, eval_batches
from trainer.data.sets import each_set

_BATCHES: Final = 8


def tried_batches(trainer: Trainer, val: Any) -> Any:
    """This process's share of a few batches of the validation data."""

    def first(one: Any) -> TriedBatches:
        shard = trainer.group.shard(trainer.state)
        return TriedBatches(eval_batches(one, trainer.batching, trainer.device, "val", shard=shard), _BATCHES)

    return each_set(first, val)


class TriedBatches(FirstBatches):
    """The first batches of a data set."""

    sharded = True  # as far as they have to be

    @property
    def scale(self) -> float:
        """How many times as long all batches take; 1 if unknown."""
        length = known_length(self._batches)
        return 1.0 if not length else length / min(length, self._count)
