"""The Ray engine on a real cluster of three nodes. Drivers are processes of their own, as they are for people."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hpo.execution.engines.engine import (
    AgentOrder,
    Change,
    Ended,
    NodeGone,
    Placement,
    Resources,
    Running,
)
from tests.support.commands import wait_until
from tests.support.driving import driving
from tests.support.engine_host import HostedEngine, hosted
from tests.support.machines_study import TRIALS, MachinesStudy
from tests.support.ray_cluster import ADDRESS, HOSTS, RayCluster
from tests.support.servers import PostgresServer

#: In place of hpo: leaves as an agent does when it is asked to, and says what it has heard.
STAND_IN = """
import os, signal, sys, threading, time
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append("SIGTERM"))
threading.Thread(target=lambda: (sys.stdin.read(), heard.append("the end of its input")), daemon=True).start()
where = [os.uname().nodename, os.environ.get("HPO_PLACEMENT", "-"), os.environ["A_SECRET"]]
print("at", *where, *sys.argv[1:], flush=True)
while not heard and "done" not in sys.argv:
    time.sleep(0.02)
print("heard", *heard, flush=True)
sys.exit(75 if heard else 0)
"""
SECRET = "the-word"
#: Seconds; agents import torch, all at once.
_PATIENCE = 240.0

Drivers = Callable[..., AbstractContextManager[HostedEngine]]


@pytest.fixture
def drivers(ray_cluster: RayCluster, tmp_path: Path) -> Drivers:
    """Starts drivers, whose agents are the stand-in: for an agent only, since the driver's folder comes first."""
    package = tmp_path / "stand-in" / "hpo"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(STAND_IN)

    def driver(text: str = ADDRESS) -> AbstractContextManager[HostedEngine]:
        return hosted(text, ray_cluster.command(), PYTHONPATH=str(package.parent), A_SECRET=SECRET)

    return driver


@pytest.fixture
def order(tmp_path: Path) -> AgentOrder:
    return AgentOrder(
        tmp_path / "study.yaml",
        "tiny",
        tmp_path / "my runs" / "logs",
        arguments=("--output-dir", str(tmp_path / "my runs")),
        workers=2,
        resources=Resources(cpu=3),
        environment=("PYTHONPATH", "A_SECRET", "NOT_SET"),
    )


def changes_until(engine: HostedEngine, kind: type[Change], count: int = 1) -> list[Change]:
    """What an engine reports until there is enough of a kind."""
    changes: list[Change] = []

    def enough() -> bool:
        changes.extend(engine.changes())
        return sum(isinstance(change, kind) for change in changes) >= count

    wait_until(enough, _PATIENCE)
    return changes


def hosts_of(changes: list[Change]) -> dict[Placement, str]:
    return {change.placement: change.host for change in changes if isinstance(change, Running)}


def said(engine: HostedEngine, placement: Placement) -> str:
    return Path(engine.logs(placement)).read_text()


def test_agents_outlive_their_driver_and_obey_the_next(
    ray_cluster: RayCluster, drivers: Drivers, order: AgentOrder
) -> None:
    with drivers() as engine:
        assert engine.agents == len(HOSTS)
        placed = engine.place(order, 4)  # a machine of four cores has room for one
        hosts = hosts_of(changes_until(engine, Running, 3))
        assert set(hosts.values()) == set(HOSTS)
        for placement, host in hosts.items():
            wait_until(lambda of=placement: said(engine, of))
            command = f"worker {order.study} --workers 2 --output-dir {order.logs.parent}"
            assert said(engine, placement) == f"at {host} {placement.id} {SECRET} {command}\n"
        listed = _run(ray_cluster, _ALL_THAT_RAY_SHOWS)
        assert placed[0].id in listed
        assert SECRET not in listed + engine.script(order, 4)
    # The driver was killed.
    with drivers() as engine:
        assert engine.find(replace(order, name="another")) == []
        assert set(engine.find(order)) == set(placed)
        assert hosts_of(changes_until(engine, Running, 3)) == hosts
        first, second, third = hosts
        (queued,) = set(placed) - set(hosts)
        engine.drain([queued])
        engine.drain([first])
        engine.kill([second])
        changes = changes_until(engine, Ended, 3)
        assert Ended(queued, "it was taken back before it ran", in_order=True) in changes
        assert Ended(first, "the agent ended with exit code 75", in_order=False) in changes
        assert Ended(second, "it was killed", in_order=False) in changes
        assert said(engine, first).endswith("heard SIGTERM\n")
        assert engine.find(order) == [third]
        ray_cluster.lose(hosts[third])
        assert changes_until(engine, NodeGone) == [NodeGone(third, hosts[third])]
        assert engine.find(order) == []


