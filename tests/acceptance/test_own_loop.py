"""A study of a function that trains by itself, run, killed, looked at and trained, as a person does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpo.config.spec import load_spec
from hpo.study.open_study import load_study
from tests.support.commands import hpo, hpo_json, ledger_of

LOOP = """
import os

import torch


def run(trial, lr, deadly=False, saves=True, epochs=8):
    state = (trial.load_checkpoint() if saves else None) or {"epoch": 0, "weight": torch.ones(2)}
    for epoch in range(state["epoch"] + 1, epochs + 1):
        if deadly and epoch == 4 and trial.folder.name == "attempt-1":
            os._exit(3)
        weight = state["weight"] * (1 - lr) + 0.01 * torch.randn(2)
        state = {"epoch": epoch, "weight": weight}
        trial.report(epoch, val_loss=weight.square().sum(), spread=weight.std())
        if saves:
            trial.save_checkpoint(state)


def value(lr):
    return (lr - 0.1) ** 2
"""
STUDY = """
study: {name: own, n_trials: 4, sampler: {name: random, seed: 3}, pruner: none}
run: {workers: 2}
objective: {_target_: loop.run, lr: 0.1}
search_space:
  objective.lr: {type: float, low: 1e-3, high: 0.5, log: true}
"""


def make(folder: Path) -> Path:
    folder.mkdir()
    (folder / "loop.py").write_text(LOOP)
    (folder / "study.yaml").write_text(STUDY)
    return folder / "study.yaml"


def curves(study: Path, *overrides: str) -> dict[int, tuple[Any, ...]]:
    """What each trial came to: outcome, epochs, value and curve, by number."""
    with load_study(load_spec(study, overrides)) as opened:
        return {
            trial.number: (trial.state.name, trial.value, dict(sorted(trial.intermediate_values.items())))
            for trial in opened.study.get_trials(deepcopy=False)
        }


def test_a_function_that_dies_in_each_first_attempt_resumes_or_starts_again(tmp_path: Path) -> None:
    undisturbed = make(tmp_path / "undisturbed")
    hpo("run", undisturbed, "study.n_trials=2")
    expected = curves(undisturbed)
    assert len(expected) == 2
    assert all(list(curve) == list(range(1, 9)) for _, _, curve in expected.values())
    for name, saves in (("resumed", "true"), ("again", "false")):
        study = make(tmp_path / name)
        given = ("objective.deadly=true", f"objective.saves={saves}", "study.n_trials=2")
        hpo("run", study, *given)
        assert curves(study, *given) == expected
        trials = hpo_json("trials", study, *given)
        assert [(each["outcome"], each["epochs"], len(each["internals"]["attempts"])) for each in trials] == [
            ("complete", 8, 2)
        ] * 2
        started_again = [
            "attempt 2 starts again" in path.read_text()
            for path in sorted(study.parent.glob("runs/own/trials/*/attempt-2/log.txt"))
        ]
        assert started_again == [saves == "false"] * 2
        hpo("report", study, *given, "-o", tmp_path / f"{name}.html")
        text = (tmp_path / f"{name}.html").read_text()
        assert ("trained again from the first epoch" in text) == (saves == "false")


def test_what_looks_at_a_study_and_trains_its_best(tmp_path: Path) -> None:
    study = make(tmp_path / "own")
    checked = hpo("check", study).stdout
    assert "preflight  left out: `objective` trains by itself" in checked
    assert hpo_json("check", study)["ok"]
    hpo("run", study, "study.pruner={name: median, n_startup_trials: 1, n_warmup_steps: 2}")
    outcomes = [each["outcome"] for each in hpo_json("trials", study)]
    assert sorted(set(outcomes)) == ["complete", "pruned"]
    best = hpo_json("best", study)
    assert Path(best["checkpoint"]).is_file()
    hpo("train", study, "--trial", "best")
    final = json.loads((tmp_path / "own" / "runs" / "own" / "final" / "metrics.json").read_text())
    assert final["value"] == best["value"]
    assert Path(final["checkpoint"]).name == Path(best["checkpoint"]).name
    assert Path(final["checkpoint"]).is_file()
    for option in (("--epochs", 3), ("--seeds", 2), ("--top-k", 2)):
        assert "is not for a study with `objective`" in hpo("train", study, *option, code=2).stderr
    refused = hpo("best", study, "--export", tmp_path / "model.safetensors", code=3).stderr
    assert "only that function knows" in refused


def test_a_scheduler_pauses_a_function_and_a_returned_value_is_a_whole_trial(tmp_path: Path) -> None:
    paused = make(tmp_path / "paused")
    asha = ("study.scheduler={name: asha, first_rung: 2, factor: 2}", "trainer.max_epochs=8")
    hpo("run", paused, *asha)
    outcomes = [(each["outcome"], each["epochs"]) for each in hpo_json("trials", paused, *asha)]
    assert ("complete", 8) in outcomes
    assert {outcome for outcome, _ in outcomes} <= {"complete", "pruned"}
    assert "paused" in {attempt.outcome for attempt in ledger_of(paused)}
    plain = make(tmp_path / "plain")
    target = "objective._target_=loop.value"
    hpo("run", plain, target)
    trials = hpo_json("trials", plain, target)
    assert [each["value"] for each in trials] == [(each["params"]["objective.lr"] - 0.1) ** 2 for each in trials]
    problem = hpo("run", make(tmp_path / "refused"), target, *asha, code=2).stderr
    assert "study.scheduler: pauses trials, and `loop.value` can't resume" in problem
