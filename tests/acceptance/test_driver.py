"""`hpo run --on local`: agents that die, drivers that die, and what a person asks of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hpo.execution.engines.local import LocalEngine
from tests.support.commands import (
    HELD,
    PATIENCE,
    STUDY,
    hpo,
    hpo_json,
    ledger_of,
    make_study,
    start_hpo,
    wait_until,
)
from tests.support.forked_program import ForkedProgram
from tests.support.local_agents import found, none_left

#: Two agents of one worker each.
ON = ("--on", "local", "--agents", 2, "--workers", 1)


@pytest.fixture
def study(tmp_path: Path) -> Iterator[Path]:
    """A study whose trials wait in their second epoch until a file lets them train on; no agent of it is left."""
    made = make_study(tmp_path, STUDY, HELD)
    with none_left(made):
        yield made


def at_work(study: Path) -> list[int]:
    """Agents that hold a trial, by number."""
    return sorted(each["agent"] for each in hpo_json("status", study)["agents"] if each["running"])


def let_train(study: Path) -> None:
    study.with_name("go").touch()


def end_of(process: ForkedProgram) -> tuple[str, str]:
    out, errors = process.communicate(timeout=PATIENCE)
    return out, errors


def test_killed_agents_are_replaced_and_the_study_has_all_its_trials(study: Path) -> None:
    driver = start_hpo("run", study, *ON)
    wait_until(lambda: len(found(study)) == 2)
    first = found(study)[0]
    wait_until(lambda: len(at_work(study)) == 2)
    engine = LocalEngine()
    found(study, engine)
    engine.kill([first])
    wait_until(lambda: len(set(found(study)) - {first}) == 2)  # or the other one might be done with it all before
    let_train(study)
    out, errors = end_of(driver)
    assert driver.returncode == 0, errors
    assert f"agent {first.id} has died on " in out
    assert out.count(" is placed; its output: ") >= 3
    assert "6 of 6 trials finished: 6 complete" in out
    trials = hpo_json("trials", study)
    assert [each["trial"] for each in trials] == list(range(6))
    assert sum(each.outcome == "lost" for each in ledger_of(study)) == 1
    assert found(study) == []
    alone = ("--storage", f"sqlite:///{study.parent}/alone.db", "--output-dir", study.parent / "alone")
    hpo("run", study, *alone)
    assert [each["value"] for each in trials] == [each["value"] for each in hpo_json("trials", study, *alone)]


def test_the_same_command_finds_the_agents_of_a_driver_that_left_or_was_killed(study: Path) -> None:
    done = hpo("run", study, *ON, "--detach")
    assert f"`hpo stop {study}` ends them" in done.stderr
    agents = set(found(study))
    assert len(agents) == 2
    wait_until(lambda: len(at_work(study)) == 2)
    killed = start_hpo("run", study, *ON)
    seen = found_again(killed)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    again = start_hpo("run", study, *ON)
    assert found_again(again) == seen
    again.send_signal(signal.SIGTERM)  # leaves the agents, too
    _, errors = end_of(again)
    assert again.returncode == 75
    assert "the agents go on working; " in errors
    assert set(found(study)) == agents
    let_train(study)
    last = hpo("run", study, *ON)
    assert "is placed" not in last.stdout.partition("[5/6]")[0]
    assert hpo_json("status", study)["outcomes"]["complete"] == 6


def found_again(driver: ForkedProgram) -> set[str]:
    """The agents that a driver says it has found."""
    assert driver.stdout is not None
    lines = [next(driver.stdout) for _ in range(6)]
    ids = {line.split()[1] for line in lines if " is found again; " in line}
    assert len(ids) == 2, lines
    return ids


@pytest.mark.parametrize("how", ["Ctrl-C", "hpo stop"])
def test_agents_are_asked_to_leave(study: Path, how: str) -> None:
    driver = start_hpo("run", study, *ON, "run.lost_after=6s", "--n-trials", 500, "--json")
    wait_until(lambda: len(found(study)) == 2)
    wait_until(lambda: len(at_work(study)) == 2)
    if how == "Ctrl-C":
        driver.send_signal(signal.SIGINT)
    else:
        assert hpo("stop", study).stdout.startswith("asked 2 agents to leave")
    let_train(study)
    out, _ = end_of(driver)
    assert driver.returncode == 130
    assert f'"ending": "{"interrupted" if how == "Ctrl-C" else "stopped"}"' in out
    assert out.count('"event": "agent_ended"') == 2
    assert not found(study)
    status = hpo_json("status", study)
    assert (status["running"], status["agents"]) == (0, [])
    assert {each.outcome for each in ledger_of(study)} <= {"requeued", "complete"}


LEAVING = """
import subprocess
from pathlib import Path

def run(trial, lr):
    left = subprocess.Popen(["sleep", "60"], start_new_session=True, stdin=subprocess.DEVNULL)
    Path(__file__).with_name("left").write_text(str(left.pid))
    trial.report(1, val_loss=lr)
"""


def test_what_a_trial_leaves_running_is_no_agent(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LEAVING)
    (study := tmp_path / "study.yaml").write_text(
        "study: {name: tiny, n_trials: 1, sampler: random}\n"
        "objective: {_target_: train.run, lr: 1.0}\n"
        "search_space: {objective.lr: {type: float, low: 0.1, high: 1.0}}\n"
    )
    with none_left(study):
        hpo("run", study, "--on", "local", "--workers", 1)
        left = psutil.Process(int((tmp_path / "left").read_text()))
        assert left.status() != psutil.STATUS_ZOMBIE
        assert not found(study)
        left.kill()


IGNORANT = """
import os, signal, sys

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, "-m", "hpo", *sys.argv[1:]])
"""


def test_agents_that_leave_have_left_also_where_who_started_the_driver_ignores_its_children(
    tmp_path: Path,
) -> None:
    study = make_study(tmp_path)
    command = [sys.executable, "-c", IGNORANT, "run", str(study), "--on", "local", "--json", "--n-trials", "2"]
    with none_left(study):
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    ends = [each for each in map(json.loads, done.stdout.splitlines()) if each["event"] == "agent_ended"]
    assert {each["cause"] for each in ends} <= {"it has left", "it was asked to leave"}
    assert len(ends) == 1


def test_a_study_in_python_is_run_by_agents_elsewhere(tmp_path: Path) -> None:
    made = make_study(tmp_path)
    made.unlink()
    code = """
        import hpo, parts
        from torch import nn, optim

        space = {"optimizer.lr": hpo.Float(1e-3, 1e-1, log=True)}
        study = hpo.Study(
            "tiny", data=parts.load, model=parts.Net, loss=nn.MSELoss, optimizer=hpo.Call(optim.AdamW, lr=1e-2),
            trainer={"max_epochs": 1}, search_space=space, n_trials=9, run={"on": "local", "agents": 1},
        )
        result = hpo.run(study, {"model.hidden": 3}, n_trials=3, workers=1, output_dir="results")
        print(result.ending, result.outcomes["complete"])
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\ndone 3\n"), done.stdout
    assert "study tiny: 3 trials, up to 1 agent on local" in done.stdout
    assert list((tmp_path / "results" / "agents").glob("agent-*.log"))
    config = next((tmp_path / "results").rglob("config.yaml")).read_text()
    assert "hidden: 3" in config
