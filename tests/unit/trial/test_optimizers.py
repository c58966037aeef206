"""Several optimizers and schedulers of a study file: what is built, searched, and refused at its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hpo.checks.check import check_spec
from hpo.checks.checks import check_study
from hpo.checks.meaning import check_meaning
from hpo.checks.schedule_errors import check_schedule
from hpo.config.spec import StudySpec
from hpo.errors import InputError
from hpo.trial.builder import Builder
from hpo.trial.place import RunPlace
from tests.support.studies import Studies
from trainer import Trainer

PARTS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def load():
    data = TensorDataset(torch.zeros(8, 4))
    return {"train": data, "val": data}


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 1)
        self.two = nn.Linear(4, 1)


def step(model, batch, update, scale=1.0):
    loss = model.one(batch[0]).mean()
    update(loss, "one")
    return loss
"""
STUDY = """
study: {name: pair, n_trials: 2, pruner: none, sampler: random}
data: {_target_: parts.load}
model: {_target_: parts.Pair}
step: {_target_: parts.step, scale: 2.0}
optimizer:
  one: {_target_: torch.optim.SGD, lr: 0.1}
  other: {_target_: torch.optim.Adam, lr: 0.01, parameters: ["two.*"]}
lr_scheduler:
  one: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 2, interval: step}
  late: {_target_: torch.optim.lr_scheduler.ExponentialLR, gamma: 0.9, optimizer: one}
  other: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, warmup: 2}
trainer: {max_epochs: 3}
search_space:
  optimizer.one.lr: {type: float, low: 0.01, high: 1.0}
  lr_scheduler.late.gamma: {type: float, low: 0.5, high: 1.0}
"""


#: Schedulers that are over none of the optimizers: what to replace, by what, and the error.
UNMATCHED = [
    (
        "optimizer: one}",
        "optimizer: oen}",
        r"lr_scheduler\.late: no optimizer is called `oen`\n.*one of one, o",
    ),
    (
        STUDY[STUDY.index("lr_scheduler:") : STUDY.index("trainer:")],
        "lr_scheduler: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 1}\n",
        r"lr_scheduler: is one scheduler, and there are several optimizers\n.*`lr_scheduler: \{one: \{",
    ),
]


def build(spec: StudySpec, **params: Any) -> Trainer:
    place = RunPlace(spec.output_dir, "trial-0")
    return Builder(spec).trainer(spec.resolve(params), place, seed=1, device=torch.device("cpu"))


def test_each_gets_its_parameters_its_schedulers_and_what_is_searched(studies: Studies) -> None:
    spec = studies.spec(text=STUDY, code=PARTS)
    assert check_spec(spec) == []
    assert list(check_meaning(spec)) == []
    trainer = build(spec, **{"optimizer.one.lr": 0.5, "lr_scheduler.late.gamma": 0.75})
    optimizer: Any = trainer.optimizer
    scheduler: Any = trainer.scheduler
    assert optimizer["one"].param_groups[0]["params"] == list(trainer.model.one.parameters())
    assert optimizer["other"].param_groups[0]["params"] == list(trainer.model.two.parameters())
    assert optimizer["one"].param_groups[0]["lr"] == 0.5
    assert scheduler.intervals == {"one": "step", "late": "epoch", "other": "epoch"}
    assert scheduler.by_name["late"].gamma == 0.75
    assert [each.optimizer for each in scheduler.by_name.values()] == [
        optimizer["one"],
        optimizer["one"],
        optimizer["other"],
    ]
    data = Builder(spec).data(spec.resolve())
    assert trainer.fit(data["train"], data["val"]).step == 3


def test_several_schedulers_of_one_optimizer(studies: Studies) -> None:
    schedulers = "a: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 1}, b: "
    schedulers += "{_target_: torch.optim.lr_scheduler.ExponentialLR, gamma: 0.5, interval: step}"
    spec = studies.spec(f"lr_scheduler={{{schedulers}}}")
    check_spec(spec)
    trainer = build(spec)
    scheduler: Any = trainer.scheduler
    assert [each.optimizer for each in scheduler.by_name.values()] == [trainer.optimizer] * 2


