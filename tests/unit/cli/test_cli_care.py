"""`hpo repair`, `hpo retry`, `hpo clean`, and what the tables say about failures, as a person uses them."""

from __future__ import annotations

import json
import math
import os
import pty
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from wsgiref.util import setup_testing_defaults

import optuna_dashboard
import pytest
import sqlalchemy as sa
from optuna.trial import TrialState

from hpo.config.spec import load_spec
from hpo.storage.ledger import ATTEMPTS
from hpo.study.open_study import OpenStudy, load_study
from hpo.study.status import running_trials
from tests.support.commands import MODEL, STUDY, hpo, hpo_json, make_study
from tests.support.studies import Studies, ask

pytestmark = pytest.mark.full

FLAKY = '''

class Flaky(nn.Module):
    """A loss that fails in the second epoch while the file `mended` is missing."""

    def __init__(self):
        super().__init__()
        self.batches = 0

    def forward(self, outputs, targets):
        self.batches += self.training
        if self.training and self.batches > 5 and not Path(__file__).with_name("mended").exists():
            raise ValueError("the loss is broken\\nin two lines")
        return ((outputs - targets) ** 2).mean()
'''


@pytest.fixture
def flaky(tmp_path: Path) -> Path:
    """A study of two trials that have failed in their second epoch."""
    study = make_study(tmp_path, STUDY.replace("parts.Explode", "parts.Flaky"))
    (tmp_path / "parts.py").write_text("from pathlib import Path\n" + MODEL + FLAKY)
    hpo("run", study, "--n-trials", 2, "--workers", 1, code=3)
    return study


def on_the_dashboard(study: Path) -> list[dict[str, str]]:
    """The trials' user attributes as the dashboard's pages receive them."""
    opened = load_study(load_spec(study))
    environ: dict[str, Any] = {"PATH_INFO": f"/api/studies/{opened.study_id}", "QUERY_STRING": "after=0"}
    setup_testing_defaults(environ)
    body = b"".join(optuna_dashboard.wsgi(opened.storage)(environ, lambda *_: None))
    opened.storage.close()
    trials = json.loads(body)["trials"]
    return [{item["key"]: item["value"] for item in trial["user_attrs"]} for trial in trials]


@pytest.mark.usefixtures("in_process")
def test_a_failed_trial_is_retried_as_itself_from_its_checkpoint(flaky: Path) -> None:
    failed = hpo_json("trials", flaky)
    assert [(entry["outcome"], entry["epochs"]) for entry in failed] == [("error", 1)] * 2
    assert failed[0]["reason"] == "ValueError: the loss is broken\nin two lines"
    assert "in forward" in failed[0]["traceback"]
    line = hpo("trials", flaky).stdout.splitlines()[2]
    assert line.rstrip().endswith("ValueError: the loss is broken")

    shown = on_the_dashboard(flaky)[0]
    assert shown["hpo:outcome"] == "error"
    assert "the loss is broken" in shown["hpo:reason"]
    assert "in forward" in shown["hpo:traceback"]

    (flaky.parent / "mended").touch()
    assert "trial 0 would be requeued" in hpo("retry", flaky, "--failed", "--dry-run").stdout
    assert (
        "trial 0 is requeued after 1 attempt (error: ValueError: the loss is broken)"
        in hpo("retry", flaky, "--trial", 0).stdout
    )
    assert [entry["trial"] for entry in hpo_json("retry", flaky, "--failed")["retried"]] == [1]
    assert hpo("retry", flaky, "--failed").stdout == "no trial has failed\n"
    hpo("run", flaky, "--n-trials", 2, "--workers", 1)

    done = hpo_json("trials", flaky)
    assert [(entry["outcome"], entry["epochs"], entry["reason"]) for entry in done] == [("complete", 3, None)] * 2
    assert [entry["params"] for entry in done] == [entry["params"] for entry in failed]
    assert [attempt["outcome"] for attempt in done[0]["internals"]["attempts"]] == ["error", "complete"]
    assert "resuming from" in (flaky.parent / "runs/tiny/trials/0/attempt-2/log.txt").read_text()
    rows = (flaky.parent / "runs/tiny/trials/0/attempt-2/metrics.csv").read_text().splitlines()
    assert [row.partition(",")[0] for row in rows] == ["epoch", "1", "2", "3"]


