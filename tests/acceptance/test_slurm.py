"""The Slurm engine on a real cluster, with a stand-in for the agent: what Slurm does to a process is the point."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hpo.execution.engines import engine as engine_module
from hpo.execution.engines import slurm
from hpo.execution.engines.engine import (
    AgentOrder,
    Change,
    Ended,
    EngineAwayError,
    NodeGone,
    Placement,
    Preempted,
    Resources,
    Running,
    Waits,
)
from hpo.execution.engines.slurm import SlurmEngine
from hpo.execution.engines.slurm_settings import Settings
from tests.support.commands import wait_until
from tests.support.slurm_cluster import NODES, SlurmCluster

#: Leaves as an agent does at a signal, and says what it has heard.
AGENT = """
import os, signal, sys, time
heard = []
for each in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(each, lambda number, _: heard.append(signal.Signals(number).name))
print("at", os.uname().nodename, os.environ["HPO_PLACEMENT"], os.environ.get("A_SECRET"), flush=True)
done = os.path.join(os.path.dirname(__file__), "done")
while not heard and not os.path.exists(done):
    time.sleep(0.05)
time.sleep(0.3)
print("heard", *heard, flush=True)
sys.exit(75 if heard else 0)
"""


@pytest.fixture
def cluster(slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """The cluster as this process's commands find it; no job is left in it."""
    for name, value in slurm_cluster.environment.items():
        monkeypatch.setenv(name, value)
    yield slurm_cluster
    slurm_cluster.clear()


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentOrder:
    """An order whose agents are the stand-in; its folder has every character that a shell or Slurm takes amiss."""
    folder = tmp_path / 'it\'s 100% a "test" $HOME'
    folder.mkdir()
    (folder / "agent.py").write_text(AGENT)
    monkeypatch.setattr(engine_module, "HPO", (sys.executable, str(folder / "agent.py")))
    return AgentOrder(folder / "study.yaml", "my study", folder / "logs", resources=Resources(cpu=1))


def make_engine(**options: str) -> SlurmEngine:
    return SlurmEngine(Settings(options), interval=0.0)


def changes_until(engine: SlurmEngine, done: Callable[[list[Change]], bool]) -> list[Change]:
    """What an engine reports until there is enough of it."""
    changes: list[Change] = []
    wait_until(lambda: changes.extend(engine.changes()) or done(changes))
    return changes


def of_kind(kind: type[Change], count: int = 1) -> Callable[[list[Change]], bool]:
    return lambda changes: sum(isinstance(change, kind) for change in changes) >= count


def wait_for_line(engine: SlurmEngine, placement: Placement, word: str) -> None:
    log = Path(engine.logs(placement))
    wait_until(lambda: log.exists() and word in log.read_text())


def test_agents_run_leave_and_end(
    cluster: SlurmCluster, order: AgentOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "word")
    monkeypatch.setenv("SLURM_JOB_ID", "77")  # as in a job of this study's driver
    engine = make_engine()
    placed = engine.place(order, 2)
    changes = changes_until(engine, of_kind(Running, 2))
    order.study.with_name("done").touch()
    changes += changes_until(engine, of_kind(Ended, 2))
    assert {change.placement for change in changes if isinstance(change, Running)} == set(placed)
    ended = [change for change in changes if isinstance(change, Ended)]
    assert sorted(ended, key=lambda change: change.placement.id) == [
        Ended(placement, "it has left", in_order=True) for placement in sorted(placed, key=lambda each: each.id)
    ]
    for change in changes:
        if isinstance(change, Running):
            log = Path(engine.logs(change.placement))
            assert f"at {change.host} {change.placement.id} word" in log.read_text()
    assert "word" not in engine.script(order, 2)
    assert "word" not in cluster.call("scontrol", "show", "job", placed[0].id.removeprefix("slurm:"))
    assert engine.find(order) == []


def test_agents_are_found_drained_and_killed_by_another_driver(cluster: SlurmCluster, order: AgentOrder) -> None:
    order = replace(order, resources=Resources(cpu=4, gpu=0.5, memory=2**30))
    placed = make_engine().place(order, 3)  # one too many for two nodes of four cores
    engine = make_engine()
    assert engine.find(replace(order, name="another")) == []
    assert set(engine.find(order)) == set(placed)
    first, second = (change.placement for change in changes_until(engine, of_kind(Running, 2)))
    (third,) = set(placed) - {first, second}
    wait_for_line(engine, first, "at ")
    wait_for_line(engine, second, "at ")
    engine.drain([first])
    engine.drain([first])  # Slurm itself may say it, too
    changes = changes_until(engine, of_kind(Ended))
    assert Ended(first, "its job is FAILED, exit code 75", in_order=False, asked=True) in changes
    engine.kill([second])
    engine.drain([third])  # whether it still waits, or has just started
    changes += changes_until(engine, lambda later: of_kind(Ended, 3)(changes + later))
    assert {change.placement for change in changes if isinstance(change, Ended)} == set(placed)
    assert engine.find(order) == []
    job = placed[0].id[6:].partition("_")[0]
    wait_until(lambda: set(cluster.states(job).values()) <= {"FAILED", "CANCELLED"})
    assert Path(engine.logs(first)).read_text().count("heard SIGTERM") == 1


