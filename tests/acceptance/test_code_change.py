"""A study whose code changes: refused, accepted, and shown everywhere."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sqlite3
from pathlib import Path

import pytest

from tests.support.commands import HELD, PATIENCE, held, hpo, hpo_json, make_study, start_hpo, wait_until

QUICK = ("trainer.max_epochs=1",)


def change(study: Path, old: str = "nn.Tanh", new: str = "nn.ReLU") -> None:
    """Change what the study's model computes."""
    code = study.with_name("parts.py")
    assert old in code.read_text()
    code.write_text(code.read_text().replace(old, new))


def codes(study: Path) -> dict[int, list[str]]:
    """The code of each trial's attempts."""
    trials = hpo_json("trials", study, *QUICK)
    return {entry["trial"]: [each["code"] for each in entry["internals"]["attempts"]] for entry in trials}


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return make_study(tmp_path)


def test_changed_code_is_refused_and_nothing_is_done(study: Path) -> None:
    hpo("run", study, *QUICK, "--n-trials", 1)
    before = codes(study)
    change(study)
    refused = hpo("run", study, *QUICK, "--n-trials", 2, code=2)
    assert refused.stderr.startswith(f"{study}:2: study.name: the study's code is {before[0][0]}, and")
    assert "\n    parts.py has changed\n" in refused.stderr
    assert "--accept-code-change" in refused.stderr
    assert codes(study) == before
    assert hpo_json("status", study, *QUICK)["n_trials"] == 1
    change(study, "nn.ReLU", "nn.Tanh")
    hpo("run", study, *QUICK, "--n-trials", 2)
    assert set(map(tuple, codes(study).values())) == {tuple(before[0])}


def test_comments_and_files_that_nothing_imports_change_nothing(study: Path) -> None:
    hpo("run", study, *QUICK, "--n-trials", 1)
    code = study.with_name("parts.py")
    code.write_text(f"# Reformatted\n{code.read_text()}\n\n")
    study.with_name("scratch.py").write_text("x = 1\n")
    hpo("run", study, *QUICK, "--n-trials", 2)
    assert len({code for each in codes(study).values() for code in each}) == 1


def test_code_is_free_until_the_first_trial_begins(study: Path) -> None:
    hpo("enqueue", study, "optimizer.lr=0.01", "model.hidden=4")
    change(study)
    hpo("run", study, "--n-trials", 1)
    (version,) = hpo_json("status", study)["code"]["versions"]
    assert version["changed"] == []


def test_an_accepted_change_is_told_everywhere(study: Path) -> None:
    hpo("run", study, *QUICK, "--n-trials", 2)
    change(study)
    done = hpo("run", study, *QUICK, "--n-trials", 3, "--accept-code-change")
    assert "accepted: the study's code" in done.stderr
    assert "parts.py has changed" in done.stderr
    (old,), (_,), (new,) = codes(study).values()
    assert old != new
    status = hpo_json("status", study, *QUICK)["code"]
    assert (status["hash"], status["mixed_trials"]) == (new, [])
    first, second = status["versions"]
    assert (first["hash"], first["changed"], first["trials"]) == (old, [], [0, 1])
    assert (second["hash"], second["changed"], second["trials"]) == (new, ["parts.py has changed"], [2])
    assert re.search(rf"code +{new}, changed once since the start", hpo("status", study, *QUICK).stdout)
    assert old in hpo("trials", study, *QUICK).stdout
    report = study.parent / "report.html"
    hpo("report", study, *QUICK, "--output", report)
    page = report.read_text()
    assert re.search(rf"{old}.*?0, 1.*?{new}.*?parts.py has changed", page, re.DOTALL)
    assert hpo("run", study, *QUICK, "--n-trials", 3).stderr == ""


