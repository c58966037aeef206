"""Deals the machine's devices and CPU cores out to workers."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpo.config.spec import StudySpec
from hpo.errors import InputError

# A container's CPU quota: microseconds per period, or "max" (Linux cgroups, version 2).
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_DEVICE = re.compile(r"cpu|mps|cuda(:\d{1,4})?")
#: Separates the devices of one trial.
_AND = "+"


@dataclass(frozen=True)
class Slot:
    """The devices and threads that one worker may use.

    Attributes:
        label: Its device for people to read, such as ``cuda:1``, or its devices, such as ``cuda:0+cuda:1``.
        device: Its first device, as the worker sees it; a worker sees its own GPUs as ``cuda:0``, ``cuda:1``, ….
        visible: Its CUDA_VISIBLE_DEVICES; None leaves the variable unchanged.
        threads: CPU threads for torch in each process that trains.
        size: How many devices train one trial, each with its own process.
    """

    label: str
    device: str
    visible: str | None
    threads: int
    size: int = 1

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each process, by rank, as the worker sees it."""
        if self.size == 1 or self.visible is None:
            return (self.device,) * self.size
        return tuple(f"cuda:{rank}" for rank in range(self.size))

    @property
    def names(self) -> tuple[str, ...]:
        """The device of each process, by rank, as seen by a process that sees all devices."""
        return tuple(self.label.split(_AND))


