"""Precision: autocast for the forward pass and, for fp16, the scaling of the loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.distributed.tensor_shards import held, is_sharded
from trainer.step.direct import mark_stepped

Kind = Literal["fp32", "bf16", "fp16"]

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The number type of the forward pass; weights and the optimizer's state keep the types of the model.

    bf16 has the range of fp32 and needs no scaling. fp16 does: the loss is multiplied by a scale before the
    backward pass, and the gradients are divided by it before hooks see them. If gradients overflowed, the step
    leaves the weights unchanged and lowers the scale (torch.amp.GradScaler). Such a step is not counted, so fp16
    reads once a step from the device whether it overflowed.

    Args:
        kind: ``"fp32"`` (the model's own types), ``"bf16"`` or ``"fp16"``.
        device: The model's device.

    Attributes:
        overflows: Steps in a row, up to the latest, that overflowed.

    Raises:
        ValueError: ``kind`` is none of these.
    """

    def __init__(self, kind: Kind, device: torch.device) -> None:
        if kind != "fp32" and kind not in _TYPES:
            raise ValueError(f"precision is {kind!r}: give 'fp32', 'bf16' or 'fp16'")
        self.kind = kind
        self._device = device
        self._scaler = _Scaler(device.type) if kind == "fp16" else None
        self._unscaled = False
        self._named: dict[str, Precision] = {}
        self.overflows = 0

    def of(self, name: str) -> Precision:
        """The precision of one of several optimizers, with a loss scale of its own; this object for ``""``."""
        return self._named.setdefault(name, Precision(self.kind, self._device)) if name else self

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context for a backward pass and an optimizer step inside a forward pass.

        At the end it clears autocast's cache, so that the changed weights are converted anew.
        """
        if self.kind == "fp32":
            yield
            return
        with torch.autocast(self._device.type, enabled=False):
            yield
        torch.clear_autocast_cache()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Context for a forward pass."""
        if self.kind == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, _TYPES[self.kind])

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to differentiate: multiplied by the scale in fp16."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Divide the gradients by the scale, before hooks see them."""
        if self._scaler is not None and _has_gradients(optimizer):
            self._scaler.unscale_(optimizer)
            self._unscaled = True

    def overflow_marks(self, optimizer: Optimizer) -> list[Tensor]:
        """One number per device, above 0 if the gradients unscaled for this step overflowed there."""
        if self._scaler is None or not self._unscaled:
            return []
        return list(self._scaler._found_inf_per_device(optimizer).values())  # noqa: SLF001 - it has no public name

    def step(self, optimizer: Optimizer, take: Callable[[], None]) -> bool:
        """Call ``take`` to step the optimizer unless scaled gradients overflowed; return whether it was called."""
        if self._scaler is None or not self._unscaled:
            take()
            return True
        overflowed = any(bool(value) for value in self.overflow_marks(optimizer))
        self._unscaled = False
        if overflowed:
            self.overflows += 1
            # Otherwise a scheduler that steps per epoch would warn that it steps before the optimizer.
            mark_stepped(optimizer)
        else:
            self.overflows = 0
            take()
        self._scaler.update()
        return not overflowed

    def skip_step(self) -> None:
        """Forget that gradients were unscaled, if a hook then skipped the step."""
        if self._scaler is not None and self._unscaled:
            self._scaler.update()
            self._unscaled = False

    def forget_step(self) -> None:
        """Forget a step that an error interrupted, and keep the scale."""
        self.load_state_dict(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The scale, its age and the overflows, also of each named optimizer; empty without scaling."""
        if self._scaler is None:
            return {}
        named = {name: precision.state_dict() for name, precision in self._named.items()}
        return {**self._scaler.state_dict(), "overflows": self.overflows, "named": named}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the saved scale; a checkpoint of another precision has none, and leaves the scale as it is."""
        if self._scaler is not None and state:
            self._unscaled = False
            self._scaler = _Scaler(self._device.type)
            scale = dict(state)
            self.overflows = scale.pop("overflows")
            for name, saved in scale.pop("named").items():
                self.of(name).load_state_dict(saved)
            self._scaler.load_state_dict(scale)
            # The scaler makes its tensors when it first scales a loss; a step may come before that.
            self._scaler.scale(torch.zeros((), device=self._device))


class _Scaler(torch.amp.GradScaler):
    """A scaler that looks only at this process's shards of gradients that are split over processes.

    Torch's own communicates with the other processes, and would wait for one that has failed.
    """

    def _unscale_grads_(self, optimizer: Optimizer, *arguments: Any) -> dict[torch.device, Tensor]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if is_sharded(parameters[0]):  # then all are
            held_here = [_held_with_gradient(parameter) for parameter in parameters]
            optimizer = SimpleNamespace(param_groups=[{"params": held_here}])  # type: ignore[assignment]
        return super()._unscale_grads_(optimizer, *arguments)


def _held_with_gradient(parameter: Tensor) -> Tensor:
    here = held(parameter.detach()).detach()
    if parameter.grad is not None:
        here.grad = held(parameter.grad)
    return here


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
