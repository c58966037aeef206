"""A trial's checkpoint files: over all its attempts to read, of this attempt to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from trainer.checkpoint.files import CheckpointFile, list_checkpoints
from trainer.checkpoint.manager import CheckpointManager, newest_checkpoint, verified_checkpoint
from trainer.checkpoint.retention import best_epochs, retained
from trainer.state import Mode

FOLDER: Final = "checkpoints"
#: Latest checkpoints that stay beside the best one; a damaged one is replaced by the one before it.
_KEEP_LAST: Final = 2


class Checkpoints:
    """Reads the checkpoints of all attempts at a trial, and writes those of one.

    Args:
        attempts: Folders of the attempts so far, the first attempt first; the last one writes.
        device: Where tensors are loaded to.
    """

    def __init__(self, attempts: Sequence[Path], device: torch.device | str = "cpu") -> None:
        self._folders = [folder / FOLDER for folder in attempts]
        self._manager = CheckpointManager(self._folders[-1])
        self._device = device

    def newest(self) -> tuple[CheckpointFile, dict[str, Any]] | None:
        """The readable checkpoint with the most progress, which the log names; a damaged one is passed over."""
        found = newest_checkpoint(self._folders, self._device)
        if found is not None:
            print(f"resuming from {found[0].path}", flush=True)
        return found

    def of_epoch(self, epoch: int) -> CheckpointFile | None:
        """The undamaged file of the end of an epoch, from the last attempt that has one; nothing is loaded."""
        return verified_checkpoint(self._folders, epoch)

    def write(self, checkpoint: Mapping[str, Any], epoch: int, batch: int) -> Path:
        """Write atomically; see `CheckpointManager.write`, errors included."""
        return self._manager.write(checkpoint, epoch, batch)

    def retain(self, history: Sequence[Mapping[str, float]], metric: str, mode: Mode) -> None:
        """Remove this attempt's files but those of its best epoch and its latest two."""
        saved = [file.progress for file in list_checkpoints([self._manager.folder])]
        best = best_epochs(history, metric, mode, 1)
        self._manager.retain(retained(saved, best=best, keep_last=_KEEP_LAST, fixed=()))