def deal(devices: Sequence[str] | None, workers: int | None, size: int = 1) -> list[Slot]:
    """One slot per worker, devices dealt out in turn and CPU cores shared out.

    Args:
        devices: Names: ``cpu``, ``cuda`` (every GPU), ``cuda:N``, ``mps``; or groups of them, such as
            ``cuda:0+cuda:1``. None: every GPU, or the CPU.
        workers: How many workers; None: one for each GPU or group, or one for the CPU.
        size: Devices of one trial. Single GPUs are grouped in their order; with ``cuda`` those left over are not
            used. On the CPU, that many processes train one trial.

    Raises:
        InputError: There is no such device, or the devices make no groups of this size.
    """
    groups = _groups(devices, size)
    count = workers or len(groups)
    threads = max(1, cores() // (count * size))
    return [_slot(groups[index % len(groups)], threads) for index in range(count)]


def study_slots(spec: StudySpec, *, workers: int | None = None) -> list[Slot]:
    """One slot per worker of a study; ``workers`` replaces the number in the study file.

    Raises:
        InputError: There is no such device, or it can't do what the study needs.
    """
    try:
        slots = deal(_asked_for(spec), workers or spec.run.workers, spec.trainer.devices)
    except InputError as error:
        path = _place(spec) if error.path == "devices" else error.path
        raise spec.error(error.problem, path=path, value=error.value, fix=error.fix) from error
    for slot in slots:
        if spec.trainer.cuda_graph and not slot.device.startswith("cuda"):
            fix = "set it to false, or give GPUs with `run.devices`"
            raise spec.error(
                f"needs CUDA devices, and a worker is on {slot.label}", path="trainer.cuda_graph", fix=fix
            )
    return slots


def training_slot(spec: StudySpec) -> Slot:
    """The slot for a single training of a study that has this machine for itself.

    It gets the first of `run.devices` that this machine has: the study may have run on a larger machine.

    Raises:
        InputError: There is no such device, or it can't do what the study needs.
    """
    lacking = set(devices_elsewhere(spec))
    if lacking and spec.run.devices:
        here = [name for name in spec.run.devices if lacking.isdisjoint(map(str.strip, name.split(_AND)))]
        if not here:
            there = _there(_gpus())
            fix = f"there are {', '.join(there)}; for this training alone add `run.devices={there[-1]}`"
            named = ",".join(spec.run.devices)
            raise spec.error("no such device here", path="run.devices", value=named, fix=fix)
        spec = spec.with_options(devices=tuple(here[: 1 if _AND in here[0] else spec.trainer.devices]))
    return study_slots(spec, workers=1)[0]


def devices_elsewhere(spec: StudySpec) -> list[str]:
    """The study's devices that this machine lacks, so that other machines must have them; may be empty.

    Raises:
        InputError: A name is not a device's name, or a group has another size than `trainer.devices`.
    """
    names, gpus = _asked_for(spec) or (["cuda"] if spec.trainer.cuda_graph else []), _gpus()
    try:
        single = [device for name in names for device in _named(name, spec.trainer.devices)]
    except InputError as error:
        raise spec.error(error.problem, path=_place(spec), value=error.value, fix=error.fix) from error
    for name in single:
        if not _DEVICE.fullmatch(name):
            fix = "write cpu, cuda (every GPU), cuda:0, cuda:1, … or mps"
            raise spec.error("is not a device name", path=_place(spec), value=name, fix=fix)
    return [name for name in single if not _is_here(name, gpus) and not (name == "cuda" and gpus)]


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


def _groups(devices: Sequence[str] | None, size: int) -> list[tuple[str, ...]]:
    """The devices of each group, in the order in which they are dealt out."""
    gpus = _gpus()
    every = [f"cuda:{index}" for index in range(gpus)]
    groups: list[tuple[str, ...]] = []
    single: list[str] = []
    for name in devices or (["cuda"] if gpus else ["cpu"]):
        if name == "cuda" and gpus:
            if gpus < size:
                raise _too_few(size, gpus)
            groups += _dealt(every[: gpus - gpus % size], size)
            continue
        named = _named(name, size)
        for device in named:
            _check(device, gpus)
        if len(named) == size:
            groups.append(named)
        elif name == "cpu":
            groups.append(named * size)
        else:
            single += named
    if len(single) % size:
        there = f"{len(single)} {'device' if len(single) == 1 else 'devices'}"
        raise InputError(
            f"{there} can't be dealt out in groups of {size}, as `trainer.devices` says",
            path="devices",
            value=",".join(single),
            fix=f"name {size} devices for each worker, such as {_AND.join(every[:size]) or 'cpu'}",
        )
    groups += _dealt(single, size)
    for group in groups:
        _check_together(group)
    return groups


def _dealt(names: Sequence[str], size: int) -> list[tuple[str, ...]]:
    return [tuple(names[first : first + size]) for first in range(0, len(names), size)]


def _named(name: str, size: int) -> tuple[str, ...]:
    """The devices in a name: those of a group, or a single one."""
    named = tuple(device.strip() for device in name.split(_AND))
    if len(named) not in (1, size):
        other = f"groups of {size}" if size > 1 else "a comma between devices of different trials"
        problem = f"is a group of {len(named)} devices, and `trainer.devices` is {size}"
        fix = f"set `trainer.devices` to {len(named)}, or write {other}"
        raise InputError(problem, path="devices", value=name, fix=fix)
    return named


def _too_few(size: int, gpus: int) -> InputError:
    return InputError(
        f"a trial is to train on {size} devices, and there {'is 1 GPU' if gpus == 1 else f'are {gpus} GPUs'}",
        path="trainer.devices",
        value=str(size),
        fix=f"write at most {gpus}, or `run.devices=cpu` for {size} processes on the processor",
    )


def _check_together(group: tuple[str, ...]) -> None:
    """Refuse a group whose devices can't train together."""
    if len(group) == 1 or group == ("cpu",) * len(group):
        return
    problem = ""
    if len(set(group)) < len(group):
        problem = "names a device twice, and each of its processes needs its own"
    elif not all(name.startswith("cuda") for name in group):
        problem = "mixes devices that can't train together"
    if problem:
        fix = "write different GPUs, such as cuda:0+cuda:1, or cpu"
        raise InputError(problem, path="devices", value=_AND.join(group), fix=fix)


def _gpus() -> int:
    """Number of GPUs, counted without starting CUDA, since a parent of workers must not start it.

    Parts of GPUs (MIG) are counted by their names: torch would start CUDA to count them, and a process sees one.
    """
    import torch  # here, because modules that only pass slots around must not import torch

    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if torch.version.cuda and all(name.strip().startswith("MIG-") for name in names):
        return len(names)
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
    fix = f"there are {', '.join(_there(gpus))}"
    raise InputError("no such device here", path="devices", value=name, fix=fix)


def _there(gpus: int) -> list[str]:
    return ["cpu", *(f"cuda:{number}" for number in range(gpus))]


def _slot(group: tuple[str, ...], threads: int) -> Slot:
    label, size = _AND.join(group), len(group)
    if not group[0].startswith("cuda"):
        return Slot(label, group[0], None, threads, size)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    indices = [name.partition(":")[2] for name in group]
    physical = [visible.split(",")[int(index)].strip() if visible else index for index in indices]
    return Slot(label, "cuda:0", ",".join(physical), threads, size)
