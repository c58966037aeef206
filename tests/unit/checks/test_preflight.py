"""Trying a study out: what it finds in broken models, losses, data and callbacks, and what it measures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hpo.checks import peak_memory
from hpo.checks import preflight as trying
from hpo.checks.known_errors import broadcast_in
from hpo.checks.largest import largest_params
from hpo.checks.peak_memory import PeakMemory
from hpo.checks.preflight import preflight
from hpo.checks.preflight_costs import DevicePreflight, estimated_seconds
from hpo.config.space import SearchSpace
from hpo.config.spec import load_spec
from hpo.errors import InputError
from hpo.trial.resources import Slot
from tests.support.commands import make_study

PARTS = """
import asyncio
import time
import numpy as np
import torch
from torch import nn
from torch.utils.data import ChainDataset, DataLoader, IterableDataset, Subset, TensorDataset
from trainer import Callback


NUMPY = {"float32": np.float32, "array": np.asarray, "bool": np.bool_, "row": lambda error: error.reshape(1)}


class Endless(DataLoader):
    def __len__(self):
        raise RuntimeError("it is not known")


class Stream(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        yield from self.data


def load(samples=96, kind="good"):
    if kind == "fails":
        raise RuntimeError("the disk is gone")
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, 4, generator=generator)
    if kind == "nan":
        inputs[:, 1] = float("nan")
    targets = inputs[:, :1] * 2
    if kind == "flat":
        targets = targets.squeeze(1)
    if kind == "triples":
        return {name: TensorDataset(inputs, inputs, targets) for name in ("train", "val")}
    if kind in ("no_train", "no_val"):
        cut = 0 if kind == "no_train" else samples
        pairs = TensorDataset(inputs, targets)
        return {"train": Subset(pairs, range(cut)), "val": Subset(pairs, range(cut, samples))}
    val = TensorDataset(inputs * float("nan"), targets) if kind == "nan_val" else TensorDataset(inputs, targets)
    if kind == "tuples":
        return {name: (inputs, targets) for name in ("train", "val")}
    if kind == "chained":
        return {"train": ChainDataset([Stream(TensorDataset(inputs, targets))]), "val": val}
    if kind == "endless":
        return {name: Endless(TensorDataset(inputs, targets), 32) for name in ("train", "val")}
    return {"train": [] if kind == "list" else TensorDataset(inputs, targets), "val": val}


class Mute(Exception):
    def __str__(self):
        raise ValueError


class Net(nn.Module):
    def __init__(self, hidden=4, kind="good"):
        super().__init__()
        if kind == "unbuilt":
            raise ValueError("no such width")
        self.kind = kind
        self.first = nn.Linear(3 if kind == "narrow" else 4, hidden)
        self.last = nn.Linear(hidden, 1)
        self.unused = nn.Linear(2, 2) if kind == "unused" else nn.Identity()
        if kind == "frozen":
            for parameter in self.parameters():
                parameter.requires_grad_(False)
        if kind == "large" and hidden > 6:
            raise RuntimeError("can't allocate memory: you tried to allocate 9 bytes")

    def forward(self, inputs):
        hidden = self.first(inputs)
        if self.kind == "leaves":
            raise SystemExit(3)
        if self.kind == "cancelled":
            raise asyncio.CancelledError("a task")
        if self.kind == "interrupt":
            raise KeyboardInterrupt
        if self.kind == "mute":
            raise Mute
        if self.kind == "sqrt":
            hidden = torch.sqrt(hidden * 0)
        outputs = self.last(hidden)
        return outputs.detach() if self.kind == "detached" else outputs


class Plain:
    pass


class Unregistered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(4, 1)]


class Loss(nn.Module):
    def __init__(self, kind="good"):
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.ones(())) if kind == "learns" else 1.0

    def forward(self, outputs, targets):
        if self.kind == "raises":
            raise TypeError("wrong types")
        if self.kind == "vector":
            return ((outputs - targets) ** 2).squeeze(1)
        loss = nn.functional.mse_loss(outputs, targets) * self.scale
        if self.kind in ("number", "nothing"):
            return loss.item() if self.kind == "number" else None
        return loss / 0 if self.kind == "infinite" else loss


