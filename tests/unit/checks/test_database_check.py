"""What `hpo check` says of the study's database: what a run would meet there."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from hpo.checks.database_check import check_stored
from hpo.config.study_modules import forget_modules
from hpo.errors import InputError
from hpo.study.open_study import load_study
from hpo.study.taking import Taker
from tests.support.commands import MODEL, hpo
from tests.support.studies import Studies


def test_a_study_that_is_new_or_as_it_was_is_passed_over(studies: Studies) -> None:
    spec = studies.spec()
    assert check_stored(spec) == []
    assert not spec.output_dir.exists()
    with studies.open() as (view,):
        Taker(view).take()
        assert check_stored(spec) == []
    assert check_stored(studies.spec("study.name=another")) == []


def test_another_config_than_the_stored_one_is_named(studies: Studies) -> None:
    with studies.open():
        pass
    (found,) = check_stored(studies.spec("model.dropout=0.3"))
    assert found.path == "study.name"
    assert found.problem.startswith("the study tiny was started with another config:\n    model.dropout: ")
    assert "undo the change" in found.fix
    assert "(`study.name=tiny-2`, with `study.warm_start=study.yaml` to give it this study's trials)" in found.fix
    (found,) = check_stored(studies.spec("study.metric=val_mae", "study.direction=minimize"))
    assert "warm_start" not in found.fix, "the values of its trials are another metric's"
    (found,) = check_stored(studies.spec("model.dropout=0.3", f"run.output_dir={studies.spec().output_dir}"))
    assert "warm_start" not in found.fix, "by its file alone the study may not be found"
    said = hpo("check", studies.folder / "study.yaml", "model.dropout=0.3", "--device", "cpu").stdout
    assert "study.name: the study tiny was started with another config" in said


def test_other_code_than_that_of_its_trials_is_named(studies: Studies) -> None:
    with studies.open() as (view,):
        module = next(file for file in studies.folder.glob("*.py") if file.read_text() == MODEL)
        module.write_text(f"{MODEL}\nMORE = 1\n")
        forget_modules(studies.folder)
        assert check_stored(studies.spec()) == [], "no trial has begun"
        module.write_text(MODEL)
        Taker(view).take()
    module.write_text(f"{MODEL}\nMORE = 1\n")
    (found,) = check_stored(studies.spec())
    assert found.problem.startswith("the study's code is ")
    assert "--accept-code-change" in found.fix


def test_a_database_that_does_not_answer_is_named_and_stops_nothing(studies: Studies) -> None:
    (found,) = check_stored(studies.spec("run.storage=postgresql://ann:secret@127.0.0.1:1/x"))
    assert found.path == "run.storage"
    assert "can't open the database: " in found.problem
    assert "secret" not in str(found)
    assert found.fix.startswith("see that the server runs")


def test_tables_of_another_version_are_named(studies: Studies) -> None:
    with studies.open():
        pass
    with sqlite3.connect(studies.spec().output_dir / "study.db") as conn:
        conn.execute("UPDATE alembic_version SET version_num = 'v9.9.9'")
    conn.close()
    (found,) = check_stored(studies.spec())
    assert "its tables are at version v9.9.9" in found.problem


@pytest.mark.parametrize("text", ["no database", ""])
def test_a_file_that_is_no_database_is_named(studies: Studies, tmp_path: Path, text: str) -> None:
    file = tmp_path / "odd.db"
    file.write_text(text)
    found = check_stored(studies.spec(f"run.storage=sqlite:///{file}"))
    assert [each.path for each in found] == (["run.storage"] if text else [])
    assert file.read_text() == text


@pytest.mark.parametrize(
    "url",
    [
        "mysql://ann:secret@127.0.0.1:1/x?colour=red",
        "mysql://ann:secret@127.0.0.1:1/x?connect_timeout=soon",
        "mysql://ann:secret@127.0.0.1:1/x?charset=none",
    ],
    ids=["unknown", "no number", "no charset"],
)
def test_an_option_that_the_driver_refuses_is_an_error_in_words(studies: Studies, url: str) -> None:
    spec = studies.spec(f"run.storage={url}")
    for opened in (lambda: check_stored(spec), lambda: load_study(spec)):
        with pytest.raises(InputError, match="an option in it can't be used: ") as said:
            opened()
        assert "secret" not in str(said.value)
        assert said.value.fix == "correct what follows the `?`"
