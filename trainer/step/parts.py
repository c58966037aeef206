"""Checks and prepares what a Trainer is given: model, loss or step, optimizer and scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainer.step.fused import use_fused
from trainer.step.optimizers import Scheduler, each_of
from trainer.step.supervised import Step, SupervisedStep


def choose_step(loss: Callable[[Any, Any], Tensor] | None, step: Step | None) -> Step:
    """The given step, or one that computes the given loss.

    Raises:
        ValueError: Neither or both are given.
    """
    if step is not None and loss is None:
        return step
    if loss is not None and step is None:
        return SupervisedStep(loss)
    raise ValueError("give either loss or step")


def module_of_step(step: Step) -> nn.Module | None:
    """The loss or the step if it is a module, which may have parameters or class weights; else None."""
    inner: object = step.loss if isinstance(step, SupervisedStep) else step
    return inner if isinstance(inner, nn.Module) else None


def state_of_step(step: Step, optimizer: Optimizer) -> Any:
    """A step's ``state_dict``, or what training has changed of a loss; None for a step without a state."""
    if isinstance(step, SupervisedStep):
        return step.state_of_loss({id(item) for group in optimizer.param_groups for item in group["params"]})
    return step.state_dict() if hasattr(step, "state_dict") else None


def load_step(step: Step, state: Any) -> None:
    """Restore what `state_of_step` saved; does nothing if that is None."""
    if state is not None and hasattr(step, "load_state_dict"):
        step.load_state_dict(deepcopy(state))


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that was built over another model.

    Raises:
        ValueError: The optimizer, or one of several, holds no parameter of this model.
    """
    own = {id(parameter) for parameter in model.parameters()}
    for name, each in each_of(optimizer).items():
        if own and not any(id(item) in own for group in each.param_groups for item in group["params"]):
            called = f"optimizer {name!r}" if name else "the optimizer"
            raise ValueError(f"{called} holds no parameter of the model: build it over model.parameters()")


def check_scheduler(scheduler: Scheduler | None, optimizer: Optimizer) -> None:
    """Refuse a scheduler that was built over another optimizer, or over only one of several.

    Raises:
        ValueError: It was.
    """
    # `Schedulers` checks its own when it is built.
    over = getattr(scheduler, "optimizer", optimizer)
    if over is optimizer:
        return
    for name, each in each_of(optimizer).items():
        if over is each:
            raise ValueError(
                f"the scheduler is over optimizer {name!r}, one of {len(each_of(optimizer))}: give schedulers by "
                f"name too, as scheduler={{{name!r}: …}}"
            )
    raise ValueError("the scheduler was built over another optimizer: build it over the trainer's")


def bare_model(model: nn.Module) -> nn.Module:
    """The model without torch's wrappers: DataParallel, DistributedDataParallel and that of torch.compile."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:  # noqa: SLF001 - the mark of torch.compile
            model = model.get_submodule("_orig_mod")
        else:
            return model


def lazy_parameters(model: nn.Module) -> list[str]:
    """Names of the lazy parameters and buffers that have no shape yet."""
    bare = bare_model(model)
    return [name for name, item in (*bare.named_parameters(), *bare.named_buffers()) if is_lazy(item)]


def refuse_lazy(model: nn.Module, before: str, called: str = "model") -> None:
    """Refuse a model with lazy parameters that have no shape yet.

    Args:
        model: The model, or a loss that is a module.
        before: What needs the shapes, for the error text.
        called: What the error text calls ``model``.

    Raises:
        ValueError: A parameter or buffer has no shape yet.
    """
    for name in lazy_parameters(model):
        raise ValueError(f"parameter {name} has no shape yet: call the {called} once with a batch before {before}")


class Parts:
    """The model, optimizer and scheduler that a trainer works with, checked against each other.

    Args:
        device: Where to move the model; None leaves it where it is, for a model that the sharding code moves.
        compile_options: See `compiled`.

    Attributes:
        called: What the step calls: the model itself or its compiled form.
    """

    def __init__(self, device: torch.device | None, compile_options: bool | Mapping[str, Any]) -> None:
        self._device = device
        self._compile_options = compile_options
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._scheduler: Scheduler | None = None
        self.called: nn.Module

    def differ(self, model: nn.Module, optimizer: Optimizer, scheduler: Scheduler | None) -> bool:
        """Whether one of these is another object than at the latest `take`."""
        return model is not self._model or optimizer is not self._optimizer or scheduler is not self._scheduler

    def take(self, model: nn.Module, optimizer: Optimizer, scheduler: Scheduler | None) -> None:
        """Check these, and prepare those that are new.

        Raises:
            ValueError: They do not belong together.
        """
        if not self.differ(model, optimizer, scheduler):
            return
        new_model, new_optimizer = model is not self._model, optimizer is not self._optimizer
        if self._device is not None:
            model.to(self._device)
        check_optimizer(model, optimizer)
        if self._model is not None and not new_optimizer:
            _check_replaced(self._model, model, optimizer)
        check_scheduler(scheduler, optimizer)
        if new_optimizer:
            for each in each_of(optimizer).values():
                use_fused(each)
        if new_model:
            self.called = compiled(model, self._compile_options)
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler


def _check_replaced(before: nn.Module, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse a replacement model with parameters that the optimizer would not train."""
    known = {id(parameter) for parameter in before.parameters()}
    known |= {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    missed = [name for name, item in model.named_parameters() if item.requires_grad and id(item) not in known]
    if missed:
        raise ValueError(
            f"trainer.model was replaced by one with parameters that the optimizer does not hold, such as "
            f"{missed[0]}: give it to trainer.optimizer.add_param_group, or replace trainer.optimizer too"
        )


def compiled(model: nn.Module, options: bool | Mapping[str, Any]) -> nn.Module:
    """The model itself, or its compiled form, which shares its parameters.

    Args:
        model: The model.
        options: Whether to compile; or the arguments of torch.compile.

    Raises:
        ValueError: ``options`` is neither a bool nor a mapping.
    """
    if options is False:
        return model
    if options is not True and not isinstance(options, Mapping):
        raise ValueError(f"compile is {options!r}: give True, or torch.compile's arguments as a mapping")
    compiled: nn.Module = torch.compile(model, **({} if options is True else options))  # type: ignore[assignment]
    return compiled


def is_compiled(model: nn.Module) -> bool:
    """Whether the model or a module in it comes from torch.compile, or had its ``compile()`` called."""
    return any(
        "_orig_mod" in module._modules or module._compiled_call_impl is not None  # noqa: SLF001
        for module in model.modules()
    )
