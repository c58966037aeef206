"""Whole studies on a GPU: processes that share it, memory that runs out, and kernels that fail."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.support import DEVICE, needs_gpu
from tests.support.commands import (
    HELD,
    PATIENCE,
    Result,
    held,
    kill_all,
    make_study,
    start_hpo,
    wait_until,
)

pytestmark = [needs_gpu, pytest.mark.full]

#: Losses that fail on the device, in the trials whose learning rate is above a threshold.
FAULTS = """
import torch


import parts


class Hungry(parts.Net):
    "Asks for more memory than there is, for batches of more than so many samples."

    def __init__(self, most=0, **arguments):
        super().__init__(**arguments)
        self.most = most

    def forward(self, inputs):
        if self.training and len(inputs) > self.most and self.layers[0].out_features > 5:
            torch.empty(2**42, device=inputs.device)
        return super().forward(inputs)


class Assert(parts.Net):
    "Asks the device for a row that is not there."

    def forward(self, inputs):
        outputs = super().forward(inputs)
        if self.training and self.layers[0].out_features > 5:
            outputs = outputs + outputs[torch.full((1,), 10**6, device=inputs.device)]
        return outputs
"""
PIDS = """
import os
from pathlib import Path

from trainer.callback import Callback


class Pids(Callback):
    def on_fit_start(self, trainer):
        rate = float(trainer.optimizer.param_groups[0]["initial_lr"])
        with (Path(__file__).parent / "pids").open("a") as file:
            print(rate, os.getpid(), trainer.state.epoch, file=file)
"""


def run(*arguments: object, code: int = 0, **environment: str) -> Result:
    """The `hpo` command as a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-m", "hpo", *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == code, f"{ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    return Result(ended.returncode, ended.stdout, ended.stderr)


def trials(study: Path, *overrides: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run("trials", study, *overrides, "--json").stdout)
    return found


def values(study: Path) -> dict[int, float]:
    return {each["trial"]: each["value"] for each in trials(study) if each["outcome"] == "complete"}


def started(study: Path, *overrides: str, workers: int = 1) -> list[Any]:
    return ["run", study, "--devices", f"{DEVICE}:0", "--workers", workers, *overrides]


@pytest.mark.parametrize("graph", [False, True])
def test_workers_that_share_a_gpu_train_what_one_trains(tmp_path: Path, graph: bool) -> None:
    found = []
    for workers in (1, 8):
        study = make_study(tmp_path / str(workers))
        run(*started(study, f"trainer.cuda_graph={str(graph).lower()}", "study.n_trials=12", workers=workers))
        found.append(values(study))
    assert found[0] == found[1]
    assert len(found[0]) == 12
    assert all(map(math.isfinite, found[0].values()))


@pytest.mark.parametrize("graph", [False, True])
def test_a_killed_study_resumes_to_the_same_bits(tmp_path: Path, graph: bool) -> None:
    option = f"trainer.cuda_graph={str(graph).lower()}"
    whole, broken = make_study(tmp_path / "whole"), make_study(tmp_path / "broken", code=HELD)
    run(*started(whole, option))
    process = start_hpo(*started(broken, option, workers=2))
    wait_until(lambda: len(held(broken)) == 2)
    kill_all(process)
    (broken.parent / "go").touch()
    run(*started(broken, option, workers=2))
    assert values(broken) == values(whole)
    assert len(values(whole)) == 6


@pytest.mark.parametrize(("kind", "graph"), [("Hungry", False), ("Hungry", True), ("Assert", False)])
def test_what_fails_on_the_device_fails_one_trial(tmp_path: Path, kind: str, graph: bool) -> None:
    study = make_study(tmp_path)
    (tmp_path / "faults.py").write_text(FAULTS)
    option = f"trainer.cuda_graph={str(graph).lower()}"
    result = run(
        *started(study, option, f"model._target_=faults.{kind}", "study.n_trials=12", workers=2),
    )  # fmt: skip
    ended = trials(study)
    for each in ended:
        failing = each["params"]["model.hidden"] > 5
        wanted = "complete" if not failing else "out_of_memory" if kind == "Hungry" else "error"
        assert each["outcome"] == wanted, (each, result.stdout, result.stderr)
    assert {each["outcome"] for each in ended} > {"complete"}


def test_batches_that_do_not_fit_are_cut(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    (tmp_path / "faults.py").write_text(FAULTS)
    run(
        *started(study, "model={_target_: faults.Hungry, most: 4}", "run.on_oom=retry_with_accumulation"),
    )
    assert {each["outcome"] for each in trials(study)} == {"complete"}


def test_a_gpu_may_be_named_by_its_uuid(tmp_path: Path) -> None:
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    study = make_study(tmp_path)
    run(*started(study, workers=2), CUDA_VISIBLE_DEVICES=uuid)
    assert len(values(study)) == 6


def test_what_a_gpu_trained_is_used_on_a_machine_without(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    run(*started(study, "trainer.cuda_graph=true"))
    load = f"import hpo; model = hpo.load_best_model({str(study)!r}); print(next(model.parameters()).device)"
    code = [sys.executable, "-c", load]
    assert subprocess.run(code, capture_output=True, text=True, check=True).stdout == "cpu\n"
    run("train", study, "--trial", "best", "trainer.device=cpu", CUDA_VISIBLE_DEVICES="")
    run("train", study, "--trial", "best")


def test_processes_of_paused_trials_are_kept(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    (tmp_path / "pids.py").write_text(PIDS)
    run(
        *started(study, "study.scheduler={name: asha}", "study.n_trials=16", "trainer.max_epochs=9"),
        "callbacks={pids: {_target_: pids.Pids}}",
    )
    lines = [line.split() for line in (tmp_path / "pids").read_text().splitlines()]
    processes: dict[str, set[str]] = {}
    resumed = kept = 0
    for rate, pid, epoch in lines:
        resumed += epoch != "0"
        kept += pid in processes.get(rate, ())
        processes.setdefault(rate, set()).add(pid)
    assert resumed >= 2
    assert kept == resumed


def test_the_doctor_and_the_checks_know_the_gpu(tmp_path: Path) -> None:
    assert torch.cuda.get_device_name(0) in run("doctor").stdout
    study = make_study(tmp_path)
    run("check", study, "--device", f"{DEVICE}:0")
