"""The plain step of a fused Adam is torch's own, bit by bit, and leaves to torch what it does not know."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim import adam as torch_adam

from tests.unit.trainer.support import assert_same, make_trainer, regression
from trainer.step import direct
from trainer.step.direct import DirectStep
from trainer.step.plain_adam import take_plain_step

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda parameters: Adam(parameters, lr=0.1, fused=True),
    "adam with weight decay": lambda parameters: Adam(parameters, lr=0.1, weight_decay=0.1, fused=True),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01, betas=(0.5, 0.9), eps=1e-3, fused=True),
    "maximize": lambda parameters: AdamW(parameters, lr=0.1, maximize=True, fused=True),
}


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4), nn.Linear(4, 1)).to(dtype)


def give_gradients(model: nn.Module, seed: int) -> None:
    """Random gradients; now and then a parameter has none."""
    generator = torch.Generator().manual_seed(seed)
    for number, parameter in enumerate(model.parameters()):
        value = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = None if (seed + number) % 5 == 4 else value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_torchs_step(kind: str, dtype: torch.dtype) -> None:
    models = network(dtype), network(dtype)
    made = [
        KINDS[kind]([{"params": list(model[0].parameters())}, {"params": model[1:].parameters(), "lr": 0.05}])
        for model in models
    ]
    taken = 0
    for seed in range(12):
        for model in models:
            give_gradients(model, seed)
        made[0].step()
        with torch.no_grad():
            plain = take_plain_step(made[1])
        taken += plain
        if not plain:
            made[1].step()
        made[0].param_groups[1]["lr"] = made[1].param_groups[1]["lr"] = 0.05 / (seed + 1)
        assert_same(*[model.state_dict() for model in models])
        assert_same(*[optimizer.state_dict() for optimizer in made])
    assert taken >= 8  # all but the first ones, at which a parameter has no state yet


def prepared(**options: Any) -> tuple[nn.Module, Optimizer]:
    model = network()
    optimizer = AdamW(model.parameters(), **{"lr": 0.1, "fused": True, **options})
    give_gradients(model, 0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def scaled(_: nn.Module, optimizer: Optimizer) -> None:
    optimizer.grad_scale = torch.ones(())  # type: ignore[attr-defined]


def other_type(model: nn.Module, optimizer: Optimizer) -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
    weight.grad = torch.ones_like(weight)
    model.register_parameter("other", weight)
    optimizer.param_groups[0]["params"].append(weight)
    zeros = torch.zeros_like(weight)
    optimizer.state[weight] = {"exp_avg": zeros, "exp_avg_sq": zeros.clone(), "step": torch.ones(())}


def tensor_lr(_: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)


def own_part(_: nn.Module, optimizer: Optimizer) -> None:
    optimizer._init_group = optimizer._init_group  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", [scaled, other_type, tensor_lr, own_part])
def test_what_it_does_not_know_is_left_to_torch(change: Callable[[nn.Module, Optimizer], None]) -> None:
    model, optimizer = prepared()
    change(model, optimizer)
    assert_nothing_done(model, optimizer)


@pytest.mark.parametrize("options", [{"amsgrad": True}, {"fused": False}, {"fused": None, "foreach": True}])
def test_other_forms_are_left_to_torch(options: dict[str, Any]) -> None:
    assert_nothing_done(*prepared(**options))


def test_a_first_step_is_left_to_torch() -> None:
    model = network()
    give_gradients(model, 0)
    assert_nothing_done(model, Adam(model.parameters(), fused=True))


def test_a_replaced_part_of_torch_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = prepared()
    called: list[int] = []
    whole = torch_adam.adam
    monkeypatch.setattr(torch_adam, "adam", lambda *a, **k: called.append(1) or whole(*a, **k))
    DirectStep(optimizer)()
    assert called == [1]


def assert_nothing_done(model: nn.Module, optimizer: Optimizer) -> None:
    before = deepcopy((model.state_dict(), optimizer.state_dict()))
    with torch.no_grad():
        assert not take_plain_step(optimizer)
    assert_same(before, (model.state_dict(), optimizer.state_dict()))


def test_a_fit_takes_it_for_all_steps_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []

    def watched(optimizer: Optimizer) -> bool:
        taken.append(take_plain_step(optimizer))
        return taken[-1]

    def weights() -> dict[str, Tensor]:
        model = nn.Linear(4, 1)
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
        make_trainer(model=model, optimizer=Adam(model.parameters(), lr=0.1), max_epochs=2).fit(regression(32))
        return model.state_dict()

    monkeypatch.setattr(direct, "take_plain_step", watched)
    plain = weights()
    assert taken[0] is False
    assert len(taken) > 2
    assert all(taken[1:])
    monkeypatch.setattr(direct, "take_plain_step", lambda _: False)
    assert_same(plain, weights())
