"""Losses and metrics of a study file: true values whatever batch size is drawn, and metrics over the whole set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import hpo
from hpo.checks.check_metrics import check_metrics
from hpo.checks.preflight import preflight
from hpo.config.spec import load_spec
from hpo.errors import InputError
from hpo.trial.builder import Builder
from hpo.trial.micro_batch import cut
from hpo.trial.place import RunPlace
from hpo.trial.resources import Slot
from tests.support.commands import hpo as command
from tests.support.commands import hpo_json
from trainer import Trainer, WholeSet

pytestmark = pytest.mark.full

PARTS = """
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import TensorDataset


def load(samples=240):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 4, generator=generator)
    rare = (torch.arange(samples) > samples * 0.9).long()
    data = TensorDataset(inputs + rare[:, None], rare)
    return {"train": data, "val": data}


class Net(nn.Sequential):
    def __init__(self, hidden=4):
        super().__init__(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 2))


class Weighted(nn.CrossEntropyLoss):
    def __init__(self, rare):
        super().__init__(weight=torch.tensor([1.0, rare]))


def auc(outputs, targets, sign=1.0):
    score = sign * (outputs[:, 1] - outputs[:, 0])
    return roc_auc_score(targets.numpy(), score.numpy())


def mean_error(outputs, targets):
    return (outputs.argmax(1) != targets).float().mean()


class Recall:
    def __init__(self, odd=False):
        self.odd = odd
        self.reset()

    def reset(self):
        self.helper = object() if getattr(self, "odd", False) else None
        self.found = self.all = torch.zeros(())

    def update(self, outputs, targets):
        self.found = self.found + (outputs.argmax(1) * targets).sum()
        self.all = self.all + targets.sum()

    def compute(self):
        return self.found / self.all


def broken(outputs, targets):
    raise LookupError("no such curve")
"""

STUDY = """
study:
  name: rare
  n_trials: 2
  metric: val_auc
  direction: maximize
  pruner: none
data: {_target_: parts.load}
model: {_target_: parts.Net}
loss: {_target_: parts.Weighted, rare: 20.0}
optimizer: {_target_: torch.optim.SGD, lr: 0.0}
metrics:
  auc: {_target_: parts.auc, over: epoch, max_bytes: 1MiB}
  recall: {_target_: parts.Recall}
trainer: {max_epochs: 1}
search_space:
  loader.batch_size: {type: categorical, choices: [4, 32, 240]}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "study.yaml").write_text(STUDY)
    return tmp_path / "study.yaml"


def fitted(file: Path, params: dict[str, Any], parts: int = 1, *overrides: str) -> Trainer:
    spec = load_spec(file, overrides)
    builder, config = Builder(spec), spec.resolve(params)
    place = RunPlace(file.parent / "out", "trial")
    trainer = builder.trainer(cut(config, parts), place, seed=1, device=torch.device("cpu"))
    data = builder.data(config)
    trainer.fit(data["train"], data["val"])
    return trainer


def test_equal_weights_score_the_same_whatever_batch_size_is_drawn(file: Path) -> None:
    found = [fitted(file, {"loader.batch_size": size}) for size in (4, 32, 240)]
    found.append(fitted(file, {"loader.batch_size": 240}, 60))
    trainer = found[0]
    data = Builder(load_spec(file)).data(load_spec(file).resolve())["val"].tensors
    with torch.no_grad():
        outputs = trainer.model(data[0]).double()
    loss = functional.cross_entropy(outputs, data[1], torch.tensor([1.0, 20.0]).double()).item()
    ranked = outputs[data[1] == 1][:, None] - outputs[data[1] == 0][None]
    auc = (ranked[..., 1] > ranked[..., 0]).double().mean().item()
    for item in found:
        for prefix in ("train", "val"):
            assert item.state.metrics[f"{prefix}_loss"] == pytest.approx(loss, rel=1e-6)
            assert item.state.metrics[f"{prefix}_auc"] == pytest.approx(auc, rel=1e-9)
        assert item.state.metrics["val_recall"] == found[0].state.metrics["val_recall"]


