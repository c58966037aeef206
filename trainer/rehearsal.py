"""Rehearsal: one batch of everything, and then the trainer as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainer.callback import global_callbacks
from trainer.checkpoint.manager import snapshot
from trainer.data.plan import Plan
from trainer.runner import CallbackRunner
from trainer.trainer import Trainer


def rehearse(trainer: Trainer, train: Any, val: Any = None, test: Any = None) -> dict[str, float]:
    """Train on one batch, validate and test on one, with every event of a whole run, and put everything back.

    What fails late in a run, in a hook of an epoch's end or with the test set, fails here at once. The trainer,
    its model and optimizer are afterwards as they were, so that the fit is the same to the bit. Callbacks
    that write checkpoints, or print or write files (``rank_zero_only``), are left out.

    Example::

        rehearse(trainer, train, val, test)
        trainer.fit(train, val)

    Args:
        trainer: Not fitted yet.
        train: Training data, as for `Trainer.fit`.
        val: Validation data.
        test: Test data.

    Returns:
        The numbers of the one epoch, and of the test.

    Raises:
        Exception: What the run raised, type unchanged.
        ValueError: The trainer has trained.
    """
    if trainer.state.step or trainer.state.epoch or trainer.state.batch_index:
        raise ValueError("the trainer has trained already: rehearse before its first fit")
    saved = snapshot(trainer.state_dict())
    before = trainer.plan, trainer.batching, trainer.callbacks
    left_out = {id(item) for item in before[2].callbacks if item.saves or item.rank_zero_only}
    left_out |= set(map(id, global_callbacks()))  # which every runner has
    trainer.plan = Plan(max_epochs=1)
    trainer.batching = replace(trainer.batching, limit_train_batches=1, limit_val_batches=1, limit_test_batches=1)
    trainer.callbacks = CallbackRunner(core=[item for item in before[2].callbacks if id(item) not in left_out])
    try:
        found = dict(trainer.fit(train, val).metrics)
        return found | (trainer.test(test) if test is not None else {})
    finally:
        trainer.load_state_dict(saved)
        trainer.plan, trainer.batching, trainer.callbacks = before
        trainer.callbacks.resolve()
