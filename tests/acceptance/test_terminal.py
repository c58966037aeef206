"""`hpo run` and `hpo status --watch` on a real terminal."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import pexpect
import pytest
from pexpect.fdpexpect import fdspawn

from tests.support.commands import (
    CRAWLING,
    HELD,
    LONG,
    PATIENCE,
    STUDY,
    epochs_trained,
    held,
    hpo,
    hpo_json,
    ledger_of,
    make_study,
    wait_until,
)
from tests.support.forked_program import ForkedProgram
from tests.support.local_agents import none_left

#: What a terminal is ordered to do, apart from text: cursor, colours, erasing.
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal(fdspawn):
    """The command on a terminal of its own.

    Args:
        program: Starts it there.
    """

    def __init__(
        self, program: Callable[[Connection], ForkedProgram | subprocess.Popen[bytes]], size: tuple[int, int]
    ) -> None:
        own, its = pty.openpty()
        termios.tcsetwinsize(own, size)
        self.program = program(Connection(its))
        super().__init__(own, encoding="utf-8", timeout=PATIENCE)
        self.logfile_read = self.seen = Recorder()

    def setwinsize(self, rows: int, columns: int) -> None:
        termios.tcsetwinsize(self.child_fd, (rows, columns))

    def sendintr(self) -> None:
        self.send("\x03")


@contextmanager
def terminal(
    *arguments: object, width: int = 100, height: int = 30, anew: bool = False, **environment: str
) -> Iterator[Terminal]:
    """The command on a terminal of its own; anew: with imports of its own, as a person starts it."""
    plain = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    variables = {**plain, "TERM": "xterm-256color", **environment}
    words = ["-m", "hpo", *map(str, arguments)]

    def started(end: Connection) -> ForkedProgram | subprocess.Popen[bytes]:
        if not anew:
            return ForkedProgram(words, environment=variables, terminal=end)
        with end:
            own = ["setsid", "--ctty", sys.executable, *words]
            return subprocess.Popen(
                own, stdin=end.fileno(), stdout=end.fileno(), stderr=end.fileno(), env=variables
            )

    child = Terminal(started, (height, width))
    try:
        yield child
    finally:
        child.program.kill()
        child.program.communicate()
        child.close()


class Recorder:
    """Everything that the terminal was sent."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def ended(child: Terminal) -> int:
    """Read to the end; the exit code."""
    child.expect(pexpect.EOF)
    return child.program.wait()


def left(child: Terminal) -> list[str]:
    """What stays on the terminal below the last picture, and whether the cursor can be seen."""
    text = child.seen.text
    assert text.rfind("\x1b[?25h") >= text.rfind("\x1b[?25l"), "the cursor stays hidden"
    assert "\x1b[?1049h" not in text, "the scrollback would be lost"
    return [line.rstrip() for line in CONTROL.sub("", text).split("\n")]


@pytest.fixture
def crawling(tmp_path: Path) -> Path:
    """A study whose trials train until they are asked to leave."""
    return make_study(tmp_path, code=CRAWLING)


def test_a_run_is_drawn_and_leaves_its_lines_and_summary(tmp_path: Path) -> None:
    study = make_study(tmp_path, code=CRAWLING.replace("> 64", "> 8"))  # from the third epoch on
    with terminal("run", study, "--workers", 2, "--n-trials", 3, "trainer.max_epochs=6", anew=True) as child:
        child.expect(r"0/3 trials")
        child.expect(r"worker-1 +\S*\d+ +cpu +[1-6]/6 +\d\.\d+ +0:\d\d")
        child.expect("█")
        child.expect(r"best \S*trial \d")
        (tmp_path / "go").touch()
        assert ended(child) == 0
        lines = left(child)
    below = lines[len(lines) - lines[::-1].index("3 of 3 trials finished: 3 complete") :]
    assert below[0].startswith("best: trial ")
    assert not [line for line in below if "worker-1" in line]
    said = re.findall(r"\[[1-3]/3\] trial ([0-2]) +complete +val_loss", "\n".join(lines))
    assert sorted(said) == ["0", "1", "2"]


