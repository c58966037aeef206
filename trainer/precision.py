"""Precision: autocast for the forward pass and, for fp16, the scaling of the loss."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from trainer.direct import mark_stepped

Kind = Literal["fp32", "bf16", "fp16"]

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """In which numbers a batch is computed; weights and the optimizer's state stay as the model has them.

    bf16 has the range of fp32 and needs no scaling. fp16 does: the loss is multiplied before the backward pass and
    the gradients are divided before anyone looks at them; a step whose gradients overflowed leaves the weights
    alone and lowers the scale (torch.amp.GradScaler).

    Args:
        kind: ``"fp32"`` (as the model is), ``"bf16"`` or ``"fp16"``.
        device: Where the model is.

    Raises:
        ValueError: ``kind`` is none of these.
    """

    def __init__(self, kind: Kind, device: torch.device) -> None:
        if kind != "fp32" and kind not in _TYPES:
            raise ValueError(f"precision is {kind!r}: give 'fp32', 'bf16' or 'fp16'")
        self.kind = kind
        self._device = device
        self._scaler = torch.amp.GradScaler(device.type) if kind == "fp16" else None
        self._unscaled = False

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

    def step(self, optimizer: Optimizer, take: Callable[[], None]) -> None:
        """Take the optimizer's step with ``take``; where gradients are scaled, unless they overflowed."""
        if self._scaler is None or not self._unscaled:
            take()
            return
        self._unscaled = False
        self._scaler.step(optimizer)
        self._scaler.update()
        # A step that overflowed was none to a scheduler, which would warn that it is ahead.
        mark_stepped(optimizer)

    def skip_step(self) -> None:
        """Forget gradients that were unscaled for a step that a hook then skipped."""
        if self._scaler is not None and self._unscaled:
            self._scaler.update()
            self._unscaled = False

    def forget_step(self) -> None:
        """Forget a step that an error broke off; the scale stays."""
        if self._scaler is not None:
            self.load_state_dict(self._scaler.state_dict())

    def state_dict(self) -> dict[str, Any]:
        """The scale and its age; nothing where nothing is scaled."""
        return {} if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the saved scale; a checkpoint of another precision has none, and the scale starts anew."""
        if self._scaler is not None and state:
            self._unscaled = False
            self._scaler = torch.amp.GradScaler(self._device.type)
            self._scaler.load_state_dict(dict(state))
            # It makes its tensors at the first loss, but a step may be due before that.
            self._scaler.scale(torch.zeros((), device=self._device))


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