@pytest.fixture
def small(studies: Studies) -> Path:
    """A study with a failed, a pruned and a running trial."""

    def end(view: OpenStudy, state: TrialState, reason: str | None = None) -> None:
        trial, _ = ask(view)
        trial.report(1.0, 1)
        if reason:
            trial.set_user_attr("hpo:reason", reason)
        view.study.tell(trial, state=state)

    with studies.open() as (view,):
        end(view, TrialState.FAIL, "x" * 200)
        end(view, TrialState.PRUNED)
        ask(view)
        diverged, _ = ask(view)
        diverged.set_user_attr("hpo:outcome", "diverged")
        view.study.tell(diverged, math.inf)
        folder = view.spec.output_dir / "trials" / "1" / "attempt-1" / "checkpoints"
        folder.mkdir(parents=True)
        (folder / "epoch-00001.pt").write_bytes(b"x" * 1500)
    return studies.folder / "study.yaml"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "neither says which trials\n  fix: `--failed`"),
        (("--failed", "--trial", "0"), 2, "not both"),
        (("--trial", "zero"), 2, "--trial"),
        (("--trial", "1"), 3, "trial 1 has not failed: it was pruned"),
        (("--trial", "2"), 3, "trial 2 has not failed: it is running\n  fix: if its worker is dead, `hpo repair`"),
        (("--trial", "3"), 3, "trial 3 has not failed: it diverged, which is a result"),
        (("--trial", "7"), 3, "has no trial 7"),
    ],
)
def test_what_cannot_be_retried_is_said(small: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    result = hpo("retry", small, *arguments, code=code)
    assert said in result.stderr
    assert result.stdout == ""


def test_a_long_reason_is_cut_in_the_table_only(small: Path) -> None:
    line = hpo("trials", small).stdout.splitlines()[2]
    assert line.rstrip().endswith("x…")
    assert len(hpo_json("trials", small)[0]["reason"]) == 200


def test_status_says_who_runs_what(small: Path) -> None:
    (entry,) = hpo_json("status", small)["running_trials"]
    assert (entry["trial"], entry["attempt"], entry["worker"]) == (2, 1, "worker-0")
    assert f"worker-0 on {entry['host']}, attempt 1, last beat" in hpo("status", small).stdout


def test_status_says_that_the_process_of_a_running_trial_is_gone(studies: Studies) -> None:
    """After a crash nothing else tells such a trial from one that is trained."""
    with studies.open() as (view,):
        ask(view)
        (entry,) = running_trials(view)
        assert entry["alive"] is True
        with view.storage.one_transaction() as conn:
            conn.execute(sa.update(ATTEMPTS).values(start_time=1.0))  # its id is another process's by now
        (entry,) = running_trials(view)
        assert entry["alive"] is False
        assert "attempt 1, its process is gone: `hpo run` resumes it" in hpo("status", view.spec.path).stdout


def test_a_repair_says_what_it_leaves_alone(small: Path) -> None:
    printed = hpo("repair", small).stdout
    assert "trial 2, attempt 1 left alone: worker-0 is alive: process" in printed
    assert printed.endswith("nothing to repair\n")
    report = hpo_json("repair", small, "--dry-run")
    assert (report["study"], report["dry_run"], report["done"]) == ("tiny", True, [])
    assert [entry["trial"] for entry in report["left"]] == [2]


def test_a_clean_says_what_goes_and_training_on_from_it_says_that_it_went(small: Path) -> None:
    dry = hpo("clean", small, "--dry-run").stdout
    assert dry == "trial 1 (pruned): 1 file, 1.5 kB would go\n1.5 kB would go in all; 0 B of checkpoints stay\n"
    assert hpo_json("clean", small, "--dry-run")["freed_bytes"] == 1500
    assert hpo("clean", small, "--yes").stdout == dry.replace("would go", "removed")
    assert hpo("clean", small, "--yes").stdout == "nothing to remove; 0 B of checkpoints stay\n"
    said = hpo("train", small, "--trial", 1, code=3).stderr
    assert "trial 1 has no checkpoints any more: `hpo clean`" in said
    export = ("best", small, "--trial", 1, "--export", small.with_name("model.pt"))
    for refused in (said, hpo(*export, code=3).stderr):
        assert "fix: train it anew with `hpo train --trial 1 --from-scratch`" in refused
    # This one never had any.
    assert "no readable checkpoint" in hpo("train", small, "--trial", 0, code=3).stderr


@pytest.fixture
def answered(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """A terminal as standard input, at which a person answers."""
    keyboard, screen = pty.openpty()
    with open(screen) as terminal:  # noqa: PTH123 - a descriptor
        monkeypatch.setattr(sys, "stdin", terminal)

        def answer(text: str) -> None:
            os.write(keyboard, f"{text}\n".encode())

        yield answer
    os.close(keyboard)


def test_a_clean_that_cannot_ask_is_refused_with_the_fix(small: Path) -> None:
    refused = hpo("clean", small, code=2)
    assert refused.stderr == "clean: removes checkpoints of the study tiny\n  fix: say so with `--yes`\n"
    assert hpo_json("clean", small, "--dry-run")["freed_bytes"] == 1500


def test_a_clean_asks_at_a_terminal(small: Path, answered: Callable[[str], None]) -> None:
    for no in ("n", "", "yesterday"):
        answered(no)
        kept = hpo("clean", small, "--json", code=1)
        assert kept.stdout == ""
        assert kept.stderr == (
            "This removes 1.5 kB of checkpoints, of 1 trial; `--dry-run` lists them.\n"
            "Continue? [y/N] nothing was changed\n"
        )
    answered("y")
    assert json.loads(hpo("clean", small, "--json").stdout)["freed_bytes"] == 1500
    assert hpo("clean", small).stdout.startswith("nothing to remove")  # so nothing is asked


def test_a_delete_asks_at_a_terminal(studies: Studies, answered: Callable[[str], None]) -> None:
    with studies.open() as (view,):
        trial, _ = ask(view)
        view.study.tell(trial, 0.5)
    study = studies.folder / "study.yaml"
    answered("no")
    kept = hpo("delete", study, code=1)
    assert "This deletes the study tiny, and the trials, the logs and the final training in" in kept.stderr
    assert "Trials in it: 1." in kept.stderr
    assert hpo_json("status", study)["finished"] == 1
    answered("yes")
    assert hpo("delete", study).stdout == "deleted the study tiny\n"
    assert "no study named tiny" in hpo("status", study, code=3).stderr
