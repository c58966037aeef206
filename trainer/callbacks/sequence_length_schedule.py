"""SequenceLengthSchedule: shortens the sequences of training batches by a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from trainer.callback import Callback, TrainerView
from trainer.callbacks.stages import Stages
from trainer.data.moving import map_batch, tensors_in

How = Literal["truncate", "split"]


class SequenceLengthSchedule(Callback):
    """Shortens the sequences of training batches, to a length that depends on the number of finished steps.

    The length of a batch is that of its first tensor with a dimension ``dim``; every tensor of the batch with the
    same length there is shortened alike, the others stay. Validation sees whole sequences. What is trained follows
    from the step alone, so a resumed run continues exactly. With a CUDA graph each length but the first is
    computed without it.

    Short sequences first: Li et al., "The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for
    Training GPT Models", arXiv:2108.06084.

    Example::

        Trainer(model, optimizer, step=step, callbacks=[SequenceLengthSchedule({0: 64, 1000: 128, 5000: 256})])

        callbacks: {sequence_length_schedule: {lengths: {"0": 64, "1000": 128}}}  # in a study file

    Args:
        lengths: Number of finished steps → longest sequence from then on; 0 must be among the keys. A key may be
            text such as ``"1000"``, since the keys of a study file are text.
        how: ``"truncate"`` cuts off the rest of a sequence. ``"split"`` makes samples of it: 8 sequences of 128
            become 16 of 64, and nothing is lost; if the length does not divide, the remainder is cut off. All
            tensors of the batch must then have this length.
        dim: The dimension of the sequence.

    Raises:
        ValueError: ``lengths`` lacks 0 or holds a number out of range, or another argument does; at a batch, if
            nothing in it has that dimension, or with ``"split"`` one of its tensors lacks it.
    """

    priority = 3

    def __init__(
        self, lengths: Mapping[int, int] | Mapping[str, int], how: How = "truncate", dim: int = 1
    ) -> None:
        if how not in ("truncate", "split"):
            raise ValueError(f"how is {how!r}: give 'truncate' or 'split'")
        if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
            raise ValueError(
                f"dim is {dim!r}: give the dimension of the sequence, 1 or more (0 is that of samples)"
            )
        self.lengths = Stages("lengths", lengths)
        self.how = how
        self.dim = dim

    def on_train_batch_start(self, trainer: TrainerView) -> None:
        """Shorten the batch."""
        state = trainer.state
        wanted = self.lengths.at(state.step)
        whole = self._length(state.batch)
        if wanted >= whole:
            return
        if self.how == "truncate":
            state.batch = map_batch(lambda item: self._truncated(item, whole, wanted), state.batch)
        else:
            state.batch = map_batch(lambda item: self._split(item, whole, wanted), state.batch)

    def _length(self, batch: Any) -> int:
        for item in tensors_in(batch):
            if item.dim() > self.dim:
                return item.shape[self.dim]
        raise ValueError(f"no tensor of the batch has a dimension {self.dim}: give the dim of its sequences")

    def _truncated(self, item: Tensor, whole: int, wanted: int) -> Tensor:
        if item.dim() > self.dim and item.shape[self.dim] == whole:
            return item.narrow(self.dim, 0, wanted)
        return item

    def _split(self, item: Tensor, whole: int, wanted: int) -> Tensor:
        if item.dim() <= self.dim or item.shape[self.dim] != whole:
            raise ValueError(
                f"a tensor of shape {tuple(item.shape)} can't be split along dimension {self.dim} as one of "
                f"length {whole}: use how='truncate'"
            )
        parts = torch.split(item, wanted, self.dim)[: whole // wanted]
        return torch.cat(parts)
