"""A short storm on each kind of database; `benchmarks/chaos.py` is the long one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpo.config.spec import StudySpec, load_spec
from tests.acceptance.chaos.audit import audit
from tests.acceptance.chaos.storm import Storm, other_hosts_work
from tests.acceptance.chaos.study import make_study
from tests.acceptance.chaos.weather import Weather
from tests.support.servers import DatabaseServer, PostgresServer


def _survives(
    spec: StudySpec, weather: Weather, hosts: Sequence[str], server: DatabaseServer | None = None
) -> None:
    storm = Storm(spec, weather, hosts=hosts, server=server)
    record = storm.run()
    log = f"seed {weather.seed}, see {storm.log}"
    assert not record.surprises, f"{log}\n" + "\n".join(record.surprises)
    problems = audit(spec)
    assert not problems, f"{log}\n" + "\n".join(problems)


def test_nothing_is_lost_or_doubled_on_sqlite(tmp_path: Path) -> None:
    spec = load_spec(make_study(tmp_path / "study"))
    # Where host names can't be set, both are on this host: then no living worker counts as dead.
    hosts = ["", "other" if other_hosts_work() else ""]
    _survives(spec, Weather(kills=8, seed=39, pause=(0.05, 0.5), longest_stop=4.5), hosts)


def test_paused_trials_are_resumed_or_pruned_whatever_happens(tmp_path: Path) -> None:
    spec = load_spec(make_study(tmp_path / "study", ["study.pruner=none", "run.background_reports=true"]))
    weather = Weather(kills=7, seed=5, pause=(0.05, 0.5), longest_stop=2.0, pauses=True, mines=0.02)
    _survives(spec, weather, ["", ""])


def test_forks_follow_their_lineages_whatever_happens(tmp_path: Path) -> None:
    pbt = ["study.scheduler={name: pbt, population: 4, every: 2}", "study.pruner=none", "study.n_trials=100"]
    spec = load_spec(make_study(tmp_path / "study", [*pbt, "study.epochs=40", "trainer.max_epochs=30"]))
    weather = Weather(kills=6, seed=7, pause=(0.05, 0.5), longest_stop=2.0, mines=0.02)
    _survives(spec, weather, ["", ""])


def test_nothing_is_lost_or_doubled_on_postgresql(tmp_path: Path, postgres_server: PostgresServer) -> None:
    spec = load_spec(make_study(tmp_path / "study")).with_options(storage=postgres_server.new_database())
    weather = Weather(kills=6, restarts=1, seed=25, workers=3, pause=(0.05, 0.5), longest_stop=2.0)
    _survives(spec, weather, [""], postgres_server)
