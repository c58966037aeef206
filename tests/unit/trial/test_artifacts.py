"""What a trial leaves in the artifact store, and the study's note."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
import sqlalchemy as sa
import yaml
from optuna.artifacts import FileSystemArtifactStore, download_artifact, get_all_artifact_meta
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from optuna_dashboard import get_note

from hpo.config.yaml_loader import Loader
from hpo.errors import LeaseLostError
from hpo.report.origin import origin
from hpo.study.environment import environment
from hpo.study.folders import attempt_folder
from hpo.study.note import note, write_note
from hpo.study.open_study import OpenStudy, load_study
from hpo.trial.artifacts import artifact_folder, artifact_id, keep_artifacts
from tests.support.commands import STUDY, hpo
from tests.support.studies import Studies, ask
from trainer.git_state import git_state

NAMES = ["config.yaml", "log.txt"]


def attempted(view: OpenStudy, number: int, attempt: int = 1, log: str = "epoch 1\n") -> Path:
    """An attempt's folder as a worker leaves it."""
    folder = attempt_folder(view.spec, number, attempt)
    (folder / "config.yaml").write_text(f"seed: {attempt}\n")
    (folder / "log.txt").write_text(log)
    return folder


def kept(view: OpenStudy, trial: optuna.Trial, folder: Path) -> None:
    keep_artifacts(view, trial._trial_id, trial.number, folder)


def read(view: OpenStudy, number: int, folder: Path) -> dict[str, str]:
    """A trial's artifacts as plain Optuna finds and downloads them, by file name."""
    storage = RDBStorage(view.spec.storage_url)
    try:
        study = optuna.load_study(study_name=view.spec.study.name, storage=storage)
        store, found = FileSystemArtifactStore(artifact_folder(view.spec)), {}
        for meta in get_all_artifact_meta(study.trials[number], storage=storage):
            file = folder / meta.artifact_id
            download_artifact(artifact_store=store, file_path=str(file), artifact_id=meta.artifact_id)
            found[meta.filename] = file.read_text()
            file.unlink()
        return found
    finally:
        storage.engine.dispose()


def commits(view: OpenStudy) -> list[str]:
    """Fills up with a word for each transaction that the study's storage stores."""
    seen: list[str] = []
    sa.event.listen(view.storage.engine, "commit", lambda _: seen.append("commit"))
    return seen


def test_plain_optuna_finds_config_and_log_of_every_end(studies: Studies, tmp_path: Path) -> None:
    with studies.open() as (view,):
        for number, state in enumerate((TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)):
            trial, _ = ask(view)
            kept(view, trial, attempted(view, number))
            view.study.tell(trial, 0.5 if state == TrialState.COMPLETE else None, state=state)
            found = read(view, number, tmp_path)
            assert sorted(found) == NAMES
            assert (found["config.yaml"], found["log.txt"]) == ("seed: 1\n", "epoch 1\n")
        assert len(list(artifact_folder(view.spec).iterdir())) == 6


