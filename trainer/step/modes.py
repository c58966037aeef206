"""Sets the modules of a model to train or eval mode, and restores their modes after an evaluation or a run.

If the model is in train mode when training begins, a module in it that is in eval mode counts as frozen by the
user and stays in eval mode. If the model itself is in eval mode, as many libraries return it, all of it trains.
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
    """Put a model into train mode, except modules that were frozen in eval mode; returns those."""
    before = modes_of(model) if bare_model(model).training else []
    model.train()
    # A module that the model's own `train` leaves in eval mode stays there too.
    apply_modes([(module, training and module.training) for module, training in before])
    return [module for module, training in before if not training]


def begin_training(model: nn.Module) -> None:
    """Put a model into train mode as `enter_training` does; warn about frozen modules with trained parameters."""
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
    """Restore each module's present mode at the end of the block."""
    before = modes_of(model)
    try:
        yield
    finally:
        # Through `train`, which some models override, for example to fold weights into each other.
        model.train(before[0][1])
        apply_modes(before)


def modes_of(model: nn.Module) -> Modes:
    """The modes of a module and of each module in it."""
    return [(module, module.training) for module in model.modules()]


def apply_modes(modes: Modes) -> None:
    """Put modules back into these modes."""
    for module, training in modes:  # each module comes before the modules in it
        if module.training != training:
            module.train(training)
