"""Rehearsal: trains one step and evaluates one batch of each data set, then restores the trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trainer.callback import Callback, TrainerView, global_callbacks
from trainer.checkpoint.manager import snapshot
from trainer.runner import CallbackRunner
from trainer.step.parts import refuse_lazy
from trainer.trainer import Trainer


def rehearse(trainer: Trainer, train: Any, val: Any = None, test: Any = None) -> dict[str, float]:
    """Train one step, validate and test on one batch, with every event of a whole run; then restore everything.

    So an error that would come late in a run, in a hook at the end of an epoch or with the test set, comes at
    once. A step has one batch, or several with `GradientAccumulation`. Trainer, model and optimizer are afterwards
    as they were before, so a fit has the same bits as without the rehearsal. Callbacks that write checkpoints,
    print or write files (``rank_zero_only``) are left out.

    Example::

        rehearse(trainer, train, val, test)
        trainer.fit(train, val)

    Args:
        trainer: A trainer that has not trained yet.
        train: Training data, as for `Trainer.fit`.
        val: Validation data.
        test: Test data.

    Returns:
        The metrics of the epoch and of the test.

    Raises:
        Exception: What the run raised, type unchanged.
        ValueError: The trainer has trained, or the model has lazy modules without weights.
    """
    if trainer.state.step or trainer.state.epoch or trainer.state.batch_index:
        raise ValueError("the trainer has trained already: rehearse before its first fit")
    refuse_lazy(trainer.model, "rehearse")
    before = trainer.plan, trainer.batching, trainer.callbacks
    left_out = {id(item) for item in before[2].callbacks if item.saves or item.rank_zero_only}
    left_out |= set(map(id, global_callbacks()))  # each runner has these anyway
    kept = [item for item in before[2].callbacks if id(item) not in left_out]
    runner = CallbackRunner(core=[*kept, _OneStep()])
    # Without the callbacks that are left out: they keep their state.
    saved = snapshot({**trainer.state_dict(), "callbacks": runner.state_dict()})
    trainer.plan = replace(trainer.plan, max_epochs=1, max_steps=1)
    trainer.batching = replace(trainer.batching, limit_val_batches=1, limit_test_batches=1)
    trainer.callbacks = runner
    try:
        with _kept_buffers(trainer.model):
            found = dict(trainer.fit(train, val).metrics)
            return found | (trainer.test(test) if test is not None else {})
    finally:
        trainer.load_state_dict(saved)
        trainer.plan, trainer.batching, trainer.callbacks = before
        trainer.callbacks.resolve()


def _own_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, buffer.clone()) for name, buffer in module.named_buffers(recurse=False)]


@contextmanager
def _kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore all buffers at the end of the block, as the model's state lacks those that are not persistent."""
    kept = [(module, *each) for module in model.modules() for each in _own_buffers(module)]
    try:
        yield
    finally:
        for owner, name, before in kept:
            now = getattr(owner, name)
            if isinstance(now, Tensor) and now.shape == before.shape:
                with torch.no_grad():
                    now.copy_(before)
            else:
                setattr(owner, name, before)


class _OneStep(Callback):
    """Ends the epoch, and with it the pass, after the batches of one step.

    Not done by a limit on the data, as callbacks that need more batches, or change the batch size, refuse a limit.
    """

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Count batches rather than steps, as a callback may skip the step."""
        if trainer.state.batch_index >= trainer.state.batches_per_step:
            trainer.state.stop_epoch()
