"""Agents as Jobs, placed by the real kubectl in a stand-in for a cluster; small programs stand in for agents."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpo.execution.engines.engine import (
    AgentOrder,
    Change,
    Ended,
    Engine,
    Placement,
    Preempted,
    Running,
)
from hpo.execution.engines.kubectl import Kubectl
from hpo.execution.engines.kubernetes import KubernetesEngine
from hpo.execution.engines.kubernetes_settings import Settings
from tests.support.commands import wait_until
from tests.support.engine_contract import MachinesContract
from tests.support.kubernetes_cluster import Cluster, cluster_in

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed"),
]

#: Works until it is asked to leave, and then has itself started again, as an agent does.
AGENT = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print(os.environ.get("HPO_PLACEMENT"), os.environ["HPO_STORAGE"], *sys.argv[1:], flush=True)
if "leave" in sys.argv:
    sys.exit(0)
if "fail" in sys.argv:
    sys.exit(3)
signal.pause()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    secrets = {"hpo": {"HPO_STORAGE": "postgresql://hpo:hunter2@db/hpo"}}
    with cluster_in(tmp_path, secrets, [sys.executable, "-IS", "-c", AGENT]) as found:
        yield found


@pytest.fixture(autouse=True)
def each_look_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines look as often as they are asked. Their clock is the real one: agents have their grace to leave."""
    monkeypatch.setattr("hpo.execution.engines.kubernetes._INTERVAL", 0.0)


class Driver:
    """An engine, and what it has said."""

    def __init__(self, cluster: Cluster, **settings: str) -> None:
        kubectl = Kubectl("default", [str(cluster.kubectl)])
        self.engine = KubernetesEngine(Settings("i", "c", **settings), kubectl)
        self.said: list[Change] = []

    def hear(self, wanted: Callable[[list[Change]], bool]) -> list[Change]:
        """What is said until it is what is waited for."""
        wait_until(lambda: wanted(self.said) or self.said.extend(self.engine.changes()))
        said, self.said = self.said, []
        return said


def order(folder: Path, *arguments: str) -> AgentOrder:
    study = folder / "study" / "study.yaml"
    study.parent.mkdir(exist_ok=True)
    study.touch()
    return AgentOrder(study, "tiny", study.parent / "runs" / "tiny" / "logs", arguments)


def has(kind: type[Change]) -> Callable[[list[Change]], bool]:
    return lambda said: sum(isinstance(each, kind) for each in said) == 1


def job_of(placement: Placement) -> str:
    return placement.id.split("/")[1]


class LoggedEngine(KubernetesEngine):
    """Has its agents' output in files, which the contract reads."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(Settings("i", "c"), Kubectl("default", [str(cluster.kubectl)]))
        self._folder = cluster.folder

    def logs(self, placement: Placement) -> str:
        return str(self._folder / f"{job_of(placement)}.0.0.log")


class TestKubernetes(MachinesContract):
    kind = "k8s"
    kill_is_heard = "SIGTERM"  # a second before its end

    @pytest.fixture(autouse=True)
    def of_the_order(self, order: AgentOrder, tmp_path: Path) -> Iterator[None]:
        image = [sys.executable, "-IS", str(order.study.with_name("agent.py"))]
        with cluster_in(tmp_path, {"hpo": {"A_SECRET": "word"}}, image) as self.cluster:
            yield

    def make(self) -> Engine:
        return LoggedEngine(self.cluster)

    def lose(self, placement: Placement, host: str) -> None:
        self.cluster.lose_node(job_of(placement))

    def test_the_loss_of_a_machine_is_said(self, order: AgentOrder) -> None:
        super().test_the_loss_of_a_machine_is_said(order)
        assert not self.cluster.jobs, "it is not started again"


def test_a_preempted_agent_is_started_again_and_one_that_fails_is_not(cluster: Cluster, tmp_path: Path) -> None:
    driver = Driver(cluster)
    [placement] = driver.engine.place(order(tmp_path), 1)
    driver.hear(has(Running))
    cluster.preempt(job_of(placement))
    said = driver.hear(has(Running))
    assert [type(each) for each in said] == [Preempted, Running]
    assert cluster.output(job_of(placement)).count(placement.id) == 2
    [failing] = driver.engine.place(order(tmp_path, "fail"), 1)
    assert driver.hear(has(Ended))[-1] == Ended(failing, "hpo ended with exit code 3", in_order=False)


def test_the_files_are_shipped_once(cluster: Cluster, tmp_path: Path) -> None:
    driver = Driver(cluster, files="configmap")
    driver.engine.place(order(tmp_path), 1)
    driver.engine.place(order(tmp_path), 1)
    assert len(cluster.objects["configmaps"]) == 1


def test_the_driver_is_submitted(cluster: Cluster, tmp_path: Path) -> None:
    driver = Driver(cluster, account="mine")
    job = driver.engine.submit(["run", "study.yaml", "leave"], order(tmp_path))
    assert job in cluster.jobs
    assert driver.engine.find(order(tmp_path)) == [], "it is no agent"
    wait_until(lambda: cluster.jobs[job]["status"])
    assert "run study.yaml leave" in cluster.output(job)
