"""Creates databases with a study of finished trials, for benchmarks that continue such a study."""

import contextlib
import itertools
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
import psutil
import sqlalchemy as sa
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution, distribution_to_json
from optuna.storages._rdb import models
from optuna.trial import TrialState

from hpo.storage.opening import open_storage

NAME = "study"
EPOCHS = 10
SPACE: dict[str, BaseDistribution] = {
    "lr": FloatDistribution(1e-5, 1e-1, log=True),
    "hidden": IntDistribution(8, 256, log=True),
    "dropout": FloatDistribution(0.0, 0.5),
}


def curve(number: int) -> list[float]:
    """A falling loss, by epoch; trials differ."""
    level = 0.5 + 0.4 * math.sin(number * 12.9898)
    return [level + math.exp(-epoch / 3) for epoch in range(1, EPOCHS + 1)]


def point(number: int) -> dict[str, Any]:
    """A trial's parameters."""
    low = (number * 0.618034) % 1
    return {"lr": 1e-5 * 10 ** (4 * low), "hidden": 8 + number % 249, "dropout": 0.5 * ((number * 0.754878) % 1)}


def fill(engine: sa.Engine, trials: int) -> None:
    """Add finished trials to the database's only study, table by table."""
    start = datetime(2026, 1, 1)
    tables = {
        models.TrialModel: [
            {
                "trial_id": i + 1,
                "number": i,
                "study_id": 1,
                "state": TrialState.COMPLETE,
                "datetime_start": start + timedelta(seconds=i),
                "datetime_complete": start + timedelta(seconds=i + 1),
            }
            for i in range(trials)
        ],
        models.TrialParamModel: [
            {
                "trial_id": i + 1,
                "param_name": name,
                "param_value": float(value),
                "distribution_json": distribution_to_json(SPACE[name]),
            }
            for i in range(trials)
            for name, value in point(i).items()
        ],
        models.TrialValueModel: [
            {"trial_id": i + 1, "objective": 0, "value": curve(i)[-1], "value_type": "FINITE"}
            for i in range(trials)
        ],
        models.TrialIntermediateValueModel: [
            {
                "trial_id": i + 1,
                "step": step,
                "intermediate_value": value,
                "intermediate_value_type": "FINITE",
            }
            for i in range(trials)
            for step, value in enumerate(curve(i), start=1)
        ],
    }
    with engine.begin() as conn:
        for model, rows in tables.items():
            conn.execute(sa.insert(model.__table__), rows)
        if engine.name == "postgresql":  # inserts with explicit ids don't advance the sequence
            conn.execute(sa.text(f"SELECT setval('trials_trial_id_seq', {trials})"))
    if engine.name == "postgresql":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
            conn.exec_driver_sql("ANALYZE")


def prepare(contestant: str, url: str, trials: int) -> None:
    """Create a study of finished trials in an empty database, with the contestant's own code."""
    if contestant == "ours":
        storage = open_storage(url, create=True)
        optuna.create_study(study_name=NAME, storage=storage)
        storage.set_budget(1, 10**6)
        fill(storage.engine, trials)
        storage.close()
        return
    plain = optuna.storages.RDBStorage(url)
    optuna.create_study(study_name=NAME, storage=plain)
    fill(plain.engine, trials)
    plain.engine.dispose()


class Databases:
    """Fresh copies of prepared databases, as a URL each."""

    def __init__(self, kind: str, folder: Path, server: str = "") -> None:
        self.kind, self._folder, self._server = kind, folder, server
        self._names = (f"db{i}" for i in itertools.count())
        self._templates: dict[tuple[str, int], str] = {}

    @contextmanager
    def fresh(self, contestant: str, trials: int) -> Iterator[str]:
        """A separate database for one run."""
        key = contestant, trials
        if key not in self._templates:
            self._templates[key] = self._create()
            prepare(contestant, self._url(self._templates[key]), trials)
        name = self._create(self._templates[key])
        try:
            yield self._url(name)
        finally:
            self._drop(name)

    def _url(self, name: str) -> str:
        return self._server.format(name) if self._server else f"sqlite:///{self._folder / name}.db"

    def _create(self, template: str = "") -> str:
        name = next(self._names)
        if self._server:
            self._administer(f"CREATE DATABASE {name} TEMPLATE {template or 'template1'}")
        elif template:
            shutil.copy(self._folder / f"{template}.db", self._folder / f"{name}.db")
        return name

    def _drop(self, name: str) -> None:
        if self._server:
            self._administer(f"DROP DATABASE {name} WITH (FORCE)")
            return
        for file in self._folder.glob(f"{name}.db*"):
            file.unlink()

    def _administer(self, statement: str) -> None:
        engine = sa.create_engine(self._url("postgres"), isolation_level="AUTOCOMMIT")
        with engine.connect() as conn:
            conn.exec_driver_sql(statement)
        engine.dispose()


@contextmanager
def postgres() -> Iterator[str]:
    """A private server; yields its URL with ``{}`` for the database."""
    binaries = max(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parts[-2]))
    folder = Path(tempfile.mkdtemp(prefix="hpo-pg-"))
    folder.chmod(0o755)  # its socket is for every user, as a package's
    user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    if user:
        shutil.chown(folder, "postgres", "postgres")
    data = folder / "data"

    def run(program: str, *arguments: str) -> None:
        subprocess.run(
            [*user, str(binaries / program), "-D", str(data), *arguments],
            check=True, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    try:
        run("initdb", "-A", "trust", "-U", "postgres")
        run("pg_ctl", "-o", f"-c listen_addresses='' -k {folder}", "-l", str(folder / "log"), "-w", "start")
        try:
            yield f"postgresql+psycopg://postgres@/{{}}?host={folder}"
        finally:
            run("pg_ctl", "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def server_cpu(url: str) -> float:
    """CPU seconds of a PostgreSQL server's processes, ended ones included."""
    folder = sa.make_url(url).query["host"]
    main = psutil.Process(int(Path(str(folder), "data", "postmaster.pid").read_text().split()[0]))
    ended = main.cpu_times()
    total = ended.user + ended.system + ended.children_user + ended.children_system
    for process in main.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended in the meantime
            times = process.cpu_times()
            total += times.user + times.system
    return total