def metric(outputs, targets, kind="good"):
    if kind == "raises":
        raise KeyError("auc")
    if kind == "vector":
        return (outputs - targets).abs().squeeze(1)
    error = (outputs - targets).abs().mean()
    if kind in NUMPY:
        return NUMPY[kind](error.numpy())
    return error * float("nan") if kind == "nan" else error


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        raise ArithmeticError("no step")


class Scheduler(torch.optim.lr_scheduler.LRScheduler):
    def __init__(self, optimizer, kind):
        self.kind = kind
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch and self.kind == "raises":
            raise IndexError("past the end")
        return [float("nan") if self.last_epoch and self.kind == "nan" else 0.01]

    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "last_epoch": 7} if self.kind == "forgets" else state_dict)


class Wrong(Callback):
    def on_train_batch_end(self, trainer):
        raise LookupError("nothing there")


class SlowSecond(Callback):
    def on_train_batch_start(self, trainer):
        time.sleep(1.0 * (trainer.state.step == 1))


class Words(Callback):
    def on_epoch_end(self, trainer):
        trainer.state.metrics["word"] = "good"


class Counts(Callback):
    def __init__(self):
        self.count = 0

    def on_train_batch_end(self, trainer):
        self.count += 1


class Stateful(Callback):
    def __init__(self, kind):
        self.kind = kind

    def state_dict(self):
        return {"mine": {1, 2} if self.kind == "unsafe" else Stateful if self.kind == "pickled" else 3}

    def load_state_dict(self, state):
        self.state_dict = lambda: {"mine": 4}
"""

STUDY = """
study:
  name: tried
  n_trials: 6
  pruner: none
data: {_target_: parts.load}
loader: {batch_size: 32}
model: {_target_: parts.Net}
loss: {_target_: parts.Loss}
optimizer: {_target_: torch.optim.AdamW, lr: 1e-2}
lr_scheduler: {_target_: torch.optim.lr_scheduler.CosineAnnealingLR, T_max: "${trainer.max_epochs}"}
metrics: {mae: {_target_: parts.metric}}
trainer: {max_epochs: 3}
search_space:
  model.hidden: {type: int, low: 2, high: 8}
