"""The parts that a Trainer is given, checked and completed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.step import Step, SupervisedStep


def choose_step(loss: Callable[[Any, Any], Tensor] | None, step: Step | None) -> Step:
    """The step: as given, or made of a loss.

    Raises:
        ValueError: Neither or both are given.
    """
    if step is not None and loss is None:
        return step
    if loss is not None and step is None:
        return SupervisedStep(loss)
    raise ValueError("give either loss or step")


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that was built over another model.

    Raises:
        ValueError: It holds no parameter of this one.
    """
    own = {id(parameter) for parameter in model.parameters()}
    if own and not any(id(item) in own for group in optimizer.param_groups for item in group["params"]):
        raise ValueError("the optimizer holds no parameter of the model: build it over model.parameters()")


def compiled(model: nn.Module, options: bool | Mapping[str, Any]) -> nn.Module:
    """What is called in place of the model: itself, or its compiled form, which shares its parameters.

    Raises:
        ValueError: ``options`` are no arguments.
    """
    if options is False:
        return model
    if options is not True and not isinstance(options, Mapping):
        raise ValueError(f"compile is {options!r}: give True, or torch.compile's arguments as a mapping")
    compiled: nn.Module = torch.compile(model, **({} if options is True else options))  # type: ignore[assignment]
    return compiled


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile made the model or a module in it, or the user called its ``compile()``."""
    return any(
        "_orig_mod" in module._modules or module._compiled_call_impl is not None  # noqa: SLF001
        for module in model.modules()
    )
