"""A study as `hpo init` writes it is searched and trained, and learns what its data hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import hpo, hpo_json


# A guess of equal chances has a loss of 1.1; the mean has one of 1.
@pytest.mark.parametrize(("template", "guess"), [("classification", 1.0), ("regression", 0.9)])
def test_a_template_runs_as_it_is_and_learns(template: str, guess: float, tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    hpo("init", tmp_path, "--template", template, code=0)
    shorter = ("trainer.max_epochs=8",)
    hpo("run", study, "--n-trials", 3, "--workers", 2, *shorter, code=0)
    best = hpo_json("best", study, *shorter)
    assert best["value"] < guess
    assert {trial["outcome"] for trial in hpo_json("trials", study, *shorter)} <= {"complete", "pruned"}
