"""Reads the git commit of a run's code, and whether it has changes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, Final

_TIMEOUT_S: Final = 5.0


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """The commit that a folder is at, and whether tracked files were changed since.

    Args:
        folder: A folder in the repository; None: the working directory.

    Returns:
        ``commit`` and ``dirty``; None if there is no git, no repository, or no commit.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path | None, *arguments: str) -> str | None:
    return output_of(["git", "--no-optional-locks", *arguments], folder)  # takes no lock that others need


def output_of(command: list[str], folder: Path | None = None) -> str | None:
    """The output of a program; None if it is missing, fails, or takes too long."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
