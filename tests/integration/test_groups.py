"""Trials on several devices: real runs whose trials are trained by two processes, on the processor."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpo.execution.supervisor import Supervisor
from tests.support.commands import (
    CRAWLING,
    MODEL,
    PATIENCE,
    STUDY,
    epochs_trained,
    hpo,
    hpo_json,
    ledger_of,
    make_study,
    start_hpo,
    values,
    wait_until,
)

pytestmark = pytest.mark.full

#: One rank does something to its process, or to its loss, in the second epoch; a death comes once in a trial.
FAULTS = """
import os
import signal
import time
from pathlib import Path

import torch

from parts import Explode


class Fault(Explode):
    def __init__(self, kind, rank=1):
        super().__init__()
        self.kind, self.mine, self.calls = f"be_{kind}", int(os.environ.get("RANK", "0")) == rank, 0

    def forward(self, outputs, targets):
        loss = super().forward(outputs, targets)
        self.calls += outputs.requires_grad
        self.samples = len(outputs)
        return getattr(self, self.kind)(loss) if self.calls == 6 and self.mine and loss.requires_grad else loss

    def be_fine(self, loss):
        return loss

    def be_failing(self, loss):
        raise ValueError("this rank fails")

    def be_memory(self, loss):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def be_large(self, loss):
        return self.be_memory(loss) if self.samples > 4 else loss

    def be_nan(self, loss):
        return loss * float("nan")

    def be_hanging(self, loss):
        time.sleep(1000)

    def be_eating(self, loss):
        self.eaten = torch.ones(2**29)
        time.sleep(1000)

    def be_killed(self, loss):
        mark = Path(__file__).with_name(f"mark-{self.kind}-{os.environ['RANK']}")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return loss
"""
#: Batches are slow until there is a file named `go`: an epoch of 32 ends long after any request.
SLOW = CRAWLING.replace("self.calls > 64 and ", "")
#: Each process draws dropout of its own.
GROUPED = STUDY.replace("dropout: 0.1", "dropout: 0.0").replace("n_trials: 6", "n_trials: 2")
TWO = "trainer.devices=2"


def grouped(folder: Path, text: str = GROUPED, **given: Any) -> Path:
    study = make_study(folder, text, **given)
    (folder / "faults.py").write_text(FAULTS)
    return study


def folder_of(study: Path, trial: int, attempt: int = 1) -> Path:
    return study.parent / "runs" / "tiny" / "trials" / str(trial) / f"attempt-{attempt}"


def processes_of(study: Path) -> list[int]:
    """The processes that have a file of the study's open: its trials' and their peers'."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            found += [process.pid for file in process.open_files() if file.path.startswith(str(study.parent))]
    return found


def test_two_devices_come_to_what_one_comes_to(tmp_path: Path) -> None:
    one, two = grouped(tmp_path / "one"), grouped(tmp_path / "two")
    hpo("run", one, "--workers", 1)
    hpo("run", two, TWO, "--workers", 1)
    assert values(two) == pytest.approx(values(one), abs=1e-6)
    assert hpo_json("trials", two)[0]["internals"]["device"] == "cpu+cpu"
    # Rank 0 alone writes what there is one of.
    assert [file.name for file in (folder_of(two, 0) / "rank-1").iterdir()] == ["log.txt"]
    assert epochs_trained(two) == [3, 3]
    assert processes_of(two) == []


def test_what_happens_on_one_rank_is_the_trials(tmp_path: Path) -> None:
    kinds = ["failing", "memory", "nan", "fine"]
    study = grouped(tmp_path, GROUPED.replace("parts.Explode", "faults.Fault, kind: fine"))
    space = f"search_space={{loss.kind: {{type: categorical, choices: [{', '.join(kinds)}]}}}}"
    hpo("run", study, TWO, "study.sampler.name=grid", "study.n_trials=4", "--workers", 1, space)
    trials = {trial["params"]["loss.kind"]: trial for trial in hpo_json("trials", study, space)}
    assert {kind: trial["outcome"] for kind, trial in trials.items()} == {
        "failing": "error",
        "memory": "out_of_memory",
        "nan": "diverged",
        "fine": "complete",
    }
    assert trials["failing"]["reason"] == "RankError: rank 1 failed: ValueError: this rank fails"
    assert 'raise ValueError("this rank fails")' in trials["failing"]["traceback"]
    assert processes_of(study) == []


