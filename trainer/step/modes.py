"""Train and eval mode of a model's modules: which train, and what is put back after an evaluation and a run.

A module that is in eval mode when training begins, inside a model that is in train mode, was frozen by its owner
and stays in eval mode. A model that is in eval mode as a whole, as many libraries hand theirs over, trains.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from trainer.step.parts import bare_model

logger = logging.getLogger(__name__)

Modes = list[tuple[nn.Module, bool]]


def enter_training(model: nn.Module) -> list[nn.Module]:
    """Bring a model into train mode, without the modules that were frozen in eval mode; returns those."""
    before = modes_of(model) if bare_model(model).training else []
    model.train()
    # What its own `train` leaves in eval mode stays so too.
    apply_modes([(module, training and module.training) for module, training in before])
    return [module for module, training in before if not training]


def begin_training(model: nn.Module) -> None:
    """Bring a model into train mode as `enter_training` does; frozen modules that are trained are a warning."""
    frozen = enter_training(model)
    trained = [module for module in frozen if any(item.requires_grad for item in module.parameters(recurse=False))]
    if trained:
        logger.warning(
            "%d modules are in eval mode and stay so while they are trained, the first a %s: call model.train() "
            "before the fit if that is not meant",
            len(trained),
            type(trained[0]).__name__,
        )


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Put every module back, at the end, into the mode that it is in now."""
    before = modes_of(model)
    try:
        yield
    finally:
        # By way of `train`, which some models have of their own, to fold weights and unfold them.
        model.train(before[0][1])
        apply_modes(before)


def modes_of(model: nn.Module) -> Modes:
    """The mode of a module and of each inside it."""
    return [(module, module.training) for module in model.modules()]


def apply_modes(modes: Modes) -> None:
    """Put modules back into these modes."""
    for module, training in modes:  # a module comes before those inside it
        if module.training != training:
            module.train(training)