#: What the state API knows of actors and their environments.
_ALL_THAT_RAY_SHOWS = """
from ray.util.state import list_actors, list_runtime_envs, list_tasks
for listed in (list_actors, list_tasks, list_runtime_envs):
    print(listed("http://127.0.0.1:8265", detail=True))
"""


def test_sixty_trials_on_three_machines_one_of_which_is_lost(
    ray_cluster: RayCluster, postgres_server: PostgresServer, tmp_path: Path
) -> None:
    """By the command; each of its agents has a machine to itself, so that a replacement waits for the new one."""
    study = MachinesStudy(tmp_path, postgres_server.new_database(ready=True))
    command = (study.path, "--on", ADDRESS, "--workers", 2)
    with driving(*command, environment=study.environment, within=ray_cluster.command()) as driver:
        driver.wait(lambda: set(driver.hosts.values()) == set(HOSTS))
        lost, host = next((each, host) for each, host in driver.hosts.items() if host != HOSTS[0])
        driver.wait(lambda: host in study.hosts_at_work())
        ray_cluster.lose(host)
        driver.wait(lambda: driver.said("agent_lost") and driver.said("trial_requeued"))
        ray_cluster.add(host)
        driver.wait(lambda: study.agents_that_trained() == 4)
        study.hurry()
        assert driver.end() == 0, driver.output
        ended = driver.events[-1]
    assert (ended["ending"], ended["status"]["finished"]) == ("done", TRIALS)
    assert [(each["placement"], each["host"]) for each in driver.said("agent_lost")] == [(lost, host)]
    assert len(driver.said("agent_placed")) == 4
    assert set(study.lost_on()) == {host}
    assert study.secret not in driver.output + "".join(log.read_text() for log in study.logs.iterdir())
    study.check()


def test_a_driver_is_submitted_and_a_script_submits_agents(
    ray_cluster: RayCluster, drivers: Drivers, order: AgentOrder
) -> None:
    with drivers() as engine:
        job = engine.submit(["run", "done"], order)
        log = order.logs / f"driver-{job.rpartition('-')[2]}.log"
        wait_until(lambda: "heard" in log.read_text())
        assert f" {SECRET} run done" in log.read_text()
        script = engine.script(order, 1)
    printed = _run(ray_cluster, script)
    # Of the real hpo, for a job has the environment of its node.
    missing = f"{order.study}: no such file"
    wait_until(lambda: missing in _run(ray_cluster, _LOG_OF_JOB, printed.strip()), seconds=240)


_LOG_OF_JOB = """
import sys
from ray.job_submission import JobSubmissionClient
print(JobSubmissionClient("http://127.0.0.1:8265").get_job_logs(sys.argv[1]))
"""


def _run(cluster: RayCluster, script: str, *arguments: str) -> str:
    """What a Python script prints that is run beside the cluster."""
    command = cluster.command(sys.executable, "-c", script, *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _kill_actor(placement: Placement) -> None:
    """Kill the process that Ray runs for an agent, which is the agent's parent."""
    (agent,) = (each for each in psutil.process_iter() if placement.id in _environment(each))
    parent = agent.parent()
    assert parent is not None
    parent.kill()


def _environment(process: psutil.Process) -> Collection[str]:
    try:
        return process.environ().values()
    except psutil.Error:
        return ()


def test_each_agent_has_a_node_of_its_own(drivers: Drivers, order: AgentOrder) -> None:
    order = replace(order, resources=Resources(), arguments=("done",))
    stays = replace(order, study=order.study.with_name("another.yaml"), arguments=())
    with drivers() as engine:
        (placed,) = engine.place(stays, 1)
        assert len(engine.place(order, 5)) == len(HOSTS) - 1
        changes = changes_until(engine, Ended, len(HOSTS) - 1)
        assert {each.in_order for each in changes if isinstance(each, Ended)} == {True}
        assert set(hosts_of(changes).values()) == set(HOSTS)
        assert engine.find(order) == []
        _kill_actor(placed)
        (ended,) = changes_until(engine, Ended)
        assert isinstance(ended, Ended)
        assert ended.cause.startswith("The actor died unexpectedly"), ended.cause
        wait_until(lambda: said(engine, placed).endswith("heard the end of its input\n"))
