"""Slurm, on a real cluster, does what every engine does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpo.execution.engines.engine import Engine, Placement
from hpo.execution.engines.slurm import SlurmEngine
from hpo.execution.engines.slurm_settings import Settings
from tests.support.engine_contract import MachinesContract
from tests.support.slurm_cluster import SlurmCluster


class TestSlurm(MachinesContract):
    kind = "slurm"
    kill_is_heard = "SIGTERM"
    starts_again = True

    @pytest.fixture(autouse=True)
    def cluster(self, slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """The cluster as this process's commands find it; no job is left in it."""
        self.slurm = slurm_cluster
        for name, value in slurm_cluster.environment.items():
            monkeypatch.setenv(name, value)
        yield
        slurm_cluster.clear()

    def make(self) -> Engine:
        return SlurmEngine(Settings({}), interval=0.0)

    def lose(self, placement: Placement, host: str) -> None:
        self.slurm.lose_node(host)
