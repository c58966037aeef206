"""Lists and removes the checkpoint files of a study's trials on disk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hpo.errors import StudyError
from hpo.study.folders import CHECKPOINTS, is_attempt

#: Prefix of a file that is being written, or whose writer was killed.
HALF_WRITTEN: Final = ".epoch-"


@dataclass(frozen=True)
class StoredFile:
    """A file as it was when it was looked at.

    Attributes:
        path: The file.
        size: Bytes.
        changed: When it was last modified, in nanoseconds since 1970.
    """

    path: Path
    size: int
    changed: int


def unlink(file: StoredFile) -> bool:
    """Remove a file if it has not changed since it was looked at; returns whether it was removed.

    Raises:
        StudyError: It can't be removed.
    """
    try:
        if file.path.stat().st_mtime_ns != file.changed:
            return False
        file.path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        problem = f"{file.path}: can't be removed: {error.strerror or error}"
        raise StudyError(f"{problem}\n  fix: run this as a user who may write there") from error
    return True


def total_size(files: Mapping[int, Sequence[StoredFile]]) -> int:
    """The total size in bytes of files by trial."""
    return sum(file.size for there in files.values() for file in there)


def scan(output_dir: Path) -> dict[int, list[StoredFile]]:
    """The checkpoint files of all trials, by trial, including half-written ones.

    Symbolic links in place of a trial's folder or a folder in it are not followed: their target may belong to
    another study.
    """
    found: dict[int, list[StoredFile]] = {}
    for trial in _entries(output_dir / "trials"):
        if trial.name.isdecimal() and not trial.is_symlink():
            found[int(trial.name)] = [
                file
                for attempt in _entries(trial)
                if is_attempt(attempt.name) and not attempt.is_symlink()
                for file in _stored_files(Path(attempt.path, CHECKPOINTS))
            ]
    return found


def _stored_files(folder: Path) -> Iterator[StoredFile]:
    for entry in () if folder.is_symlink() else _entries(folder):
        if entry.name.startswith(("epoch-", HALF_WRITTEN)):
            try:
                stat = entry.stat()
            except FileNotFoundError:  # a running trial has just removed it
                continue
            yield StoredFile(folder / entry.name, stat.st_size, stat.st_mtime_ns)


def _entries(folder: Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []
