"""Synchronises the batch norms of a model over all processes during a fit, on any device.

While a fit runs, the class of each batch norm of the model is replaced by a subclass that normalises with the mean
and variance of the whole batch. torch.nn.SyncBatchNorm does the same, but only on CUDA.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.callback import Callback, TrainerView
from trainer.distributed.processes import Processes
from trainer.state import TrainState
from trainer.step.parts import bare_model


class SyncedBatchNorm(Callback):
    """Makes the batch norms of the model use the whole batch, from the start of a fit to its end.

    In a forward pass without gradients, as of a teacher model, they do so only while a training step is computed,
    which all processes do at the same time: a hook may compute something in its own process alone.

    Args:
        group: The processes.

    Attributes:
        in_step: Whether a training step is being computed.
    """

    priority = -(10**6) + 1
    transient = ("_changed", "in_step")

    def __init__(self, group: Processes) -> None:
        self._group = group
        self.in_step = False
        self._changed: list[tuple[nn.Module, type[nn.Module]]] = []

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Replace the classes of the batch norms."""
        self._changed = [
            (module, type(module))
            for module in bare_model(trainer.model).modules()
            if isinstance(module, _BatchNorm)
        ]
        kinds = {kind: self._synced(kind, trainer.state) for _, kind in self._changed}
        for module, kind in self._changed:
            module.__class__ = kinds[kind]

    def on_after_forward(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Note that the step's forward pass has ended; `StepStart` notes its beginning, after all other hooks."""
        self.in_step = False

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:  # noqa: ARG002
        """Note that no step is being computed, as the error may come from one."""
        self.in_step = False

    def teardown(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Restore the classes."""
        for module, kind in self._changed:
            module.__class__ = kind
        self._changed = []

    def _synced(self, kind: type[Any], state: TrainState) -> type[Any]:
        """The subclass of a batch norm class that uses the batches of all processes."""
        group = self._group

        def forward(norm: Any, input: Tensor) -> Tensor:  # noqa: A002 - torch's name of it
            if not norm.training or not (self.in_step or torch.is_grad_enabled()):
                return kind.forward(norm, input)  # type: ignore[no-any-return]
            norm._check_input_dim(input)  # noqa: SLF001 - this is its method
            return _normalised(norm, input, group, absent=state.absent)

        if "torch._dynamo" in sys.modules:  # a compiled model must leave its graph for the exchange
            forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]
        return type(f"Synced{kind.__name__}", (kind,), {"forward": forward})


class StepStart(Callback):
    """Tells `SyncedBatchNorm`, after all other hooks, that a training step begins.

    Args:
        norms: The callback to notify.
    """

    priority = 10**6

    def __init__(self, norms: SyncedBatchNorm) -> None:
        self._norms = norms

    def on_before_forward(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """See `SyncedBatchNorm.in_step`."""
        self._norms.in_step = True


def _normalised(norm: Any, inputs: Tensor, group: Processes, *, absent: bool) -> Tensor:
    outputs, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
        inputs, norm.weight, norm.bias, norm.eps, group, absent
    )
    if norm.track_running_stats and norm.running_mean is not None:
        norm.num_batches_tracked.add_(1)
        share = norm.momentum
        if share is None:
            share = 1.0 / norm.num_batches_tracked.item()
        with torch.no_grad():
            unbiased = variance * (count / (count - 1))
            norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), share)
            norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), share)
    return outputs  # type: ignore[no-any-return]


class _Normalise(torch.autograd.Function):
    """(x - mean) / √(variance + ε) · weight + bias, per channel, with mean and variance of all processes' samples.

    The gradient is that of the sum of the losses of all processes. Source: Ioffe and Szegedy, "Batch
    Normalization", arXiv:1502.03167, section 3.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        group: Processes,
        absent: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        values = inputs if inputs.dtype == torch.float64 else inputs.float()
        over = [0, *range(2, inputs.dim())]
        variance, mean = torch.var_mean(values, over, correction=0)
        # In 64 bits, as mean of squares minus square of mean loses all digits of a small variance otherwise.
        variance, mean = variance.double(), mean.double()
        count = 0 if absent else values.numel() // values.shape[1]
        sums = torch.cat([mean, variance + mean.square(), mean.new_ones(1)]) * count
        group.wait([group.sum(sums)])
        total = sums[-1]
        if not inputs.is_cuda and total <= 1:
            raise ValueError(
                "batch norm needs more than one value per channel to train, in all processes together"
            )
        mean, squares = (sums[:-1] / total).chunk(2)
        variance = (squares - mean.square()).clamp_(min=0)
        scale = (variance + eps).rsqrt().to(values.dtype)
        shape = [1, -1, *[1] * (inputs.dim() - 2)]
        normal = (values - mean.to(values.dtype).view(shape)) * scale.view(shape)
        ctx.save_for_backward(normal, scale, weight, total)
        ctx.over, ctx.shape, ctx.group, ctx.absent, ctx.dtype = over, shape, group, absent, inputs.dtype
        outputs = normal if weight is None else normal * weight.view(shape)
        if bias is not None:
            outputs = outputs + bias.view(shape)
        ctx.mark_non_differentiable(mean, variance, total)
        return outputs.to(inputs.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        normal, scale, weight, total = ctx.saved_tensors
        gradient = gradients[0].to(normal.dtype)
        # The gradients of weight and bias stay this process's; they are summed like those of all parameters.
        of_bias, of_weight = gradient.sum(ctx.over), (gradient * normal).sum(ctx.over)
        sums = torch.cat([of_bias, of_weight]).double()
        ctx.group.wait([ctx.group.sum(sums)])
        mean, slope = ((sums / total).to(normal.dtype)).chunk(2)
        inner = gradient - mean.view(ctx.shape) - normal * slope.view(ctx.shape)
        factor = scale if weight is None else scale * weight
        of_inputs = (inner * factor.view(ctx.shape)).to(ctx.dtype)
        if ctx.absent:  # the samples are another process's, where they count
            of_inputs = torch.zeros_like(of_inputs)
        if weight is None:
            return of_inputs, None, None, None, None, None
        return of_inputs, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None, None
