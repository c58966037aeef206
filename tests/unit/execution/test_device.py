"""What a process has of a device beside its training; tests/gpu has the real one."""

import ctypes
from typing import Any

import pytest
import torch

from hpo.execution import device
from hpo.execution.device import contexts, spare_contexts, start

_GIB = 2**30


class Driver:
    """Of a GPU in a compute mode: 0 is the usual one, 3 lets one process have a context."""

    def __init__(self, mode: int = 0, failure: int = 0) -> None:
        self.mode, self.failure = mode, failure

    def cuDeviceGetAttribute(self, place: Any, attribute: int, ordinal: int) -> int:  # noqa: N802 - its name in C
        assert (attribute, ordinal) == (20, 0)
        place._obj.value = self.mode  # of a ctypes.byref
        return self.failure


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that trainings of 2 GiB share, on a machine with memory to spare."""
    monkeypatch.setattr(device, "is_ample", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 * _GIB, 80 * _GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * _GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)


@pytest.mark.parametrize(
    ("free", "total", "peak", "held", "expected"),
    [
        (78, 80, 10, 0, 5),
        (78, 80, 41, 0, 0),  # the next training may take as much
        (39, 80, 10, 0, 0),  # others train there
        (78, 80, 10, 1, 2),  # the study's code holds on to some
        (23, 24, 2, 0, 1),
        (7.5, 8, 1, 0, 0),
    ],
)
def test_contexts_take_little_of_a_device(free: float, total: int, peak: int, held: int, expected: int) -> None:
    assert contexts(int(free * _GIB), total * _GIB, peak * _GIB, held * _GIB) == expected


def test_a_device_that_has_failed_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lost)
    assert spare_contexts(torch.device("cuda:0")) == 0


@pytest.mark.parametrize(("free", "expected"), [(79, 5), (20, 0)])
def test_room_is_what_the_device_says(monkeypatch: pytest.MonkeyPatch, free: int, expected: int) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * _GIB, 80 * _GIB))
    assert spare_contexts(torch.device("cuda:0")) == expected
    assert spare_contexts(torch.device("cpu")) is None


def test_what_an_ending_process_has_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its allocator's cache is given back with its end."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (39 * _GIB, 80 * _GIB))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 8 * _GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8 * _GIB)
    assert spare_contexts(torch.device("cuda:0")) == 0
    assert spare_contexts(torch.device("cuda:0"), ends=True) == 5


def test_a_device_that_the_trial_has_not_used_is_not_started_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert spare_contexts(torch.device("cuda:0")) is None


def test_a_machine_without_memory_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "is_ample", lambda: False)
    assert spare_contexts(torch.device("cuda:0")) == 0


def test_a_device_for_one_process_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(mode=3))
    assert spare_contexts(torch.device("cuda")) == 0
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(failure=101))
    assert spare_contexts(torch.device("cuda")) == 0


def test_without_the_driver_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert spare_contexts(torch.device("cuda")) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_can_not_be_started_is_left_to_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def out_of_memory(*size: int, device: torch.device) -> None:
        asked.append(str(device))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device.torch, "ones", out_of_memory)
    start(torch.device("cpu"))
    start(torch.device("cuda:0"))
    assert asked == ["cuda:0"]