def test_files_are_linked_and_registered_in_one_transaction(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        folder = attempted(view, 0)
        seen = commits(view)
        kept(view, trial, folder)
        assert len(seen) == 1
        for name in ("config.yaml", "log.txt"):
            assert (artifact_folder(view.spec) / artifact_id("tiny", 0, name)).samefile(folder / name)
        with (folder / "log.txt").open("a") as log:
            log.write("what came later\n")
        assert (artifact_folder(view.spec) / artifact_id("tiny", 0, "log.txt")).read_text().endswith("later\n")


def test_a_trial_that_goes_on_replaces_its_own(studies: Studies, tmp_path: Path) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        kept(view, trial, attempted(view, 0))
        kept(view, trial, attempted(view, 0, 1))  # the same file once more
        kept(view, trial, attempted(view, 0, 2, "the second attempt\n"))
        view.study.tell(trial, 0.5)
        found = read(view, 0, tmp_path)
        assert (found["config.yaml"], found["log.txt"]) == ("seed: 2\n", "the second attempt\n")
        assert len(list(artifact_folder(view.spec).iterdir())) == 2


def test_a_trial_that_failed_early_has_what_there_is(studies: Studies, tmp_path: Path) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        folder = attempted(view, 0)
        (folder / "config.yaml").unlink()
        keep_artifacts(view, trial._trial_id, 0, folder)
        view.study.tell(trial, state=TrialState.FAIL)
        assert list(read(view, 0, tmp_path)) == ["log.txt"]


def test_where_there_are_no_links_files_are_copied(
    studies: Studies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)  # as FAT answers, which a test can't mount
    with studies.open() as (view,):
        trial, _ = ask(view)
        folder = attempted(view, 0)
        kept(view, trial, folder)
        view.study.tell(trial, 0.5)
        assert read(view, 0, tmp_path)["log.txt"] == "epoch 1\n"
        assert not (artifact_folder(view.spec) / artifact_id("tiny", 0, "log.txt")).samefile(folder / "log.txt")


def test_a_store_that_cannot_be_written_costs_the_artifacts_and_no_more(
    studies: Studies, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        artifact_folder(view.spec).write_text("a file where the folder should be")
        kept(view, trial, attempted(view, 0))
        assert "trial 0: its artifacts can't be kept in" in caplog.text
        view.study.tell(trial, 0.5)
        assert read(view, 0, tmp_path) == {}


def test_a_lost_lease_registers_nothing(studies: Studies, tmp_path: Path) -> None:
    with studies.open(views=2) as (view, other):
        trial, _ = ask(view)
        view.storage.requeue(trial._trial_id)
        with pytest.raises(LeaseLostError):
            kept(view, trial, attempted(view, 0))
        again, _ = ask(other)
        assert again.number == 0
        with pytest.raises(LeaseLostError):
            kept(view, trial, attempted(view, 0))
        other.study.tell(again, 0.5)
        assert read(other, 0, tmp_path) == {}


def test_a_lease_lost_behind_its_back_registers_nothing(studies: Studies, tmp_path: Path) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        with view.storage.engine.begin() as conn:
            conn.execute(sa.text("UPDATE hpo_attempts SET ended_at = 1"))
        with pytest.raises(LeaseLostError):
            kept(view, trial, attempted(view, 0))
        assert read(view, 0, tmp_path) == {}


def test_deleting_the_study_deletes_its_artifacts(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        kept(view, trial, attempted(view, 0))
        view.study.tell(trial, 0.5)
        hpo("delete", studies.folder / "study.yaml", "--yes")
        assert not artifact_folder(view.spec).exists()


# ---- the note


def shown(view: OpenStudy) -> str:
    """The note as the dashboard reads it."""
    storage = RDBStorage(view.spec.storage_url)
    try:
        text: str = get_note(optuna.load_study(study_name=view.spec.study.name, storage=storage))
        return text
    finally:
        storage.engine.dispose()


def blocks(text: str) -> list[str]:
    """The content of the fenced blocks, with their ends as in CommonMark."""
    return [body for _, body in re.findall(r"^(`{3,})yaml\n(.*?)^ {0,3}\1`*$", text, re.MULTILINE | re.DOTALL)]


def test_the_note_holds_the_study_file_and_the_environment(studies: Studies) -> None:
    with studies.open() as (view,):
        write_note(view)
        config, here = map(yaml.safe_load, blocks(shown(view)))
        assert config["optimizer"] == view.spec.base_config()["optimizer"]
        assert config["search_space"]["optimizer.lr"]["high"] == 0.1
        assert here == environment(view.spec.folder)


def test_text_that_looks_like_a_number_is_text_in_the_note_and_in_the_report(studies: Studies) -> None:
    with studies.open("data.note='1e-3'", "data.day='2026-01-02'", "data.rate=1e-3") as (view,):
        write_note(view)
        config, _ = (yaml.load(block, Loader=Loader) for block in blocks(shown(view)))
        assert config["data"] == view.spec.base_config()["data"]
        assert origin(view)[0]["data"] == view.spec.base_config()["data"]


def test_a_shorter_note_leaves_nothing_of_a_longer_one(studies: Studies) -> None:
    with studies.open("study.name=long", f"data.note={'x' * 9000}") as (view,):
        write_note(view)
        assert "x" * 9000 in shown(view)
        other = load_study(studies.spec("study.name=long"))
        write_note(other)
        assert shown(other) == note(other.spec)
        other.storage.close()


def test_nothing_secret_is_in_the_note_and_nothing_gets_out_of_its_block(studies: Studies) -> None:
    tricky = "a\n````\n# not a heading <script>"
    text = STUDY.replace("data: {", 'data: {url: "https://me:s3cret@host/x", api_key: s3cret, max_tokens: 7, ')
    spec = studies.spec("run.storage=postgresql://me:s3cret@host/db?sslpassword=s3cret", text=text)
    with_fence = studies.spec(f"data.text={yaml.safe_dump(tricky, default_style=chr(34)).strip()}")
    assert "s3cret" not in note(spec)
    config, _ = map(yaml.safe_load, blocks(note(spec)))
    assert config["run"]["storage"] == "postgresql://me:***@host/db?sslpassword=%2A%2A%2A"
    queried = studies.spec(
        "data.url='mysql://h/d?user=me&password=s3cret&port=1'", "data.other='http://me:s/3cret@h'"
    )
    assert "3cret" not in note(queried)
    assert "mysql://h/d?user=me&password=***&port=1" in note(queried)
    assert (config["data"]["url"], config["data"]["max_tokens"]) == ("https://me:***@host/x", 7)
    config, _ = map(yaml.safe_load, blocks(note(with_fence)))
    assert config["data"]["text"] == tricky


# ---- the environment


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs git in the test's folder, without personal settings."""
    for name, value in {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    def run(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    return run


def test_the_commit_and_whether_files_were_changed(tmp_path: Path, git: Callable[..., str]) -> None:
    assert git_state(tmp_path) is None
    git("init", "-q")
    assert git_state(tmp_path) is None  # no commit yet
    (tmp_path / "study.yaml").write_text("a")
    git("add", ".")
    git("commit", "-qm", "one")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "study.yaml").write_text("b")
    assert git_state(tmp_path) == {"commit": git("rev-parse", "HEAD"), "dirty": True}


def test_a_folder_or_a_program_that_is_missing_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert git_state(tmp_path / "missing") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    here = environment(tmp_path)
    assert here["git"] is None
    assert here["gpus"] == []


def test_the_gpus_are_those_that_the_driver_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpo.study.environment import gpu_names

    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf 'NVIDIA H200\\nNVIDIA H200\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu_names() == ["NVIDIA H200", "NVIDIA H200"]