"""

CPU = [Slot("cpu", "cpu", None, 1)]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_study(tmp_path_factory.mktemp("tried"), STUDY)
    path.with_name("parts.py").write_text(PARTS)
    return path


def tried(file: Path, *overrides: str, search: bool = False) -> DevicePreflight:
    return preflight(load_spec(file, overrides if search else (*overrides, "search_space={}")), CPU)[0]


def test_a_good_study_is_measured_and_leaves_nothing(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in file.parent.iterdir())
    found = tried(file, search=True)
    assert sorted(path.name for path in file.parent.iterdir()) == before
    assert capfd.readouterr() == ("", "")
    base, largest = found.base, found.largest
    assert (base.inputs, base.outputs) == ([(32, 4), (32, 1)], [(32, 1)])
    assert (base.parameters, base.batches, base.epochs) == (4 * 4 + 4 + 4 + 1, 3, 3)
    assert base.batch_s > 0
    assert base.epoch_s is not None
    assert base.trial_s is not None
    assert base.trial_s > base.epoch_s * 3 > base.batch_s * 9
    assert largest is not None
    assert (largest.params, largest.parameters) == ({"model.hidden": 8}, 8 * 4 + 8 + 8 + 1)
    assert found.warnings == []


@pytest.mark.parametrize(
    ("override", "path", "problem"),
    [
        ("data.kind=fails", "data._target_", "building it failed: RuntimeError: the disk is gone"),
        ("data.kind=nan", "data", "32 of 128 values of a training batch's tensor 0 are not finite"),
        ("data.kind=list", "data._target_", "no batches can be made of list"),
        ("data.kind=triples", "data._target_", "taking inputs and targets from a batch failed"),
        ("data.kind=endless", "data._target_", "making batches of it failed: RuntimeError: it is not known"),
        ("data.kind=nan_val", "loss", "the loss of a validation batch is not finite"),
        ("model.kind=unbuilt", "model._target_", "building it failed: ValueError: no such width"),
        ("model.kind=narrow", "model._target_", r"the forward pass \(inputs \(32, 4\) float32\) failed"),
        ("model.kind=leaves", "model._target_", r"the forward pass .* failed: SystemExit: 3"),
        ("model.kind=cancelled", "model._target_", r"the forward pass .* failed: CancelledError: a task"),
        ("model.kind=mute", "model._target_", r"failed: Mute: \(no message: its __str__ raised ValueError\)"),
        ("model.kind=frozen", "loss", "does not depend on the model's parameters"),
        ("model.kind=detached", "loss", "does not depend on the model's parameters"),
        ("model.kind=sqrt", "model", "gradients of `first.weight` are not finite"),
        (
            "loss.kind=raises",
            "loss._target_",
            r"outputs \(32, 1\) float32, targets \(32, 1\) float32\) failed: TypeE",
        ),
        ("loss.kind=vector", "loss", r"has the shape \(32,\), and must be one number"),
        ("loss.kind=number", "loss._target_", "TypeError: a loss returns a tensor of one number, not float"),
        ("loss.kind=nothing", "loss._target_", "TypeError: a loss returns a tensor of one number, not NoneType"),
        ("loss.kind=infinite", "loss", "the loss of the first batch is inf"),
        ("metrics.mae.kind=raises", "metrics.mae._target_", "the metric .* failed: KeyError: 'auc'"),
        (
            "metrics={mae.all: {_target_: parts.metric, kind: raises}}",
            "metrics[mae.all]._target_",
            "the metric .* failed: KeyError: 'auc'",
        ),
        (
            "metrics={mae.all: {_target_: parts.metric, kind: nan}}",
            "metrics[mae.all]",
            "is nan for the first batch",
        ),
        ("metrics.mae.kind=vector", "metrics.mae", r"a Tensor of shape \(32,\), and must return one number"),
        ("metrics.mae.kind=row", "metrics.mae", r"a ndarray of shape \(1,\), and must return one number"),
        ("metrics.mae.kind=nan", "metrics.mae", "is nan for the first batch"),
        ("optimizer._target_=parts.Optimizer", "optimizer._target_", "step failed: ArithmeticError: no step"),
        ("optimizer.lr=1e38", "optimizer", "after one step the weights of `first.weight` are not finite"),
        ("optimizer.betas=[2, 2]", "optimizer._target_", "building it failed: ValueError: Invalid beta"),
        (
            "lr_scheduler={_target_: parts.Scheduler, kind: raises}",
            "lr_scheduler._target_",
            "step failed: IndexError",
        ),
        ("lr_scheduler={_target_: parts.Scheduler, kind: nan}", "lr_scheduler", "the learning rate is nan"),
        ("callbacks={wrong: {_target_: parts.Wrong}}", "callbacks.wrong._target_", "Wrong failed: LookupError"),
        ("callbacks={mine: {_target_: parts.Words}}", "callbacks.mine._target_", "MetricError: Words: metric"),
        (
            "callbacks={wrong: {_target_: parts.Counts}}",
            "callbacks",
            "taking them failed: ValueError: callback Counts sets `count`",
        ),
        (
            "callbacks={mine: {_target_: parts.Stateful, kind: pickled}}",
            "callbacks",
            r"what a checkpoint holds of it \(Stateful\) can't be saved and read back",
        ),
        ("trainer.compile={mode: fastest}", "trainer.compile", "torch.compile failed: .*mode=fastest"),
        ("trainer.validate_every=0.5", "", ""),
    ],
)
def test_what_is_broken_is_named(file: Path, override: str, path: str, problem: str) -> None:
    if not path:  # the control: an override that breaks nothing
        assert tried(file, override).base.epochs == 9
        return
    with pytest.raises(InputError, match=problem) as caught:
        tried(file, override)
    assert caught.value.path == path
    assert caught.value.fix
    assert caught.value.file is not None


@pytest.mark.parametrize("kind", ["float32", "array", "bool"])
def test_a_number_of_numpys_is_one_for_a_metric_as_it_is_in_a_run(file: Path, kind: str) -> None:
    assert tried(file, f"metrics.mae.kind={kind}").base.epochs == 3


@pytest.mark.parametrize(
    ("overrides", "path", "problem", "fix"),
    [
        (["data.kind=no_train"], "data._target_", "empty: there is nothing to train on", "selected and split"),
        (["data.kind=no_val"], "data._target_", "empty: there is nothing to evaluate", "selected and split"),
        (
            ["loader.batch_size=128", "loader.drop_last=true"],
            "data._target_",
            "smaller than a batch, which drop_last leaves out",
            "write a smaller `loader.batch_size`",
        ),
        (["model={_target_: parts.Plain}", "search_space={}"], "model._target_", "no torch.nn.Module", "derived"),
        (["callbacks={own: {_target_: parts.Plain}}"], "callbacks.own._target_", "no trainer.Callback", "derived"),
        (
            ["model={_target_: parts.Unregistered}", "search_space={}"],
            "optimizer._target_",
            "empty parameter list",
            "the model has no parameters",
        ),
    ],
)
def test_the_fix_is_for_what_is_wrong(file: Path, overrides: list[str], path: str, problem: str, fix: str) -> None:
    with pytest.raises(InputError, match=problem) as caught:
        tried(file, *overrides)
    assert caught.value.path == path
    assert caught.value.fix is not None
    assert fix in caught.value.fix


def test_of_parts_of_a_gpu_the_one_that_it_sees_is_tried(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []
    monkeypatch.setattr(trying, "_on_devices", lambda _, __, slot, ___: tried.append(slot.label))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    slots = [Slot(f"cuda:{number}", "cuda:0", f"MIG-{number}", 1) for number in range(2)]
    preflight(load_spec(file), slots)
    assert tried == ["cuda:0"]


def test_a_ctrl_c_ends_it(file: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        tried(file, "model.kind=interrupt")


def test_an_error_of_the_studys_own_code_is_shown_where_it_is(file: Path) -> None:
    with pytest.raises(InputError) as caught:
        tried(file, "loss.kind=raises")
    line = PARTS.splitlines().index('            raise TypeError("wrong types")') + 1
    assert caught.value.fix == f"see {file.with_name('parts.py')}:{line}"
    assert isinstance(caught.value.__cause__, TypeError)


def test_a_tuple_of_tensors_has_as_many_samples_as_rows(file: Path) -> None:
    found = [tried(file, "data.kind=tuples", f"loader.batch_size={size}").warnings for size in (96, 128)]
    assert [[item.problem for item in each] for each in found] == [
        [],
        ["a batch of 128 is more than all 96 training samples"],
    ]


def test_a_chain_of_streams_has_no_length(file: Path) -> None:
    assert not tried(file, "data.kind=chained", "loader.batch_size=128").warnings


def test_what_does_not_stop_a_trial_is_a_warning(file: Path) -> None:
    found = [
        *tried(file, "model.kind=unused").warnings,
        *tried(file, "loader.batch_size=128").warnings,
        *tried(file, "callbacks={mine: {_target_: parts.Stateful, kind: forgets}}").warnings,
        *tried(file, "lr_scheduler={_target_: parts.Scheduler, kind: forgets}").warnings,
        *tried(file, "data.kind=flat", "loss={_target_: torch.nn.MSELoss}", "metrics={}").warnings,
    ]
    assert [(item.path, item.problem.partition(":")[0]) for item in found] == [
        ("model", "no gradient reaches `unused.weight`, `unused.bias`"),
        ("loader.batch_size", "a batch of 128 is more than all 96 training samples"),
        ("callbacks", "callbacks (Stateful) changes when a checkpoint saves and restores it"),
        ("lr_scheduler", "scheduler changes when a checkpoint saves and restores it"),
        ("loss", "outputs of shape [batch, 1] and targets of shape [batch] are broadcast"),
    ]
    assert found[-1].fix.startswith("return the targets as `y.unsqueeze(-1)`")
    assert (found[-1].file, found[-1].line) == ("command line", None)


@pytest.mark.parametrize(
    ("override", "path", "name"),
    [
        ("loss.kind=learns", "loss", "scale"),
        ("optimizer={head: {_target_: torch.optim.SGD, parameters: last, lr: 0.01}}", "model", "first.weight"),
    ],
)
def test_what_no_optimizer_trains_is_a_warning(file: Path, override: str, path: str, name: str) -> None:
    found = tried(file, override, "lr_scheduler=null").warnings
    assert [item.path for item in found] == [path]
    assert found[0].problem.startswith(f"no optimizer trains `{name}`")


@pytest.mark.parametrize(
    ("outputs", "targets", "shapes", "fix"),
    [
        ((8, 1), (8,), ("[batch, 1]", "[batch]"), "`y.unsqueeze(-1)`"),
        ((8,), (8, 1), ("[batch]", "[batch, 1]"), "`y.squeeze(-1)`"),
        ((8, 1), (8, 3), ("[batch, 1]", "[batch, 3]"), "have one shape"),
        ((8, 3), (1, 3), ("[8, 3]", "[1, 3]"), "have one shape"),
    ],
)
def test_torchs_words_on_shapes_that_are_broadcast(
    outputs: tuple[int, ...], targets: tuple[int, ...], shapes: tuple[str, str], fix: str
) -> None:
    for loss in (torch.nn.MSELoss(), torch.nn.L1Loss(), torch.nn.SmoothL1Loss(), torch.nn.HuberLoss()):
        with pytest.warns(UserWarning, match="target size") as heard:
            loss(torch.zeros(outputs), torch.zeros(targets))
        found = broadcast_in(" ".join(str(heard[0].message).split()))
        assert found is not None
        assert found[0].startswith(f"outputs of shape {shapes[0]} and targets of shape {shapes[1]} are broadcast")
        assert fix in found[1]


def test_a_step_of_ones_own_and_steps_as_length(file: Path) -> None:
    step = "\n\ndef step(model, batch):\n    return {'loss': (model(batch[0]) - batch[1]).abs().mean()}\n"
    file.with_name("steps.py").write_text("import torch" + step)
    length = ("trainer={max_steps: 20, validate_every: 5}", "lr_scheduler.T_max=20", "lr_scheduler.interval=step")
    own = ("step={_target_: steps.step}", "metrics={}", "callbacks={gradient_accumulation: {batches: 2}}")
    base = tried(file, *length, *own).base
    assert (base.epochs, base.batches, base.outputs) == (4, 10, [])


OBJECTS = """
from dataclasses import dataclass

