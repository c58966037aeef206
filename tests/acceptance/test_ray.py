"""The Ray engine on a real cluster of three nodes. Drivers are processes of their own, as they are for people."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hpo.execution.engines.engine import AgentOrder, Ended, Placement, Resources
from tests.support.driving import driving
from tests.support.engine_contract import MachinesContract, ended, hosts_of, line, until
from tests.support.engine_host import HostedEngine, hosted
from tests.support.machines_study import TRIALS, MachinesStudy
from tests.support.ray_cluster import ADDRESS, HOSTS, RayCluster
from tests.support.servers import PostgresServer

SECRET = "the-word"


class TestRay(MachinesContract):
    kind = "ray"

    @pytest.fixture(autouse=True)
    def cluster(self, ray_cluster: RayCluster, order: AgentOrder) -> Iterator[None]:
        """The cluster; the drivers of a test end with it, and what they leave there."""
        with contextlib.ExitStack() as stack:
            self.ray, self._drivers = ray_cluster, stack
            yield
            for each in (order, replace(order, name="another")):
                self._latest.kill(self._latest.find(each))

    def make(self) -> HostedEngine:
        self._latest = self._drivers.enter_context(hosted(ADDRESS, self.ray.command()))
        return self._latest

    def put_in_place(self, agent: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
        """As a package named hpo: for agents only, since the folder of a driver comes first."""
        package = agent.with_name("hpo")
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(f"import runpy; runpy.run_path({str(agent)!r}, run_name='__main__')")
        monkeypatch.setenv("PYTHONPATH", str(package.parent))
        return ("PYTHONPATH", "NOT_SET")

    def lose(self, placement: Placement, host: str) -> None:
        self.ray.lose(host)

    def test_who_waits_for_room_is_taken_back_and_ray_shows_no_secret(
        self, order: AgentOrder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("A_SECRET", SECRET)
        order = replace(order, resources=Resources(cpu=3))
        engine = self.make()
        placed = engine.place(order, 4)  # a machine of four cores has room for one
        hosts = hosts_of(until(engine, lambda found: len(hosts_of(found)) == 3))
        assert set(hosts.values()) == set(HOSTS)
        (queued,) = set(placed) - set(hosts)
        assert all(f" {SECRET} worker" in line(engine, placement, "pid") for placement in hosts)
        listed = _run(self.ray, _ALL_THAT_RAY_SHOWS)
        assert placed[0].id in listed
        assert SECRET not in listed + engine.script(order, 4)
        again = self.make()
        assert set(again.find(order)) == set(placed)
        until(again, lambda found: len(hosts_of(found)) == 3)
        again.drain([queued])
        assert until(again, ended) == [Ended(queued, "it was taken back before it ran", in_order=True)]

    def test_each_agent_has_a_node_of_its_own_and_leaves_with_its_actor(self, order: AgentOrder) -> None:
        engine = self.make()
        (first,) = engine.place(replace(order, name="another"), 1)
        placed = engine.place(order, 5)
        assert len(placed) == len(HOSTS) - 1
        changes = until(engine, lambda found: len(hosts_of(found)) == len(HOSTS))
        assert set(hosts_of(changes).values()) == set(HOSTS)
        line(engine, first, "pid")
        _kill_actor(first)
        (end,) = until(engine, ended)
        assert isinstance(end, Ended)
        assert end.cause.startswith("The actor died unexpectedly"), end.cause
        assert line(engine, first, "heard") == "heard the end of its input"


#: What the state API knows of actors and their environments.
_ALL_THAT_RAY_SHOWS = """
from ray.util.state import list_actors, list_runtime_envs, list_tasks
for listed in (list_actors, list_tasks, list_runtime_envs):
    print(listed("http://127.0.0.1:8265", detail=True))
"""


def test_a_study_on_three_machines_one_of_which_is_lost(
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
        driver.wait(lambda: driver.said("agent_lost"))
        ray_cluster.add(host)
        driver.wait(lambda: study.agents_that_trained() == 4)
        study.hurry()
        assert driver.end() == 0, driver.output
        ended = driver.events[-1]
    assert (ended["ending"], ended["status"]["finished"]) == ("done", TRIALS)
    assert [(each["placement"], each["host"]) for each in driver.said("agent_lost")] == [(lost, host)]
    assert len(driver.said("agent_placed")) == 4
    assert study.losses() == {(host, f"its machine {host} is gone")}
    assert study.secret not in driver.output + "".join(log.read_text() for log in study.logs.iterdir())
    study.check()


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
