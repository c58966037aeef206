"""Direct backward pass and step do what torch's do: same bits, same errors, every hook that is registered."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import StepLR
from torch.overrides import TorchFunctionMode

from tests.trainer.support import assert_same, frozen, make_model, make_trainer, regression
from trainer.direct import DirectStep, backward


class Counted(AdamW):
    """A subclass whose step does more."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: Adam(parameters, lr=0.1),
    "adamw": lambda parameters: AdamW(parameters, lr=0.1, amsgrad=True),
    "fused": lambda parameters: AdamW(parameters, lr=0.1, fused=True),
    "foreach": lambda parameters: SGD(parameters, lr=0.1, foreach=True),
    "differentiable": lambda parameters: SGD(parameters, lr=0.1, differentiable=False),
    "other": lambda parameters: RMSprop(parameters, lr=0.1),
}


def stepped(make: Callable[[Any], Optimizer], direct: bool) -> tuple[list[Any], dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = make(model.parameters())
    step = DirectStep(optimizer) if direct else optimizer.step
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        step()
    return [parameter.detach().clone() for parameter in model.parameters()], optimizer.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_to_the_same_bits(name: str) -> None:
    make = OPTIMIZERS[name]
    assert_same(stepped(make, direct=True), stepped(make, direct=False))


def optimizer_with_gradients() -> AdamW:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    return AdamW(model.parameters())


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_of_the_optimizer_are_called(kind: str, when: str) -> None:
    called: list[str] = []
    optimizer = optimizer_with_gradients()
    register = getattr(optimizer, kind)
    if when == "before":
        register(lambda *arguments: called.append("hook"))
    step = DirectStep(optimizer)
    if when == "after":
        step()
        register(lambda *arguments: called.append("hook"))
    step()
    assert called == ["hook"]


@pytest.mark.parametrize("kind", ["register_optimizer_step_pre_hook", "register_optimizer_step_post_hook"])
def test_hooks_on_all_optimizers_are_called(kind: str) -> None:
    called: list[str] = []
    handle = getattr(torch_optimizer, kind)(lambda *arguments: called.append("hook"))
    try:
        DirectStep(optimizer_with_gradients())()
    finally:
        handle.remove()
    assert called == ["hook"]


def test_a_profiler_sees_the_step() -> None:
    step = DirectStep(optimizer_with_gradients())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    assert any("Optimizer.step#AdamW.step" in event.key for event in profiler.key_averages())


def test_a_step_that_was_wrapped_for_the_whole_class_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    plain = AdamW.step

    @functools.wraps(plain)
    def wrapped(self: Optimizer, *arguments: Any) -> Any:
        called.append("step")
        return plain(self, *arguments)

    monkeypatch.setattr(AdamW, "step", wrapped)
    DirectStep(optimizer_with_gradients())()
    assert called == ["step"]


def test_a_mode_that_watches_torchs_functions_sees_the_backward() -> None:
    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
            seen.append(getattr(function, "__name__", ""))
            return function(*arguments, **(options or {}))

    seen: list[str] = []
    loss = torch.ones((), requires_grad=True) * 2
    with Watch():
        backward(loss)
    assert "backward" in seen


def test_a_subclass_keeps_its_own_step() -> None:
    model = nn.Linear(4, 1)
    optimizer = Counted(model.parameters())
    make_trainer(model=model, optimizer=optimizer, max_epochs=1).fit(regression(8))
    assert optimizer.steps == 2


def test_a_replaced_step_is_the_one_that_is_taken() -> None:
    called: list[str] = []
    optimizer = optimizer_with_gradients()
    step = DirectStep(optimizer)
    optimizer.step = lambda: called.append("mine")  # type: ignore[method-assign, assignment]
    step()
    assert called == ["mine"]


def test_a_replaced_step_behind_a_scheduler_is_the_one_that_is_taken() -> None:
    called: list[str] = []

    def mine(self: Optimizer) -> None:
        called.append("mine")

    optimizer = optimizer_with_gradients()
    optimizer.step = mine.__get__(optimizer)  # type: ignore[method-assign]
    StepLR(optimizer, 1)
    DirectStep(optimizer)()
    assert called == ["mine"]


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_scheduler_does_not_warn_that_it_is_ahead(interval: str) -> None:
    model = make_model()
    optimizer = AdamW(model.parameters())
    trainer = make_trainer(
        model=model, optimizer=optimizer, scheduler=StepLR(optimizer, 1), scheduler_interval=interval
    )
    trainer.fit(regression(8))
    assert frozen(trainer)["scheduler"]["last_epoch"] == (2 if interval == "epoch" else 4)


class Plain(torch.Tensor):
    """A subclass, which may do anything in its backward."""


def gradients(take: Callable[[torch.Tensor], None], *, kind: type = torch.Tensor, dims: int = 0) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 1))
    for _ in range(2):  # the second time gradients are added up
        loss = model(torch.randn(5, 4)).square().mean()
        take((loss.reshape([1] * dims) if dims else loss).as_subclass(kind))
    return [parameter.grad.as_subclass(torch.Tensor) for parameter in model.parameters()]


@pytest.mark.parametrize("kind", [torch.Tensor, Plain])
@pytest.mark.parametrize("dims", [0, 1])
def test_gradients_are_the_same_bits(kind: type, dims: int) -> None:
    assert_same(
        gradients(backward, kind=kind, dims=dims),
        gradients(lambda loss: loss.backward(), kind=kind, dims=dims),
    )


@pytest.mark.parametrize(
    "loss",
    [
        torch.tensor(1.0),
        torch.ones(3, requires_grad=True) * 2,
        torch.ones((), dtype=torch.complex64, requires_grad=True) * 2,
    ],
    ids=["no gradient", "no scalar", "complex"],
)
def test_a_loss_without_gradients_is_refused_as_torch_does(loss: torch.Tensor) -> None:
    with pytest.raises(RuntimeError) as expected:
        loss.backward()
    with pytest.raises(RuntimeError) as raised:
        backward(loss)
    assert str(raised.value) == str(expected.value)


def test_hooks_on_tensors_are_called() -> None:
    called: list[float] = []
    weight = torch.ones((), requires_grad=True)
    loss = weight * 3
    loss.register_hook(lambda gradient: gradient.mul_(2))
    weight.register_hook(lambda gradient: called.append(gradient.item()))
    backward(loss)
    backward(weight * 3)
    assert called == [6, 3]


def test_a_graph_is_gone_after_its_backward() -> None:
    loss = torch.ones((), requires_grad=True).square()
    backward(loss)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        backward(loss)
