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
    """In which numbers a batch is computed; weights and the optimizer's state stay as the model has them.

    bf16 has the range of fp32 and needs no scaling. fp16 does: the loss is multiplied before the backward pass and
    the gradients are divided before anyone looks at them; a step whose gradients overflowed leaves the weights
    alone and lowers the scale (torch.amp.GradScaler). It is not counted, and so fp16 reads from the device, once a
    step, whether it overflowed.

    Args:
        kind: ``"fp32"`` (as the model is), ``"bf16"`` or ``"fp16"``.
        device: Where the model is.

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
        """That of one of several optimizers, whose loss has a scale of its own; ``""`` is all together."""
        return self._named.setdefault(name, Precision(self.kind, self._device)) if name else self

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Context of a backward pass and an optimizer's step inside a forward pass.

        Afterwards the weights are converted anew: autocast keeps what it made of them before.
        """
        if self.kind == "fp32":
            yield
            return
        with torch.autocast(self._device.type, enabled=False):
            yield
        torch.clear_autocast_cache()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Context of a forward pass."""
        if self.kind == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, _TYPES[self.kind])

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to take gradients of."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Give the gradients their true size, before hooks see them."""
        if self._scaler is not None and _has_gradients(optimizer):
            self._scaler.unscale_(optimizer)
            self._unscaled = True

    def overflow_marks(self, optimizer: Optimizer) -> list[Tensor]:
        """One number a device, above 0 where gradients that were unscaled for a step have overflowed."""
        if self._scaler is None or not self._unscaled:
            return []
        return list(self._scaler._found_inf_per_device(optimizer).values())  # noqa: SLF001 - it has no public name

    def step(self, optimizer: Optimizer, take: Callable[[], None]) -> bool:
        """Take the optimizer's step with ``take``, unless scaled gradients overflowed; whether it was taken."""
        if self._scaler is None or not self._unscaled:
            take()
            return True
        overflowed = any(bool(value) for value in self.overflow_marks(optimizer))
        self._unscaled = False
        if overflowed:
            self.overflows += 1
            # A scheduler that goes by epochs would warn that it is ahead of the optimizer.
            mark_stepped(optimizer)
        else:
            self.overflows = 0
            take()
        self._scaler.update()
        return not overflowed

    def skip_step(self) -> None:
        """Forget gradients that were unscaled for a step that a hook then skipped."""
        if self._scaler is not None and self._unscaled:
            self._scaler.update()
            self._unscaled = False

    def forget_step(self) -> None:
        """Forget a step that an error broke off; the scale stays."""
        self.load_state_dict(self.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The scale, its age and the overflows; nothing where nothing is scaled."""
        if self._scaler is None:
            return {}
        named = {name: precision.state_dict() for name, precision in self._named.items()}
        return {**self._scaler.state_dict(), "overflows": self.overflows, "named": named}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the saved scale; a checkpoint of another precision has none, and the scale starts over."""
        if self._scaler is not None and state:
            self._unscaled = False
            self._scaler = _Scaler(self._device.type)
            scale = dict(state)
            self.overflows = scale.pop("overflows")
            for name, saved in scale.pop("named").items():
                self.of(name).load_state_dict(saved)
            self._scaler.load_state_dict(scale)
            # It makes its tensors at the first loss, but a step may be due before that.
            self._scaler.scale(torch.zeros((), device=self._device))


class _Scaler(torch.amp.GradScaler):
    """A scaler that looks at what this process holds of gradients that are split over processes.

    Torch's own asks the other processes, and waits for one that has failed.
    """

    def _unscale_grads_(self, optimizer: Optimizer, *arguments: Any) -> dict[torch.device, Tensor]:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if is_sharded(parameters[0]):  # as all are then
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
