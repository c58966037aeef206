"""Output that can't be written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import hpo_json, make_study

pytestmark = pytest.mark.full

HPO = f"{sys.executable} -m hpo"


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_no_reader_that_stops(tmp_path: Path) -> None:
    done = shell(f"{HPO} schema > /dev/full", tmp_path)
    assert done.returncode == 3
    assert done.stderr.startswith("standard output can't be written: No space left on device\n  fix: free")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("errors", ["", " 2>&1"], ids=["errors are read", "errors are lost, too"])
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["with a buffer", "without a buffer"])
def test_a_study_continues_where_its_events_can_not_be_written(
    tmp_path: Path, errors: str, unbuffered: str
) -> None:
    study = make_study(tmp_path)
    done = shell(
        f"PYTHONUNBUFFERED={unbuffered} {HPO} run {study} --n-trials 2 --json > /dev/full{errors}", tmp_path
    )
    assert done.returncode == 0, done.stderr
    said = "standard output can't be written: No space left on device; the study continues\n"
    assert errors or (done.stderr.count("can't"), done.stderr[-len(said) :]) == (1, said)
    assert hpo_json("status", study)["finished"] == 2


def test_a_reader_that_stops_is_none_of_our_business(tmp_path: Path) -> None:
    done = shell(f"{HPO} schema | true; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams(tmp_path: Path, closed: str) -> None:
    study = make_study(tmp_path)
    done = shell(f"{HPO} run {study} --n-trials 1 {closed} && {HPO} trials {study} {closed}", tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_schema_that_can_not_be_written_leaves_the_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "study.schema.json").write_text("an earlier one")
    done = shell(f"ulimit -f 8; trap '' XFSZ; {HPO} schema -o study.schema.json", tmp_path)
    assert (done.returncode, done.stderr[:36]) == (2, "--output: can't be written: File too")
    assert (tmp_path / "study.schema.json").read_text() == "an earlier one"


def test_what_an_encoding_does_not_have_is_escaped(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    done = shell(f"PYTHONIOENCODING=ascii {HPO} check {study}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "\\u2192 16 x 1, " in done.stdout  # the arrow between the shapes of a batch


def test_json_stays_json_where_the_encoding_lacks_a_character(tmp_path: Path) -> None:
    text = "study: {name: words, direction: minimize, n_trials: 1}\nobjective: {_target_: parts.run, unit: a}\n"
    space = "search_space: {objective.unit: {type: categorical, choices: [größe]}}\n"
    study = make_study(tmp_path, text + space, "def run(unit):\n    return 1.0\n")
    of_trials = ("trials {} --json", "export {} --format json")
    for command in ("run {} --json", "status {} --watch --json", *of_trials, "schema"):
        done = shell(f"PYTHONIOENCODING=ascii {HPO} {command.format(study)}", tmp_path)
        assert done.returncode == 0, done.stderr
        lines = command.startswith(("run", "status"))
        for each in done.stdout.splitlines() if lines else [done.stdout]:
            json.loads(each)
        assert "gr\\u00f6\\u00dfe" in done.stdout or command == "schema"
