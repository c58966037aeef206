"""GradientSum: sums the gradients of all processes, as if one process had computed the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.callback import Callback, TrainerView
from trainer.data.lengths import batch_length
from trainer.distributed.processes import Processes
from trainer.step.supervised import Weight

#: The most bytes that are sent together.
_BUCKET: Final = 2**26
# One call for all tensors of a bucket, as in torch's DistributedDataParallel.
_JOINED: Any = torch._utils._flatten_dense_tensors  # noqa: SLF001
_SPLIT: Any = torch._utils._unflatten_dense_tensors  # noqa: SLF001
_SENT_AS_THEY_ARE: Final = frozenset({torch.float32, torch.float64})


class GradientSum(Callback):
    """Sums the gradients over the processes before any callback but `GradientAccumulation` reads them.

    Each process multiplies its loss by its weight (``state.weight``, what the loss is the mean of). The sum of the
    gradients, divided by the sum of the weights, is the gradient of the mean over the whole batch: Σ wᵣ gᵣ / Σ wᵣ.
    If the loss is a sum, the gradients are only summed. The weights are sent together with the gradients.

    Args:
        group: The processes.
    """

    priority = 3

    def __init__(self, group: Processes) -> None:
        self._group = group

    def on_before_backward(self, trainer: TrainerView) -> None:
        """Turn the loss from a mean into a sum, unless a callback that accumulates batches does so."""
        state = trainer.state
        if state.batches_per_step == 1:
            weight = weight_of_batch(trainer)
            state.gradient_share = 1.0 if weight is None else weight

    def on_before_optimizer_step(self, trainer: TrainerView) -> None:
        """Replace this process's gradients by those of all."""
        state = trainer.state
        self._group.arrive()
        weight = state.step_weight if state.batches_per_step > 1 else weight_of_batch(trainer)
        self._put_together(trainer, weight)
        for overflows in trainer.precision.overflow_marks(trainer.optimizer):  # an overflow in one counts in all
            self._group.wait([self._group.sum(overflows)])

    def _put_together(self, trainer: TrainerView, weight: Weight) -> None:
        add_gradients(self._group, trainer.optimizer, weight)


def weight_of_batch(trainer: TrainerView) -> Weight:
    """The weight of the batch; for a step that makes its own updates, its number of samples."""
    state = trainer.state
    if not state.manual:
        return state.weight
    return 0.0 if state.absent else float(batch_length(state.batch))


def add_gradients(group: Processes, optimizer: Optimizer, weight: Weight) -> None:
    """Replace each gradient by the sum over all processes, divided by the sum of the weights.

    A parameter that has a gradient in one process has one in all afterwards.

    Args:
        group: The processes.
        optimizer: The optimizer whose parameters have the gradients.
        weight: The weight of this process's gradients; None if the losses are sums, and nothing is divided.

    Raises:
        ValueError: A gradient is sparse.
    """
    parameters = [item for part in optimizer.param_groups for item in part["params"] if item.requires_grad]
    if not parameters:
        return
    gradients = [_gradient(parameter) for parameter in parameters]
    header = _header(parameters, weight)
    buckets = list(_buckets(gradients))
    sent = [_JOINED([gradients[index] for index in bucket]) for bucket in buckets[1:]]
    first = _JOINED([*(gradients[index] for index in buckets[0]), header])
    group.wait([group.sum(values) for values in (first, *sent)])
    header = first[-len(header) :]
    known = header[1:].tolist() if any(item.grad is None for item in parameters) else None
    for bucket, values in zip(buckets, (first[: -len(header)], *sent), strict=True):
        if weight is not None:
            values.div_(header[0] + (header[0] == 0))
        views = _SPLIT(values, [gradients[index] for index in bucket])
        for index, view in zip(bucket, views, strict=True):
            if known is None or known[index]:
                _put(parameters[index], view)


def _gradient(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    elif gradient.is_sparse:
        raise ValueError(
            "a gradient is sparse, and sparse gradients can't be added up over several processes: build the "
            "embedding with sparse=False"
        )
    if gradient.is_complex():
        return torch.view_as_real(gradient.resolve_conj())
    return gradient if gradient.dtype in _SENT_AS_THEY_ARE else gradient.float()


def _header(parameters: Sequence[Tensor], weight: Weight) -> Tensor:
    """The weight, and a 1 or 0 for each parameter with or without a gradient, in the type of the first bucket."""
    first = parameters[0]
    header = torch.ones(
        1 + len(parameters),
        dtype=first.dtype if first.dtype in _SENT_AS_THEY_ARE else torch.float32,
        device=first.device,
    )
    header[0] = 1.0 if weight is None else weight
    for index, parameter in enumerate(parameters, start=1):
        if parameter.grad is None:
            header[index] = 0.0
    return header


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of gradients that are sent together: of one type and device, up to `_BUCKET` bytes."""
    bucket: list[int] = []
    size, kind = 0, None
    for index, gradient in enumerate(gradients):
        own = gradient.dtype, gradient.device
        if bucket and (own != kind or size + gradient.nbytes > _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(index)
        size, kind = size + gradient.nbytes, own
    if bucket:
        yield bucket


def _put(parameter: Tensor, value: Tensor) -> None:
    """Set a parameter's gradient; one of another type or memory layout is overwritten in place."""
    if parameter.is_complex():
        value = torch.view_as_complex(value.clone())  # in its bucket it may begin at an odd offset
    gradient = parameter.grad
    if gradient is not None and (gradient.dtype != value.dtype or not gradient.is_contiguous()):
        gradient.copy_(value)
    else:
        parameter.grad = value.to(parameter.dtype)
