"""The studies that come with the project are valid, and run."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpo.checks.check import check_spec
from hpo.checks.check_callbacks import check_callbacks
from hpo.checks.check_metrics import check_metric
from hpo.config.spec import load_spec
from hpo.config.targets import TargetResolver
from hpo.errors import InputError
from tests.support.commands import hpo, hpo_json

FOLDER = Path(__file__).parents[2] / "studies"
STUDIES = sorted(FOLDER.glob("*/study.yaml"))
#: Less to learn from, where an epoch takes long.
LESS_DATA = {"text": ("data.train=6_400", "data.held_out=1_600")}

every_study = pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.parent.name)


def part(study: str, path: str) -> Any:
    """A study's own class or function."""
    return TargetResolver(FOLDER / study).resolve(path)


def loaded(study: str) -> Any:
    """A study's sets, as large as they are by default."""
    return part(study, load_spec(FOLDER / study / "study.yaml").base_config()["data"]["_target_"])()


def test_there_are_studies_and_each_has_a_readme() -> None:
    names = {"digits", "mnist1d", "mnist5k", "oscillator", "tabular", "text"}
    assert {path.parent.name for path in STUDIES} >= names
    for path in STUDIES:
        readme = (path.parent / "README.md").read_text()
        assert f"hpo run studies/{path.parent.name}/study.yaml" in readme


@every_study
def test_a_study_fits_the_code_that_it_names(study: Path) -> None:
    spec = load_spec(study, require_search_space=True)
    assert check_spec(spec) == []
    errors: list[InputError] = []
    check_metric(spec, check_callbacks(spec, (), errors)[0])
    assert not errors
    assert spec.study.name == study.parent.name


@every_study
def test_a_study_runs(study: Path, tmp_path: Path) -> None:
    options = ("--output-dir", tmp_path, "trainer.max_epochs=2", *LESS_DATA.get(study.parent.name, ()))
    hpo("run", study, "--n-trials", 2, "--workers", 2, *options)
    trials = hpo_json("trials", study, *options)
    assert [(entry["trial"], entry["outcome"]) for entry in trials] == [(0, "complete"), (1, "complete")]
    assert {path.name for path in tmp_path.iterdir()} >= {"study.db", "trials"}


@every_study
def test_a_study_trains_without_a_search(study: Path, tmp_path: Path) -> None:
    less_data = LESS_DATA.get(study.parent.name, ())
    result = hpo_json("train", study, "--epochs", 1, "--output-dir", tmp_path, *less_data)
    assert (result["epochs"], result["trial"]) == (1, None)
    assert {"val_loss", "test_loss"} <= result["metrics"].keys()
    assert json.loads((tmp_path / "final" / "metrics.json").read_text())["value"] == result["value"]


@pytest.mark.parametrize("name", [path.parent.name for path in STUDIES])
def test_no_sample_is_in_two_sets(name: str) -> None:
    sets = loaded(name)
    samples = {key: {row.numpy().tobytes() for row in dataset.tensors[0]} for key, dataset in sets.items()}
    assert set(samples) == {"train", "val", "test"}
    for one, other in (("train", "val"), ("train", "test"), ("val", "test")):
        assert not samples[one] & samples[other]


@pytest.mark.parametrize("name", ["mnist1d", "mnist5k", "tabular"])
def test_inputs_are_standardised_by_what_is_learned_from(name: str) -> None:
    sets = loaded(name)
    inputs = {key: dataset.tensors[0].double() for key, dataset in sets.items()}
    assert inputs["train"].mean().abs() < 1e-5
    assert inputs["train"].std() == pytest.approx(1, abs=1e-3)
    assert all(inputs[key].mean().abs() > 1e-5 for key in ("val", "test"))


@pytest.mark.parametrize(
    ("name", "path", "value", "metric", "guessing"),
    [
        ("oscillator", "optimizer._target_", "schedulefree.AdamWScheduleFree", "val_relative_error", 1.01),
        ("oscillator", "optimizer._target_", "pytorch_optimizer.SPlus", "val_relative_error", 1.01),
        ("mnist1d", "model._target_", "model.CNN", "val_loss", math.log(10)),
        ("mnist1d", "model._target_", "model.MLP", "val_loss", math.log(10)),
        ("mnist5k", "optimizer._target_", "torch.optim.SGD", "val_loss", math.log(10)),
        ("text", "model._target_", "model.GRU", "val_bits_per_character", math.log2(97)),
        ("text", "model._target_", "model.Transformer", "val_bits_per_character", math.log2(97)),
        ("tabular", "model.layers", 0, "val_loss", 1.0),
        ("tabular", "model.layers", 3, "val_loss", 1.0),
    ],
)
def test_each_class_that_may_be_drawn_learns(
    name: str, path: str, value: Any, metric: str, guessing: float, tmp_path: Path
) -> None:
    study = FOLDER / name / "study.yaml"
    param = load_spec(study).search_space[path]
    assert value in (param.choices if param.type == "categorical" else (param.low, param.high))
    changes = (f"{path}={value}", "optimizer.lr=0.02", *LESS_DATA.get(name, ()))
    result = hpo_json("train", study, "--epochs", 2, "--output-dir", tmp_path, *changes)
    assert result["metrics"][metric] < guessing


def test_the_oscillators_curves_solve_their_equation() -> None:
    displacement = part("oscillator", "data.displacement")
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


