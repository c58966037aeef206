"""`hpo logs`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest

from hpo.cli.logs import _outcome
from hpo.config.spec import load_spec
from hpo.errors import StudyError
from hpo.study.open_study import load_study
from tests.support.commands import MODEL, PATIENCE, hpo, make_study, start_hpo
from tests.support.in_process import workers_in_process
from tests.support.studies import Studies, ask

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    study = make_study(tmp_path_factory.mktemp("logs"))
    with workers_in_process():
        hpo("run", study, "--n-trials", 2)
    return study


def log_of(study: Path, trial: int, attempt: int = 1) -> Path:
    return study.parent / "runs" / "tiny" / "trials" / str(trial) / f"attempt-{attempt}" / "log.txt"


@pytest.mark.parametrize("flag", [(), ("-f",), ("--follow",)])
def test_a_log_is_printed_as_it_is(done: Path, flag: tuple[str, ...]) -> None:
    assert hpo("logs", done, 1, *flag).stdout == log_of(done, 1).read_text()


@pytest.fixture
def two_attempts(done: Path) -> Iterator[Path]:
    second = log_of(done, 0, 2)
    second.parent.mkdir()
    second.write_bytes("zwölf\rone half of ö: ".encode() + b"\xc3")
    yield second
    shutil.rmtree(second.parent)


def test_the_logs_of_all_attempts_follow_one_another(done: Path, two_attempts: Path) -> None:
    printed = hpo("logs", done, 0).stdout
    first = log_of(done, 0).read_text()
    assert printed == f"==> attempt 1 <==\n{first}==> attempt 2 <==\nzwölf\rone half of ö: "


def test_a_trial_that_is_not_there(done: Path) -> None:
    result = hpo("logs", done, 7, code=3)
    assert result.stderr == "the study tiny has no trial 7\n  fix: its trials are 0 to 1\n"
    assert "Invalid value" in hpo("logs", done, "best", code=2).stderr


def test_a_study_without_trials(studies: Studies) -> None:
    said = "has no trial yet\n  fix: run the study first, with `hpo run`"
    with studies.open() as (view,), pytest.raises(StudyError, match=said):
        _outcome(view, 0)


def test_a_study_that_is_not_there(tmp_path: Path) -> None:
    assert "there is no such database yet" in hpo("logs", make_study(tmp_path), 0, code=3).stderr


def test_a_log_that_lies_elsewhere(done: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{done.parent}/runs/tiny/study.db"
    for flag in ((), ("-f",)):
        result = hpo("logs", done, 0, *flag, "--storage", url, "--output-dir", tmp_path, code=3)
        assert f"trial 0 has no log in {tmp_path / 'trials' / '0'}" in result.stderr
        assert "--output-dir" in result.stderr


@pytest.mark.usefixtures("in_process")
def test_a_trial_that_has_not_begun(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    hpo("run", study, "--n-trials", 1)
    with load_study(load_spec(study)) as opened:
        opened.storage.set_budget(opened.study_id, 2)
        opened.study.enqueue_trial({})
    result = hpo("logs", study, 1, code=3)
    assert result.stderr == "trial 1 is waiting and has no log yet\n  fix: `--follow` waits for it\n"


def test_a_reader_that_stops_reading_is_no_error(done: Path) -> None:
    log = log_of(done, 1)
    kept = log.read_bytes()
    log.write_bytes(b"a line\n" * 400_000)
    try:
        command = f"{sys.executable} -m hpo logs {done} 1 | head -n 1"
        result = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    finally:
        log.write_bytes(kept)
    assert (result.stdout, result.stderr) == ("a line\n", "")


#: Asks for an end, as Ctrl-C does, in the last batch of the first attempt's second epoch.
STOPPED_ONCE = MODEL.replace(
    "            time.sleep(self.delay)\n",
    "            time.sleep(self.delay)\n"
    "        self.calls = getattr(self, 'calls', 0) + self.training\n"
    "        if self.calls == 8 and not STOPPED.exists():\n"
    "            STOPPED.touch()\n"
    "            os.kill(os.getpid(), signal.SIGINT)\n",
).replace(
    "import time\n",
    "import os\nimport signal\nimport time\nfrom pathlib import Path\n\n"
    "STOPPED = Path(__file__).with_name('stopped')\n",
)


@pytest.mark.usefixtures("in_process")
def test_a_log_is_followed_over_attempts_to_the_trials_end(tmp_path: Path) -> None:
    study = make_study(tmp_path, code=STOPPED_ONCE)
    slow = ("--n-trials", 1, "model.delay=0.02", "trainer.max_epochs=6")
    hpo("run", study, *slow, code=130)
    following = start_hpo("logs", study, 0, "-f", *slow[2:])
    hpo("run", study, *slow)
    printed, errors = following.communicate(timeout=PATIENCE)
    assert (following.returncode, errors) == (0, "")
    attempts = sorted((study.parent / "runs" / "tiny" / "trials" / "0").iterdir())
    first, heading, second = printed.partition(
        "==> attempt 2 <=="
    )  # of the first, where the second was there before
    assert heading
    for folder, part in zip(attempts, (first, second), strict=True):
        assert (folder / "log.txt").read_text() in part
    assert printed.endswith("training ended after epoch 6 of 6\n")


def test_a_study_that_is_deleted_while_its_log_is_followed_is_said_to_be(studies: Studies) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        assert _outcome(view, trial.number) == "running"
        optuna.delete_study(study_name=view.spec.study.name, storage=view.spec.storage_url)
        with pytest.raises(StudyError, match="the study tiny has been deleted"):
            _outcome(view, trial.number)


def test_a_log_that_can_not_be_read(done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, opened = log_of(done, 0), Path.open

    def refuse(self: Path, *arguments: Any, **more: Any) -> Any:
        if self.name == log.name:
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *arguments, **more)

    monkeypatch.setattr(Path, "open", refuse)
    assert f"{log}: can't be read: Permission denied\n  fix: " in hpo("logs", done, 0, code=3).stderr