def test_a_trial_whose_rank_is_killed_resumes_to_the_same_bits(tmp_path: Path) -> None:
    text = GROUPED.replace("parts.Explode", "faults.Fault, kind: killed")
    command = [TWO, "study.sampler.name=grid", "callbacks.checkpoint.max_overhead=1", "--workers", 1]
    space = "search_space={loss.rank: {type: categorical, choices: [0, 1]}}"
    spared, killed = grouped(tmp_path / "spared", text), grouped(tmp_path / "killed", text)
    for rank in (0, 1):
        (spared.parent / f"mark-killed-{rank}").touch()
    hpo("run", spared, *command, space)
    hpo("run", killed, *command, space)
    for trial, found in enumerate(hpo_json("trials", killed, space)):
        first, _ = found["internals"]["attempts"]
        assert "killed by SIGKILL" in first["reason"]
        assert "resuming from" in (folder_of(killed, trial, 2) / "log.txt").read_text()
        assert found["metrics"] == hpo_json("trials", spared, space)[trial]["metrics"]
    assert processes_of(killed) == []


def test_a_pruned_trial_ends_in_all_ranks(tmp_path: Path) -> None:
    study = grouped(tmp_path)
    pruner = "study.pruner={name: threshold, upper: 0.0001}"
    hpo("run", study, TWO, pruner, "--workers", 1, code=3)
    trials = hpo_json("trials", study, pruner)
    assert [(trial["outcome"], trial["epochs"]) for trial in trials] == [("pruned", 1)] * 2
    assert processes_of(study) == []


def test_data_that_can_not_be_forked_is_loaded_by_each_rank(tmp_path: Path) -> None:
    code = MODEL.replace(
        "def load(",
        "def load(samples=96):\n    load.kept = open(__file__)\n    return loaded(samples)\n\n\ndef loaded(",
    )
    one, two = grouped(tmp_path / "one"), grouped(tmp_path / "two", code=code)
    hpo("run", one, "--workers", 1)
    hpo("run", two, TWO, "--workers", 1)
    assert values(two) == pytest.approx(values(one), abs=1e-6)
    assert processes_of(two) == []


def test_ctrl_c_requeues_a_trial_of_two_ranks(tmp_path: Path) -> None:
    study = grouped(tmp_path, GROUPED.replace("batch_size: 16", "batch_size: 2"), code=SLOW)
    command = [study, TWO, "--workers", 1]
    running = start_hpo("run", *command)
    log = folder_of(study, 0) / "rank-1" / "log.txt"
    wait_until(log.exists)
    os.killpg(running.pid, signal.SIGINT)
    running.communicate(timeout=PATIENCE)
    assert processes_of(study) == []
    assert [each.outcome for each in ledger_of(study)] == ["requeued"]
    (study.parent / "go").touch()
    hpo("run", *command)
    assert len(values(study)) == 2


def test_a_study_is_checked_and_trained_in_the_group(tmp_path: Path) -> None:
    study = grouped(tmp_path)
    group = (TWO, "trainer.strategy=fsdp")
    checked = hpo_json("check", study, *group)
    assert [each["device"] for each in checked["devices"]] == ["cpu+cpu"]
    hpo("run", study, *group, "--workers", 1)
    whole = hpo_json("train", study, *group)
    assert hpo_json("train", study)["metrics"] == pytest.approx(whole["metrics"], abs=1e-6)
    further = hpo_json("train", study, *group, "--trial", "best", "--epochs", 2)
    alone = hpo_json("train", study, "--trial", "best", "--epochs", 2)
    assert alone["metrics"] == pytest.approx(further["metrics"], abs=1e-6)
    seeds = hpo_json("train", study, *group, "--seeds", 2)
    assert seeds["diverged"] == []
    assert processes_of(study) == []


