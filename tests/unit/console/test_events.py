"""The events of `hpo run --json`, and what a quiet run says."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import CRAWLING, hpo, hpo_json, make_study

pytestmark = pytest.mark.full

NAMES = {
    "study_started": [
        *("study", "goals", "n_trials", "n_epochs", "finished", "workers", "agents", "storage", "output_dir")
    ],
    "trial_started": ["trial", "worker", "epochs", "granted"],
    "trial_granted": ["trial", "worker", "granted"],
    "epoch_ended": ["trial", "worker", "epoch", "max_epochs", "value", "predicted"],
    "trial_ended": ["trial", "worker", "outcome", "value", "params", "epochs", "duration_s", "reason"],
    "trial_paused": ["trial", "worker", "epochs", "value"],
    "trial_requeued": ["trial", "worker", "reason"],
    "notice": ["text"],
    "worker_failed": ["worker", "reason"],
    "study_ended": ["ending", "reason", "status"],
}


def events(printed: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in printed.splitlines()]
    for event in found:
        assert list(event) == ["event", "time", *_names(event)]
        assert datetime.fromisoformat(event["time"]).tzinfo is not None
    return found


def _names(event: dict[str, Any]) -> list[str]:
    """Of a trial that no worker has any more, less is known at its end."""
    reaped = event["event"] == "trial_ended" and "value" not in event
    return ["trial", "worker", "outcome", "reason"] if reaped else NAMES[event["event"]]


def of(name: str, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in found if event["event"] == name]


@pytest.mark.usefixtures("in_process")
def test_a_run_tells_each_thing_that_happens_once(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    code = tmp_path / "parts.py"
    code.write_text("print('this is not an event')\n" + code.read_text())
    arguments = (
        "run",
        study,
        "--n-trials",
        3,
        "loss.nan=true",
        "search_space={loss.nan: {type: categorical, choices: [false, true]}}",
    )
    result = hpo(*arguments, "--json", "study.sampler={name: grid}", "callbacks.loss_prediction.min_epochs=2")
    found = events(result.stdout)
    assert "this is not an event" in result.stderr
    assert found[0]["event"] == "study_started"
    assert (found[0]["n_trials"], found[0]["finished"], found[0]["workers"]) == (2, 0, ["cpu"])
    assert [event["trial"] for event in of("trial_started", found)] == [0, 1]
    ends = {event["outcome"]: event for event in of("trial_ended", found)}
    assert set(ends) == {"complete", "diverged"}
    assert ends["diverged"]["value"] is None
    assert ends["complete"]["params"] == {"loss.nan": False}
    number = ends["complete"]["trial"]
    epochs = [event for event in of("epoch_ended", found) if event["trial"] == number]
    assert [event["epoch"] for event in epochs] == [1, 2, 3]
    assert min(event["value"] for event in epochs) == ends["complete"]["value"]
    assert {event["max_epochs"] for event in epochs} == {3}
    assert found[-1]["event"] == "study_ended"
    assert (found[-1]["ending"], found[-1]["reason"]) == ("done", None)
    status = hpo_json(
        "status", study, *arguments[4:], "study.sampler={name: grid}", "callbacks.loss_prediction.min_epochs=2"
    )
    assert found[-1]["status"] == status


@pytest.mark.usefixtures("in_process")
def test_each_grant_is_told_once_with_its_reason(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    options = ("study.scheduler=asha", "study.pruner=none", "study.epochs=40", "trainer.max_epochs=9")
    found = events(hpo("run", study, "--n-trials", 30, *options, "--json").stdout)
    told = [event["granted"] for event in found if event["event"] in ("trial_started", "trial_granted")]
    stored = [grant for trial in hpo_json("trials", study, *options) for grant in trial["internals"]["grants"]]
    assert told == sorted(stored, key=lambda grant: grant["number"])
    assert of("trial_granted", found), "one that was promoted at once"
    assert [event["epochs"] > 0 for event in of("trial_started", found)] == [
        event["granted"]["why"]["kind"] == "promotion" for event in of("trial_started", found)
    ]
    bests = [grant["why"]["incumbent"] for grant in told]
    assert bests[0] is None
    assert bests[1:] == sorted(bests[1:], reverse=True), "the best value so far"
    (status,) = (event["status"] for event in of("study_ended", found))
    assert bests[-1] >= status["best"]["value"]
    ends = of("trial_ended", found)
    assert {event["trial"]: event["reason"] for event in ends if event["outcome"] == "pruned"} == {
        trial["trial"]: f"pruned at epoch {trial['epochs']}: paused there when the study ended"
        for trial in hpo_json("trials", study, *options)
        if trial["outcome"] == "pruned"
    }


@pytest.mark.usefixtures("in_process")
def test_a_resumed_trials_epochs_are_not_told_again(tmp_path: Path) -> None:
    study = make_study(tmp_path, code=CRAWLING)
    options = ("--n-trials", 1, "loader.batch_size=1", "trainer.max_epochs=4", "--json")
    first = events(hpo("run", study, "--timeout", "1s", *options).stdout)
    (tmp_path / "go").touch()
    second = events(hpo("run", study, *options).stdout)
    assert first[-1]["ending"] == "timeout"
    assert len(of("trial_requeued", first)) == len(of("trial_started", first))
    reported_epochs = [event["epoch"] for event in [*of("epoch_ended", first), *of("epoch_ended", second)]]
    assert reported_epochs == [1, 2, 3, 4]


@pytest.mark.usefixtures("in_process")
def test_a_study_that_fails_ends_with_the_reason(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    result = hpo("run", study, "--json", "data.broken=true", code=3)
    found = events(result.stdout)
    assert [event["reason"] for event in of("trial_ended", found)] == ["RuntimeError: the data is broken"] * 3
    assert found[-1]["ending"] == "failed"
    assert found[-1]["reason"].startswith("the first 3 trials failed alike")
    assert "the first 3 trials failed alike" in result.stderr


@pytest.mark.usefixtures("in_process")
def test_a_quiet_run_says_nothing_but_what_went_wrong(tmp_path: Path) -> None:
    study = make_study(tmp_path / "well")
    result = hpo("run", study, "--quiet", "--n-trials", 1)
    assert (result.stdout, result.stderr) == ("", "")
    study = make_study(tmp_path / "broken")
    result = hpo("run", study, "--quiet", "data.broken=true", code=3)
    assert result.stdout == ""
    assert "trial 0    error" in result.stderr
    assert "RuntimeError: the data is broken" in result.stderr


def test_quiet_and_events_exclude_each_other(tmp_path: Path) -> None:
    result = hpo("run", make_study(tmp_path), "--quiet", "--json", code=2)
    assert result.stdout == ""
    assert result.stderr.startswith("--quiet, --json: give one of them")


@pytest.mark.parametrize("flag", [(), ("--json",), ("--quiet",)])
def test_an_error_in_the_study_is_one_in_every_mode(tmp_path: Path, flag: tuple[str, ...]) -> None:
    study = make_study(tmp_path)
    result = hpo("run", study, "optimizer.lt=1", *flag, code=2)
    assert result.stdout == ("" if flag else f"checking {study}\n")
    assert "takes no argument `lt`" in result.stderr
