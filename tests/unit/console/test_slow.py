"""Lines on what takes long."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import pytest

from hpo.console import slow
from hpo.console.slow import slow_steps
from tests.support.commands import hpo, make_study, wait_until

#: What holds outside of tests, which set it higher.
SILENCE = slow.SILENCE


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes long."""
    monkeypatch.setattr(slow, "SILENCE", 0.0)


@pytest.mark.usefixtures("at_once")
def test_a_step_that_takes_long_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    said = ""

    def there() -> bool:
        nonlocal said
        said += capsys.readouterr().err
        return "importing torch …\n" in said

    with slow_steps() as say:
        say("importing torch")
        wait_until(there)


def test_a_step_that_ends_soon_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    with slow_steps() as say:
        say("importing torch")
        (waiting,) = (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))
        say("loading the data")
        waiting.join()
    assert wait_until(lambda: not any(isinstance(each, threading.Timer) for each in threading.enumerate()))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("json", [True, False])
def test_a_program_that_reads_the_output_sees_none(json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hpo", "best", *(["--json"] if json else [])])
    with slow_steps(shown=json) as say:
        say("importing torch")
        assert not any(isinstance(each, threading.Timer) for each in threading.enumerate())


def test_the_thread_that_waits_leaves_signals_to_the_main_one() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with slow_steps() as say:
        say("importing torch")
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("check", "loading the data, and training a few batches"),
        ("run", "importing torch and what the study names"),
    ],
)
@pytest.mark.usefixtures("at_once")
def test_slow_data_and_imports_are_said(command: str, line: str, tmp_path: Path) -> None:
    study = make_study(tmp_path)
    result = hpo(command, study, *(["--n-trials", 1, "--workers", 1] if command == "run" else []))
    assert line in result.stderr


def test_it_is_named_within_two_seconds() -> None:
    assert SILENCE < 2
