"""`hpo worker`: an agent that joins a study, works, and leaves."""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing import Pipe
from pathlib import Path

import psutil
import pytest

from hpo.config.spec import load_spec
from hpo.execution.engines.engine import PLACEMENT_ENV
from hpo.storage import machine
from hpo.storage.recovery import Sightings
from hpo.study.open_study import load_study, start_study
from tests.support.commands import PATIENCE, hpo, hpo_json, ledger_of, make_study, start_hpo, wait_until

SLOW = ("model.delay=0.05", "trainer.max_epochs=1000")
#: Exit code of an agent that was asked to leave.
ASKED = 75


def begun(folder: Path, *overrides: str) -> Path:
    """A study of six trials that no worker has claimed yet."""
    study = make_study(folder)
    start_study(load_spec(study, overrides)).storage.close()
    return study


def saved(study: Path) -> int:
    return len(list(study.parent.rglob("epoch-*.pt")))


def test_an_agent_joins_a_study_and_leaves_when_it_has_ended(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    assert "fix: `hpo run` makes it" in hpo("worker", study, code=3).stderr
    refused = hpo("worker", study, "--leave-when-idle", "never", code=2).stderr
    assert refused.startswith("--leave-when-idle: is not a duration\n  value: never")
    begun(tmp_path)
    done = hpo("worker", study, "study.n_trials=9", "--workers", 2)
    assert "left the study tiny: all its trials have ended" in done.stdout
    assert hpo_json("status", study)["outcomes"]["complete"] == 6, "an agent changes no budget"
    assert {each.agent for each in ledger_of(study)} == {1}


@pytest.mark.parametrize(
    ("overrides", "change", "said"),
    [
        (["trainer.max_epochs=4"], "", "trainer.max_epochs: 3 → 4"),
        ([], "\n\ndef more():\n    pass\n", "the code here is"),
    ],
    ids=["config", "code"],
)
def test_an_agent_with_another_config_or_other_code_is_refused(
    tmp_path: Path, overrides: list[str], change: str, said: str
) -> None:
    study = begun(tmp_path)
    parts = tmp_path / "parts.py"
    parts.write_text(parts.read_text() + change)
    refused = hpo("worker", study, *overrides, code=2)
    assert said in refused.stderr
    assert hpo_json("status", study)["finished"] == 0


@pytest.mark.parametrize(
    ("how", "code"),
    [("signals", ASKED), ("the end of standard input", ASKED), ("SIGKILL", -signal.SIGKILL)],
)
def test_an_agent_that_leaves_or_dies_requeues_its_trials(tmp_path: Path, how: str, code: int) -> None:
    loader = "loader.num_workers=1"
    study = begun(tmp_path, loader, *SLOW)
    stdin, ours = Pipe(duplex=False)
    with start_hpo("worker", study, "--workers", 1, loader, *SLOW, stdin=stdin) as agent, ours:
        wait_until(lambda: saved(study) > 0)
        if how == "SIGKILL":
            agent.kill()
        elif how == "signals":
            # Slurm and systemd send them to every process, and a script's trap again: still one request.
            main = psutil.Process(agent.pid)
            processes = [main, *main.children(recursive=True)]
            for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
                for process in processes:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.send_signal(number)
        else:
            ours.close()
        assert agent.wait(PATIENCE) == code
    wait_until(lambda: hpo_json("status", study)["running"] == 0)
    (only,) = ledger_of(study)
    assert (only.outcome, only.reason) == ("requeued", "interrupted")
    assert hpo_json("status", study)["agents"] == []


@pytest.mark.parametrize(
    ("placement", "code", "finished"), [(None, 0, 1), ("paper:1", ASKED, 0)], ids=["by a person", "by an engine"]
)
def test_a_pipe_that_has_ended_before_an_agent_starts_is_none_that_closes(
    tmp_path: Path, placement: str | None, code: int, finished: int
) -> None:
    """Cron gives such a pipe; an engine's closes as well while the agent is being started."""
    study = begun(tmp_path, "study.n_trials=1")
    stdin, ours = Pipe(duplex=False)
    ours.close()
    environment = os.environ if placement is None else {**os.environ, PLACEMENT_ENV: placement}
    command = ("worker", study, "study.n_trials=1", "--leave-when-idle", "1s")
    agent = start_hpo(*command, environment=environment, stdin=stdin)
    _, said = agent.communicate()
    assert agent.returncode == code, said
    assert ("leaving: the pipe that is standard input has closed" in said) is bool(code)
    assert hpo_json("status", study)["finished"] == finished


LONG = """
import time


def run(trial, lr=0.1):
    trial.report(1, val_loss=1.0)
    while not trial.should_stop:
        time.sleep(0.05)
    (trial.folder / "saving").touch()
    time.sleep(14.0)
    trial.save_checkpoint({"lr": lr}, batch=1)
"""
LONG_STUDY = """
study: {name: long, n_trials: 1}
run: {workers: 1, lost_after: 6}
objective: {_target_: long.run, lr: 0.1}
search_space: {objective.lr: {type: float, low: 0.1, high: 0.2}}
"""


def test_a_long_checkpoint_after_the_agents_death_is_no_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine sees only who beats: the trial's process does so itself until it has requeued its trial."""
    (tmp_path / "study.yaml").write_text(LONG_STUDY)
    (tmp_path / "long.py").write_text(LONG)
    study = tmp_path / "study.yaml"
    start_study(load_spec(study)).storage.close()
    with start_hpo("worker", study) as agent:
        wait_until(lambda: [each for each in ledger_of(study) if each.beat_at > each.started_at])
        agent.kill()
    wait_until(lambda: list(tmp_path.rglob("saving")))
    opened, sightings = load_study(load_spec(study)), Sightings()
    monkeypatch.setattr(machine, "host_name", lambda: "another")

    def has_ended() -> bool:
        assert opened.requeue_dead(sightings) == []
        return ledger_of(study)[0].ended_at is not None

    wait_until(has_ended)
    opened.storage.close()
    (only,) = ledger_of(study)
    assert (only.outcome, only.reason) == ("requeued", "interrupted")


def test_hpo_stop_reaches_every_agent_and_what_starts_later_works_again(tmp_path: Path) -> None:
    study = begun(tmp_path, "study.n_trials=2", *SLOW)
    assert "no agent is at work on the study" in hpo("stop", study).stdout
    agents = [start_hpo("worker", study, "--workers", 1, "run.lost_after=3", *SLOW) for _ in range(2)]
    wait_until(lambda: len(hpo_json("status", study)["running_trials"]) == 2)
    at_work = hpo_json("status", study)["agents"]
    assert [(each["agent"], each["workers"], each["running"]) for each in at_work] == [(1, 1, 1), (2, 1, 1)]
    assert "agent 2" in hpo("status", study).stdout
    labels = {each["worker"] for each in hpo_json("status", study)["running_trials"]}
    assert labels == {"worker-1", "worker-2"}, "two agents on one machine have workers of their own"
    assert len(list(tmp_path.rglob("*-worker-?.log"))) == 2
    idle = hpo("worker", study, "--leave-when-idle", "1s", *SLOW)
    assert "left the study tiny: there was nothing to do" in idle.stdout, "it waits for no trial elsewhere"
    stopped = hpo("stop", study, "--wait").stdout
    assert "asked 2 agents to leave on " in stopped
    assert "all of them have left" in stopped
    for agent in agents:
        printed, _ = agent.communicate(timeout=PATIENCE)
        assert (agent.returncode, "left the study tiny: `hpo stop`" in printed) == (0, True)
    status = hpo_json("status", study)
    assert (status["running"], status["waiting"], status["agents"]) == (0, 2, [])
    assert {each.outcome for each in ledger_of(study)} == {"requeued"}
    quick = ("trainer.max_epochs=1", "study.name=quick")
    begun(tmp_path, *quick)
    hpo("stop", study, *quick)
    assert "all its trials have ended" in hpo("worker", study, *quick).stdout
