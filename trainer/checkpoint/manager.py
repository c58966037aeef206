"""Writes checkpoint files atomically, verifies them when they are read, and removes those no longer kept."""

from __future__ import annotations

import logging
import os
import shutil
import zipfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, TypeVar

import torch
from torch import Tensor

from trainer.checkpoint.files import CheckpointError, CheckpointFile, Progress, list_checkpoints
from trainer.checkpoint.readable import readable
from trainer.checkpoint.versions import versioned
from trainer.files import aside_name

_PLAIN = frozenset({int, float, str, bool, type(None)})

#: Key of a checkpoint; its value says whether the file is never removed.
PERMANENT: Final = "permanent"

Read = TypeVar("Read")

logger = logging.getLogger(__name__)

#: Files that this process has written or verified, with their `_identity` at that time.
_sound: dict[Path, tuple[int, int, int]] = {}


class CheckpointWriteError(OSError):
    """A checkpoint can't be written; the text says where, why, how much space is free and which files remain."""

    def __str__(self) -> str:
        return str(self.strerror)


def snapshot(value: Any) -> Any:
    """A copy of a checkpoint on the CPU, which further training does not change."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return versioned({key: snapshot(item) for key, item in value.items()}, value)
    if isinstance(value, list | tuple):
        plain = _PLAIN.issuperset(map(type, value))  # Python's generator alone has 625 numbers
        return type(value)(value if plain else (snapshot(item) for item in value))
    return value


def load_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read and verify one checkpoint.

    A torch file is a zip archive with a CRC-32 for each record; all are checked. Only tensors and plain values
    are unpickled (``weights_only``).

    Args:
        path: The file.
        device: The device to load the tensors to.

    Returns:
        The result of `trainer.Trainer.state_dict`, for its `load_state_dict`.

    Raises:
        CheckpointError: The file is missing, truncated or corrupted, or holds something else.
    """
    verify_checkpoint(path)
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        # torch and pickle raise a dozen types for damaged files; the reader needs just one.
        raise CheckpointError(f"{path}: no readable checkpoint: {error}") from error
    if not isinstance(checkpoint, dict):
        raise CheckpointError(f"{path}: holds {type(checkpoint).__name__}, not a checkpoint")
    return checkpoint


def verify_checkpoint(path: Path) -> None:
    """Check each record of a torch file against its CRC-32, without loading tensors.

    A file that this process has written or checked and that has not changed since is not read again.

    Raises:
        CheckpointError: The file is missing, truncated or corrupted.
    """
    try:
        found = _identity(path)
        if _sound.get(path) == found:
            return
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except Exception as error:
        # zipfile raises a dozen types for damaged files; the reader needs just one.
        raise CheckpointError(f"{path}: no readable checkpoint: {error}") from error
    if broken:
        raise CheckpointError(f"{path}: the record {broken} is corrupted")
    _sound[path] = found


def _identity(path: Path) -> tuple[int, int, int]:
    """Inode, length and modification time of a file: they change when its content does."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def is_permanent(path: Path) -> bool:
    """Whether a checkpoint is permanent. Its tensors are mapped rather than read, and nothing is verified.

    Raises:
        CheckpointError: The file is no checkpoint, or too damaged to be read.
    """
    try:
        return bool(torch.load(path, map_location="cpu", mmap=True, weights_only=True).get(PERMANENT))
    except Exception as error:
        raise CheckpointError(f"{path}: no readable checkpoint: {error}") from error


def newest_checkpoint(
    folders: Iterable[Path], device: torch.device | str = "cpu"
) -> tuple[CheckpointFile, dict[str, Any]] | None:
    """The readable checkpoint with the most progress; damaged ones are skipped with a warning.

    Args:
        folders: Folders that `trainer.callbacks.Checkpoint` wrote to; of equal progress, the last folder's
            checkpoint is taken. A folder may be missing.
        device: The device to load the tensors to.

    Returns:
        The file, and its content for `trainer.Trainer.load_state_dict`; None if no file is readable.
    """
    files = list_checkpoints(folders)
    return _latest(files, lambda path: load_checkpoint(path, device), "; the checkpoint before it is used")


def find_checkpoint(
    folders: Iterable[Path], epoch: int, device: torch.device | str = "cpu"
) -> tuple[CheckpointFile, dict[str, Any]] | None:
    """The readable checkpoint of the end of ``epoch``, counted from 1, from the last folder that has one.

    A damaged one is skipped with a warning. ``folders``, ``device`` and the result are as in `newest_checkpoint`.
    """
    return _latest(_of_epoch(folders, epoch), lambda path: load_checkpoint(path, device))


def verified_checkpoint(folders: Iterable[Path], epoch: int) -> CheckpointFile | None:
    """The undamaged file of the end of ``epoch``, counted from 1, from the last folder that has one.

    Nothing is loaded; a damaged file is skipped with a warning.
    """
    found = _latest(_of_epoch(folders, epoch), verify_checkpoint)
    return None if found is None else found[0]


def _of_epoch(folders: Iterable[Path], epoch: int) -> list[CheckpointFile]:
    return [file for file in list_checkpoints(folders) if file.progress == (epoch, 0)]


def _latest(
    files: Sequence[CheckpointFile], read: Callable[[Path], Read], instead: str = ""
) -> tuple[CheckpointFile, Read] | None:
    """The last file that ``read`` can read, and its result; logs a warning for each one that it can't."""
    for file in reversed(files):
        try:
            return file, read(file.path)
        except CheckpointError as error:
            logger.warning("%s%s", error, instead)
    return None


