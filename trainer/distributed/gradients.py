"""GradientSum: the gradients of all processes, as those of one process with the whole batch would be."""

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

#: Bytes that are sent together at most.
_BUCKET: Final = 2**26
# One call for all tensors of a bucket, as torch's own wrapper does it.
_JOINED: Any = torch._utils._flatten_dense_tensors  # noqa: SLF001
_SPLIT: Any = torch._utils._unflatten_dense_tensors  # noqa: SLF001
_SENT_AS_THEY_ARE: Final = frozenset({torch.float32, torch.float64})


class GradientSum(Callback):
    """Adds up the gradients over the processes before any callback but `GradientAccumulation` looks at them.

    Each process takes the gradients of its loss times what that is the mean of (``state.weight``). Their sum,
    divided by the sum of the weights, is the gradient of the mean over the whole batch: Σ wᵣ gᵣ / Σ wᵣ. Those of a
    loss that is a sum are added up. The weights travel with the gradients.

    Args:
        group: The processes.
    """

    priority = 3

    def __init__(self, group: Processes) -> None:
        self._group = group

    def on_before_backward(self, trainer: TrainerView) -> None:
        """Turn the loss from a mean into a sum; who accumulates batches has done so."""
        state = trainer.state
        if state.batches_per_step == 1:
            weight = weight_of_batch(trainer)
            state.gradient_share = 1.0 if weight is None else weight

    def on_before_optimizer_step(self, trainer: TrainerView) -> None:
        """Put the gradients of all in the place of this process's."""
        state = trainer.state
        self._group.arrive()
        weight = state.step_weight if state.batches_per_step > 1 else weight_of_batch(trainer)
        self._put_together(trainer, weight)
        for overflows in trainer.precision.overflow_marks(trainer.optimizer):  # those of all count for each
            self._group.wait([self._group.sum(overflows)])

    def _put_together(self, trainer: TrainerView, weight: Weight) -> None:
        add_gradients(self._group, trainer.optimizer, weight)


def weight_of_batch(trainer: TrainerView) -> Weight:
    """What the loss is the mean of; that of a step with updates of its own counts as one over samples."""
    state = trainer.state
    if not state.manual:
        return state.weight
    return 0.0 if state.absent else float(batch_length(state.batch))


def add_gradients(group: Processes, optimizer: Optimizer, weight: Weight) -> None:
    """Replace each gradient by the sum over all processes, divided by the sum of the weights.

    A parameter that has a gradient in one process has it in all afterwards.

    Args:
        group: The processes.
        optimizer: Whose parameters' gradients they are.
        weight: What this process's gradients are to be divided by; None: nothing, they are those of sums.

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
    """The weight, and for each parameter whether it has a gradient, in the type that the first is sent in."""
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
    """Places of gradients that are sent together: of one type and device, up to some bytes."""
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
    """Make a value the gradient; one that lies in memory as its parameter does stays there."""
    if parameter.is_complex():
        value = torch.view_as_complex(value.clone())  # in its bucket it may begin at an odd place
    gradient = parameter.grad
    if gradient is not None and (gradient.dtype != value.dtype or not gradient.is_contiguous()):
        gradient.copy_(value)
    else:
        parameter.grad = value.to(parameter.dtype)
