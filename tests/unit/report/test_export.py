"""Trials as tables: every format says the same, empty studies and odd values included."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import sqlalchemy as sa
from pyarrow import parquet

from hpo.errors import StudyError
from hpo.report import tables
from hpo.report.data import study_report
from hpo.report.tables import Table, curves_table, table_text, trials_table, write_table
from hpo.storage.attributes import PAUSE_AT_ATTR
from hpo.storage.ledger import ATTEMPTS
from hpo.storage.optuna_private import id_of_trial
from hpo.study.open_study import OpenStudy
from hpo.study.status import study_best
from hpo.study.trial_entries import study_trials
from tests.support.attempts import run
from tests.support.commands import STUDY, hpo
from tests.support.finished import finished_study
from tests.support.studies import Studies, ask

#: One entry of each type that a column may have.
SPACE = (
    "search_space={optimizer.lr: {type: float, low: 0.001, high: 0.1}, "
    "model.hidden: {type: int, low: 2, high: 8}, "
    "loss.nan: {type: categorical, choices: [false]}, loader.batch_size: {type: categorical, choices: [8, 16]}, "
    "callbacks.early_stopping: {type: categorical, choices: [true, false]}, "
    "trainer.device: {type: categorical, choices: [null, cpu]}, "
    "trainer.compile: {type: categorical, choices: [false]}, "
    "model.dropout: {type: categorical, choices: [0.5, 0], when: {loader.batch_size: 16}}}"
)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory, ready_sqlite_file: Path) -> Iterator[OpenStudy]:
    with finished_study(tmp_path_factory.mktemp("study"), ready_sqlite_file, SPACE) as opened:
        failed = opened.study.ask()
        opened.space.suggest(failed)
        failed.report(math.inf, 1)
        opened.study.tell(failed, state=opened.study.trials[0].state.FAIL)
        yield opened


def test_a_row_says_what_the_trial_was(view: OpenStudy) -> None:
    table, best = trials_table(view), study_best(view)
    assert isinstance(best, dict)
    row = table.rows[best["trial"]]
    assert (row["trial"], row["outcome"], row["value"]) == (best["trial"], "complete", best["value"])
    metrics = {name.removeprefix("metrics."): row[name] for name in row if name.startswith("metrics.")}
    assert metrics == best["metrics"] | best["internals"]["metrics"]
    assert all(row[f"params.{name}"] == value for name, value in best["params"].items())
    assert (row["epochs"], row["attempts"], row["worker"]) == (3, 1, "worker-0")
    assert row["started"] <= row["ended"] <= datetime.now(UTC)
    assert [each["outcome"] for each in table.rows] == [each["outcome"] for each in study_trials(view)]
    assert table.rows[3]["outcome"] == "error"
    assert table.rows[3]["value"] is None


def test_all_formats_hold_the_same(view: OpenStudy, tmp_path: Path) -> None:
    table = trials_table(view)
    as_json = json.loads(table_text(table, "json"))
    as_csv = list(csv.DictReader(io.StringIO(table_text(table, "csv"))))
    write_table(table, "parquet", tmp_path / "new" / "trials.parquet")
    as_parquet = parquet.read_table(tmp_path / "new" / "trials.parquet").to_pylist()
    for row, from_json, from_csv, from_parquet in zip(table.rows, as_json, as_csv, as_parquet, strict=True):
        assert list(row) == list(from_json) == list(from_csv) == list(from_parquet)
        for name, value in row.items():
            if isinstance(value, datetime):
                assert datetime.fromisoformat(from_json[name]) == datetime.fromisoformat(from_csv[name]) == value
                assert abs((from_parquet[name] - value).total_seconds()) < 0.001
            else:
                assert from_json[name] == value
                assert from_csv[name] == ("" if value is None else str(value))
                assert from_parquet[name] == value


def test_columns_have_the_types_of_the_space_whatever_the_trials_are(
    view: OpenStudy, studies: Studies, tmp_path: Path
) -> None:
    with studies.open(SPACE) as (empty,):
        for name, opened in (("full", view), ("empty", empty)):
            write_table(trials_table(opened), "parquet", tmp_path / f"{name}.parquet")
    full, none = (parquet.read_schema(tmp_path / f"{name}.parquet") for name in ("full", "empty"))
    assert {name: full.field(name).type for name in none.names} == {
        name: none.field(name).type for name in none.names
    }
    assert {name for name in full.names if name not in none.names} == {
        name for name in full.names if name.startswith("metrics.")
    }
    assert none.field("params.callbacks.early_stopping").type == pa.bool_()
    assert none.field("params.loader.batch_size").type == pa.int64()
    assert none.field("params.model.dropout").type == pa.float64()
    assert none.field("params.trainer.device").type == pa.string()
    with studies.open(SPACE) as (empty,):
        assert table_text(trials_table(empty), "json") == "[]\n"
        assert table_text(trials_table(empty), "csv").count("\n") == 1


def test_odd_values_survive_as_each_format_can() -> None:
    table = Table(
        {"number": "number", "text": "text"},
        [{"number": math.inf, "text": '=1+1, "so"\nto say'}, {"number": math.nan, "text": None}],
    )
    rows = list(csv.DictReader(io.StringIO(table_text(table, "csv"))))
    assert rows[0] == {"number": "inf", "text": '=1+1, "so"\nto say'}
    assert rows[1] == {"number": "nan", "text": ""}
    assert [row["number"] for row in json.loads(table_text(table, "json"))] == [None, None]


def test_choices_of_several_types_are_text_in_parquet(tmp_path: Path) -> None:
    table = Table({"choice": "text"}, [{"choice": value} for value in ("a", 1, True, None)])
    write_table(table, "parquet", tmp_path / "t.parquet")
    assert parquet.read_table(tmp_path / "t.parquet")["choice"].to_pylist() == ["a", "1", "true", None]


def test_whole_numbers_of_any_size_that_a_function_draws_are_in_parquet(studies: Studies, tmp_path: Path) -> None:
    text = "study: {name: drawn, direction: minimize, n_trials: 3}\nobjective: {_target_: parts.objective}\n"
    drawn = {"mixed": [0.5, 2**60 + 1, -1], "large": [1, 2**63, None]}
    with studies.open(text=text, code="def objective(trial):\n    return 0.0\n") as (view,):
        for number in range(3):
            view.study.enqueue_trial({name: choices[number] for name, choices in drawn.items()})
            trial, _ = ask(view)
            for name, choices in drawn.items():
                trial.suggest_categorical(name, choices)
            trial.suggest_int("range", 1, 2**64)
            view.study.tell(trial, 0.0)
        table = trials_table(view)
    write_table(table, "parquet", tmp_path / "t.parquet")
    found = parquet.read_table(tmp_path / "t.parquet")
    for name, as_written in (("mixed", float), ("large", str), ("range", str)):
        values = [row[f"params.{name}"] for row in table.rows]
        assert found[f"params.{name}"].to_pylist() == [
            None if each is None else as_written(each) for each in values
        ]


def test_curves_have_a_row_an_epoch(view: OpenStudy) -> None:
    table = curves_table(view)
    trials = view.study.trials
    assert [(row["trial"], row["epoch"]) for row in table.rows] == [
        *((number, epoch) for number in range(3) for epoch in (1, 2, 3)),
        (3, 1),
    ]
    assert all(row["value"] == trials[row["trial"]].intermediate_values[row["epoch"]] for row in table.rows)
    assert json.loads(table_text(table, "json"))[-1]["value"] is None


def test_a_trial_took_what_its_attempts_took(studies: Studies) -> None:
    with studies.open("study.n_trials=2") as (view,):
        (trial, _), _ = ask(view), ask(view)
        view.storage.requeue(id_of_trial(trial), "interrupted")
        ask(view)
        view.study.tell(trial.number, 1.0)
        with view.storage.engine.begin() as conn:  # the second attempt came a day later, or whenever
            conn.execute(sa.update(ATTEMPTS).values(seconds=40.0 + ATTEMPTS.c.attempt))
        assert [row["duration_s"] for row in trials_table(view).rows] == [83.0, None]
        report = study_report(view)
        assert list(map(report.took, report.trials)) == [83.0, None]


def test_a_paused_trial_took_what_its_attempts_took_so_far(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        trial.report(1.0, 2)
        trial.set_user_attr(PAUSE_AT_ATTR, 2)
        view.storage.pause(id_of_trial(trial), 2)
        with view.storage.engine.begin() as conn:
            conn.execute(sa.update(ATTEMPTS).values(seconds=41.0))
        (entry,) = study_trials(view)
        assert (entry["outcome"], entry["duration_s"]) == ("paused", 41.0)
        assert [row["duration_s"] for row in trials_table(view).rows] == [41.0]
        report = study_report(view)
        assert report.took(report.trials[0]) == 41.0


def test_a_trial_that_begins_meanwhile_is_left_out(studies: Studies, monkeypatch: pytest.MonkeyPatch) -> None:
    with studies.open(views=2) as (view, worker):
        ask(worker)
        read = tables.study_trials

        def meanwhile(opened: OpenStudy) -> list[dict[str, Any]]:
            found = read(opened)
            ask(worker)
            return found

        monkeypatch.setattr(tables, "study_trials", meanwhile)
        assert [row["trial"] for row in trials_table(view).rows] == [0]


def test_several_objectives_have_a_column_each(studies: Studies) -> None:
    text = STUDY.replace("pruner: none", "pruner: none\n  objectives: {val_loss: minimize, val_mae: minimize}")
    with studies.open(text=text) as (view,):
        run(view)
        table = trials_table(view)
        assert [name for name in table.columns if name.startswith("value")] == [
            "values.val_loss",
            "values.val_mae",
        ]
        assert [table.rows[0]["values.val_loss"], table.rows[0]["values.val_mae"]] == view.study.trials[0].values
        trial = view.study.ask()
        for step, value in enumerate((2.0, 1.5, 1.75), start=1):
            view.storage.set_trial_intermediate_value(id_of_trial(trial), step, value)
        under_way = trials_table(view).rows[1]  # as `hpo trials` has it
        assert [under_way["values.val_loss"], under_way["values.val_mae"]] == [1.5, None]


def test_without_pyarrow_it_says_what_to_install(
    view: OpenStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(StudyError, match=r"pip install 'hpo-service\[parquet\]'"):
        write_table(trials_table(view), "parquet", tmp_path / "trials.parquet")
    assert not list(tmp_path.iterdir())


def test_the_command(view: OpenStudy, tmp_path: Path) -> None:
    study = view.spec.path
    options = (SPACE,)
    assert len(list(csv.reader(io.StringIO(hpo("export", study, *options).stdout)))) == 5
    assert len(json.loads(hpo("export", study, *options, "--format", "json").stdout)) == 4
    assert "4 trials" in hpo("export", study, *options, "-o", tmp_path / "t.parquet").stdout
    assert parquet.read_table(tmp_path / "t.parquet").num_rows == 4
    assert "10 epochs" in hpo("export", study, *options, "--curves", "-o", tmp_path / "c.csv").stdout
    for wrong, text in (
        (("--format", "parquet"), "name a file with `-o"),
        (("-o", "trials.xlsx"), "names no format"),
        (("-o", tmp_path, "--format", "csv"), "is a folder"),
    ):
        assert text in hpo("export", study, *options, *wrong, code=2).stderr
    blocked = hpo("export", study, *options, "-o", tmp_path / "c.csv" / "t.csv", code=3).stderr
    assert "can't be written" in blocked


@pytest.mark.parametrize("form", ["csv", "json", "parquet"])
def test_a_link_stays_one(tmp_path: Path, form: str) -> None:
    target, link = tmp_path / "there" / "trials", tmp_path / f"trials.{form}"
    target.parent.mkdir()
    target.write_text("an earlier one")
    link.symlink_to(target)
    write_table(Table({"trial": "integer"}, [{"trial": 7}]), form, link)
    assert link.is_symlink()
    assert target.read_bytes() != b"an earlier one"
    assert [file.name for file in target.parent.iterdir()] == ["trials"]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        write_table(Table({"trial": "integer"}, [{"trial": 7}]), "csv", pipe)
        if not pipe.is_fifo():
            reader.kill()
        assert reader.communicate()[0] == "trial\n7\n"
    assert pipe.is_fifo()