def test_why_an_agent_waits_for_long_is_said(
    cluster: SlurmCluster, order: AgentOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "LONG_WAIT", 0.0)
    order = replace(order, resources=Resources(cpu=4))
    engine = make_engine()
    placed = engine.place(order, 3)  # one too many for two nodes of four cores
    changes = changes_until(engine, lambda found: of_kind(Running, 2)(found) and of_kind(Waits)(found))
    (third,) = set(placed) - {change.placement for change in changes if isinstance(change, Running)}
    causes = [change.cause for change in changes if isinstance(change, Waits) and change.placement == third]
    assert causes[-1] in ("Slurm's reason is Resources", "Slurm's reason is Priority")
    assert len(causes) == len(set(causes))
    job = third.id.removeprefix("slurm:")
    cluster.call("scontrol", "hold", job)
    (held,) = changes_until(engine, of_kind(Waits))
    assert held == Waits(third, f"Slurm's reason is JobHeldAdmin; `scontrol release {job}` lets it start")


def test_a_persons_defaults_for_slurms_commands_hide_no_agent_and_move_none(
    cluster: SlurmCluster, order: AgentOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command, option in (("SBATCH", "PARTITION"), ("SBATCH", "JOB_NAME"), ("SQUEUE", "PARTITION")):
        monkeypatch.setenv(f"{command}_{option}", "high")
    engine = make_engine(partition="gpu")
    (placement,) = engine.place(order, 1)
    changes_until(engine, of_kind(Running))
    assert make_engine().find(order) == [placement]
    assert cluster.call("scontrol", "show", "job", placement.id.removeprefix("slurm:")).count("Partition=gpu") == 1


def test_a_machine_that_can_not_write_the_output_is_named(
    cluster: SlurmCluster, order: AgentOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "_make_folder", lambda _: None)  # as where a machine does not share it
    engine = make_engine(nodelist=NODES[0])
    (placement,) = engine.place(order, 1)
    cause = f"{NODES[0]} can't write to {order.logs}, where its output goes"
    assert Ended(placement, cause, in_order=False) in changes_until(engine, of_kind(Ended))


def test_an_agent_that_no_partition_lets_run_so_long_is_taken_back(
    cluster: SlurmCluster, order: AgentOrder
) -> None:
    cluster.call("scontrol", "update", "PartitionName=gpu", "MaxTime=60")
    try:
        engine = SlurmEngine(Settings({"partition": "gpu"}, time=2 * 3600), interval=0.0)
        (placement,) = engine.place(order, 1)
        (ended,) = changes_until(engine, of_kind(Ended))
    finally:
        cluster.call("scontrol", "update", "PartitionName=gpu", "MaxTime=UNLIMITED")
    assert isinstance(ended, Ended)
    assert ended.cause == "it can't start (PartitionTimeLimit): `time` is above what is allowed"
    assert set(cluster.states(placement.id[6:].partition("_")[0]).values()) == {"CANCELLED"}


def test_a_preempted_agent_is_requeued(cluster: SlurmCluster, order: AgentOrder) -> None:
    engine = make_engine(nodelist=NODES[0])
    (placement,) = engine.place(order, 1)
    changes_until(engine, of_kind(Running))
    wait_for_line(engine, placement, "at ")
    cluster.preempt(NODES[0])
    assert changes_until(engine, of_kind(Preempted)) == [Preempted(placement, requeued=True)]
    wait_for_line(engine, placement, "heard SIGTERM")
    assert make_engine().find(order) == [placement]


def test_agents_that_leave_at_their_time_limit_are_requeued_each_by_itself(
    cluster: SlurmCluster, order: AgentOrder
) -> None:
    engine = make_engine()
    first, second = engine.place(order, 2)
    changes_until(engine, of_kind(Running, 2))
    for placement in (first, second):
        wait_for_line(engine, placement, "at ")
    # As Slurm does at the time of `--signal`. The array's id is that of its last task's job, too.
    cluster.call("scancel", "--signal=USR1", second.id.removeprefix("slurm:"))
    assert changes_until(engine, of_kind(Preempted)) == [Preempted(second, requeued=True)]
    job = second.id[6:].partition("_")[0]
    wait_until(lambda: set(cluster.states(job).values()) == {"RUNNING", "PENDING"})
    assert "heard" not in Path(engine.logs(first)).read_text()


def test_who_was_asked_to_leave_and_loses_its_node_is_not_started_again(
    cluster: SlurmCluster, order: AgentOrder
) -> None:
    engine = make_engine()
    (placement,) = engine.place(order, 1)
    (running,) = changes_until(engine, of_kind(Running))
    assert isinstance(running, Running)
    wait_for_line(engine, placement, "at ")
    engine._agents[placement].asked_at = time.monotonic()  # as by a drain that did not reach it any more
    cluster.lose_node(running.host)
    assert changes_until(engine, of_kind(NodeGone)) == [NodeGone(placement, running.host)]
    assert make_engine().find(order) == []


def test_a_controller_that_is_away_ends_nothing(
    cluster: SlurmCluster, order: AgentOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    (placement,) = engine.place(order, 1)
    changes_until(engine, of_kind(Running))
    conf = (cluster.folder / "slurm.conf").read_text()
    away = cluster.folder / "away.conf"
    away.write_text(re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=1", conf) + "MessageTimeout=1\n")
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("SLURM_CONF", str(away))
        with pytest.raises(EngineAwayError, match=r"squeue: .*[Uu]nable to contact"):
            list(engine.changes())
    assert list(engine.changes()) == []
    assert engine.find(order) == [placement]
