"""One final training of a study at a time: two would resume from each other's checkpoints."""

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

#: Says which process trains in its folder; that process has the lock on it.
LOCK_FILE: Final = ".lock"
_HELD: Final = (errno.EACCES, errno.EAGAIN)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Have a folder of final training to this process; the kernel ends that where the process dies.

    Where the file system has no locks, or this user may not write the file, nothing is locked.

    Raises:
        StudyError: Another process has it.
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
            path.unlink(missing_ok=True)  # while it is locked: later it may be another's
            file.close()


def _locked(path: Path) -> FileIO:
    """The file that stands there, locked.

    Raises:
        OSError: There are no locks there, or the file can't be opened.
        StudyError: Another process has it.
    """
    while True:
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(path.open("ab+", buffering=0))
            try:
                # Not flock: processes forked by this one would keep that lock after its death.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _HELD:
                    raise
                file.seek(0)
                raise _taken(path.parent, file.read().decode(errors="replace").strip()) from error
            with contextlib.suppress(FileNotFoundError):  # who had it has removed it meanwhile
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                    opened.pop_all()
                    return file


def _taken(folder: Path, by: str) -> StudyError:
    return StudyError(
        f"{folder}: {by or 'another process'} trains there\n  fix: wait until that has ended, or stop it"
    )
