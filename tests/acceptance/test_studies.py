"""The studies that come with the project are valid, and run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hpo.build import offered_callbacks
from hpo.check import check_metric, check_spec
from hpo.check_callbacks import check_callbacks
from hpo.config import load_spec
from hpo.targets import TargetResolver
from tests.acceptance.support import hpo, hpo_json

STUDIES = sorted((Path(__file__).parents[2] / "studies").glob("*/study.yaml"))

every_study = pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.parent.name)


def test_there_are_studies_and_each_has_a_readme() -> None:
    assert {path.parent.name for path in STUDIES} >= {"digits", "oscillator"}
    for path in STUDIES:
        readme = (path.parent / "README.md").read_text()
        assert f"hpo run studies/{path.parent.name}/study.yaml" in readme


@every_study
def test_a_study_fits_the_code_that_it_names(study: Path) -> None:
    spec = load_spec(study, require_search_space=True)
    assert check_spec(spec, callbacks=offered_callbacks()) == []
    check_metric(spec, check_callbacks(spec))
    assert spec.study.name == study.parent.name


@every_study
def test_a_study_runs(study: Path, tmp_path: Path) -> None:
    options = ("--output-dir", tmp_path, "trainer.max_epochs=2")
    hpo("run", study, "--n-trials", 2, "--workers", 2, *options)
    trials = hpo_json("trials", study, *options)
    assert [(entry["trial"], entry["outcome"]) for entry in trials] == [(0, "complete"), (1, "complete")]
    assert {path.name for path in tmp_path.iterdir()} >= {"study.db", "trials"}


@every_study
def test_a_study_trains_without_a_search(study: Path, tmp_path: Path) -> None:
    result = hpo_json("train", study, "--epochs", 1, "--output-dir", tmp_path)
    assert (result["epochs"], result["trial"]) == (1, None)
    assert {"val_loss", "test_loss"} <= result["metrics"].keys()
    assert json.loads((tmp_path / "final" / "metrics.json").read_text())["value"] == result["value"]


@pytest.mark.parametrize("optimizer", ["schedulefree.AdamWScheduleFree", "pytorch_optimizer.SPlus"])
def test_the_oscillator_trains_with_each_optimizer_that_it_may_draw(optimizer: str, tmp_path: Path) -> None:
    study = next(path for path in STUDIES if path.parent.name == "oscillator")
    assert optimizer in load_spec(study).search_space["optimizer._target_"].choices
    change = (f"optimizer._target_={optimizer}", "optimizer.lr=0.02")
    result = hpo_json("train", study, "--epochs", 2, "--output-dir", tmp_path, *change)
    assert result["metrics"]["val_relative_error"] < 1.01


def test_the_oscillators_curves_solve_their_equation() -> None:
    displacement = TargetResolver(STUDIES[0].parents[1] / "oscillator").resolve("data.displacement")
    time = torch.linspace(0.0, 20.0, 400, dtype=torch.float64).expand(9, -1).requires_grad_()
    damping = torch.linspace(0.05, 0.5, 3, dtype=torch.float64).repeat(3)[:, None]
    ratio = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64).repeat_interleave(3)[:, None]
    position = displacement(time, damping, ratio)
    velocity = torch.autograd.grad(position.sum(), time, create_graph=True)[0]
    acceleration = torch.autograd.grad(velocity.sum(), time)[0]
    residual = acceleration + 2 * damping * velocity + position - torch.cos(ratio * time)
    assert residual.abs().max() < 1e-12
    assert position[:, 0].abs().max() < 1e-12
    assert velocity[:, 0].abs().max() < 1e-12
