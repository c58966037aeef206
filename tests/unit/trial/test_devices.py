"""Devices dealt to workers."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpo.errors import InputError
from hpo.trial import resources
from hpo.trial.resources import Slot, deal


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine with three GPUs and eight cores."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(resources, "_QUOTA", tmp_path / "cpu.max")
    return monkeypatch


@pytest.fixture
def no_gpu(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: 0)


def test_a_machine_without_a_gpu_gets_one_worker_with_all_cores(no_gpu: None) -> None:
    assert deal(None, None) == [Slot("cpu", "cpu", None, 8)]


@pytest.mark.parametrize(("workers", "threads"), [(1, 8), (2, 4), (3, 2), (8, 1), (20, 1)])
def test_cores_are_shared_out_and_never_below_one(no_gpu: None, workers: int, threads: int) -> None:
    assert deal(None, workers) == [Slot("cpu", "cpu", None, threads)] * workers


def test_each_gpu_gets_a_worker_that_sees_no_other(gpus: pytest.MonkeyPatch) -> None:
    assert deal(None, None) == [Slot(f"cuda:{index}", "cuda:0", str(index), 2) for index in range(3)]


def test_each_named_part_of_a_gpu_gets_a_worker_and_is_counted_without_cuda(gpus: pytest.MonkeyPatch) -> None:
    def count() -> int:
        raise AssertionError("that starts CUDA where parts of GPUs are named")

    gpus.setattr(torch.cuda, "device_count", count)
    gpus.setattr(torch.version, "cuda", "13.0")
    gpus.setenv("CUDA_VISIBLE_DEVICES", "MIG-1111, MIG-2222")
    assert [slot.visible for slot in deal(None, None)] == ["MIG-1111", "MIG-2222"]
    assert [slot.visible for slot in deal(["cuda:1"], None)] == ["MIG-2222"]


def test_more_workers_than_gpus_take_turns(gpus: pytest.MonkeyPatch) -> None:
    assert [slot.visible for slot in deal(["cuda:2", "cuda:0"], 5)] == ["2", "0", "2", "0", "2"]


def test_a_gpu_may_be_named_twice_and_stand_beside_the_cpu(gpus: pytest.MonkeyPatch) -> None:
    slots = deal(["cuda:1", "cuda:1", "cpu"], None)
    assert [(slot.label, slot.device, slot.visible) for slot in slots] == [
        ("cuda:1", "cuda:0", "1"),
        ("cuda:1", "cuda:0", "1"),
        ("cpu", "cpu", None),
    ]


def test_cuda_alone_means_every_gpu(gpus: pytest.MonkeyPatch) -> None:
    assert [slot.label for slot in deal(["cuda"], None)] == ["cuda:0", "cuda:1", "cuda:2"]


@pytest.mark.parametrize(
    ("visible", "physical"), [("5,6,7", ["5", "6", "7"]), ("GPU-a, GPU-b,GPU-c", ["GPU-a", "GPU-b", "GPU-c"])]
)
def test_gpus_are_counted_among_those_that_are_visible(
    gpus: pytest.MonkeyPatch, visible: str, physical: list[str]
) -> None:
    gpus.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [slot.visible for slot in deal(None, None)] == physical


@pytest.mark.parametrize("name", ["cuda:3", "cuda:-1", "cuda:x", "cuda:", "gpu", "", "CPU", "xla"])
def test_a_device_that_is_not_there_is_named_with_those_that_are(gpus: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(InputError) as caught:
        deal(["cpu", name], 2)
    assert caught.value.path == "devices"
    assert caught.value.fix == "there are cpu, cuda:0, cuda:1, cuda:2"


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_cuda_without_a_gpu_is_an_error(no_gpu: None, name: str) -> None:
    with pytest.raises(InputError, match="no such device"):
        deal([name], None)


def test_a_system_that_does_not_say_which_cores_are_ours_has_them_all(gpus: pytest.MonkeyPatch) -> None:
    gpus.delattr(os, "sched_getaffinity")
    gpus.setattr(os, "cpu_count", lambda: 6)
    assert deal(["cpu"], 2)[0].threads == 3


@pytest.mark.parametrize(
    ("quota", "threads"), [("300000 100000\n", 3), ("max 100000\n", 8), ("20000 100000\n", 1)]
)
def test_a_containers_quota_limits_the_cores(
    gpus: pytest.MonkeyPatch, tmp_path: Path, quota: str, threads: int
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    assert deal(["cpu"], 1)[0].threads == threads


def test_omp_num_threads_limits_the_cores(gpus: pytest.MonkeyPatch) -> None:
    gpus.setenv("OMP_NUM_THREADS", "4")
    assert deal(["cpu"], 2)[0].threads == 2


def test_gpus_make_groups_in_their_order_and_what_is_left_over_stays_idle(gpus: pytest.MonkeyPatch) -> None:
    assert deal(None, None, 2) == [Slot("cuda:0+cuda:1", "cuda:0", "0,1", 4, 2)]
    assert deal(["cuda"], None, 3)[0].devices == ("cuda:0", "cuda:1", "cuda:2")


def test_groups_are_dealt_as_they_are_named(gpus: pytest.MonkeyPatch) -> None:
    gpus.setattr(torch.cuda, "device_count", lambda: 4)
    gpus.setenv("CUDA_VISIBLE_DEVICES", "7,5,3,1")
    slots = deal(["cuda:3+cuda:0", "cuda:1", "cuda:2"], 3, 2)
    assert [slot.label for slot in slots] == ["cuda:3+cuda:0", "cuda:1+cuda:2", "cuda:3+cuda:0"]
    assert [slot.visible for slot in slots] == ["1,7", "5,3", "1,7"]
    assert slots[0].devices == ("cuda:0", "cuda:1")
    assert slots[0].names == ("cuda:3", "cuda:0")


def test_the_processor_is_shared_by_the_processes_of_a_trial(no_gpu: None) -> None:
    assert deal(None, 2, 2) == [Slot("cpu+cpu", "cpu", None, 2, 2)] * 2
    assert deal(["cpu+cpu"], None, 2)[0].devices == ("cpu", "cpu")


@pytest.mark.parametrize(
    ("devices", "size", "problem"),
    [
        (None, 4, "a trial is to train on 4 devices, and there are 3 GPUs"),
        (["cuda:0", "cuda:1", "cuda:2"], 2, "3 devices can't be dealt out in groups of 2"),
        (["cuda:0+cuda:1"], 3, "is a group of 2 devices, and `trainer.devices` is 3"),
        (["cuda:0+cuda:1"], 1, "is a group of 2 devices, and `trainer.devices` is 1"),
        (["cuda:0+cuda:0"], 2, "names a device twice"),
        (["cuda:0+cpu"], 2, "mixes devices that can't train together"),
        (["cuda:0+cuda:3"], 2, "no such device here"),
    ],
)
def test_devices_that_make_no_groups_are_refused(
    gpus: pytest.MonkeyPatch, devices: list[str] | None, size: int, problem: str
) -> None:
    with pytest.raises(InputError, match=re.escape(problem)) as refused:
        deal(devices, None, size)
    assert refused.value.fix


@given(st.integers(1, 9), st.integers(1, 4), st.none() | st.integers(1, 12))
def test_groups_share_no_gpu_and_each_is_whole(count: int, size: int, workers: int | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: count)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if count < size:
            with pytest.raises(InputError, match="a trial is to train on"):
                deal(None, workers, size)
            return
        slots = deal(None, workers, size)
    assert len(slots) == (workers or count // size)
    groups = {slot.names for slot in slots}
    assert all(len(group) == size for group in groups)
    used = [name for group in groups for name in group]
    assert len(set(used)) == len(used)
    assert len(groups) == min(len(slots), count // size)
