"""How many threads linear algebra has in the processes of a run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.studies import Studies

#: A trial's own process looks at itself, and at the worker that it was forked from.
CODE = """
import os
from pathlib import Path

import torch
from threadpoolctl import threadpool_info

def train(x, trial):
    start = trial.load_checkpoint() or {"epoch": 0}
    blas = {each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"}
    with Path(__file__).with_name("seen.txt").open("a") as file:
        print(torch.get_num_threads(), *blas, len(os.listdir(f"/proc/{os.getppid()}/task")), file=file)
    for epoch in range(start["epoch"] + 1, 10):
        trial.report(epoch, val_loss=x / epoch)
        trial.save_checkpoint({"epoch": epoch})
"""
STUDY = """
study: {name: threads, metric: val_loss, n_trials: 8, sampler: random, scheduler: {name: freeze_thaw, switch: 1}}
objective: {_target_: parts.train, x: 1.0}
trainer: {max_epochs: 9}
search_space:
  objective.x: {type: float, low: 0.0, high: 1.0}
"""


@pytest.mark.full
def test_a_worker_that_decides_runs_one_thread_and_a_trial_computes_on_its_own_number(studies: Studies) -> None:
    spec = studies.spec(text=STUDY)
    (spec.folder / "parts.py").write_text(CODE)
    # As on a machine with two cores: the tests' own processes have one thread.
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "hpo", "run", str(spec.path), "--workers", "1"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    rows = [line.split() for line in (spec.folder / "seen.txt").read_text().splitlines()]
    assert len(rows) >= 8
    assert {tuple(row) for row in rows} == {("2", "2", "1")}
