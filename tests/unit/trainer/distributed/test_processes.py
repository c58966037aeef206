"""What a process sees of another one's end."""

import builtins
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
import torch

from trainer.distributed import processes
from trainer.distributed.group import Group
from trainer.distributed.local_ranks import has_ended
from trainer.distributed.packing import bytes_of, value_of


class _GoneWhenRead:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self) -> str:
        raise ProcessLookupError


def test_a_process_that_goes_while_it_is_looked_athas_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_ended(os.getpid())
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    assert has_ended(process.pid)
    with monkeypatch.context() as patched:
        opened: Any = lambda *_: _GoneWhenRead()  # noqa: E731
        patched.setattr(builtins, "open", opened)
        ended = has_ended(os.getpid())
    assert ended


class _OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU, and comes from there."""

    device = property(lambda self: torch.device("cuda:1"))

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_what_processes_hand_each_other_does_not_name_the_gpu_of_one() -> None:
    value = {"total": torch.ones(2).as_subclass(_OnGpu), "seen": [torch.zeros(1), 3]}
    found = value_of(bytes_of(value))
    assert type(found["total"]) is torch.Tensor
    assert found["total"].tolist() == [1.0, 1.0]
    assert found["seen"] == [torch.zeros(1), 3]


@pytest.mark.parametrize("given", [None, "cuda", torch.device("cuda")])
@pytest.mark.parametrize(("seen", "index"), [(4, 3), (1, 0)])
def test_each_process_has_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, given: Any, seen: int, index: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setenv("LOCAL_RANK", "3")
    group = processes.Processes()
    assert group.device(given) == torch.device("cuda", index)
    assert group.device("cuda:2") == torch.device("cuda:2")
    assert group.device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "entered"), [("cuda:1", [torch.device("cuda:1")]), ("cuda:0", []), ("cuda", []), ("cpu", [])]
)
def test_a_run_of_one_process_has_its_gpu_as_the_current_one(
    monkeypatch: pytest.MonkeyPatch, device: str, entered: list[torch.device]
) -> None:
    found = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        found.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with Group().session(torch.device(device)):
        assert found == entered
