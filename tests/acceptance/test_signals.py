"""A run that is to end: signals, a closed terminal, a pipe without a reader."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import (
    CRAWLING,
    LONG,
    MODEL,
    PATIENCE,
    epochs_trained,
    hpo_json,
    ledger_of,
    make_study,
    start_hpo,
    start_program,
    wait_until,
)

#: What is printed where that takes long.
_SLOW = "importing torch and what the study names …\n"


def test_a_signal_puts_trials_down_with_all_they_have_done(tmp_path: Path) -> None:
    """The hang-up; of SIGTERM, see the tests of terminals."""
    study = make_study(tmp_path, code=CRAWLING)
    process = start_hpo("run", study, "--workers", 2, *LONG)
    wait_until(lambda: epochs_trained(study) == [1, 1])
    for _ in range(2):  # a shell passes the hang-up on a second time
        process.send_signal(signal.SIGHUP)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "stopping: each worker finishes its batch" in errors
    assert "resume with:" in errors
    status = hpo_json("status", study)
    assert (status["running"], status["waiting"]) == (0, 2)
    ends = {(each.outcome, each.reason) for each in ledger_of(study)}
    assert ends == {("requeued", "interrupted")}
    assert list(tmp_path.rglob("epoch-*-batch-*.pt")), "interrupted inside an epoch"


def test_an_interrupt_that_comes_twice_without_a_terminal_is_one_request(tmp_path: Path) -> None:
    study = make_study(tmp_path, code=CRAWLING)
    process = start_hpo("run", study, "--workers", 2, *LONG)
    assert process.stderr is not None
    wait_until(lambda: epochs_trained(study) == [1, 1])
    process.send_signal(signal.SIGINT)
    said = next(line for line in process.stderr if "stopping" in line)  # a slow step may be named before
    assert said == "stopping: each worker finishes its batch and checkpoints\n"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert {(each.outcome, each.reason) for each in ledger_of(study)} == {("requeued", "interrupted")}


def test_a_run_that_is_to_ignore_the_hang_up_goes_on(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    command = [sys.executable, "-m", "hpo", "run", str(study), "model.delay=0.05"]
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(["nohup", *command], stdout=out, stderr=out, start_new_session=True)
        wait_until(lambda: list(tmp_path.rglob("epoch-*.pt")))
        os.killpg(process.pid, signal.SIGHUP)
        assert process.wait(timeout=PATIENCE) == 0, (tmp_path / "out").read_text()
    assert hpo_json("status", study)["finished"] == 6


def test_a_pipe_whose_reader_is_gone_ends_the_run_in_order(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    process = start_hpo("run", study, "--workers", 2, "--n-trials", 500)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    with process:
        errors = process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "BrokenPipe" not in errors
    status = hpo_json("status", study)
    assert status["running"] == 0
    assert status["finished"] < 500


@pytest.mark.parametrize("on", [(), ("--on", "local")], ids=["here", "on local"])
@pytest.mark.parametrize("library", ["_pydantic_core", "sqlalchemy"])
def test_ctrl_c_while_libraries_are_loaded_shows_no_traceback(
    tmp_path: Path, library: str, on: tuple[str, ...]
) -> None:
    study = make_study(tmp_path)
    process = start_program("run", study, *on)
    wait_until(lambda: library in Path(f"/proc/{process.pid}/maps").read_text())
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to the fork server as well
    printed, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert printed in ("", f"checking {study}\n")
    assert errors in ("", _SLOW)


def test_ctrl_c_while_a_driver_checks_the_study_shows_no_traceback(tmp_path: Path) -> None:
    study = make_study(tmp_path, code=f"open('{tmp_path}/imported', 'w')\nimport time\ntime.sleep(600)\n{MODEL}")
    process = start_program("run", study, "--on", "local")
    wait_until((tmp_path / "imported").exists)
    os.killpg(process.pid, signal.SIGINT)
    printed, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, printed) == (130, f"checking {study}\n")
    assert errors in ("", _SLOW)


def _fork_server_that(does: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study whose fork server does this while it imports the study's libraries."""
    (folder / "libraries" / "sklearn").mkdir(parents=True)
    (folder / "libraries" / "sklearn" / "__init__.py").write_text(f"import os, time\n{does}\n")
    path = os.pathsep.join([str(folder / "libraries"), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    return make_study(folder, code=f"import sklearn\n{MODEL}")


def test_ctrl_c_while_the_fork_server_imports_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begins, waits = f"open('{tmp_path}/imports', 'w')", "while os.getppid() == starter: time.sleep(0.01)"
    study = _fork_server_that(f"starter = os.getppid()\n{begins}\n{waits}", tmp_path, monkeypatch)
    process = start_program("run", study)
    wait_until((tmp_path / "imports").exists)
    assert process.stderr is not None
    assert process.stderr.readline() == _SLOW  # by now it waits for that server
    os.killpg(process.pid, signal.SIGINT)
    printed, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, printed, errors) == (130, f"checking {study}\n", "")


def test_a_fork_server_that_dies_while_it_imports_is_an_error_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = start_program("run", _fork_server_that("os.kill(os.getpid(), 9)", tmp_path, monkeypatch))
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3
    died = "the fork server, from which it is started, was killed by SIGKILL"
    assert f"the process that checks the study can't be started: {died}" in errors
