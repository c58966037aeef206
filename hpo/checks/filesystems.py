"""Which file system a path is on, whether SQLite can be trusted there, and whether it can be written to."""

import os
import tempfile
from pathlib import Path
from typing import Final

from hpo.storage.engines import normalize_url, sqlite_file

#: Shared by several machines: a write-ahead log needs memory that all its processes see, and locks that hold.
NETWORK_TYPES: Final = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs", "fuse.s3fs"),
        *("fuse.sshfs", "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "smb3"),
        *("smbfs", "virtiofs"),
    }
)


def file_system_type(path: Path, mountinfo: str) -> str:
    """The type of the file system that holds an absolute path; empty where the table doesn't say.

    Args:
        path: It need not exist.
        mountinfo: The kernel's table of mounts, as in ``/proc/self/mountinfo``.
    """
    longest, found = -1, ""
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        if not separator:
            continue
        point = Path(_unescaped(before.split()[4]))
        # The last line of a mount point is the mount on top.
        if path.is_relative_to(point) and len(point.parts) >= longest:
            longest, found = len(point.parts), after.split()[0]
    return found


def _unescaped(field: str) -> str:
    """The kernel writes blanks and backslashes as octal numbers."""
    for code, character in ((r"\040", " "), (r"\011", "\t"), (r"\012", "\n"), (r"\134", "\\")):
        field = field.replace(code, character)
    return field


def network_file_system(url: str, mountinfo: str | None = None) -> str | None:
    """The type of the network file system that a study database lies on; None where it lies on no such one.

    SQLite's log and locks work on one machine only: there, several machines or a lost lock can damage the file.

    Args:
        url: The database.
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
    """A path itself where it exists, or else the nearest one above it that does, as far as this user can see."""
    # Unlike Path.exists, this is False where this user may not look.
    return next(each for each in (path, *path.parents) if os.path.exists(each))  # noqa: PTH110


def writing_error(folder: Path) -> OSError | None:
    """Why a folder can't be written to, or can't be made; None where it can. Nothing is left there.

    Permissions alone do not tell: root has all of them in ``/proc``, too.
    """
    try:
        with tempfile.TemporaryFile(dir=nearest_folder(folder)):
            return None
    except OSError as error:
        return error


def refused_writing(folder: Path) -> str | None:
    """The same in words."""
    error = writing_error(folder)
    if error is None:
        return None
    return f"{nearest_folder(folder)}: can't be written to: {error.strerror or error}"