import torch


@dataclass
class Rows:
    x: torch.Tensor
    names: list


class Plain:
    def __init__(self, x, names):
        self.x, self.names = x, names


def collate(samples, kind="Rows", bad=False):
    x = torch.stack([torch.cat(sample) for sample in samples])
    return globals()[kind](x * float("nan") if bad else x, [str(row) for row in range(len(x))])


def step(model, batch):
    return (model(batch.x[:, :4]) - batch.x[:, 4:]).square().mean()
"""


@pytest.mark.parametrize("kind", ["Rows", "Plain"])
def test_tensors_of_a_batch_that_is_an_object_are_looked_at(file: Path, kind: str) -> None:
    file.with_name("objects.py").write_text(OBJECTS)
    collate = "loader={batch_size: 32, collate_fn: {_target_: objects.collate, kind: %s, bad: %s}}"
    own = ("step={_target_: objects.step}", "metrics={}")
    assert tried(file, collate % (kind, "false"), *own).base.inputs == [(32, 5)]
    with pytest.raises(InputError, match="160 of 160 values of a training batch's tensor 0 are not finite"):
        tried(file, collate % (kind, "true"), *own)


SPARSE = """
import torch
from torch import nn


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(4, 1, sparse=True)


def collate(samples, bad):
    x, y = map(torch.stack, zip(*samples))
    return (x * float("nan") if bad else x).to_sparse(), y


