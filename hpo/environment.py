"""What a study runs on: versions, processors, and the state of the code that it belongs to."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

_PACKAGE: Final = "hpo-service"
_TIMEOUT_S: Final = 5.0


def environment(folder: Path | None = None) -> dict[str, Any]:
    """This machine, and the software on it, as plain values that JSON and YAML can hold.

    CUDA is not started, so a parent of workers may ask.

    Args:
        folder: Whose git repository is looked at; None: the working directory's.

    Returns:
        ``hpo``, ``python``, ``torch``, ``optuna``: versions; ``platform``, ``host``, and ``cpu_count``;
        ``cuda``: the version that torch was built for, None where it was built without; ``gpus``: names, one for
        each GPU of the machine; ``git``: `git_state`.
    """
    import torch  # only here: the command line imports this file

    return {
        "hpo": _version(_PACKAGE),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu_count": os.cpu_count(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "gpus": gpu_names() if torch.version.cuda else [],
        "optuna": _version("optuna"),
        "git": git_state(folder),
    }


def gpu_names() -> list[str]:
    """Names of the machine's NVIDIA GPUs by their driver's own program; empty where there is none."""
    # Asking torch for names would start CUDA: hundreds of MB in a process that only watches.
    answer = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], None)
    return [line.strip() for line in (answer or "").splitlines() if line.strip()]


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """The commit that a folder is at, and whether tracked files were changed since.

    Args:
        folder: A folder in the repository; None: the working directory.

    Returns:
        ``commit`` and ``dirty``; None where there is no git, no repository, or no commit.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its sources, without being installed
        return None


def _git(folder: Path | None, *arguments: str) -> str | None:
    return _output(["git", "--no-optional-locks", *arguments], folder)  # others may be at work in the repository


def _output(command: list[str], folder: Path | None) -> str | None:
    """What a program prints; None where it isn't there, fails, or takes too long."""
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