def test_a_signal_of_mnist1d_holds_its_digit_and_no_other() -> None:
    """Without the smooth noise, the template that fits best, at any place and length, is that of the digit."""
    digits = torch.arange(10).repeat(20)
    signals = part("mnist1d", "data.draw")(digits, 0.0, torch.Generator().manual_seed(3))
    assert signals.shape == (200, 40)
    assert signals.dtype == torch.float32
    time = torch.linspace(0, 1, 40)
    lengths = torch.linspace(12 / 72, 12 / 48, 8).repeat_interleave(60)[:, None]
    starts = torch.linspace(0, 1, 60).repeat(8)[:, None] * (1 - lengths)
    places = (time - starts) / lengths * 11
    inside = ((places >= 0) & (places <= 11)).float()
    fits = torch.stack(
        [
            _similarity(signals, inside * part("mnist1d", "data._read")(torch.full((480,), digit), places))
            for digit in range(10)
        ]
    )
    assert (fits.argmax(dim=0) == digits).float().mean() > 0.9


def _similarity(signals: Tensor, shapes: Tensor) -> Tensor:
    """How well the best of the shapes fits each signal, offsets and slopes aside."""
    line = torch.stack([torch.ones(40), torch.linspace(-1, 1, 40)])
    line = line / line.norm(dim=1, keepdim=True)
    signals, shapes = (values - values @ line.T @ line for values in (signals, shapes))
    return (signals @ (shapes / shapes.norm(dim=1, keepdim=True)).T).amax(dim=1)


def test_the_signals_of_mnist1d_follow_from_their_seed() -> None:
    load = part("mnist1d", "data.load_signals")
    first, again, other = (load(train=50, held_out=10, seed=seed)["val"].tensors[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_the_convolutions_of_mnist1d_want_an_odd_kernel() -> None:
    with pytest.raises(ValueError, match="odd"):
        part("mnist1d", "model.CNN")(kernel=4)


def test_mnist5k_holds_out_as_many_of_each_digit() -> None:
    counts = {name: dataset.tensors[1].bincount().tolist() for name, dataset in loaded("mnist5k").items()}
    assert counts == {"train": [350] * 10, "val": [75] * 10, "test": [75] * 10}


def test_a_shift_moves_each_picture_by_whole_pixels_and_only_in_training() -> None:
    shift = part("mnist5k", "model.RandomShift")(2)
    pictures = torch.zeros(200, 1, 9, 9)
    pictures[:, 0, 4, 4] = 1.0
    torch.manual_seed(0)
    moved = shift(pictures)
    assert moved.shape == pictures.shape
    at = moved.nonzero()
    assert at[:, 0].tolist() == list(range(200))  # each picture still has its one pixel
    assert at[:, 2].unique().tolist() == at[:, 3].unique().tolist() == [2, 3, 4, 5, 6]
    assert len(at[:, 2:].unique(dim=0)) == 25
    assert torch.equal(shift.eval()(pictures), pictures)
    assert torch.equal(part("mnist5k", "model.RandomShift")(0)(pictures), pictures)


def test_no_paragraph_of_the_text_is_in_two_sets() -> None:
    paragraphs = {name: re.split(r"\n\s*\n", text) for name, text in part("text", "data.split_text")().items()}
    everything = [paragraph for found in paragraphs.values() for paragraph in found]
    assert len(everything) == len(set(everything)) > 1000


def test_the_text_asks_for_the_character_that_comes_next() -> None:
    encode, load = part("text", "data.encode"), part("text", "data.load_text")
    text = part("text", "data.split_text")()["val"]
    inputs, targets = load(context=16, train=160, held_out=320)["val"].tensors
    assert inputs.shape == targets.shape == (20, 16)
    assert torch.equal(inputs.flatten(), encode(text[:320]))
    assert torch.equal(targets.flatten(), encode(text[1:321]))
    assert encode("\n ~\N{SNOWMAN}").tolist() == [1, 2, 96, 0]


def test_more_text_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        part("text", "data.load_text")(train=10_000_000)


@pytest.mark.parametrize("name", ["GRU", "Transformer"])
@pytest.mark.parametrize("training", [True, False])
def test_a_model_of_the_text_does_not_look_ahead(name: str, training: bool) -> None:
    torch.manual_seed(0)
    model: nn.Module = part("text", f"model.{name}")(width=16, layers=2).train(training)
    characters = torch.randint(97, (3, 64))
    changed = characters.clone()
    changed[:, 40] = (changed[:, 40] + 1) % 97
    with torch.no_grad():
        difference = (model(characters) - model(changed)).abs().amax(dim=(0, 1))
    assert difference.shape == (64,)
    assert difference[:40].max() == 0
    assert difference[40:].min() > 0


def test_the_table_is_friedmans_and_a_network_without_layers_is_linear() -> None:
    inputs, targets = part("tabular", "data.load_table")(noise=0.0)["train"].tensors
    assert (inputs.shape, targets.shape) == ((1000, 10), (1000, 1))
    assert inputs.dtype == targets.dtype == torch.float32
    linear = part("tabular", "model.Network")(layers=0)
    assert sum(parameter.numel() for parameter in linear.parameters()) == 11
    assert torch.allclose(
        linear(inputs[:4] + inputs[4:8]), linear(inputs[:4]) + linear(inputs[4:8]) - linear[0].bias
    )
    solution = torch.linalg.lstsq(inputs, targets).solution
    assert solution[5:].abs().max() < 0.1 < solution[3:5].min()  # only the first five columns matter


def test_r2_of_the_truth_is_one_and_of_the_mean_zero() -> None:
    r2, targets = part("tabular", "model.r2"), torch.tensor([[1.0], [2.0], [6.0]])
    assert r2(targets, targets) == 1
    assert r2(targets.mean().expand(3, 1), targets) == 0