@pytest.mark.parametrize(
    ("before", "after", "path", "problem"),
    [
        ("lr: 0.1", "lrr: 0.1", "optimizer.one.lrr", "`torch.optim.SGD` takes no argument `lrr`"),
        ("torch.optim.SGD", "torch.optim.SDG", "optimizer.one._target_", "SDG"),
        ("{_target_: torch.optim.SGD, lr: 0.1}", "3", "optimizer.one", "must be a mapping with `_target_`"),
        ('["two.*"]', "7", "optimizer.other.parameters", "must be a pattern or a list of patterns"),
        ("parameters: [", "groups: {}, parameters: [", "optimizer.other.groups", "go with a single optimizer"),
        ("warmup: 2", "warmup: -2", "lr_scheduler.other.warmup", "must be a whole number"),
        ("interval: step", "interval: batch", "lr_scheduler.one.interval", "must be `epoch` or `step`"),
        ("  other: {_target_: torch.optim.A", "  o-r: {_target_: torch.optim.A", "optimizer.o-r", "is not a name"),
        (
            "optimizer.one.lr:",
            "optimizer.two.lr:",
            "search_space[optimizer.two.lr]",
            "names nothing in the config",
        ),
    ],
)
def test_what_is_wrong_is_said_at_its_place(
    studies: Studies, before: str, after: str, path: str, problem: str
) -> None:
    assert before in STUDY
    with pytest.raises(InputError) as caught:
        check_spec(studies.spec(text=STUDY.replace(before, after, 1), code=PARTS))
    assert path in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            '["two.*"]',
            '"tow.*"',
            r"optimizer\.other: no parameter .* 'tow\.\*': did you mean 'two'",
        ),
        *UNMATCHED,
    ],
)
def test_what_the_model_does_not_have_is_said_as_it_is_built(
    studies: Studies, before: str, after: str, message: str
) -> None:
    text = STUDY.replace(before, after, 1)
    text = text[: text.index("search_space")]
    with pytest.raises(InputError, match=message):
        build(studies.spec(text=text, code=PARTS))


@pytest.mark.parametrize(("before", "after", "message"), UNMATCHED)
def test_a_scheduler_over_no_optimizer_is_said_before_anything_is_built(
    studies: Studies, before: str, after: str, message: str
) -> None:
    text = STUDY.replace(before, after, 1).replace("lr_scheduler.late.gamma", "optimizer.other.lr")
    with pytest.raises(InputError, match=message):
        check_schedule(studies.spec(text=text, code=PARTS))


@pytest.mark.parametrize("path", ["optimizer.parameters", "lr_scheduler.optimizer"])
def test_a_single_one_has_no_key_of_several(studies: Studies, path: str) -> None:
    with pytest.raises(InputError, match="leave it out") as raised:
        studies.spec(f"{path}=a", "lr_scheduler._target_=torch.optim.lr_scheduler.ConstantLR")
    assert raised.value.path == path


@pytest.mark.parametrize("metric", ["max_grad_norm_one", "lr_other"])
def test_what_is_recorded_of_each_may_be_pursued(studies: Studies, metric: str) -> None:
    spec = studies.spec(*pursuing(metric), text=STUDY, code=PARTS)
    assert not check_study(spec)
    trainer, data = build(spec), Builder(spec).data(spec.resolve())
    assert metric in trainer.fit(data["train"], data["val"]).metrics


@pytest.mark.parametrize(
    ("metric", "overrides"),
    [
        ("max_grad_norm_two", []),
        ("max_grad_norm_one", ["callbacks.gradient_monitor=false"]),
        ("max_grad_norm_one", ["step=null", "loss={_target_: torch.nn.MSELoss}"]),  # they step together
        ("lr_two", []),
    ],
)
def test_what_is_recorded_of_none_is_refused(studies: Studies, metric: str, overrides: list[str]) -> None:
    with pytest.raises(InputError, match=rf"nothing records this metric\n  value: {metric}\n"):
        check_study(studies.spec(*pursuing(metric), *overrides, text=STUDY, code=PARTS))


def pursuing(metric: str) -> list[str]:
    return [f"study.metric={metric}", "study.direction=minimize"]