def test_a_batch_in_parts_takes_the_step_of_the_whole_one(file: Path) -> None:
    whole, parts = (
        fitted(file, {"loader.batch_size": 240}, parts, "optimizer.lr=1.0", "loader.shuffle=false")
        for parts in (1, 60)
    )
    assert whole.state.step == parts.state.step == 1
    for ours, theirs in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_batch_size_that_is_searched_leaves_validation_alone(file: Path) -> None:
    spec = load_spec(file)
    sizes = {spec.resolve({"loader.batch_size": size})["loader"]["eval_batch_size"] for size in (4, 32, 240)}
    assert sizes == {256}


def test_a_metric_over_the_epoch_is_built_with_its_arguments_and_its_bound(file: Path) -> None:
    metric = fitted(file, {"loader.batch_size": 32}, 1, "metrics.auc.sign=-1.0").metrics["auc"]
    assert isinstance(metric, WholeSet)
    assert metric.max_bytes == 2**20
    assert metric.compute is not None


def test_more_than_the_bound_ends_the_trial_and_names_the_metric(file: Path) -> None:
    with pytest.raises(ValueError, match=r"metric train_auc .*raise max_bytes"):
        fitted(file, {"loader.batch_size": 32}, 1, "metrics.auc.max_bytes=2KB")


@pytest.mark.parametrize("name", ["auc", "val_macro_f1", "R2"])
def test_a_name_that_says_whole_set_is_warned_of_without_over_epoch(file: Path, name: str) -> None:
    (warned,) = check_metrics(load_spec(file, [f"metrics={{{name}: {{_target_: parts.mean_error}}}}"]))
    assert (warned.path, warned.fix[:18]) == (f"metrics.{name}", "add `over: epoch`:")
    assert (
        check_metrics(load_spec(file, [f"metrics={{{name}: {{_target_: parts.mean_error, over: epoch}}}}"])) == []
    )
    assert check_metrics(load_spec(file, ["metrics={recall: {_target_: parts.Recall}}"])) == []
    assert check_metrics(load_spec(file, ["metrics={precise: {_target_: parts.mean_error}}"])) == []


@pytest.mark.usefixtures("in_process")
def test_a_study_of_such_metrics_is_checked_and_run(file: Path) -> None:
    assert "Traceback" not in command("check", file).stdout
    command("run", file)
    assert [0 < trial["value"] < 1 for trial in hpo_json("trials", file)] == [True, True]


def test_the_same_in_python(file: Path) -> None:
    spec = load_spec(file)
    study = hpo.Study(
        "rare-too",
        data="parts.load",
        model="parts.Net",
        loss=hpo.Call("parts.Weighted", rare=20.0),
        optimizer=hpo.Call("torch.optim.SGD", lr=0.1),
        metrics={"auc": hpo.Call("parts.auc", over="epoch", max_bytes="1MiB"), "recall": hpo.Call("parts.Recall")},
        metric="val_auc",
        direction="maximize",
        search_space={"loader.batch_size": hpo.Categorical([4, 32])},
        folder=file.parent,
    )
    assert study.spec().base_config()["metrics"] == spec.base_config()["metrics"]


@pytest.mark.parametrize(
    ("override", "path", "problem"),
    [
        (
            "metrics.auc._target_=parts.broken",
            "metrics.auc._target_",
            "the metric failed: LookupError: no such",
        ),
        ("metrics.recall.odd=true", "metrics.recall._target_", r"the metric failed: .*helper is a object"),
    ],
)
def test_a_check_names_the_metric_that_fails(file: Path, override: str, path: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem) as raised:
        preflight(load_spec(file, [override, "search_space={}"]), [Slot("cpu", "cpu", None, 1)])
    assert raised.value.path == path
