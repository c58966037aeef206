"""Freeze: keeps parts of a model from training, for a while or for the whole run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from trainer.callback import Callback, TrainerView
from trainer.step.groups import matches, parameters_of
from trainer.step.modes import Modes, apply_modes, modes_of
from trainer.step.optimizers import each_of
from trainer.step.parts import bare_model


class Freeze(Callback):
    """Freezes parts of the model between two points of a run; before and after, they train.

    Frozen parameters require no gradients, so the backward pass ends above them, and have none, so torch's
    optimizers skip them: neither momentum nor weight decay changes them, and the optimizer's state of them stays.
    LBFGS, whose one direction is for all parameters, begins anew where what it remembers would move them. The
    frozen modules are in eval mode: batch norm keeps its statistics, and dropout is off. What is frozen follows
    from the epoch and the step, so a resumed run needs no state for it. After the fit, everything requires
    gradients as before. Several `Freeze` callbacks can unfreeze a model part by part.

    Args:
        parts: Names of modules or parameters, or patterns; see `trainer.step.groups.parameters_of`.
        from_epoch: Number of finished epochs after which the parts are frozen; 0: from the beginning.
        until_epoch: Number of finished epochs after which they train again; None: never.
        from_step: Optimizer steps after which they are frozen, in place of epochs.
        until_step: Optimizer steps after which they train again, in place of epochs.
        eval_mode: Whether frozen modules are in eval mode.

    Example::

        Trainer(model, optimizer, loss, callbacks=[Freeze("encoder", until_epoch=3)])

        callbacks: {freeze: {parts: encoder, until_epoch: 3}}

    Raises:
        ValueError: ``parts`` is empty, an end comes before its beginning, epochs and steps are mixed, a pattern
            matches no parameter, nothing would be left to train, or the optimizer does not hold what is to train
            later, or is SPlus, which averages what it holds as if it trained all of that in every step.
    """

    priority = 4
    transient = ("_model", "_frozen", "_checked", "_parameters", "_modules", "_modes")

    def __init__(
        self,
        parts: str | Sequence[str],
        *,
        from_epoch: int = 0,
        until_epoch: int | None = None,
        from_step: int = 0,
        until_step: int | None = None,
        eval_mode: bool = True,
    ) -> None:
        by_epochs, by_steps = from_epoch or until_epoch is not None, from_step or until_step is not None
        if by_epochs and by_steps:
            raise ValueError("give epochs or steps: from_epoch and until_epoch, or from_step and until_step")
        begin, end = (from_step, until_step) if by_steps else (from_epoch, until_epoch)
        if begin < 0 or (end is not None and end <= begin):
            raise ValueError(f"nothing is frozen from {begin} until {end}: give an end after the beginning")
        self.parts = (parts,) if isinstance(parts, str) else tuple(parts)
        if not self.parts:
            raise ValueError("parts is empty: name what is to be frozen, or leave the callback out")
        self.begin, self.end, self.by_steps, self.eval_mode = begin, end, bool(by_steps), eval_mode
        self._model: nn.Module | None = None
        self._frozen = False
        self._checked = False  # whether something is left to train
        self._parameters: dict[str, nn.Parameter] = {}
        self._modules: dict[str, nn.Module] = {}
        self._modes: Modes = []

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Find the parts, and freeze them if that is due."""
        self._model, self._frozen = None, False
        self._settle(trainer)

    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        """Freeze or unfreeze before the first forward pass, which comes first in a step with its own updates."""
        if trainer.model is not self._model or self._is_due(trainer) is not self._frozen:
            self._settle(trainer)

    def on_before_zero_grad(self, trainer: TrainerView) -> None:
        """Freeze or unfreeze if that is due; so all gradients that accumulate to one step have the same parts."""
        if not self._checked or trainer.model is not self._model or self._is_due(trainer) is not self._frozen:
            self._settle(trainer)

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Freeze or unfreeze if that is due after the step, as a run that resumes here does."""
        if self._is_due(trainer) is not self._frozen:
            self._set(trainer, frozen=not self._frozen)

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """The same after the step of batches that were left over to accumulate."""
        self.on_train_batch_end(trainer)

    def on_fit_end(self, trainer: TrainerView) -> None:
        """Make everything require gradients as before the fit."""
        self._set(trainer, frozen=False)

    def _is_due(self, trainer: TrainerView) -> bool:
        now = trainer.state.step if self.by_steps else trainer.state.epoch
        return self.begin <= now and (self.end is None or now < self.end)

    def _settle(self, trainer: TrainerView) -> None:
        if trainer.model is not self._model:
            self._find(trainer)
        self._set(trainer, frozen=self._is_due(trainer))
        if not any(parameter.requires_grad for parameter in trainer.model.parameters()):
            raise ValueError(f"{', '.join(self.parts)}: with these frozen nothing is left to train")
        self._checked = True

    def _set(self, trainer: TrainerView, *, frozen: bool) -> None:
        if frozen is self._frozen:
            return
        self._frozen, self._checked = frozen, False
        for parameter in self._parameters.values():
            parameter.requires_grad = not frozen  # a lazy one does not have requires_grad_()
            if frozen:
                parameter.grad = None
        if frozen:
            _forget_directions(trainer.optimizer, set(map(id, self._parameters.values())))
        if self.eval_mode and frozen:
            self._modes = [mode for module in self._modules.values() for mode in modes_of(module)]
            for module in self._modules.values():
                module.eval()
        elif self.eval_mode:
            apply_modes(self._modes)

    def _find(self, trainer: TrainerView) -> None:
        """Find the parts in a new model; a wrapped one has them under other names."""
        new, self._model = self._model is None, trainer.model
        own = {id(parameter) for parameter in trainer.model.parameters()}
        if not new and own.issuperset(map(id, self._parameters.values())):
            return
        found = parameters_of(trainer.model, self.parts)
        named = bare_model(trainer.model).named_modules()
        modules = {name: each for name, each in named if any(matches(name, pattern) for pattern in self.parts)}
        if not new and self._frozen:
            self._set(trainer, frozen=False)
            # A copy of what was frozen is frozen too.
            for name in found.keys() & self._parameters.keys():
                found[name].requires_grad = True
            apply_modes([(modules[name], it.training) for name, it in self._modules.items() if name in modules])
        self._parameters = {name: each for name, each in found.items() if each.requires_grad}
        self._modules = modules
        _refuse_one_average(trainer.optimizer, self._parameters)
        if self.begin or self.end is not None:
            self._check_held(trainer, found)

    def _check_held(self, trainer: TrainerView, found: dict[str, nn.Parameter]) -> None:
        held = {id(item) for group in trainer.optimizer.param_groups for item in group["params"]}
        if missed := [name for name, item in found.items() if item.requires_grad and id(item) not in held]:
            raise ValueError(
                f"the optimizer does not hold {missed[0]}, which is to train before or after it is frozen: "
                "build it over model.parameters()"
            )


def _refuse_one_average(optimizer: Optimizer, frozen: dict[str, nn.Parameter]) -> None:
    """Refuse to freeze parameters of an optimizer that corrects all its averages by one step count (SPlus).

    Raises:
        ValueError: The optimizer holds a parameter to freeze, whose average would have fewer steps.
    """
    names = {id(parameter): name for name, parameter in frozen.items()}
    for each in each_of(optimizer).values():
        for group in each.param_groups:
            held = next((names[id(item)] for item in group["params"] if id(item) in names), None)
            if held is not None and hasattr(each, "eval") and "ema_rate" in group:
                raise ValueError(
                    f"{type(each).__name__} evaluates averages that are wrong for weights which it does not train "
                    f"in every step, such as {held}: leave Freeze out, or take another optimizer"
                )


def _forget_directions(optimizer: Optimizer, frozen: set[int]) -> None:
    """Reset LBFGS if it remembers directions of frozen parameters, whose missing gradients it takes as 0."""
    for each in each_of(optimizer).values():
        if not isinstance(each, LBFGS):
            continue
        for kept in each.state.values():
            of_frozen = torch.cat([_as_flat(item, id(item) in frozen) for item in each.param_groups[0]["params"]])
            remembered = (
                kept.get("d"),
                kept.get("prev_flat_grad"),
                *kept.get("old_dirs", ()),
                *kept.get("old_stps", ()),
            )
            if any(vector is not None and bool(vector[of_frozen].any()) for vector in remembered):
                kept.clear()


def _as_flat(parameter: Tensor, is_frozen: bool) -> Tensor:
    """For each element of a parameter, in the layout of LBFGS, whether it is frozen."""
    numbers = parameter.numel() * (2 if parameter.is_complex() else 1)
    return torch.full((numbers,), is_frozen, device=parameter.device)
