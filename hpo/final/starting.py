"""A trainer that starts from a trial's checkpoint."""

from __future__ import annotations

from typing import Any, Final

from torch.optim import Optimizer

from hpo.errors import StudyError
from hpo.trial.micro_batch import state_in_parts
from trainer import Trainer
from trainer.step.optimizers import load_optimizer
from trainer.step.parts import bare_model

#: Entries of a parameter group that a scheduler moves; final training starts with them as configured.
_SCHEDULED: Final = (
    "lr",
    "initial_lr",
    "max_lr",
    "min_lr",
    "betas",
    "momentum",
    "base_momentum",
    "max_momentum",
)


def start_from(trainer: Trainer, checkpoint: dict[str, Any], *, of: str) -> None:
    """Take weights, optimizer state and history of a checkpoint; learning rate and schedule are as freshly built.

    Args:
        trainer: A new one.
        checkpoint: Of a trial's epoch.
        of: Which trial's, for people.

    Raises:
        StudyError: It is of another model or optimizer.
    """
    fresh = [dict(group) for group in trainer.optimizer.param_groups]
    try:
        bare_model(trainer.model).load_state_dict(checkpoint["model"])
        load_optimizer(trainer.optimizer, checkpoint["optimizer"])
        _as_built(trainer.optimizer, fresh)
    except (RuntimeError, ValueError, KeyError) as error:
        raise StudyError(
            f"the checkpoint of {of} does not fit the model and optimizer here: {error}\n"
            "  fix: undo what has changed since the trial ran, or train it anew with `--from-scratch`"
        ) from error
    # The trial's batches may have been cut; here they are whole. What a callback had set of them is as built, too.
    state = {**state_in_parts(checkpoint, 1), "stop_reason": None, "batch_size": None}
    trainer.state.load_state_dict(state)


def _as_built(optimizer: Optimizer, fresh: list[dict[str, Any]]) -> None:
    """Give loaded groups what a scheduler moves as it was built; refuse those of another optimizer."""
    for group, built in zip(optimizer.param_groups, fresh, strict=True):
        if missing := optimizer.defaults.keys() - group.keys() - {*_SCHEDULED}:
            raise ValueError(f"the optimizer was another one, without {', '.join(sorted(missing))}")
        for key in _SCHEDULED:
            if key in built:
                group[key] = built[key]
