"""Writes all trials of a study as a table: CSV, JSON or Parquet, with a row for each trial, or each epoch."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial

from hpo.config.schema_space import FloatParam, IntParam, ParamSpec, label
from hpo.errors import InputError, StudyError
from hpo.storage.attributes import BEST_ATTR
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import finite
from hpo.study.own_trials import own_trials
from hpo.study.trial_entries import study_trials
from trainer.files import aside_of, replacing

Kind = Literal["integer", "number", "text", "boolean", "time"]
Row = dict[str, Any]

_FIXED: Final[Mapping[str, Kind]] = {"trial": "integer", "outcome": "text"}
_AFTER: Final[Mapping[str, Kind]] = {
    "epochs": "integer",
    "best_epoch": "integer",
    "seed": "integer",
    "started": "time",
    "ended": "time",
    "duration_s": "number",
    "attempts": "integer",
    "worker": "text",
    "device": "text",
    "reason": "text",
}
#: Whole numbers of 64 bits are smaller; larger ones, which a function may draw, become text with all digits.
_WHOLE: Final = 2**63
_CURVES: Final[Mapping[str, Kind]] = {"trial": "integer", "epoch": "integer", "value": "number"}


@dataclass(frozen=True)
class Table:
    """A table: its columns with their kinds, and its rows.

    The columns come from the study file, so two exports of one study have the same columns; only those of metrics,
    and of parameters that the file does not have, depend on the trials. A value that a trial lacks is None.
    Numbers may be infinite or NaN.

    Attributes:
        columns: The columns' kinds by name, in order.
        rows: The rows, with a value for each column.
    """

    columns: Mapping[str, Kind]
    rows: Sequence[Row]


def trials_table(opened: OpenStudy) -> Table:
    """One row for each trial, by number.

    Columns: ``trial``, ``outcome``, ``value`` (with several objectives ``values.<metric>`` instead),
    ``params.<dotted path>``, ``metrics.<name>`` of the best epoch, ``epochs``, ``best_epoch``, ``seed``,
    ``started`` and ``ended`` (of the first and the last attempt, UTC), ``duration_s`` (of all attempts together),
    ``attempts``, ``worker``, ``device`` (of the last attempt), ``reason`` (of a failed trial). The values are
    those of `hpo trials`: for a trial that is not complete, the best so far.
    """
    entries = study_trials(opened)
    # Read after the entries: a trial may have started since, and a trial that has ended has all its final data.
    by_number = {trial.number: trial for trial in own_trials(opened)}
    frozen = [by_number[entry["trial"]] for entry in entries]
    rows = [_row(opened, trial, entry) for trial, entry in zip(frozen, entries, strict=True)]
    metrics = sorted({name for row in rows for name in row if name.startswith("metrics.")})
    columns: dict[str, Kind] = dict(_FIXED)
    columns |= dict.fromkeys(_values(opened, None), "number")
    space = opened.spec.search_space
    columns |= {f"params.{name}": _kind(param) for name, param in space.items()}
    # Parameters that a function draws itself, and those of an earlier study file.
    drawn = {name: each for trial in frozen for name, each in trial.distributions.items() if name not in space}
    columns |= {f"params.{name}": _drawn_kind(each) for name, each in drawn.items()}
    columns |= dict.fromkeys(metrics, "number")
    columns |= _AFTER
    return Table(columns, [{name: row.get(name) for name in columns} for row in rows])


def curves_table(opened: OpenStudy) -> Table:
    """One row for each epoch that a trial has reported: ``trial``, ``epoch`` (from 1), ``value`` of the metric."""
    rows: list[Row] = [
        {"trial": trial.number, "epoch": epoch, "value": float(value)}
        for trial in own_trials(opened)
        for epoch, value in sorted(trial.intermediate_values.items())
    ]
    return Table(_CURVES, rows)


def write_table(table: Table, form: str, path: Path) -> None:
    """Write a table to a file, completely or not at all; creates folders.

    Raises:
        InputError: The path is a folder.
        StudyError: It can't be written, or a package for the format is missing.
    """
    if path.is_dir():
        raise InputError("is a folder", path="--output", value=str(path), fix="name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if form == "parquet":
            _write_parquet(table, path)
            return
        with replacing(path) as file:
            file.write(table_text(table, form))
    except OSError as error:
        problem = f"{path}: the table can't be written: {error.strerror or error}"
        raise StudyError(f"{problem}\n  fix: free some room, or choose another place") from error


def table_text(table: Table, form: str) -> str:
    """A table as text: ``csv`` (RFC 4180, but lines end as on Unix) or ``json`` (a list of objects).

    A missing value is an empty field in CSV and null in JSON; a list or mapping is JSON in CSV. Numbers that are
    not finite are ``inf``, ``-inf`` and ``nan`` in CSV, which pandas reads back, and null in JSON. Text is written
    unchanged, even if it begins with ``=``: it comes from the user's own study file, and joins with other data
    need it unchanged. To open a stranger's study in a spreadsheet, import the columns as text.
    """
    if form == "json":
        return json.dumps(finite([_plain(row) for row in table.rows]), indent=2) + "\n"
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table.columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_cells(row) for row in table.rows)
    return text.getvalue()


def _plain(row: Row) -> Row:
    """The row with times in ISO 8601."""
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in row.items()}


def _cells(row: Row) -> Row:
    """A plain row with lists and mappings as text, as tables show them."""
    return {name: label(value) for name, value in _plain(row).items()}


def _row(opened: OpenStudy, trial: FrozenTrial, entry: Mapping[str, Any]) -> Row:
    kept = trial.user_attrs.get(BEST_ATTR) or {}
    internals = entry["internals"]
    attempts = internals["attempts"]
    started = datetime.fromisoformat(attempts[0]["started"]) if attempts else _utc(trial.datetime_start)
    ended = attempts[-1]["ended"] if attempts else None
    return {
        "trial": entry["trial"],
        "outcome": str(entry["outcome"]),
        **_values(opened, entry),
        **{f"params.{name}": value for name, value in entry["params"].items()},
        **{f"metrics.{name}": value for name, value in kept.get("metrics", {}).items()},
        "epochs": entry["epochs"],
        "best_epoch": kept.get("epoch"),
        "seed": internals["seed"],
        "started": started,
        "ended": datetime.fromisoformat(ended) if ended else _utc(trial.datetime_complete),
        "duration_s": entry["duration_s"],
        "attempts": len(attempts),
        "worker": internals["worker"],
        "device": internals["device"],
        "reason": entry["reason"],
    }


def _values(opened: OpenStudy, entry: Mapping[str, Any] | None) -> Row:
    """The columns of the study's metrics with a trial's values, or None without one; the leading may be so far."""
    goals = opened.spec.study.objectives
    if goals is None:
        return {"value": entry and entry["value"]}
    values = {} if entry is None else {**entry["values"], next(iter(goals)): entry["value"]}
    return {f"values.{name}": values.get(name) for name in goals}


def _utc(moment: datetime | None) -> datetime | None:
    """A time of Optuna, which is in this machine's time zone without saying so, in UTC."""
    return None if moment is None else moment.astimezone(UTC)


