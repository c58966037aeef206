"""Studies with several objectives, and with constraints, as a person runs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

from hpo.config.spec import load_spec
from hpo.study.open_study import load_study
from tests.support.commands import STUDY, hpo, hpo_json, make_study

SEVERAL = STUDY.replace("  pruner: none\n", "  objectives: {val_loss: minimize, parameters: minimize}\n").replace(
    "search_space:", "callbacks: {parameter_count: true}\nsearch_space:"
)
BOUNDED = STUDY.replace("  pruner: none\n", '  pruner: none\n  constraints: {parameters: "<= 31"}\n').replace(
    "search_space:", "callbacks: {parameter_count: true}\nsearch_space:"
)


def dominated(entry: dict[str, Any], by: list[dict[str, Any]]) -> bool:
    mine = entry["values"]
    return any(
        all(other["values"][name] <= mine[name] for name in mine) and other["values"] != mine for other in by
    )


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two objectives that ran; one of its trials diverged."""
    study = make_study(tmp_path_factory.mktemp("several"), SEVERAL)
    hpo("run", study, "--workers", 2, "--n-trials", 8)
    return study


def test_the_best_is_a_pareto_front(several: Path) -> None:
    trials, front = hpo_json("trials", several), hpo_json("best", several)
    assert [trial["outcome"] for trial in trials] == ["complete"] * 8
    assert isinstance(front, list)
    numbers = {entry["trial"] for entry in front}
    assert numbers == {trial["trial"] for trial in trials if not dominated(trial, trials)}
    assert hpo_json("status", several)["best"] == front
    for entry in front:
        assert list(entry["values"]) == ["val_loss", "parameters"]
        assert entry["value"] == entry["values"]["val_loss"]
        assert entry["metrics"]["parameters"] == entry["values"]["parameters"]
        assert Path(entry["checkpoint"]).is_file()
    assert "parameters" in hpo("best", several).stdout


def test_optuna_sees_the_same_front(several: Path) -> None:
    with load_study(load_spec(several)) as opened:
        assert opened.study.directions == [optuna.study.StudyDirection.MINIMIZE] * 2
        best = sorted(trial.number for trial in opened.study.best_trials)
    assert best == sorted(entry["trial"] for entry in hpo_json("best", several))


def test_a_single_best_is_asked_for_by_number(several: Path) -> None:
    refused = hpo("train", several, "--trial", "best", "--epochs", 1, code=3)
    assert "several objectives" in refused.stderr
    number = hpo_json("best", several)[0]["trial"]
    assert str(number) in refused.stderr.partition("fix:")[2]
    assert hpo_json("train", several, "--trial", number, "--epochs", 1)["trial"] == number


def test_every_view_of_it_works(several: Path, tmp_path: Path) -> None:
    assert "8 of 8 finished" in hpo("status", several).stdout
    hpo("trials", several)
    hpo("report", several, "-o", tmp_path / "report.html")
    assert hpo_json("clean", several, "--keep-best", 1, "--dry-run")["removed"]
    assert "is requeued" not in hpo("run", several, "--n-trials", 8).stdout


def test_a_diverged_trial_is_beaten_in_every_objective(tmp_path: Path) -> None:
    study = make_study(tmp_path, SEVERAL)
    ended = hpo("run", study, "--workers", 1, "--n-trials", 2, "loss.nan=true", code=3)
    assert "no trial of tiny is complete: 2 diverged" in ended.stderr
    trials = hpo_json("trials", study, "loss.nan=true")
    assert [(trial["outcome"], trial["value"]) for trial in trials] == [("diverged", None)] * 2
    assert "no complete trial" in hpo("best", study, "loss.nan=true", code=3).stderr
    assert hpo_json("status", study, "loss.nan=true")["best"] == []


@pytest.mark.parametrize(
    ("override", "first"),
    [
        ("study.pruner=median", "study.pruner: can't be used with several objectives"),
        (
            "study.objectives={val_loss: minimize, params: minimize}",
            "study.objectives.params: nothing records this",
        ),
        ("study.objectives={val_loss: minimize, parameters: least}", "study.objectives.parameters: must be"),
        ("study.metric=val_loss", "study.metric: can't stand beside `objectives`"),
        ("study.target_value=0.5", "study.target_value: needs a single metric"),
    ],
)
def test_objectives_that_can_not_be_are_refused(tmp_path: Path, override: str, first: str) -> None:
    study = make_study(tmp_path, SEVERAL)
    result = hpo("run", study, override, code=2)
    assert result.stderr.startswith(f"command line: {first}")
    assert "fix:" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_trial_outside_the_bounds_is_never_the_best(tmp_path: Path) -> None:
    study = make_study(tmp_path, BOUNDED)
    hpo("run", study, "--workers", 2, "--n-trials", 8)
    trials = hpo_json("trials", study)
    for trial in trials:
        # 4 inputs, 1 output: weights and biases of two layers
        count = 6 * trial["params"]["model.hidden"] + 1
        assert trial["constraints"] == {"parameters": pytest.approx(count - 31)}
    within = [trial for trial in trials if trial["params"]["model.hidden"] <= 5]
    assert 0 < len(within) < 8
    best = hpo_json("best", study)
    assert best["trial"] == min(within, key=lambda trial: trial["value"])["trial"]
    assert hpo_json("train", study, "--trial", "best", "--epochs", 1)["trial"] == best["trial"]


def test_bounds_that_nothing_keeps_leave_no_best(tmp_path: Path) -> None:
    study = make_study(tmp_path, BOUNDED.replace("<= 31", "<= 3"))
    ran = hpo("run", study, "--workers", 2, "--n-trials", 2)
    refused = hpo("best", study, code=3)
    said = "none of the 2 complete trials of tiny meets its constraints: parameters <= 3"
    assert said in refused.stderr
    assert said in ran.stdout
    assert said in " ".join(hpo("status", study).stdout.split())
    assert said in hpo("status", study, "--watch").stdout
    assert hpo_json("status", study)["best"] is None


@pytest.mark.parametrize(
    ("override", "first"),
    [
        ('study.constraints={parameters: "< 3"}', "study.constraints.parameters: is not a bound"),
        ('study.constraints={parameters: "<= many"}', "study.constraints.parameters: is not a bound: its limit"),
        ("study.constraints={parameters: 3}", "study.constraints.parameters: is not a bound"),
        ('study.constraints={parametres: "<= 3"}', "study.constraints.parametres: nothing records this metric"),
    ],
)
def test_constraints_that_can_not_be_are_refused(tmp_path: Path, override: str, first: str) -> None:
    study = make_study(tmp_path, BOUNDED)
    result = hpo("run", study, override, code=2)
    assert result.stderr.startswith(f"command line: {first}")
    assert not (tmp_path / "runs").exists()
