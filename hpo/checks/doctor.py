"""Examines the machine for a study: versions, GPUs, the database, W&B, disk, limits of the system."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import platform
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hpo.checks.database_check import Answer, ask
from hpo.checks.filesystems import nearest_folder, refused_writing
from hpo.checks.wandb_login import FIX, is_logged_in, uses_wandb, wandb_mode
from hpo.config.spec import StudySpec
from hpo.errors import HpoError, InputError
from hpo.trial.resources import cores
from hpo.wording import gib

Status = Literal["ok", "warning", "error"]

_PACKAGE: Final = "hpo-service"
#: Packages whose versions are shown: a study runs, or is shown, with them.
_WATCHED: Final = ("torch", "optuna", "optuna-dashboard", "sqlalchemy")
_GIB: Final = 2**30
_LOW_DISK: Final = 5 * _GIB
_NO_DISK: Final = _GIB // 10
_LOW_SHARED: Final = _GIB
_FEW_FILES: Final = 1024
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_SHARED: Final = Path("/dev/shm")


@dataclass(frozen=True)
class Line:
    """The result of one check.

    Attributes:
        name: What was checked.
        status: ``error`` if no study can run like this.
        found: What was found.
        fix: What to do; empty if nothing.
    """

    name: str
    status: Status
    found: str
    fix: str = ""


def examine(spec: StudySpec | None = None, *, storage: str | None = None) -> list[Line]:
    """Run all checks.

    Args:
        spec: The study; None for checks that hold for any study.
        storage: The database's URL; None for the study's.
    """
    url = storage if storage is not None or spec is None else spec.storage_url
    folder = Path.cwd() if spec is None else spec.output_dir
    parts: list[Callable[[], Iterator[Line]]] = [
        _python,
        _versions,
        _gpus,
        _processors,
        lambda: iter(()) if url is None else _database(url),
        lambda: _wandb(spec),
        lambda: _disk(folder),
        lambda: _shared_memory(spec),
        _files,
    ]
    return [line for part in parts for line in part()]


def _python() -> Iterator[Line]:
    version, wanted = platform.python_version(), metadata.metadata(_PACKAGE)["Requires-Python"]
    fine = SpecifierSet(wanted).contains(version)
    yield Line("python", "ok" if fine else "error", version, "" if fine else f"use Python {wanted}")


def _versions() -> Iterator[Line]:
    wanted = {requirement.name.lower(): requirement for requirement in _requirements()}
    for name in _WATCHED:
        found, supported = metadata.version(name), wanted[name].specifier
        fine = supported.contains(found, prereleases=True)
        fix = "" if fine else f"supported is {supported}: `pip install '{name}{supported}'`"
        yield Line(name, "ok" if fine else "error", found, fix)


def _requirements() -> list[Requirement]:
    """The requirements of the package itself, without its extras."""
    asked = [Requirement(text) for text in metadata.requires(_PACKAGE) or ()]
    return [requirement for requirement in asked if requirement.marker is None]


def _gpus() -> Iterator[Line]:
    built, driver = torch.version.cuda, _driver()
    count = torch.cuda.device_count()
    if not count:
        yield _without_gpu(built, driver)
        return
    yield Line("cuda", "ok", f"torch built for {built}, driver {driver or 'unknown'}")
    for index in range(count):
        yield _gpu(index)


def _without_gpu(built: str | None, driver: str) -> Line:
    if torch.backends.mps.is_available():
        return Line("gpu", "ok", "Apple's, as device mps")
    if not driver:
        return Line("gpu", "ok", "none: trials run on the processor")
    why = "is built without CUDA" if built is None else f"is built for CUDA {built}, and finds none"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    fix = "install a torch built for CUDA that is no newer than the driver"
    if hidden is not None:
        fix = f"CUDA_VISIBLE_DEVICES is {hidden!r}: unset it, or name GPUs that exist"
    return Line("gpu", "warning", f"there is an NVIDIA driver ({driver}), but torch {why}", fix)


def _gpu(index: int) -> Line:
    name = f"cuda:{index}"
    try:
        free, total = torch.cuda.mem_get_info(index)
        torch.ones(8, device=name).sum().item()
        model = torch.cuda.get_device_name(index)
    except RuntimeError as error:
        problem = str(error).partition("\n")[0]
        return Line(
            name, "error", f"does not compute: {problem}", "see `nvidia-smi`; leave it out with `--devices`"
        )
    found = f"{model}, {gib(free)} of {gib(total)} free"
    if free < total / 2:
        return Line(name, "warning", found, "others use it; see `nvidia-smi`")
    return Line(name, "ok", found)


def _driver() -> str:
    """The NVIDIA driver's version; empty without a driver."""
    if not _DRIVER.exists():
        return ""
    words = _DRIVER.read_text(errors="replace").partition("\n")[0].split()
    return next((word for word in words if word[0].isdigit() and "." in word), "unknown")