def test_a_run_is_drawn_anew_where_the_terminal_becomes_narrow_and_ctrl_c_leaves_it_as_it_was(
    crawling: Path,
) -> None:
    with terminal("run", crawling, "--workers", 2, *LONG) as child:
        child.expect(r"worker-1 +\S*\d +cpu +1/40[^\n]+\n[^\n]*worker-2 +\S*\d +cpu +1/40")
        child.setwinsize(20, 40)
        child.expect(r"\n\x1b\[2mtrial")  # the first column is left out
        child.sendintr()
        child.expect("stopping: each worker finishes")
        child.expect("interrupted; resume with:")
        assert ended(child) == 130
        left(child)
        assert "Traceback" not in child.seen.text
    assert hpo_json("status", crawling)["waiting"] == 2


def test_a_signal_leaves_the_terminal_as_it_was(crawling: Path) -> None:
    with terminal("run", crawling, *LONG) as child:
        child.expect("1/40")
        child.program.send_signal(signal.SIGTERM)
        child.expect("stopping: each worker finishes its batch")
        child.expect("interrupted; resume with:")
        assert ended(child) == 130
        left(child)
    assert [(each.outcome, each.reason) for each in ledger_of(crawling)] == [("requeued", "interrupted")]
    assert list(crawling.parent.rglob("epoch-*-batch-*.pt")), "interrupted inside an epoch"


def test_a_terminal_that_is_closed_ends_the_run_in_order(crawling: Path) -> None:
    with terminal("run", crawling, *LONG) as child:
        child.expect("1/40")
        child.close()
        assert child.program.wait() == 130
    assert hpo_json("status", crawling)["waiting"] == 1


def test_a_study_that_can_not_go_on_leaves_its_reason_on_the_terminal_without_colours_where_they_are_unwanted(
    tmp_path: Path,
) -> None:
    study = make_study(tmp_path)
    with terminal("run", study, "data.broken=true", NO_COLOR="1") as child:
        assert ended(child) == 3
        lines = left(child)
        assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", child.seen.text)
        assert "0/6 trials" in child.seen.text
    assert "! trial 1: RuntimeError: the data is broken" in lines
    assert [line for line in lines if line.startswith("the first 3 trials failed alike:")]
    assert lines[-2].lstrip().startswith("fix: see the log of trial 2 in ")


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    with terminal("run", study, "--n-trials", 1, TERM="dumb") as child:
        assert ended(child) == 0
        assert "\x1b" not in child.seen.text
        assert "[1/1] trial 0" in child.seen.text
    with terminal("status", study, "--watch", TERM="dumb") as child:
        assert ended(child) == 0
        assert child.seen.text.startswith("1/1 trials, 1 complete, best trial 0")


def test_a_study_is_watched_from_another_terminal(crawling: Path) -> None:
    with terminal("run", crawling, *LONG, "--quiet") as child:
        wait_until(lambda: epochs_trained(crawling) == [1])
        with terminal("status", crawling, "--watch", "--interval", 0.2) as watching:
            watching.expect(r"worker-1 +\S*0 +cpu +1/40 +\d")
            watching.sendintr()
            assert ended(watching) == 130
            assert "worker-1" in left(watching)[-2]
            assert "Traceback" not in watching.seen.text
        child.sendintr()
        assert ended(child) == 130


def test_a_second_ctrl_c_stops_at_once_and_costs_no_retry(tmp_path: Path) -> None:
    study = make_study(tmp_path, code=HELD)
    command = ("run", study, "--workers", 2, "--n-trials", 2, "run.max_retries=0")
    with terminal(*command, "--quiet") as child:
        wait_until(lambda: len(held(study)) == 2)
        child.sendintr()
        child.expect("stopping: each worker finishes its batch and checkpoints; a second Ctrl-C stops them")
        child.sendintr()
        assert ended(child) == 130
        assert "Traceback" not in child.seen.text
    assert {(each.outcome, each.reason) for each in ledger_of(study)} == {
        ("stopped", "its worker was stopped immediately")
    }
    assert hpo_json("status", study)["waiting"] == 2
    (tmp_path / "go").touch()
    hpo(*command)
    assert hpo_json("status", study)["outcomes"]["complete"] == 2


def test_a_second_ctrl_c_stops_agents_at_once(tmp_path: Path) -> None:
    study = make_study(tmp_path, STUDY, HELD)
    with none_left(study), terminal("run", study, "--on", "local", "--workers", 1, "--quiet") as child:
        wait_until(lambda: held(study))
        child.sendintr()
        child.expect("stopping: agents checkpoint their trials and leave; a second Ctrl-C stops them immediately")
        child.sendintr()
        assert ended(child) == 130
    assert [each.reason for each in ledger_of(study)] == ["its agent was stopped immediately"]
