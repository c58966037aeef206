"""Refuses Lightning modules as models: the Trainer would ignore the training that they define."""

from __future__ import annotations

from typing import Final

from hpo.config.spec import StudySpec
from hpo.config.targets import TARGET

_NAME: Final = "LightningModule"
_HOMES: Final = frozenset({"lightning", "pytorch_lightning"})


def refuse_lightning(spec: StudySpec, kind: object) -> None:
    """Refuse a class derived from Lightning's module, without importing Lightning.

    Args:
        spec: The study; its ``model`` names the class, or a function that makes an object of it.
        kind: The class; an object that is no class is accepted.

    Raises:
        InputError: The class is derived from Lightning's module.
    """
    if isinstance(kind, type) and any(
        each.__name__ == _NAME and each.__module__.partition(".")[0] in _HOMES for each in kind.__mro__
    ):
        node = spec.config.model or {}
        raise spec.error(
            f"is a {_NAME}: its training_step and configure_optimizers would be ignored here",
            path=f"model.{TARGET}",
            value=str(node.get(TARGET, kind.__name__)),
            fix="train it by Lightning's own Trainer, in a function: write `objective: {_target_: train.run}` in "
            "place of model, data, loss and optimizer, and give the Trainer the callback of "
            "hpo.integrations.lightning (docs/how-to/from-lightning.md)",
        )
