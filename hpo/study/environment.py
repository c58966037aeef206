"""Describes what a study runs on: software versions, processors, and the git state of its code."""

from __future__ import annotations

import importlib.util
import os
import platform
import runpy
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from trainer.git_state import git_state, output_of

_PACKAGE: Final = "hpo-service"


def environment(folder: Path | None = None) -> dict[str, Any]:
    """This machine and its software, as plain values that JSON and YAML can represent.

    Does not start CUDA, so a process that later forks workers may call it.

    Args:
        folder: A folder in the git repository to describe; None: the working directory.

    Returns:
        ``hpo``, ``python``, ``torch``, ``optuna``: versions; ``platform``, ``host``, and ``cpu_count``;
        ``cuda``: the version that torch was built for, None where it was built without; ``gpus``: names, one for
        each GPU of the machine; ``git``: `trainer.git_state.git_state`.
    """
    torch, cuda = _torch_build()
    return {
        "hpo": _version(_PACKAGE),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "cpu_count": os.cpu_count(),
        "torch": torch,
        "cuda": cuda,
        "gpus": gpu_names() if cuda else [],
        "optuna": _version("optuna"),
        "git": git_state(folder),
    }


def _torch_build() -> tuple[str, str | None]:
    """Versions of torch and of its CUDA, read from torch's version file, since importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    build = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return str(build["__version__"]), build["cuda"]


def gpu_names() -> list[str]:
    """Names of the machine's NVIDIA GPUs, from `nvidia-smi`; empty where there is none."""
    # Asking torch would start CUDA, which takes hundreds of MB in a process that only watches.
    answer = output_of(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return [line.strip() for line in (answer or "").splitlines() if line.strip()]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its sources, without being installed
        return None
