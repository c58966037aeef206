"""Locks a folder of final training: two trainings would resume from each other's checkpoints."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Final

from hpo.errors import StudyError
from hpo.storage.machine import host_name

#: The file that names the process that trains in its folder, and that this process locks.
LOCK_FILE: Final = ".lock"
_HELD: Final = (errno.EACCES, errno.EAGAIN)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Lock a folder of final training for this process; the kernel releases the lock if the process dies.

    Nothing is locked if the file system has no locks, or this user may not write the file.

    Raises:
        StudyError: Another process has the lock.
    """
    path, file = folder / LOCK_FILE, None
    try:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = _locked(path)
            os.truncate(path, 0)
            file.write(f"process {os.getpid()} on {host_name()}\n".encode())
        yield
    finally:
        if file is not None:
            path.unlink(missing_ok=True)  # before the lock is released: later it may be another process's
            file.close()


def _locked(path: Path) -> FileIO:
    """Open and lock the file at this path.

    Raises:
        OSError: The file system has no locks, or the file can't be opened.
        StudyError: Another process has the lock.
    """
    while True:
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(path.open("ab+", buffering=0))
            try:
                # Not flock: forked processes would keep such a lock after this process's death.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _HELD:
                    raise
                file.seek(0)
                raise _taken(path.parent, file.read().decode(errors="replace").strip()) from error
            with contextlib.suppress(FileNotFoundError):  # its last owner has removed it meanwhile
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                    opened.pop_all()
                    return file


def _taken(folder: Path, by: str) -> StudyError:
    return StudyError(
        f"{folder}: {by or 'another process'} trains there\n  fix: wait until that has ended, or stop it"
    )
