"""A study of very many finished trials, written in seconds: table by table, past Optuna.

For tests and benchmarks of what reads or continues a large study. As a program:
``python -m tests.support.big_study FOLDER [--trials 50000] [--epochs 50] [--storage URL]``.

The trials are those of a plain search: points drawn at random, losses that fall towards a floor which depends on
the point, three in five pruned at a fifth of their epochs, one in a hundred diverged. Each has what hpo stores
with it: attempt, best epoch, run, artifacts. In a study whose scheduler promotes trials most are paused, as ASHA
leaves them, with the grants that brought them to their rungs.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from importlib import resources
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any, Final

import numpy as np
import optuna
import sqlalchemy as sa
from optuna.distributions import BaseDistribution, CategoricalDistribution, distribution_to_json

from hpo.config.spec import load_spec
from hpo.search.schedulers.rungs import ladder
from hpo.storage import ledger
from hpo.storage.attributes import GRANTED_ATTR
from hpo.storage.optuna_private import (
    PARAMS,
    REPORTS,
    STUDY_USER_ATTRS,
    TRIAL_SYSTEM_ATTRS,
    TRIAL_USER_ATTRS,
    TRIALS,
    VALUES,
)
from hpo.storage.rung_values import RUNG_ATTR
from hpo.study.open_study import OpenStudy, start_study

_PRUNED: Final = 0.6
_DIVERGED: Final = 0.01
_SECONDS_A_TRIAL: Final = 60
#: Where a pruner that halves has looked, and has stored what it saw.
_RUNGS: Final = (1, 4, 16)
_WHY: Final = {"kind": "", "predicted": None, "low": None, "high": None, "incumbent": 0.5}
_START: Final = datetime(2026, 1, 1, tzinfo=UTC)
_AT_ONCE: Final = 5_000  # trials whose rows are held at a time
_SQLITE_TIME: Final = "%Y-%m-%d %H:%M:%S.%f"  # as SQLAlchemy writes it; servers read it, too

#: Table, columns, and what fills them.
_Rows = tuple[sa.Table, tuple[str, ...], Iterator[tuple[Any, ...]]]


def make_big_study(
    folder: Path, trials: int, *, epochs: int = 50, storage: str | None = None, overrides: Sequence[str] = ()
) -> Path:
    """Write a study that has had so many trials and may have as many more; returns its study file.

    Args:
        folder: Gets the study file and its modules: those of ``hpo init``.
        trials: How many trials have finished.
        epochs: Of a trial that runs to its end.
        storage: The database's URL; None for SQLite in the folder. A study named ``big`` must not be in it.
        overrides: Of the study file, for the study that is started; whoever opens it has to give them, too.
    """
    folder.mkdir(parents=True, exist_ok=True)
    template = resources.files("hpo") / "templates" / "classification"
    for name in ("model.py", "data.py"):
        (folder / name).write_text((template / name).read_text())
    text = (template / "study.yaml").read_text()
    changes = {"name: spirals": "name: big", "n_trials: 16": f"n_trials: {2 * trials}", "name: auto": "name: tpe"}
    changes["max_epochs: 20"] = f"max_epochs: {epochs}"
    if storage is not None:
        changes["  workers: 2"] = f"  storage: {storage}\n  workers: 2"
    for old, new in changes.items():
        assert old in text, old
        text = text.replace(old, new, 1)
    file = folder / "study.yaml"
    file.write_text(text)
    with start_study(load_spec(file, overrides)) as opened:
        fill(opened, trials, epochs)
    return file


def fill(opened: OpenStudy, trials: int, epochs: int) -> None:
    """Add finished trials to a study that has none. Others may not write to its database meanwhile."""
    engine = opened.storage.engine
    with engine.begin() as conn:
        first = (conn.execute(sa.select(sa.func.max(TRIALS.c.trial_id))).scalar() or 0) + 1
        granted = 0
        for start in range(0, trials, _AT_ONCE):
            block = _Block(opened, first, granted, range(start, min(start + _AT_ONCE, trials)), epochs)
            granted += sum(map(len, block.grants))
            for table, columns, rows in block.tables():
                _insert(conn, table, columns, rows)
        if engine.name == "postgresql":  # rows with ids of their own leave the sequence where it was
            conn.execute(sa.text(f"SELECT setval('trials_trial_id_seq', {first + trials - 1})"))
        if granted:
            mine = (STUDY_USER_ATTRS.c.study_id == opened.study_id, STUDY_USER_ATTRS.c.key == GRANTED_ATTR)
            conn.execute(sa.update(STUDY_USER_ATTRS).where(*mine).values(value_json=json.dumps(granted)))
    if engine.name == "postgresql":
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
            conn.exec_driver_sql("ANALYZE")


class _Block:
    """Some trials of the study, and the rows that they have in each table."""

    def __init__(self, opened: OpenStudy, first_id: int, granted: int, numbers: range, epochs: int) -> None:
        self._opened, self._epochs = opened, epochs
        self._numbers, self._ids = numbers, range(first_id + numbers.start, first_id + numbers.stop)
        count = len(numbers)
        random = np.random.default_rng([7, numbers.start])
        space = opened.space.distributions
        self._places = random.random((count, len(space)))
        ideal = np.linspace(0.2, 0.8, len(space))
        floor = 0.05 + ((self._places - ideal) ** 2).mean(axis=1) + 0.02 * random.random(count)
        steps = np.arange(1, epochs + 1)
        falling = 1.1 * np.exp(-steps / (1 + epochs * random.uniform(0.05, 0.2, (count, 1))))
        self._curves = floor[:, None] + falling + 0.005 * random.standard_normal((count, epochs))
        self.grants: list[list[dict[str, Any]]] = []
        if opened.spec.study.scheduler is not None:
            self._climb(granted)
            return
        early = max(1, epochs // 5)
        behind = self._curves[:, early - 1] > np.quantile(self._curves[:, early - 1], 1 - _PRUNED)
        self._diverged = ~behind & (random.random(count) < _DIVERGED)
        self._lengths = np.where(behind, early, epochs)
        self._states = ["PRUNED" if pruned else "COMPLETE" for pruned in behind]

    def _climb(self, granted: int) -> None:
        """Let the best third of the trials at each rung have gone on to the next."""
        rungs = ladder(self._epochs, 3)
        self._lengths = np.full(len(self._numbers), rungs[0])
        there = np.arange(len(self._numbers))
        for rung, after in pairwise(rungs):
            order = np.argsort(self._curves[there, rung - 1], kind="stable")
            there = there[order[: len(there) // 3]]
            self._lengths[there] = after
        self._diverged = np.zeros(len(self._numbers), dtype=bool)
        whole = self._lengths == self._epochs
        self._states = ["COMPLETE" if ended else "RUNNING" for ended in whole]
        for length in self._lengths.tolist():
            climbed = [None if rung == self._epochs else rung for rung in rungs if rung <= length]
            each = [
                {"number": granted + at, "until": until, "why": _WHY | {"kind": "promotion" if at else "breadth"}}
                for at, until in enumerate(climbed)
            ]
            self.grants.append(each)
            granted += len(each)

    def tables(self) -> Iterator[_Rows]:
        """All rows of the trials, by table."""
        study = self._opened.study_id
        spans = [self._span(number) for number in self._numbers]
        times = [tuple(moment.strftime(_SQLITE_TIME) for moment in span) for span in spans]
        own = zip(self._ids, self._numbers, repeat(study), self._states, times, strict=False)
        columns = ("trial_id", "number", "study_id", "state", "datetime_start", "datetime_complete")
        ended = ((*row, start, end if row[-1] != "RUNNING" else None) for *row, (start, end) in own)
        yield TRIALS, columns, ended
        yield PARAMS, ("trial_id", "param_name", "param_value", "distribution_json"), self._params()
        yield VALUES, ("trial_id", "objective", "value", "value_type"), self._values()
        yield REPORTS, ("trial_id", "step", "intermediate_value", "intermediate_value_type"), self._reports()
        attrs = ("trial_id", "key", "value_json")
        yield TRIAL_USER_ATTRS, attrs, self._user_attrs()
        yield TRIAL_SYSTEM_ATTRS, attrs, self._system_attrs()
        yield ledger.ATTEMPTS, tuple(ledger.ATTEMPTS.c.keys()), self._attempts(spans)

    def _span(self, number: int) -> tuple[datetime, datetime]:
        start = _START + timedelta(seconds=number * _SECONDS_A_TRIAL / 100)
        return start, start + timedelta(seconds=_SECONDS_A_TRIAL)

    def _params(self) -> Iterator[tuple[Any, ...]]:
        for (name, distribution), places in zip(
            self._opened.space.distributions.items(), self._places.T, strict=True
        ):
            text, place = distribution_to_json(distribution), _value_at(distribution)
            for trial_id, share in zip(self._ids, places.tolist(), strict=True):
                yield trial_id, name, place(share), text

    def _values(self) -> Iterator[tuple[Any, ...]]:
        lasts = self._curves[np.arange(len(self._lengths)), self._lengths - 1].tolist()
        for trial_id, state, diverged, value in zip(self._ids, self._states, self._diverged, lasts, strict=True):
            if state == "RUNNING":
                continue
            yield (trial_id, 0, None, "INF_POS") if diverged else (trial_id, 0, value, "FINITE")

    def _reports(self) -> Iterator[tuple[Any, ...]]:
        for trial_id, length, curve in zip(self._ids, self._lengths, self._curves.tolist(), strict=True):
            for step, value in enumerate(curve[:length], start=1):
                yield trial_id, step, value, "FINITE"

    def _user_attrs(self) -> Iterator[tuple[Any, ...]]:
        run = {"seed": 3236827166, "threads": 1, "worker": "worker-2", "device": "cpu"}
        each = zip(self._ids, self._lengths.tolist(), self._diverged, self._curves.tolist(), strict=True)
        for trial_id, length, diverged, curve in each:
            yield trial_id, "hpo:run", json.dumps(run)
            if diverged:
                yield trial_id, "hpo:outcome", json.dumps("diverged")
                yield trial_id, "hpo:reason", json.dumps(f"train_loss is nan in epoch {length}")
                continue
            if length < self._epochs and not self.grants:
                yield trial_id, "hpo:pruned_at", json.dumps(length)
                continue
            if length < self._epochs:
                yield trial_id, "hpo:paused", json.dumps(length)
            loss = curve[length - 1]
            metrics = {
                "train_loss": loss - 0.01,
                "train_accuracy": 1 - loss / 2,
                "max_grad_norm": 0.8567970991134644,
            }
            metrics |= {"val_loss": loss, "val_accuracy": 1 - loss / 2, "lr": 9.716954188667215e-06}
            yield trial_id, "hpo:best", json.dumps({"epoch": length, "metrics": metrics})
        timing = {"attempts": 1, "epochs": 1, "training_s": 10.0, "around_s": 0.5}
        for trial_id, grants in zip(self._ids, self.grants, strict=False):
            yield trial_id, "hpo:grants", json.dumps(grants)
            yield trial_id, "hpo:timing", json.dumps(timing)

    def _system_attrs(self) -> Iterator[tuple[Any, ...]]:
        if self._opened.spec.study.pruner.name in ("successive_halving", "hyperband"):
            for trial_id, length, curve in zip(self._ids, self._lengths, self._curves, strict=True):
                for rung, epoch in enumerate(_RUNGS):
                    if epoch <= length:
                        yield trial_id, f"{RUNG_ATTR}{rung}", json.dumps(curve[epoch - 1])
        for trial_id in self._ids:
            for index, name in enumerate(("config.yaml", "log.txt")):
                artifact = f"7523c5a0-09e4-5a98-a3b2-{2 * trial_id + index:012x}"
                described = {"artifact_id": artifact, "filename": name, "mimetype": "text/plain", "encoding": None}
                yield trial_id, f"artifacts:{artifact}", json.dumps(json.dumps(described))

    def _attempts(self, spans: Sequence[tuple[datetime, datetime]]) -> Iterator[tuple[Any, ...]]:
        code, agent = "92d56173c3b1f3ea", 0
        for trial_id, (start, end), state in zip(self._ids, spans, self._states, strict=True):
            first, last = start.timestamp(), end.timestamp()
            owner = (
                "elsewhere",
                "2698258a-4435-462d-a7f9-76f7bb425133",
                24140,
                8462768.0,
                "worker-2",
                "cpu",
                code,
                agent,
            )
            outcome = "paused" if state == "RUNNING" else state.lower()
            yield trial_id, 1, *owner, first, last, last - first, last, outcome, None


def _value_at(distribution: BaseDistribution) -> Callable[[float], float]:
    """What stands in the table of parameters for a place in [0, 1) of the distribution's range."""
    if isinstance(distribution, CategoricalDistribution):
        return lambda share: float(int(share * len(distribution.choices)))
    low, high, step = float(distribution.low), float(distribution.high), distribution.step  # type: ignore[attr-defined]

    def value(share: float) -> float:
        found = low * (high / low) ** share if distribution.log else low + (high - low) * share  # type: ignore[attr-defined]
        return found if step is None else min(high, low + round((found - low) / step) * step)

    return value


def _insert(
    conn: sa.Connection, table: sa.Table, columns: tuple[str, ...], rows: Iterator[tuple[Any, ...]]
) -> None:
    into = f"{table.name} ({', '.join(map(conn.dialect.identifier_preparer.quote, columns))})"
    if conn.engine.name == "postgresql":
        with conn.connection.cursor().copy(f"COPY {into} FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
        return
    mark = "?" if conn.engine.name == "sqlite" else "%s"
    conn.exec_driver_sql(f"INSERT INTO {into} VALUES ({', '.join([mark] * len(columns))})", list(rows))


def main() -> None:
    """Write a study as the command line asks."""
    parser = argparse.ArgumentParser(description="Write a study of very many finished trials.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=50_000)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--storage", help="URL of the database; SQLite in the folder without it")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the study file")
    given = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    begun = time.perf_counter()
    file = make_big_study(
        given.folder, given.trials, epochs=given.epochs, storage=given.storage, overrides=given.set
    )
    print(f"{file}: {given.trials} trials in {time.perf_counter() - begun:.1f} s")


if __name__ == "__main__":
    main()
