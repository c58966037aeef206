"""A corpus of broken study files, in `tests/unit/config/broken`: each ends with exit 2, the right line, and a fix.

A file says in its own first lines what is wrong with it, what is expected to be said, and which fix. The mistakes
are those that people make: a misspelt key, a range the wrong way round, an argument that is not there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpo.cli.app import COMMANDS
from tests.support.commands import STUDY, hpo, make_study

pytestmark = pytest.mark.full

FOLDER = Path(__file__).parent / "broken"
FILES = sorted(FOLDER.glob("*.yaml"))
#: A comment would be something in the file.
EMPTY = "# expects: 1: the file is empty\n# fix: start with a `study:` section\n"
#: For a module that can't be read: linters would stumble over it if it lay there.
NO_PYTHON = "class Net(:\n    pass\n"


@dataclass(frozen=True)
class Expected:
    """What is to be said of a file."""

    said: str
    fix: str


def expected(file: Path) -> Expected:
    text = file.read_text() or EMPTY
    said, fix = (re.search(rf"^# {name}: (.+)$", text, re.MULTILINE) for name in ("expects", "fix"))
    assert said
    assert fix
    return Expected(said[1], fix[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the corpus with its code."""
    there = tmp_path_factory.mktemp("broken")
    for file in FOLDER.iterdir():
        if file.is_file():
            (there / file.name).write_bytes(file.read_bytes())
    (there / "unreadable.py").write_text(NO_PYTHON)
    return there


def test_the_corpus_is_large_and_every_file_is_about_something_else() -> None:
    assert len(FILES) >= 60
    all_expected = [expected(file) for file in FILES]
    assert len({one.said for one in all_expected}) > len(all_expected) * 0.9


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_broken_study_ends_with_its_line_and_a_fix(
    file: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    result = hpo("run", file.name, "--output-dir", tmp_path / "out", code=2)
    lines = [line.replace(str(folder), "FOLDER") for line in result.stderr.splitlines()]
    at = next(n for n, line in enumerate(lines) if line.startswith(f"{file.name}:"))
    want = expected(file)
    assert lines[at].removeprefix(f"{file.name}:") == want.said
    fixes = [line.strip() for line in lines[at:] if line.startswith("  fix: ")]
    assert fixes == [f"fix: {want.fix}"]
    assert "Traceback" not in result.stderr
    assert result.stdout in ("", f"checking {folder / file.name}\n")
    assert not (tmp_path / "out").exists()


def test_a_metric_that_a_callback_follows_because_the_study_does_is_the_studys(tmp_path: Path) -> None:
    folder = make_study(tmp_path, STUDY + "callbacks: {early_stopping: {patience: 2}}\n")
    result = hpo("run", folder, "study.metric=val_los", "study.direction=minimize", code=2)
    assert result.stderr.startswith("command line: study.metric: nothing records this metric")


def test_a_metric_that_a_callback_is_given_on_the_command_line_is_said_to_stand_there(tmp_path: Path) -> None:
    folder = make_study(tmp_path, STUDY + "callbacks: {early_stopping: {patience: 2}}\n")
    result = hpo("run", folder, "callbacks.early_stopping.monitor=val_acc", code=2)
    assert result.stderr.startswith("command line: callbacks.early_stopping.monitor: nothing records this metric")


def test_every_command_has_an_example() -> None:
    assert [command.__name__ for command in COMMANDS if "Example" not in (command.__doc__ or "")] == []