def test_a_trial_that_goes_on_under_other_code_says_so(study: Path) -> None:
    slow = ("trainer.max_epochs=200", "model.delay=0.05")
    process = start_hpo("run", study, *slow, "--n-trials", 1)
    wait_until(lambda: list(study.parent.glob("runs/tiny/trials/0/attempt-1/checkpoints/*.pt")))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, said
    change(study, "time.sleep(self.delay)", "pass")
    hpo("run", study, *slow, "--n-trials", 1, code=2)
    hpo("run", study, *slow, "--n-trials", 1, "--accept-code-change", "--quiet")
    assert hpo_json("status", study, *slow)["code"]["mixed_trials"] == [0]
    assert "trial 0 ran under more than one code" in hpo("status", study, *slow).stdout
    hpo("report", study, *slow, "--output", study.parent / "report.html")
    assert "under more than one version of the code" in (study.parent / "report.html").read_text()
    exported = study.parent / "model.safetensors"
    hpo("best", study, *slow, "--export", exported)
    assert "under more than one code" in exported.with_name("model.safetensors.md").read_text()


def test_a_model_of_other_code_says_so(study: Path) -> None:
    """Training continues only with permission; weights are given out with a warning."""
    hpo("run", study, *QUICK, "--n-trials", 1)
    ((old,),) = codes(study).values()
    exported = study.parent / "model.safetensors"
    assert hpo("best", study, *QUICK, "--export", exported).stderr == ""
    assert f"| Code | `{old}` |" in exported.with_name("model.safetensors.md").read_text()
    change(study)
    command = ("train", study, *QUICK, "--trial", "best", "--epochs", 1)
    for more in ([], ["--from-scratch"], ["--seeds", 1]):
        refused = hpo(*command, *more, code=2).stderr
        assert refused.startswith(f"--trial: trial 0 ran under the code {old}, and the code here is ")
    assert not (study.parent / "runs" / "tiny" / "final").exists()
    hpo(*command, "--accept-code-change")
    final = json.loads((study.parent / "runs" / "tiny" / "final" / "metrics.json").read_text())
    assert final["trial_code"] == old != final["code"]
    hpo("train", study, *QUICK, "--epochs", 1)  # the base config is not a trial's
    warned = hpo("best", study, *QUICK, "--export", exported)
    assert f"warning: trial 0 ran under the code {old}, and the code here is {final['code']}" in warned.stderr
    card = exported.with_name("model.safetensors.md").read_text()
    assert f"| Code | `{old}`; exported with the code `{final['code']}` |" in card


def test_a_duplicate_takes_no_result_of_other_code_over(study: Path) -> None:
    point = "search_space={model.hidden: {type: int, low: 4, high: 4}}"
    reuse = (*QUICK, point, "study.duplicates=reuse")
    hpo("run", study, *reuse, "--n-trials", 2)
    change(study)
    hpo("run", study, *reuse, "--n-trials", 3, "--accept-code-change")
    epochs = [bool(list(study.parent.glob(f"runs/tiny/trials/{n}/*/metrics.csv"))) for n in range(3)]
    assert epochs == [True, False, True]


@pytest.mark.parametrize("accepted", [False, True])
def test_a_running_study_takes_no_trial_under_other_code(study: Path, accepted: bool) -> None:
    """Code that changes while workers run: they hold to the code that they have read, or end with the study."""
    if not accepted:
        make_study(study.parent, code=HELD)
        study.with_name("pass-one").touch()
    slow = ("trainer.max_epochs=2", "model.delay=0.05")
    process = start_hpo("run", study, *slow, "--n-trials", 400)
    wait_until(lambda: attempts(study, "ended_at IS NOT NULL"))
    change(study)
    if accepted:  # by a run that does nothing else
        hpo("run", study, *slow, "--n-trials", 400, "--timeout", "1s", "--accept-code-change", "--quiet")
    else:  # a worker that takes the place of another reads the code anew
        (pid,) = wait_until(lambda: held(study))
        os.kill(pid, signal.SIGKILL)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3, said
    assert "the study's code is" in said
    assert "parts.py has changed" in said
    if not accepted:
        assert len({code for each in codes(study).values() for code in each}) == 1


def attempts(study: Path, where: str) -> list[int]:
    """The processes of some attempts; none before there is a study."""
    database = study.parent / "runs" / "tiny" / "study.db"
    if not database.exists():
        return []
    with contextlib.closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as reader:
        try:
            return [pid for (pid,) in reader.execute(f"SELECT pid FROM hpo_attempts WHERE {where}")]
        except sqlite3.OperationalError:  # its tables are being made
            return []
