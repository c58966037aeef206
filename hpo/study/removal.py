"""Removes a deleted study's output, after a check that all of it can be removed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from hpo.config.spec import StudySpec
from hpo.errors import StudyError
from hpo.study.folders import OWN_FOLDERS, OWNER_FILE


def refuse_what_stays(spec: StudySpec) -> None:
    """Refuse to delete a study if this user could not remove a part of its output.

    Raises:
        StudyError: A part can't be removed; nothing has been removed yet.
    """
    try:
        for folder in _emptied(spec):
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    except OSError as error:
        raise _unremovable(spec, error, "nothing has been deleted") from error


def remove_output(spec: StudySpec) -> list[str]:
    """Remove the study's output; where a folder is a symbolic link, only the link.

    Returns:
        Notes for the user, one line each.

    Raises:
        StudyError: Something can't be removed.
    """
    notes = []
    try:
        for folder in (spec.output_dir / name for name in OWN_FOLDERS):
            if folder.is_symlink():
                notes.append(f"{folder} was a link; what lies in {folder.resolve()} stays")
                folder.unlink()
            elif folder.exists():
                shutil.rmtree(folder)
        (spec.output_dir / OWNER_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise _unremovable(spec, error, "the study is gone from the storage, its files in part") from error
    with contextlib.suppress(OSError):  # the folder may contain other files, such as the database, which stay
        spec.output_dir.rmdir()
    return notes


def _emptied(spec: StudySpec) -> Iterator[Path | str]:
    """Folders from which something is to be removed; links are not followed."""

    def fail(error: OSError) -> None:
        raise error

    there = [name for name in (*OWN_FOLDERS, OWNER_FILE) if os.path.lexists(spec.output_dir / name)]
    if there:
        yield spec.output_dir
    for top in (spec.output_dir / name for name in there):
        if top.is_dir() and not top.is_symlink():
            for folder, inside, files in os.walk(top, onerror=fail):
                if inside or files:
                    yield folder


def _unremovable(spec: StudySpec, error: OSError, state: str) -> StudyError:
    problem = f"{error.filename or spec.output_dir}: can't be removed: {error.strerror or error}; {state}"
    return StudyError(f"{problem}\n  fix: run this as a user who may write there, such as who ran the study")
