"""Reads a trial's checkpoints from all its attempts, and writes those of the running attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from hpo.study.folders import CHECKPOINTS, print_notice
from trainer.checkpoint.files import CheckpointError, CheckpointFile, list_checkpoints
from trainer.checkpoint.manager import (
    CheckpointManager,
    find_checkpoint,
    newest_checkpoint,
    verified_checkpoint,
)
from trainer.checkpoint.retention import best_epochs, retained
from trainer.state import Mode

#: Number of latest checkpoints kept beside the best one: if one is damaged, the one before it is used.
_KEEP_LAST: Final = 2


@dataclass(frozen=True)
class Source:
    """The checkpoint with which a fork begins.

    Attributes:
        parent: The number of the parent.
        epoch: Epochs that the parent had finished at its checkpoint.
        attempts: Folders of the parent's attempts.
    """

    parent: int
    epoch: int
    attempts: Sequence[Path]


def checkpoint_of_epoch(attempts: Sequence[Path], epoch: int) -> CheckpointFile | None:
    """The undamaged checkpoint of the end of an epoch, from the last attempt that has one; nothing is loaded.

    Args:
        attempts: Folders of the attempts, the first attempt first; none where the trial's folder was deleted.
        epoch: Counted from 1.
    """
    return verified_checkpoint([folder / CHECKPOINTS for folder in attempts], epoch)


class Checkpoints:
    """Reads the checkpoints of all attempts at a trial, and writes those of one.

    Args:
        attempts: Folders of the attempts so far, the first attempt first; the last one writes.
        device: Where tensors are loaded to.
        source: Where the trial begins, if it is a fork.
    """

    def __init__(
        self, attempts: Sequence[Path], device: torch.device | str = "cpu", source: Source | None = None
    ) -> None:
        self._folders = [folder / CHECKPOINTS for folder in attempts]
        self._manager = CheckpointManager(self._folders[-1])
        self._device = device
        self._source = source

    def on(self, device: torch.device) -> Checkpoints:
        """The same, with tensors loaded to another device."""
        other = copy(self)
        other._device = device  # noqa: SLF001 - of the same class
        return other

    def newest(self) -> tuple[CheckpointFile, dict[str, Any]] | None:
        """The readable checkpoint with the most progress; damaged ones are skipped. The log names it."""
        found = newest_checkpoint(self._folders, self._device)
        if found is not None:
            print_notice(f"resuming from {found[0].path}")
        return found

    def of_parent(self) -> dict[str, Any] | None:
        """The parent's checkpoint with which a fork begins; None for a trial that is no fork. The log names it.

        Raises:
            CheckpointError: The parent has no readable checkpoint of that epoch.
        """
        source = self._source
        if source is None:
            return None
        found = find_checkpoint([folder / CHECKPOINTS for folder in source.attempts], source.epoch, self._device)
        if found is None:
            raise CheckpointError(
                f"it is a fork of trial {source.parent} after epoch {source.epoch}, of which that trial has no "
                "readable checkpoint; training code saves one after each epoch that it reports"
            )
        print_notice(f"forked from {found[0].path}")
        return found[1]

    def of_epoch(self, epoch: int) -> CheckpointFile | None:
        """The undamaged file of the end of an epoch, as `checkpoint_of_epoch`."""
        return verified_checkpoint(self._folders, epoch)

    def write(self, checkpoint: Mapping[str, Any], epoch: int, batch: int) -> Path:
        """Write atomically; see `CheckpointManager.write`, errors included."""
        return self._manager.write(checkpoint, epoch, batch)

    def retain(
        self, history: Sequence[Mapping[str, float]], metric: str, mode: Mode, *, inherited: int = 0
    ) -> None:
        """Remove this attempt's checkpoints, except those of the trial's own best epoch and the latest two."""
        saved = [file.progress for file in list_checkpoints([self._manager.folder])]
        best = best_epochs(history, metric, mode, 1, after=inherited)
        self._manager.retain(retained(saved, best=best, keep_last=_KEEP_LAST, permanent=()))
