"""A study on a real Slurm cluster, by the command, whose machines are taken away in every way that Slurm knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.driving import driving
from tests.support.machines_study import TRIALS, MachinesStudy
from tests.support.servers import PostgresServer
from tests.support.slurm_cluster import SlurmCluster


@pytest.fixture
def study(postgres_server: PostgresServer, tmp_path: Path) -> MachinesStudy:
    return MachinesStudy(tmp_path, postgres_server.new_database(ready=True))


def test_nothing_is_lost_by_a_killed_driver_preemption_a_time_limit_and_a_lost_node(
    slurm_cluster: SlurmCluster, study: MachinesStudy
) -> None:
    command = (study.path, "--on", "slurm:exclusive=yes,nodes=2", "--workers", 2)
    environment = {**slurm_cluster.environment, **study.environment}
    with driving(*command, environment=environment) as driver:
        driver.wait(lambda: len(driver.hosts) == 2 and study.agents_that_trained() == 2)
        (first, host), (second, _) = driver.hosts.items()
        driver.kill()
    slurm_cluster.limit_time(second)
    slurm_cluster.preempt(host)
    with driving(*command, environment=environment) as again:
        again.wait(lambda: {each["placement"] for each in again.said("agent_found")} == {first, second})
        again.wait(lambda: min(slurm_cluster.restarts(first), slurm_cluster.restarts(second)) == 1)
        slurm_cluster.lift_time_limit(second)
        again.wait(lambda: len(again.hosts) == 2 and study.agents_at_work() == 2)
        again.wait(lambda: study.agents_that_trained() >= 4)
        assert not again.said("agent_placed"), "Slurm has started each of them again"
        lost = again.hosts[first]
        slurm_cluster.lose_node(lost)
        again.wait(lambda: again.said("agent_lost"))  # the other one has its machine to itself
        slurm_cluster.start_node(lost)
        again.wait(lambda: study.agents_that_trained() >= 5)
        # Slurm starts it again, too: who looks at its job before that finds that it has ended.
        assert len(again.said("agent_placed")) <= 1
        study.hurry()  # one may leave now before the last trial is put back, and be replaced
        assert again.end() == 0, again.output
        ended = again.events[-1]
    assert (ended["ending"], ended["status"]["finished"]) == ("done", TRIALS)
    assert [each["placement"] for each in again.said("agent_lost")] == [first]
    assert study.losses() == {(lost, f"its machine {lost} is gone")}, "the driver has said so at once"
    study.check()
    for placement in (first, second):
        log = study.logs / f"agent-{placement.removeprefix('slurm:')}.log"
        assert "left the study chaos: asked by a signal" in log.read_text()
        assert study.secret not in log.read_text()
    assert study.secret not in again.output
