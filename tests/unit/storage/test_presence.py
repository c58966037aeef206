"""A SQLite database whose files are removed or replaced under a storage."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hpo.storage.beats import Heartbeat
from hpo.storage.ledger import Owner
from hpo.storage.outage import DatabaseGoneError
from hpo.storage.settling import STOPPED
from hpo.study.folders import attempt_folder, note_stop, stop_note
from hpo.study.outcome import Outcome
from hpo.trial.stopping import StopRequest
from tests.support.attempts import InThirdEpoch, dying, run
from tests.support.commands import PATIENCE
from tests.support.owners import load, make_study, opened
from tests.support.studies import Studies


def remove(file: Path) -> None:
    file.unlink()


def replace(file: Path) -> None:
    shutil.copy(file, file.with_name("copy"))
    file.with_name("copy").rename(file)


def move_folder(file: Path) -> None:
    file.parent.rename(file.parent.with_name("elsewhere"))


def remove_log(file: Path) -> None:
    file.with_name(f"{file.name}-wal").unlink()


def remove_index(file: Path) -> None:
    file.with_name(f"{file.name}-shm").unlink()


HARMS = [
    (remove, "study.db was removed"),
    (replace, "study.db was replaced by another file"),
    (move_folder, "study.db was removed"),
    (remove_log, "study.db-wal was removed"),
    (remove_index, "study.db-shm was removed"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    make_study(f"sqlite:///{tmp_path}/here/study.db", 5)
    return tmp_path / "here" / "study.db"


@pytest.mark.parametrize(("harm", "problem"), HARMS)
def test_every_use_notices_that_the_files_are_gone(file: Path, harm: Callable[[Path], None], problem: str) -> None:
    noticed = threading.Event()
    with opened(f"sqlite:///{file}", owner=Owner.current()) as storage:
        study = load(storage)
        trial = study.ask()
        storage.check()
        harm(file)
        left = {path.name for path in file.parent.glob("*")}
        for use in (
            storage.check,
            storage.beat,
            study.ask,
            lambda: trial.report(1.0, 1),
            lambda: study.tell(trial, 1.0),
            lambda: study.get_trials(),
        ):
            with pytest.raises(
                DatabaseGoneError, match=f"{problem}.* while it was in use(.|\n)*fix: put the file back"
            ):
                use()
        with Heartbeat(storage.beat, interval=0.01, on_gone=noticed.set):
            assert noticed.wait(PATIENCE)
        assert {path.name for path in file.parent.glob("*")} <= left, "nothing is made in its place"


def test_a_storage_that_closes_and_opens_again_is_at_home(file: Path) -> None:
    with opened(f"sqlite:///{file}", owner=Owner.current()) as storage:
        trial = load(storage).ask()
        storage.close()
        assert not file.with_name("study.db-wal").exists()
        trial.report(1.0, 1)
        load(storage).tell(trial, 1.0)
        storage.check()


def test_a_trial_whose_database_is_gone_ends_with_a_checkpoint_and_costs_no_retry(studies: Studies) -> None:
    """The last epoch that was trained is the last one written, though its value could not be stored."""
    with studies.open("trainer.max_epochs=6", "run.max_retries=0") as (other,):
        late, request = dying(other), StopRequest()
        file = late.spec.output_dir / "study.db"
        gone = InThirdEpoch(lambda: file.rename(file.with_name("kept.db")))
        with pytest.raises(DatabaseGoneError):
            run(late, request=request, pulse=gone)
        late.storage.close()
        file.with_name("kept.db").rename(file)
        assert request.leaving
        folder = file.parent / "trials" / "0" / "attempt-1" / "checkpoints"
        assert max(folder.glob("epoch-*.pt")).name == f"epoch-{max(3, *gone.epochs):05d}.pt"
        assert "study.db was removed" in (stop_note(other.spec, 0, 1) or "")
        (settled,) = other.requeue_dead()
        assert (settled.outcome, settled.state.name) == (STOPPED, "WAITING")
        assert run(other).outcome == Outcome.COMPLETE


@pytest.mark.parametrize(("left", "reason"), [(b"", "the disk was full"), (b"no room: \xc3", "no room: \ufffd")])
def test_a_note_that_a_full_disk_has_cut_off_still_spares_the_trial_a_retry(
    studies: Studies, left: bytes, reason: str
) -> None:
    with studies.open() as (opened,):
        folder = attempt_folder(opened.spec, 0, 1)
        note_stop(opened.spec, 0, 1, "no room: é")
        (file,) = folder.iterdir()
        file.write_bytes(left)
        assert opened.stop_note(0, 1) == reason
