"""Slurm, on a real cluster, does what every engine does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hpo.execution.engines.engine import Engine
from hpo.execution.engines.slurm import SlurmEngine
from hpo.execution.engines.slurm_settings import Settings
from tests.support.engine_contract import EngineContract
from tests.support.slurm_cluster import SlurmCluster


class TestSlurm(EngineContract):
    kind = "slurm"
    kill_is_heard = True

    @pytest.fixture(autouse=True)
    def cluster(self, slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """The cluster as this process's commands find it; no job is left in it."""
        for name, value in slurm_cluster.environment.items():
            monkeypatch.setenv(name, value)
        yield
        slurm_cluster.clear()

    def make(self) -> Engine:
        return SlurmEngine(Settings({}), interval=0.0)
