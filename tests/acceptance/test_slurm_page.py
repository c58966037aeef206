"""The page on Slurm: each of its commands, on a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpo.config.spec import load_spec
from hpo.study.open_study import start_study
from tests.support.commands import wait_until
from tests.support.page_commands import Page
from tests.support.servers import PostgresServer
from tests.support.slurm_cluster import SlurmCluster


def test_the_commands_of_the_page_place_agents_and_a_driver_that_slurm_requeues(
    slurm_cluster: SlurmCluster, postgres_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page("slurm.md", tmp_path, postgres_server.new_database(ready=True), slurm_cluster.environment)
    page.export()
    logs = page.shared / "spirals" / "agents"
    with monkeypatch.context() as there:
        there.setenv("HPO_STORAGE", page.environment["HPO_STORAGE"])
        start_study(load_spec(page.study).with_options(output_dir=logs.parent)).storage.close()

    # The script places agents without a driver.
    page.do("hpo run .*--dry-run > agents.sh")
    logs.mkdir(parents=True)
    job = page.do("sbatch agents.sh").split()[-1]
    wait_until(lambda: set(slurm_cluster.states(job).values()) == {"COMPLETED"})
    said = [log.read_text() for log in logs.glob(f"agent-{job}_*.log")]
    assert len(said) == 2
    assert all("left the study spirals: " in each for each in said)
    assert "".join(said).count(" complete ") == 4

    # With a driver here.
    page.allow(6)
    assert "6 of 6 trials finished" in page.do("HPO_STORAGE=.* hpo run")

    # With a driver as a job, which Slurm warns of its time limit.
    page.allow(8)
    driver = page.do("hpo submit").strip()
    wait_until(lambda: "agent-" in _log(logs, driver))
    slurm_cluster.call("scancel", "--signal=TERM", driver)  # as Slurm does then: to the job's step
    wait_until(lambda: slurm_cluster.restarts(driver) == 1)
    wait_until(lambda: slurm_cluster.state(driver) == "COMPLETED")
    assert "the agents go on working" in _log(logs, driver)
    assert "8 of 8 trials finished" in _log(logs, driver)
    assert "8 of 8" in page.do("hpo status")
    page.do("hpo stop")

    assert not page.commands
    assert "PASSWORD" not in (page.study.with_name("agents.sh")).read_text()
    assert "PASSWORD" not in "".join(log.read_text() for log in logs.iterdir())


def _log(logs: Path, driver: str) -> str:
    log = logs / f"driver-{driver}.log"
    return log.read_text() if log.exists() else ""
