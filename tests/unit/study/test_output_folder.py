"""An output folder is one study's: no other one, and nothing of a person's, is mixed up with it."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from pathlib import Path

import optuna
import pytest

from hpo.errors import InputError
from hpo.study.folders import OWNER_FILE, make_output_folder, print_error
from hpo.study.open_study import load_study, start_study
from tests.support.commands import hpo, make_study
from tests.support.studies import Studies


def test_another_study_is_refused_the_folder_and_leaves_nothing(studies: Studies) -> None:
    place = f"run.output_dir={studies.folder / 'results'}"
    storage = f"run.storage=sqlite:///{studies.folder / 'all.db'}"
    spec = studies.spec("study.name=first", place, storage)
    start_study(spec).storage.close()
    make_output_folder(spec)
    start_study(spec).storage.close()  # the same study, again
    make_output_folder(spec)
    second = studies.spec("study.name=second", place, storage)
    for refused in (start_study, make_output_folder):
        with pytest.raises(InputError, match=r"(?s)run\.output_dir: the study first lies there.*results") as error:
            refused(second)
    assert "leave it out" in str(error.value)
    with pytest.raises(Exception, match="no study named second"):
        load_study(second)
    assert (spec.output_dir / OWNER_FILE).read_text() == "first\n"


def test_a_database_of_plain_optuna_is_refused_and_left_as_it_was(studies: Studies) -> None:
    file = studies.folder / "plain.db"
    plain = optuna.create_study(storage=f"sqlite:///{file}", study_name="tiny")
    plain.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    before = file.read_bytes()
    spec = studies.spec(f"run.storage=sqlite:///{file}")
    with pytest.raises(InputError, match=r"study\.name: the storage has a study named tiny that was not"):
        start_study(spec)
    assert file.read_bytes() == before


@pytest.mark.parametrize("name", ["logs", "final", "trials", "agents"])
def test_what_a_person_has_under_a_name_of_ours_is_not_mixed_up_with_it(studies: Studies, name: str) -> None:
    spec = studies.spec()
    mine = spec.output_dir / name / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("thesis")
    with pytest.raises(InputError, match=f"run.output_dir: it holds {name}, which no study has made"):
        start_study(spec)
    assert sorted(spec.output_dir.rglob("*")) == [mine.parent, mine]


def test_the_folder_of_an_earlier_version_or_of_one_who_was_killed_is_taken_over(studies: Studies) -> None:
    spec = studies.spec()
    (spec.output_dir / "logs").mkdir(parents=True)
    (spec.output_dir / "logs" / "host-worker-1.log").write_text("")
    start_study(spec).storage.close()
    (spec.output_dir / "trials" / "0" / "attempt-1").mkdir(parents=True)
    (spec.output_dir / "agents").mkdir()
    (spec.output_dir / "agents" / "agent-1.log").write_text("")
    start_study(spec).storage.close()
    make_output_folder(spec)
    (spec.output_dir / OWNER_FILE).write_text("")
    make_output_folder(spec)


@pytest.mark.parametrize("name", ["driver.log", "driver-17.log", "agent-17_0.log"])
def test_what_an_engine_prints_for_a_study_before_it_is_made_is_no_others(studies: Studies, name: str) -> None:
    spec = studies.spec()
    (spec.output_dir / "agents").mkdir(parents=True)
    (spec.output_dir / "agents" / name).write_text("checking study.yaml\n")
    start_study(spec).storage.close()
    make_output_folder(spec)


def test_an_empty_output_dir_is_refused(tmp_path: Path) -> None:
    said = hpo("status", make_study(tmp_path), "--output-dir", "", code=2).stderr
    assert said.startswith("command line: --output-dir: is empty\n  fix: name a folder")


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("")
    said = hpo("status", make_study(tmp_path), "--output-dir", tmp_path / "results", code=3).stderr
    assert f"{tmp_path / 'results'} is a file\n  fix: name a folder" in said


def test_what_starts_a_study_over_deletes_that_very_study(studies: Studies) -> None:
    place = studies.folder / "an odd place"
    options = ("study.name=other", f"run.output_dir={place}")
    start_study(studies.spec(*options)).storage.close()
    with pytest.raises(InputError) as error:
        start_study(studies.spec(*options, "model.dropout=0.2"))
    command = str(error.value).rpartition("start over after `")[2].rstrip("`\n")
    assert shlex.split(command) == ["hpo", "delete", str(studies.folder / "study.yaml"), *options]
    assert hpo(*shlex.split(command)[1:], "--yes").stdout == "deleted the study other\n"
    assert not place.exists() or not list(place.rglob(OWNER_FILE))


@pytest.mark.parametrize("name", ["trials", "artifacts", "final"])
def test_what_a_link_leads_to_is_not_deleted(studies: Studies, name: str) -> None:
    spec = studies.spec()
    start_study(spec).storage.close()
    make_output_folder(spec)
    elsewhere = studies.folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "thesis.txt").write_text("")
    (spec.output_dir / name).symlink_to(elsewhere, target_is_directory=True)
    inner = spec.output_dir / "logs" / "link"
    inner.symlink_to(elsewhere, target_is_directory=True)
    said = hpo("delete", studies.folder / "study.yaml", "--yes").stdout
    link = f"{spec.output_dir / name} was a link; what lies in {elsewhere} stays"
    assert said == f"deleted the study tiny\n{link}\n"
    assert [each.name for each in elsewhere.iterdir()] == ["thesis.txt"]
    assert [each.name for each in spec.output_dir.iterdir()] == ["study.db"]


@pytest.mark.parametrize("place", ["", "trials", "trials/0/attempt-1"])
def test_a_study_of_which_files_would_stay_is_not_deleted(
    studies: Studies, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    spec = studies.spec()
    start_study(spec).storage.close()
    make_output_folder(spec)
    (spec.output_dir / "trials" / "0" / "attempt-1").mkdir(parents=True)
    (spec.output_dir / "trials" / "0" / "attempt-1" / "log.txt").write_text("")
    locked, real = str(spec.output_dir / place), os.access
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != locked and real(path, mode))
    said = hpo("delete", studies.folder / "study.yaml", "--yes", code=3).stderr
    assert said == (
        f"{locked}: can't be removed: Permission denied; nothing has been deleted\n"
        "  fix: run this as a user who may write there, such as who ran the study\n"
    )
    load_study(spec).storage.close()
    assert (spec.output_dir / "trials" / "0" / "attempt-1" / "log.txt").is_file()


def test_what_goes_wrong_while_files_are_removed_is_said(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = studies.spec()
    start_study(spec).storage.close()
    make_output_folder(spec)

    def refuse(folder: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(folder / "open"))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    said = hpo("delete", studies.folder / "study.yaml", "--yes", code=3).stderr
    assert "open: can't be removed: Device or resource busy; the study is gone from the storage" in said


def test_an_error_that_names_a_path_of_other_bytes_than_utf_8_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    print_error("no such file: " + os.fsdecode(b"caf\xe9"))
    assert capfd.readouterr().err == "no such file: caf\\udce9\n"