def _kind(param: ParamSpec) -> Kind:
    """The kind of a parameter's column; choices of different types become text."""
    if isinstance(param, FloatParam | IntParam):
        return "number" if isinstance(param, FloatParam) else "integer"
    return _kind_of(param.choices)


def _drawn_kind(drawn: BaseDistribution) -> Kind:
    """The kind of the column of a parameter that a function draws itself."""
    if isinstance(drawn, IntDistribution):
        return _kind_of((drawn.low, drawn.high))
    return _kind_of(drawn.choices) if isinstance(drawn, CategoricalDistribution) else "number"


def _kind_of(choices: Sequence[Any]) -> Kind:
    types = {type(choice) for choice in choices if choice is not None}
    if types == {bool}:
        return "boolean"
    if any(type(choice) is int and not -_WHOLE <= choice < _WHOLE for choice in choices):
        return "text"
    if types == {int}:
        return "integer"
    return "number" if types and types <= {int, float} else "text"


def _write_parquet(table: Table, path: Path) -> None:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        problem = f"Parquet needs pyarrow: {error}"
        raise StudyError(
            f"{problem}\n  fix: pip install 'hpo-service[parquet]', or export to csv or json"
        ) from error
    types = {
        "integer": pa.int64(),
        "number": pa.float64(),
        "text": pa.string(),
        "boolean": pa.bool_(),
        "time": pa.timestamp("ms", tz="UTC"),
    }
    schema = pa.schema([(name, types[kind]) for name, kind in table.columns.items()])
    rows = [{name: _as(kind, row[name]) for name, kind in table.columns.items()} for row in table.rows]
    with aside_of(path) as aside:
        parquet.write_table(pa.Table.from_pylist(rows, schema), aside)


def _as(kind: Kind, value: Any) -> Any:
    """A value converted to its column's type: in a column of texts, other choices become JSON."""
    value = label(value)
    if kind == "number" and value is not None:
        return float(value)  # pyarrow refuses whole numbers that a float would round
    return json.dumps(value) if kind == "text" and not isinstance(value, str | None) else value
