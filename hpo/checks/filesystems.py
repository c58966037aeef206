"""Finds a path's file system, whether SQLite is safe on it, and whether a folder can be written to."""

import os
import tempfile
from pathlib import Path
from typing import Final

from hpo.storage.engines import normalize_url, sqlite_file

#: File systems shared by machines: a write-ahead log needs reliable locks, and memory that all processes see.
NETWORK_TYPES: Final = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.s3fs"),
        *("fuse.sshfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "smb3"),
        *("smbfs", "virtiofs"),
    }
)


def file_system_type(path: Path, mountinfo: str) -> str:
    """The type of the file system of an absolute path; empty if the table has no entry for it.

    Args:
        path: The path, which need not exist.
        mountinfo: The kernel's table of mounts, as in ``/proc/self/mountinfo``.
    """
    longest, found = -1, ""
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        if not separator:
            continue
        point = Path(_unescaped(before.split()[4]))
        # The last line for a mount point is the mount that is visible.
        if path.is_relative_to(point) and len(point.parts) >= longest:
            longest, found = len(point.parts), after.split()[0]
    return found


def _unescaped(field: str) -> str:
    """Decode a field of the table, in which the kernel writes blanks and backslashes as octal numbers."""
    for code, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        field = field.replace(code, character)
    return field


def network_file_system(url: str, mountinfo: str | None = None) -> str | None:
    """The type of the network file system that a study database is on; None if it is on none.

    SQLite's log and locks work on one machine only: on a network file system, several machines or a lost lock can
    damage the file.

    Args:
        url: The database's URL.
        mountinfo: See `file_system_type`; by default this machine's.
    """
    file = sqlite_file(normalize_url(url))
    if file is None:
        return None
    if mountinfo is None:
        table = Path("/proc/self/mountinfo")
        mountinfo = table.read_text(errors="replace") if table.exists() else ""
    kind = file_system_type(file.resolve(), mountinfo)
    return kind if kind in NETWORK_TYPES else None


def nearest_folder(path: Path) -> Path:
    """The path itself if it exists, else the nearest existing folder above it, as far as this user can see."""
    # Unlike Path.exists, this is False where this user may not look.
    return next(each for each in (path, *path.parents) if os.path.exists(each))  # noqa: PTH110


def writing_error(folder: Path) -> OSError | None:
    """Why a folder can't be written to or created; None if it can. Leaves nothing there.

    It tries to write, since permissions alone are not enough: root has all of them in ``/proc``, too.
    """
    try:
        with tempfile.TemporaryFile(dir=nearest_folder(folder)):
            return None
    except OSError as error:
        return error


def refused_writing(folder: Path) -> str | None:
    """The result of `writing_error` as text."""
    error = writing_error(folder)
    if error is None:
        return None
    return f"{nearest_folder(folder)}: can't be written to: {error.strerror or error}"
