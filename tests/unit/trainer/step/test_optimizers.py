"""Loading an optimizer's state: where its tensors come to lie, and that it is a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.optim import AdamW, Optimizer

from tests.unit.trainer.support import make_model, make_trainer, regression
from trainer.callbacks import StepMetrics
from trainer.step.fused import check_gradients, leave_fused
from trainer.step.optimizers import Optimizers, each_of, load_optimizer


class GPU(FakeTensorMode):
    """Tensors on a GPU that is not there."""

    def __deepcopy__(self, memo: Any) -> GPU:
        return self


def on_gpu(optimizer: Optimizer) -> dict[str, Any]:
    """A state as it is read from a file onto a GPU."""
    kept = {name: torch.zeros(3, device="cuda") for name in ("exp_avg", "exp_avg_sq")}
    return {
        "state": {0: {"step": torch.ones((), device="cuda"), **kept}},
        "param_groups": optimizer.state_dict()["param_groups"],
    }


class OwnAdamW(AdamW):
    """An optimizer of somebody else, who may need the count where it was."""


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # by deepcopy
def test_the_count_of_another_optimizer_stays_where_it_was_read_to() -> None:
    with GPU():
        optimizer = OwnAdamW([nn.Parameter(torch.zeros(3, device="cuda"))])
        load_optimizer(optimizer, on_gpu(optimizer))
        (kept,) = optimizer.state.values()
        assert kept["step"].device.type == "cuda"


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # by deepcopy
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("options", "device"), [({}, "cpu"), ({"foreach": True}, "cpu"), ({"capturable": True}, "cuda")]
)
def test_only_an_optimizer_that_counts_on_the_device_has_its_count_there(
    several: bool, options: dict[str, Any], device: str
) -> None:
    with GPU():
        names = ("first", "second") if several else ("",)
        parts = {name: AdamW([nn.Parameter(torch.zeros(3, device="cuda"))], **options) for name in names}
        saved = {name: on_gpu(part) for name, part in parts.items()}
        optimizer = Optimizers(parts) if several else parts[""]
        load_optimizer(optimizer, {"by_name": saved} if several else saved[""])
        for each in each_of(optimizer).values():
            (kept,) = each.state.values()
            assert {name: value.device.type for name, value in kept.items()} == {
                "step": device,
                "exp_avg": "cuda",
                "exp_avg_sq": "cuda",
            }


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")  # by deepcopy
@pytest.mark.parametrize("cause", ["gradient", "state"])
@pytest.mark.parametrize(("options", "device"), [({}, "cpu"), ({"capturable": True}, "cuda")])
def test_a_count_leaves_the_device_with_the_fused_form(cause: str, options: dict[str, Any], device: str) -> None:
    with GPU():
        parameter = nn.Parameter(torch.zeros(2, 3, device="cuda"))
        optimizer = AdamW([parameter], fused=True, **options)
        across, along = torch.zeros(3, 2, device="cuda").T, torch.zeros(2, 3, device="cuda")
        kept = optimizer.state[parameter] = {
            "step": torch.ones((), device="cuda"),
            "exp_avg": across if cause == "state" else along,
        }
        parameter.grad = across if cause == "gradient" else along
        (check_gradients if cause == "gradient" else leave_fused)(optimizer)
        assert optimizer.param_groups[0]["fused"] is None
        assert {name: value.device.type for name, value in kept.items()} == {"step": device, "exp_avg": "cuda"}


def test_the_state_is_copied() -> None:
    model = nn.Linear(2, 1)
    source, target = (AdamW(model.parameters(), foreach=True) for _ in range(2))
    model(torch.ones(1, 2)).sum().backward()
    source.step()
    saved = source.state_dict()
    load_optimizer(target, saved)
    target.step()
    assert {float(kept["step"]) for kept in saved["state"].values()} == {1.0}
    assert {float(kept["step"]) for kept in target.state_dict()["state"].values()} == {2.0}


class OwnRate(torch.optim.SGD):
    """An optimizer that finds its own learning rate: its groups have none, or None."""

    def __init__(self, parameters: Any, **rate: Any) -> None:
        super().__init__(parameters, lr=0.05)
        for group in self.param_groups:
            del group["lr"]
            group.update(rate)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=0.05)


@pytest.mark.parametrize("rate", [{}, {"lr": None}])
@pytest.mark.parametrize("several", [False, True])
def test_a_learning_rate_is_recorded_where_there_is_one(several: bool, rate: Any, tmp_path: Path) -> None:
    model = make_model()
    own = OwnRate(model[0].parameters(), **rate)
    optimizer = {"own": own, "other": AdamW(model[1:].parameters(), lr=0.1)} if several else own
    steps = StepMetrics(tmp_path)
    trainer = make_trainer([steps], model=model, optimizer=optimizer)
    trainer.fit(regression())
    recorded = ["train_loss", *(["lr_other"] if several else [])]
    assert trainer.state.metrics.keys() == set(recorded)
    assert steps.log.path.read_text().splitlines()[0] == ",".join(["step", "epoch", *recorded])