def _processors() -> Iterator[Line]:
    used, there = cores(), os.cpu_count() or 1
    found = f"{used} of {there} cores may be used" if used < there else f"{used} cores"
    yield Line("processor", "ok", found)


def _database(url: str) -> Iterator[Line]:
    try:
        answer: Answer = ask(url)
    except InputError as error:
        yield Line("database", "error", f"{error.value}: {error.problem}".removeprefix(": "), error.fix)
    except HpoError as error:
        first, _, rest = str(error).partition("\n")
        fix = (
            rest.strip().removeprefix("fix: ") or "see that the server runs, and that name and password are right"
        )
        yield Line("database", "error", first, fix)
    else:
        yield Line("database", "warning" if answer.fix else "ok", answer.found, answer.fix)


def _wandb(spec: StudySpec | None) -> Iterator[Line]:
    used = spec is not None and uses_wandb(spec)
    try:
        version = metadata.version("wandb")
    except metadata.PackageNotFoundError:
        fix = f"pip install '{_PACKAGE}[wandb]'"
        yield (
            Line("wandb", "error", "isn't installed, and the study uses it", fix)
            if used
            else Line("wandb", "ok", "isn't installed: needed by `callbacks: {wandb: …}` only")
        )
        return
    mode, source = wandb_mode()
    if mode != "online":
        fix = "`wandb sync` sends offline runs later" if mode == "offline" and used else ""
        yield Line("wandb", "ok", f"{version}, {mode} by {source}{'; ' + fix if fix else ''}")
    elif is_logged_in():
        yield Line("wandb", "ok", f"{version}, logged in")
    elif used:
        yield Line("wandb", "warning", f"{version}, not logged in", FIX)
    else:
        yield Line("wandb", "ok", f"{version}, not logged in: needed by `callbacks: {{wandb: …}}` only")


def _disk(folder: Path) -> Iterator[Line]:
    free = shutil.disk_usage(nearest_folder(folder)).free
    found = f"{gib(free)} free for {folder}"
    if (problem := refused_writing(folder)) is not None:
        yield Line("disk", "error", problem, "give another folder with `--output-dir`")
        return
    if free < _NO_DISK:
        yield Line("disk", "error", found, "free some room, or give another folder with `--output-dir`")
    elif free < _LOW_DISK:
        yield Line("disk", "warning", found, "set `run.disk_quota`, or give another folder with `--output-dir`")
    else:
        yield Line("disk", "ok", found)


def _shared_memory(spec: StudySpec | None) -> Iterator[Line]:
    if not _SHARED.is_dir():
        return
    size = shutil.disk_usage(_SHARED).total
    loads = spec is None or spec.loader.num_workers > 0
    if size < _LOW_SHARED and loads:
        fix = "loaders with `num_workers` pass batches through it: `docker run --shm-size=8g`, or `num_workers: 0`"
        yield Line("shared memory", "warning", f"{size / 2**20:.0f} MiB", fix)
    else:
        yield Line("shared memory", "ok", gib(size))


def _files() -> Iterator[Line]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} may be open at once" if soft != resource.RLIM_INFINITY else "any number may be open"
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
        yield Line("open files", "warning", found, f"`ulimit -n {_FEW_FILES}` (at most {most}) before `hpo run`")
    else:
        yield Line("open files", "ok", found)