def step(model, batch):
    return (torch.sparse.mm(batch[0], model.rows(torch.arange(4))) - batch[1]).square().mean()
"""


def test_the_second_batch_of_a_compiled_model_may_be_the_one_that_compiles(file: Path) -> None:
    slow = "callbacks={slow: {_target_: parts.SlowSecond}}"
    assert tried(file, slow, "trainer.compile={backend: eager}").base.batch_s < 0.5
    assert tried(file, slow).base.batch_s >= 0.5


def test_sparse_batches_and_gradients_are_looked_at(file: Path) -> None:
    file.with_name("sparse.py").write_text(SPARSE)
    collate = "loader={batch_size: 32, collate_fn: {_target_: sparse.collate, bad: %s}}"
    own = ("step={_target_: sparse.step}", "metrics={}", "model={_target_: sparse.Table}")
    own += ("optimizer={_target_: torch.optim.SGD, lr: 0.01}", "loss=null")
    assert tried(file, collate % "false", *own).base.inputs == [(32, 4), (32, 1)]
    with pytest.raises(InputError, match="128 of 128 values of a training batch's tensor 0 are not finite"):
        tried(file, collate % "true", *own)


def test_a_base_config_without_memory_is_an_error(file: Path) -> None:
    with pytest.raises(InputError, match="memory runs out on cpu: RuntimeError") as caught:
        tried(file, "model.kind=large", "model.hidden=7")
    assert (caught.value.path, caught.value.value) == ("loader.batch_size", "32")


def test_a_largest_config_without_memory_is_a_warning(file: Path) -> None:
    found = tried(file, "model.kind=large", search=True)
    assert found.largest is None
    (warning,) = found.warnings
    assert warning.path == "search_space"
    assert "(model.hidden=8) does not run: loader.batch_size: memory runs out on cpu" in warning.problem
    assert "set `run.on_oom: retry_with_accumulation`" in warning.fix


def test_a_value_at_one_end_of_a_range_that_does_not_run_by_itself_is_said_at_the_range(file: Path) -> None:
    file.with_name("dropping.py").write_text(
        "from parts import Net\nfrom torch import nn\n\n\nclass Dropping(Net):\n"
        "    def __init__(self, hidden=4, dropout=0.1):\n"
        "        super().__init__(hidden)\n        self.dropout = nn.Dropout(dropout)\n"
    )
    for low, high, refused in ((0, 2, "2.0"), (-1, 0.5, "-1.0")):
        entry = f"search_space[model.dropout]={{type: float, low: {low}, high: {high}}}"
        (warning,) = tried(file, "model={_target_: dropping.Dropping}", entry, search=True).warnings
        assert (warning.path, warning.value) == ("search_space[model.dropout]", refused)
        assert "dropout probability has to be between 0 and 1" in warning.problem
        assert warning.fix.startswith("narrow the search; or see ")


def test_the_largest_config_is_made_of_sizes_that_go_together(file: Path) -> None:
    space = (
        "search_space={"
        "optimizer.lr: {type: float, low: 1e-3, high: 1.0}, "
        "loader.batch_size: {type: categorical, choices: [16, 64, 32]}, "
        "model.kind: {type: categorical, choices: [good, unused]}, "
        "model.hidden: {type: int, low: 2, high: 8, when: {model.kind: good}}, "
        "data.samples: {type: int, low: 32, high: 96, when: {model.kind: unused}}}"
    )
    spec = load_spec(file, [space, "model.kind=good"])
    assert largest_params(spec, SearchSpace.from_spec(spec)) == {"loader.batch_size": 64, "model.hidden": 8}


def test_callbacks_that_tell_others_stay_silent(file: Path) -> None:
    outward = (
        "callbacks={notifier: {url: 'json://127.0.0.1:9/'}, wandb: {project: none}, console: {every_n_epochs: 1}}"
    )
    assert tried(file, outward).warnings == []
    assert not any("wandb" in path.name for path in file.parent.iterdir())


def test_weights_that_would_be_averaged_later_are_no_warning(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not tried(file, "callbacks={weight_averaging: {last_steps: 0.25}}").warnings
    assert not caplog.records


def test_the_threads_of_a_worker_are_used_and_given_back(file: Path) -> None:
    threads = torch.get_num_threads()
    preflight(load_spec(file, ["search_space={}"]), [Slot("cpu", "cpu", None, threads + 1)])
    assert torch.get_num_threads() == threads


def test_the_estimate_is_a_bound_for_all_trials(file: Path) -> None:
    spec = load_spec(file, ["study.n_trials=5"])
    (found,) = preflight(spec, [*CPU, *CPU])
    assert found.workers == 2
    slowest = max(item.trial_s or 0.0 for item in (found.base, found.largest) if item)
    assert estimated_seconds(spec, [found]) == pytest.approx(3 * slowest)


@pytest.mark.parametrize(
    ("overrides", "rounds"),
    [
        (["search_space={trainer.max_epochs: {type: int, low: 1, high: 7}}"], 5),
        (["model.hidden=7", "trainer.max_epochs=${model.hidden}"], 5),
        (["search_space={trainer.max_epochs: {type: categorical, choices: [1, 7]}}", "study.epochs=14"], 2),
        (["search_space={trainer.max_epochs: {type: int, low: 1, high: 7}}", "study.epochs=100"], 5),
    ],
)
def test_the_estimate_is_one_of_the_longest_trials_where_their_length_is_searched(
    file: Path, overrides: list[str], rounds: int
) -> None:
    spec = load_spec(file, ["study.n_trials=5", "study.pruner=none", *overrides])
    (found,) = preflight(spec, CPU)
    longest = spec.longest_trial
    assert longest is not None
    assert longest >= 7
    measured = [item for item in (found.base, found.largest) if item]
    slowest = max((item.trial_s or 0) + (longest - item.epochs) * (item.epoch_s or 0) for item in measured)
    assert estimated_seconds(spec, [found]) == pytest.approx(rounds * slowest)


def test_there_is_no_estimate_where_the_length_is_searched_and_has_no_known_end(file: Path) -> None:
    spec = load_spec(
        file,
        [
            "lr_scheduler=null",
            "trainer={max_steps: 9}",
            "search_space={trainer.max_steps: {type: int, low: 1, high: 99}}",
        ],
    )
    (found,) = preflight(spec, CPU)
    assert found.base.trial_s is not None
    assert estimated_seconds(spec, [found]) is None


def test_memory_is_what_the_process_has_grown_by_at_most() -> None:
    memory = PeakMemory(torch.device("cpu"))
    memory.reset()
    block = bytearray(64 * 2**20)
    block[:: os.sysconf("SC_PAGE_SIZE")] = b"x" * len(block[:: os.sysconf("SC_PAGE_SIZE")])
    del block
    assert 60 * 2**20 < memory.peak() < 200 * 2**20


def test_workers_that_need_more_memory_than_there_is(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, spec = PeakMemory(torch.device("cpu")), load_spec(file)
    assert memory.too_little(spec, 2, 2**20) == []
    there: Any = type("Memory", (), {"available": 3 * 2**30})
    monkeypatch.setattr(peak_memory.psutil, "virtual_memory", lambda: there)
    (warning,) = memory.too_little(spec, 2, 2 * 2**30)
    assert warning.path == "run.workers"
    assert warning.problem == "2 workers need 4 GiB, and this machine has 3 GiB"