class CheckpointManager:
    """Writes and removes the checkpoints of one folder.

    Args:
        folder: The folder; made when the first checkpoint is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, epoch: int, batch: int = 0) -> Path:
        """The file of the checkpoint with that progress."""
        return self.folder / (f"epoch-{epoch:05d}-batch-{batch:06d}.pt" if batch else f"epoch-{epoch:05d}.pt")

    def write(self, checkpoint: Mapping[str, Any], epoch: int, batch: int = 0) -> Path:
        """Write atomically: to a temporary file beside it, flushed to the disk, then renamed.

        Args:
            checkpoint: Tensors and plain values by name.
            epoch: Finished epochs.
            batch: Finished batches of the next epoch; 0 for the end of an epoch.

        Returns:
            The file.

        Raises:
            CheckpointWriteError: The disk is full or not writable; existing files are unchanged.
            UnreadableError: The checkpoint holds something that could not be read back.
        """
        path = self.path(epoch, batch)
        try:
            for left in self.folder.glob(".epoch-*"):
                left.unlink(missing_ok=True)  # left by a process that was killed while it wrote
            write_whole(checkpoint, path)
            _sound[path] = _identity(path)
        except OSError as error:
            raise CheckpointWriteError(error.errno, self._report(path, error)) from error
        return path

    def retain(self, keep: Collection[Progress]) -> None:
        """Remove all checkpoints of this folder except those in ``keep``."""
        for file in list_checkpoints([self.folder]):
            if file.progress not in keep:
                file.path.unlink(missing_ok=True)
                _sound.pop(file.path, None)

    def _report(self, path: Path, error: OSError) -> str:
        reason = f"checkpoint {path} can't be written: {error.strerror or error}"
        fix = "free some room or choose another folder"
        try:
            free = shutil.disk_usage(self.folder).free / 2**20
            files = list_checkpoints([self.folder])
        except OSError:
            return f"{reason}; {fix}"
        left = f"{len(files)} untouched there, the newest {files[-1].path.name}" if files else "none there yet"
        return f"{reason}; {free:.1f} MiB are free; checkpoints written before: {left}; {fix}, then resume"


def write_whole(content: Mapping[str, Any], path: Path) -> None:
    """Write tensors and plain values atomically: to a temporary file beside it, flushed to the disk, then renamed.

    Raises:
        OSError: The disk is full or not writable; an existing file is unchanged.
        UnreadableError: ``content`` holds something that could not be read back.
    """
    content = readable(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    _write_aside(content, path)
    _sync_folder(path.parent)


def _write_aside(checkpoint: Mapping[str, Any], path: Path) -> None:
    aside = aside_name(path)
    try:
        with aside.open("wb") as file:
            _save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def _save(checkpoint: Mapping[str, Any], file: IO[bytes]) -> None:
    try:
        torch.save(checkpoint, file)
    except RuntimeError as error:
        # torch raises an error of its own over that of a full disk.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