@pytest.mark.parametrize(
    ("kind", "limit", "outcome"),
    [("hanging", "trial_timeout=1", "timed_out"), ("eating", "trial_memory=1GB", "out_of_memory")],
)
def test_a_limit_ends_all_ranks_of_a_trial(
    tmp_path: Path, kind: str, limit: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What exceeds it is a rank that is not the trial's own process, and does not end by itself."""
    monkeypatch.setattr(Supervisor.__init__, "__defaults__", (None, 1.0))
    study = grouped(tmp_path, GROUPED.replace("parts.Explode", f"faults.Fault, kind: {kind}"))
    hpo("run", study, TWO, "study.n_trials=1", "--workers", 1, f"run.{limit}", code=None)
    (trial,) = hpo_json("trials", study, "study.n_trials=1")
    assert trial["outcome"] == outcome
    assert limit.partition("=")[0] in trial["reason"]
    wait_until(lambda: processes_of(study) == [])  # the memory of a process that was killed is freed first


def test_trials_of_two_ranks_are_stopped_paused_and_resumed(tmp_path: Path) -> None:
    """`hpo stop` first, then a scheduler that pauses trials: no epoch is lost, none is trained twice."""
    text = GROUPED.replace("n_trials: 2", "n_trials: 4").replace("batch_size: 16", "batch_size: 2")
    study = grouped(tmp_path, text, code=SLOW)
    scheduled = (TWO, "study.scheduler={name: freeze_thaw, switch: 1}", "study.epochs=12", "trainer.max_epochs=6")
    command = [study, *scheduled, "--workers", 1]
    running = start_hpo("run", *command)
    wait_until((folder_of(study, 0) / "rank-1" / "log.txt").exists)
    assert "all of them have left" in hpo("stop", study, *scheduled, "--wait").stdout
    running.communicate(timeout=PATIENCE)
    assert processes_of(study) == []
    assert [each.outcome for each in ledger_of(study)] == ["requeued"]
    (study.parent / "go").touch()
    hpo("run", *command)
    assert {each.outcome for each in ledger_of(study)} == {"requeued", "paused", "complete"}
    assert sum(trial["epochs"] for trial in hpo_json("trials", study, *scheduled)) == 12
    assert processes_of(study) == []


def test_a_trial_of_which_one_rank_has_too_little_memory_resumes_in_parts(tmp_path: Path) -> None:
    """Its batch of 16 is 8 samples a rank at first: one fails, and both resume with each batch in two parts."""
    fine, large = (
        grouped(tmp_path / kind, GROUPED.replace("parts.Explode", f"faults.Fault, kind: {kind}"))
        for kind in ("fine", "large")
    )
    hpo("run", fine, "--workers", 1)
    hpo("run", large, TWO, "--workers", 1, "run.on_oom=retry_with_accumulation")
    assert values(large) == pytest.approx(values(fine), rel=1e-5)
    for trial in hpo_json("trials", large):
        first, _ = trial["internals"]["attempts"]
        assert "it resumes with each batch in 2 parts" in first["reason"]
        assert trial["epochs"] == 3
    assert processes_of(large) == []


def test_a_population_of_trials_of_two_ranks_takes_the_steps_of_one_on_single_devices(tmp_path: Path) -> None:
    """Forks begin at their parents' checkpoints, on as many ranks, with the same lineage and the same values."""
    one, two = grouped(tmp_path / "one"), grouped(tmp_path / "two")
    population = (
        *("study.scheduler={name: pbt, population: 4, every: 1}", "study.n_trials=8"),
        *("trainer.max_epochs=4", "callbacks.checkpoint.max_overhead=1"),
    )
    hpo("run", one, *population, "--workers", 1)
    hpo("run", two, TWO, *population, "--workers", 1)
    trials, expected = hpo_json("trials", two, *population), hpo_json("trials", one, *population)
    assert [trial["params"] for trial in trials] == [trial["params"] for trial in expected]
    assert [trial["epochs"] for trial in trials] == [trial["epochs"] for trial in expected]
    assert values(two) == pytest.approx(values(one), abs=1e-5)
    assert len(trials) > 4, "none was forked"
    assert processes_of(two) == []
