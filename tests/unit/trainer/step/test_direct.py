"""Direct backward pass and step do what torch's do: same bits, same errors, every hook that is registered."""

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim import optimizer as torch_optimizer
from torch.optim.lr_scheduler import StepLR
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.trainer.support import At, assert_same, frozen, make_model, make_trainer, regression
from trainer.step import direct
from trainer.step.direct import DirectStep, backward


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


class TestWhatWatches:
    """Torch's own methods are called where other code replaced one or looks on, from that moment on."""

    def test_a_step_that_is_replaced_for_the_class_after_the_first_is_taken(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        called: list[str] = []
        step = DirectStep(optimizer_with_gradients())
        step()
        monkeypatch.setattr(AdamW, "step", lambda self: called.append("mine"))
        step()
        assert called == ["mine"]

    @pytest.mark.parametrize(
        ("owner", "name"),
        [(torch.Tensor, "backward"), (torch.autograd, "backward"), (torch.autograd, "_engine_run_backward")],
    )
    def test_a_replaced_backward_is_called(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        called: list[str] = []
        plain = getattr(owner, name)

        @functools.wraps(plain)
        def mine(*arguments: Any, **options: Any) -> Any:
            called.append(name)
            return plain(*arguments, **options)

        monkeypatch.setattr(owner, name, mine)
        make_trainer(max_epochs=1).fit(regression(8))
        assert called == [name, name]

    def test_a_loss_with_a_backward_of_its_own_is_asked(self) -> None:
        called: list[str] = []

        def own(trainer: Any) -> None:
            trainer.state.loss.backward = lambda: called.append("own")

        make_trainer([At("on_before_backward", own)], max_epochs=1).fit(regression(8))
        assert called == ["own", "own"]

    @pytest.mark.filterwarnings("ignore:Anomaly Detection")
    def test_anomaly_detection_and_debug_logging_take_torchs_path(self, monkeypatch: pytest.MonkeyPatch) -> None:
        called: list[str] = []
        plain = DirectStep(optimizer_with_gradients())
        monkeypatch.setattr(direct, "_ENGINE", None)  # taken directly, it would fail
        with torch.autograd.set_detect_anomaly(True):
            backward(torch.ones((), requires_grad=True) * 2)
            monkeypatch.setattr(plain, "_raw", lambda optimizer: called.append("direct"))
            plain()
        with debug_logging():
            backward(torch.ones((), requires_grad=True) * 2)
        assert not called

    @pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in SqrtBackward0")
    def test_an_anomaly_is_found_where_the_forward_made_it(self) -> None:
        class Broken(nn.Linear):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return (super().forward(inputs) * 0).sqrt()

        with torch.autograd.set_detect_anomaly(True), pytest.raises(RuntimeError, match="returned nan values"):
            make_trainer(model=Broken(4, 1)).fit(regression(8))

    def test_a_mode_that_watches_operations_sees_the_same_as_with_torchs_own(self) -> None:
        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, function: Any, types: Any, inputs: Any = (), options: Any = None) -> Any:
                seen.append(str(function))
                return function(*inputs, **(options or {}))

        def watched(take: Callable[[torch.Tensor], None], step: Callable[[], Any]) -> list[str]:
            seen.clear()
            loss = torch.ones((), requires_grad=True) * 2
            with Watch():
                take(loss)
                step()
            return list(seen)

        seen: list[str] = []
        optimizer = optimizer_with_gradients()
        optimizer.step()
        assert watched(backward, DirectStep(optimizer)) == watched(lambda loss: loss.backward(), optimizer.step)

    @pytest.mark.parametrize("how", ["torch.compile", "model.compile", "inside"])
    def test_a_model_that_its_user_compiled_takes_torchs_path(
        self, how: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        called: list[str] = []
        plain = torch.Tensor.backward
        monkeypatch.setattr(direct, "backward", lambda loss: called.append("direct") or plain(loss))
        model: Any = nn.Sequential(make_model())
        if how == "inside":
            model[0] = torch.compile(model[0], backend="eager")
        elif how == "torch.compile":
            model = torch.compile(model, backend="eager")
        else:
            model.compile(backend="eager")
        make_trainer(model=model, max_epochs=1).fit(regression(8))
        assert not called

    def test_the_compilers_settings_are_there_in_the_backward(self) -> None:
        """It runs in the thread that asks for it, which has them."""
        setting: contextvars.ContextVar[str] = contextvars.ContextVar("setting")
        setting.set("kept")
        seen: list[str | None] = []
        weight = torch.ones((), requires_grad=True)
        loss = weight * 2
        loss.register_hook(lambda gradient: seen.append(contextvars.copy_context().get(setting)))
        backward(loss)
        assert seen == ["kept"]

    def test_where_a_device_has_threads_of_its_own_torch_takes_its_path(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It hands the compiler's settings over to them, by functions that its versions do not share."""
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.delattr(direct, "_ENGINE")
        weight = torch.ones((), requires_grad=True)
        backward(weight * 2)
        assert weight.grad == 2


@contextlib.contextmanager
def debug_logging() -> Iterator[None]:
    """Autograd logs each node of the graph."""
    logger = logging.getLogger("torch.autograd.graph")
    before = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.setLevel(before)


def test_an_interrupt_as_the_step_begins_leaves_gradients_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(on: bool) -> None:
        set_grad(on)
        if not on:
            raise KeyboardInterrupt

    step, set_grad = DirectStep(optimizer_with_gradients()), direct._set_grad
    monkeypatch.setattr(direct, "_set_grad", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step()
    on = torch.is_grad_enabled()
    set_grad(True)
    assert on
