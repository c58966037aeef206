"""Lists the checkpoints in folders by their file names; imports no torch, for code that only reads a study."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"epoch-(\d+)(?:-batch-(\d+))?\.pt")


#: Finished epochs, and finished batches of the next epoch; sorts in the order of a run.
Progress = tuple[int, int]


class CheckpointError(Exception):
    """A checkpoint file can't be read: truncated, corrupted, or no checkpoint at all."""


@dataclass(frozen=True, order=True)
class CheckpointFile:
    """One checkpoint on disk.

    Attributes:
        epoch: Finished epochs.
        batch: Finished batches of the next epoch; 0 at the end of an epoch.
        path: The file.
    """

    epoch: int
    batch: int
    path: Path

    @property
    def progress(self) -> Progress:
        """Epoch and batch."""
        return self.epoch, self.batch


def list_checkpoints(folders: Iterable[Path]) -> list[CheckpointFile]:
    """All checkpoints in the folders, the earliest progress first; equal progress in the folders' order."""
    found: list[tuple[int, int, int, Path]] = []
    for rank, folder in enumerate(folders):
        for path in folder.iterdir() if folder.is_dir() else ():
            if match := _NAME.fullmatch(path.name):
                found.append((int(match[1]), int(match[2] or 0), rank, path))  # noqa: PERF401
    return [CheckpointFile(epoch, batch, path) for epoch, batch, _, path in sorted(found)]
