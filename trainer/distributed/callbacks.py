"""What the processes of a run do together at its events: callbacks that the Trainer adds for itself."""

from __future__ import annotations

from typing import Any

from trainer.callback import Callback, TrainerView
from trainer.distributed.agreement import agreed, wishes
from trainer.distributed.batch_norm import SyncedBatchNorm
from trainer.distributed.gradients import GradientSum
from trainer.distributed.group import Group
from trainer.distributed.processes import Processes, RankError
from trainer.step.parts import bare_model

_FIRST, _LAST = -(10**6), 10**6


class GroupStart(Callback):
    """What comes before all other callbacks: equal weights, and word of an error.

    Args:
        group: The processes.
    """

    priority = _FIRST

    def __init__(self, group: Processes) -> None:
        self._group = group

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Give all processes the weights of rank 0."""
        model = bare_model(trainer.model)
        self._group.broadcast([*model.parameters(), *model.buffers()])

    def on_train_batch_end(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """From here on rank 0 may ask the others for their part of a checkpoint."""
        self._group.at_boundary = True

    def on_exception(self, trainer: TrainerView, error: BaseException) -> None:
        """Tell the others, or take over why another one's run has ended."""
        if isinstance(error, RankError) and error.reason is not None:
            trainer.state.stop_reason = error.reason
        self._group.fail(error, trainer.state.stop_reason)


class GroupEnd(Callback):
    """What comes after all other callbacks: agreement.

    Args:
        group: The processes.
    """

    priority = _LAST
    transient = ("_before",)

    def __init__(self, group: Processes) -> None:
        self._group = group
        self._before: Any = None

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Begin with what was asked for so far."""
        self._before = None
        self._agree(trainer)

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Leave the batch with the same wishes."""
        self._agree(trainer)
        self._group.at_boundary = False

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """Validate with the same statistics: those of a rank's own samples are rank 0's from here on."""
        self._group.broadcast(list(bare_model(trainer.model).buffers()))

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Leave the epoch with the same wishes."""
        self._agree(trainer)

    def _agree(self, trainer: TrainerView) -> None:
        """Take over what any process has asked for since the last time."""
        mine = wishes(trainer.state)
        all_of_them = self._group.decide(mine if mine != self._before else None)
        if all_of_them:
            agreed(trainer.state, all_of_them, mine)
        self._before = wishes(trainer.state)


def callbacks_of(group: Group, *, sync_batchnorm: bool) -> list[Callback]:
    """The callbacks that a run needs because of its group."""
    if not isinstance(group, Processes):
        return []
    norm = [SyncedBatchNorm(group)] if sync_batchnorm else []
    return [GroupStart(group), *norm, GradientSum(group), GroupEnd(group)]
