"""A study on a real Slurm cluster whose machines are taken away in every way that Slurm knows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpo.config.spec import StudySpec, load_spec
from hpo.execution.engines.engine import AgentOrder, NodeGone, Placement, Preempted, Running
from hpo.execution.engines.slurm import SlurmEngine
from hpo.execution.engines.slurm_settings import Settings
from hpo.storage.ledger import attempts
from hpo.study.open_study import load_study, start_study
from tests.acceptance.chaos.audit import audit
from tests.acceptance.chaos.study import DELAY, make_study
from tests.support.servers import PostgresServer
from tests.support.slurm_cluster import SlurmCluster

_TRIALS = 60
_STUDY = (
    f"study.n_trials={_TRIALS}",
    "study.sampler.name=random",
    "study.pruner=none",
    "trainer.max_epochs=4",
    "callbacks.early_stopping=null",
    "run.max_retries=1",  # of the node that is lost; nothing else may cost one
)


@pytest.fixture
def spec(
    slurm_cluster: SlurmCluster, postgres_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> StudySpec:
    """A study in a database whose URL is in the environment, and nowhere else."""
    url = postgres_server.new_database(ready=True)
    for name, value in {**slurm_cluster.environment, "HPO_STORAGE": url}.items():
        monkeypatch.setenv(name, value)
    spec = load_spec(make_study(tmp_path / "study", _STUDY)).with_options(storage=url)
    start_study(spec).storage.close()
    return spec


def finished(spec: StudySpec) -> Iterator[int]:
    """How many trials have ended, until all have."""
    opened, deadline = load_study(spec), time.monotonic() + 300
    try:
        while True:
            trials = opened.study.get_trials(deepcopy=False)
            count = sum(trial.state.is_finished() for trial in trials)
            if count == _TRIALS:
                return
            assert time.monotonic() < deadline, f"{count} of {_TRIALS} trials"
            yield count
            time.sleep(0.3)
    finally:
        opened.storage.close()


def test_nothing_is_lost_by_a_time_limit_preemption_and_a_lost_node(
    slurm_cluster: SlurmCluster, spec: StudySpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DELAY, "0.08")
    engine = SlurmEngine(Settings({"exclusive": ""}), interval=0.5)
    order = AgentOrder(spec.path, spec.study.name, spec.output_dir / "agents", workers=2)
    first, second = engine.place(order, 2)
    hosts: dict[Placement, str] = {}
    taken: list[Placement] = []
    asked, lost = False, ""
    for count in finished(spec):
        if count >= 3 and not asked:
            asked = True
            slurm_cluster.limit_time(second.id)
            slurm_cluster.preempt(hosts[first])
        for change in engine.changes():
            if isinstance(change, Running):
                hosts[change.placement] = change.host
            elif isinstance(change, Preempted):
                del hosts[change.placement]
                taken.append(change.placement)
                slurm_cluster.lift_time_limit(change.placement.id)
            elif isinstance(change, NodeGone):
                slurm_cluster.start_node(change.host)
                engine.find(order)
        if not lost and set(taken) == {first, second}:
            lost = next(iter(hosts.values()), "")
            if lost:
                slurm_cluster.lose_node(lost)
    assert lost
    assert sorted(taken, key=str) == [first, second]
    monkeypatch.delenv(DELAY)
    assert audit(spec) == []
    assert lost_on(spec) <= {lost}
    for placement in (first, second):
        assert "left the study chaos: asked by a signal" in Path(engine.logs(placement)).read_text()


def lost_on(spec: StudySpec) -> set[str]:
    """The machines on which attempts were lost."""
    opened = load_study(spec)
    try:
        with opened.storage.engine.connect() as conn:
            return {each.host.split()[0] for each in attempts(conn, opened.study_id) if each.outcome == "lost"}
    finally:
        opened.storage.close()
