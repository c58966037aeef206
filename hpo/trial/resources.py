"""Dealing devices to workers."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpo.config.spec import StudySpec
from hpo.errors import InputError

# A container's share of the processors: microseconds of each period, or "max" (Linux cgroups, version 2).
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_DEVICE = re.compile(r"cpu|mps|cuda(:\d{1,4})?")


@dataclass(frozen=True)
class Slot:
    """What one worker may use.

    Attributes:
        label: Device for people to read, such as ``cuda:1``.
        device: Device that the worker sees; its own GPU is ``cuda:0`` to it.
        visible: Its CUDA_VISIBLE_DEVICES; None leaves the variable alone.
        threads: Threads for torch on the CPU.
    """

    label: str
    device: str
    visible: str | None
    threads: int


def deal(devices: Sequence[str] | None, workers: int | None) -> list[Slot]:
    """One slot per worker, devices dealt out in turn and CPU cores shared out.

    Args:
        devices: Names: ``cpu``, ``cuda`` (every GPU), ``cuda:N``, ``mps``. None: every GPU, or the CPU.
        workers: How many; None: one for each GPU, one in all for the CPU.

    Raises:
        InputError: There is no such device.
    """
    names = _named(devices)
    count = workers or len(names)
    threads = max(1, cores() // count)
    return [_slot(names[index % len(names)], threads) for index in range(count)]


def study_slots(spec: StudySpec) -> list[Slot]:
    """One slot per worker of a study, as its file says.

    Raises:
        InputError: There is no such device, or one that can't do what the study asks of it.
    """
    try:
        slots = deal(_asked_for(spec), spec.run.workers)
    except InputError as error:
        raise spec.error(error.problem, path=_place(spec), value=error.value, fix=error.fix) from error
    for slot in slots:
        if spec.trainer.cuda_graph and not slot.device.startswith("cuda"):
            fix = "set it to false, or give GPUs with `run.devices`"
            raise spec.error(
                f"needs CUDA devices, and a worker is on {slot.label}", path="trainer.cuda_graph", fix=fix
            )
    return slots


def devices_elsewhere(spec: StudySpec) -> list[str]:
    """The study's devices that this machine lacks, and others have to have; empty where it has them all.

    Raises:
        InputError: A name that no machine has.
    """
    names, gpus = _asked_for(spec) or (["cuda"] if spec.trainer.cuda_graph else []), _gpus()
    for name in names:
        if not _DEVICE.fullmatch(name):
            fix = "write cpu, cuda (every GPU), cuda:0, cuda:1, … or mps"
            raise spec.error("is no name of a device", path=_place(spec), value=name, fix=fix)
    return [name for name in names if not _is_here(name, gpus) and not (name == "cuda" and gpus)]


def _asked_for(spec: StudySpec) -> Sequence[str] | None:
    own = None if spec.trainer.device is None else [spec.trainer.device]
    return spec.run.devices or own


def _place(spec: StudySpec) -> str:
    return "run.devices" if spec.run.devices or spec.trainer.device is None else "trainer.device"


def cores() -> int:
    """Processor cores that this process may use, by its affinity, its container's quota and OMP_NUM_THREADS."""
    limits = [os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):  # macOS doesn't say
        limits.append(len(os.sched_getaffinity(0)))
    if (asked := os.environ.get("OMP_NUM_THREADS", "")).isdecimal():
        limits.append(int(asked))
    if _QUOTA.is_file():
        quota, period = _QUOTA.read_text().split()
        limits += [] if quota == "max" else [round(int(quota) / int(period))]
    return max(1, min(limits))


def _named(devices: Sequence[str] | None) -> list[str]:
    gpus = _gpus()
    if devices is None:
        return [f"cuda:{index}" for index in range(gpus)] or ["cpu"]
    names: list[str] = []
    for name in devices:
        names += [f"cuda:{index}" for index in range(gpus)] if name == "cuda" and gpus else [name]
    for name in names:
        _check(name, gpus)
    return names


def _gpus() -> int:
    """How many there are; counted without starting CUDA, which a parent of workers must not."""
    import torch  # here, because slots are passed around by those who count no devices

    return torch.cuda.device_count()


def _has_mps() -> bool:
    import torch

    return torch.backends.mps.is_available()


def _is_here(name: str, gpus: int) -> bool:
    kind, _, index = name.partition(":")
    known = name == "cpu" or (name == "mps" and _has_mps())
    return known or (kind == "cuda" and index.isdecimal() and int(index) < gpus)


def _check(name: str, gpus: int) -> None:
    if _is_here(name, gpus):
        return
    there = ["cpu", *(f"cuda:{number}" for number in range(gpus))]
    raise InputError("no such device here", path="devices", value=name, fix=f"there are {', '.join(there)}")


def _slot(name: str, threads: int) -> Slot:
    kind, _, index = name.partition(":")
    if kind != "cuda":
        return Slot(name, name, None, threads)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    physical = visible.split(",")[int(index)].strip() if visible else index
    return Slot(name, "cuda:0", physical, threads)
