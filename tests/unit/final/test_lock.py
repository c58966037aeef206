"""Two final trainings of one study: the second is refused for as long as the first one lives."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpo.errors import StudyError
from hpo.final.lock import alone_in
from tests.support.commands import hpo, make_study

HOLD = """
import sys
from pathlib import Path
from hpo.final.lock import alone_in

with alone_in(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def held(folder: Path) -> subprocess.Popen[str]:
    """A process that has the folder until its standard input ends."""
    words = [sys.executable, "-c", HOLD, str(folder)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("options", [(), ("--seeds", "0,")], ids=["one", "seeds"])
def test_a_second_training_beside_one_is_refused_and_changes_nothing(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    study, final = make_study(tmp_path), tmp_path / "runs" / "tiny" / "final"
    with held(final) as first:
        said = hpo("train", study, *options, code=3).stderr
        assert f"{final}: process {first.pid} on " in said
        assert "trains there\n  fix: wait until that has ended, or stop it" in said
        assert [file.name for file in final.iterdir()] == [".lock"]
        first.kill()
    hpo("train", study, "--epochs", 1)
    assert (final / "model.pt").exists()
    assert not (final / ".lock").exists()


def test_a_lock_that_was_removed_by_who_had_it_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def late(file: Any, how: int) -> None:
        lock(file, how)
        taken.append(1)
        if len(taken) == 1:
            (tmp_path / ".lock").unlink()

    lock = fcntl.lockf
    monkeypatch.setattr(fcntl, "lockf", late)
    with alone_in(tmp_path):
        assert len(taken) == 2
        assert "process" in (tmp_path / ".lock").read_text()


def test_without_locks_a_training_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    with held(tmp_path) as first:
        with pytest.raises(StudyError, match=f"process {first.pid}"), alone_in(tmp_path):
            pass
        monkeypatch.setattr(fcntl, "lockf", unsupported)
        with alone_in(tmp_path):
            pass
        first.communicate("")
    assert not list(tmp_path.iterdir())
