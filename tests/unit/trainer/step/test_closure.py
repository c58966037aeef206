"""Optimizers that take a closure: LBFGS, and one that looks at a second point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.unit.trainer.support import (
    At,
    Recorder,
    assert_same,
    frozen,
    interrupt_at,
    make_trainer,
    regression,
    through_file,
)
from trainer import BatchOptions, Callback, Trainer
from trainer.callbacks import GradientAccumulation, GradientClipping, GradientMonitor, StabilityMonitor

WHOLE = BatchOptions(batch_size=12, shuffle=False)


class LookAhead(torch.optim.Optimizer):
    """Sharpness-aware minimisation (arXiv:2010.01412): the gradient at the worst point near by, then SGD."""

    needs_closure = True

    def __init__(self, parameters: Any, lr: float, rho: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> None:  # type: ignore[override]
        assert closure is not None
        closure()
        group = self.param_groups[0]
        weights = [weight for weight in group["params"] if weight.grad is not None]
        norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
        moves = [group["rho"] * weight.grad / norm for weight in weights]
        torch._foreach_add_(weights, moves)
        closure()
        torch._foreach_sub_(weights, moves)
        torch._foreach_add_(weights, [weight.grad for weight in weights], alpha=-group["lr"])


class FirstStep(torch.optim.Optimizer):
    """The same as it is mostly written: it moves by the gradient that it finds, and calls the closure once."""

    def __init__(self, parameters: Any, lr: float, rho: float = 0.05, *, clears: bool = True) -> None:
        super().__init__(parameters, {"lr": lr, "rho": rho, "clears": clears})

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        moves = self._first_step(group)
        closure()
        for weight, move in zip(group["params"], moves, strict=True):
            weight.sub_(move).add_(weight.grad, alpha=-group["lr"])

    def _first_step(self, group: dict[str, Any]) -> list[Tensor]:
        norm = torch.stack([weight.grad.norm() for weight in group["params"]]).norm()
        moves = [group["rho"] * weight.grad / norm for weight in group["params"]]
        for weight, move in zip(group["params"], moves, strict=True):
            weight.add_(move)
        if group["clears"]:
            self.zero_grad()
        return moves


class Clears(torch.optim.SGD):
    """SGD that clears the gradients before it has them computed."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        self.zero_grad(set_to_none=self.param_groups[0]["weight_decay"] == 0)
        closure()
        super().step()


def lbfgs(model: nn.Module) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, history_size=3, line_search_fn="strong_wolfe")


def sam(model: nn.Module) -> LookAhead:
    return LookAhead(model.parameters(), lr=0.1)


def build(*callbacks: Callback, make: Any = lbfgs, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
    return make_trainer(callbacks, model=model, optimizer=make(model), **options)


def schedule_free(foreach: bool) -> Any:
    kind = pytest.importorskip("schedulefree").AdamWScheduleFreeClosure
    return lambda model: kind(model.parameters(), lr=0.05, foreach=foreach)


class Alone:
    """The model of a trainer that is not fitted yet, and its optimizer, with torch alone, on all data at once."""

    def __init__(self, trainer: Trainer, make: Any, data: TensorDataset) -> None:
        self.inputs, self.targets = data.tensors
        self.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        self.model.load_state_dict(trainer.model.state_dict())
        self.optimizer = make(self.model)

    def loss(self) -> Tensor:
        return nn.functional.mse_loss(self.model(self.inputs), self.targets)

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        with torch.enable_grad():
            loss = self.loss()
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self) -> None:
        self.optimizer.step(self.closure)


def assert_fits_as(trainer: Trainer, alone: Alone, data: TensorDataset, expected: list[float]) -> None:
    """A fit records the losses that are expected, which fall, and ends with the same weights."""
    history = trainer.fit(data).history
    assert [metrics["train_loss"] for metrics in history] == pytest.approx(expected)
    assert_same(dict(trainer.model.state_dict()), dict(alone.model.state_dict()))
    assert expected[-1] < expected[0]


@pytest.mark.parametrize(
    "make",
    [
        lambda model: FirstStep(model.parameters(), lr=0.1),
        lambda model: FirstStep(model.parameters(), lr=0.1, clears=False),
        lambda model: Clears(model.parameters(), lr=0.1),
        lambda model: Clears(model.parameters(), lr=0.1, weight_decay=0.01),
        lambda model: schedule_free(foreach=False)(model),
        lambda model: schedule_free(foreach=True)(model),
    ],
    ids=["sam", "sam, gradients kept", "cleared", "zeroed", "schedule-free", "schedule-free, foreach"],
)
def test_what_is_changed_before_the_first_call_is_evaluated_anew(make: Any) -> None:
    data = regression(12)
    trainer = build(make=make, max_epochs=5, batching=WHOLE)
    alone = Alone(trainer, make, data)
    expected = []
    for _ in range(5):
        expected.append(float(alone.closure()))
        alone.step()
    assert_fits_as(trainer, alone, data, expected)


@pytest.mark.parametrize("make", [lbfgs, sam])
def test_it_computes_what_torch_alone_does_and_records_the_loss_before_the_step(make: Any) -> None:
    data, expected = regression(12), []
    trainer = build(make=make, max_epochs=5, batching=WHOLE)
    alone = Alone(trainer, make, data)
    for _ in range(5):
        with torch.no_grad():
            expected.append(float(alone.loss()))
        alone.step()
    assert_fits_as(trainer, alone, data, expected)


@pytest.mark.parametrize("make", [lbfgs, sam])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_stopped_twice_resumes_to_the_same_bits(make: Any, precision: Any) -> None:
    def run(*stops: int) -> Any:
        checkpoint = None
        for stop in (*stops, 99):
            watch = (GradientMonitor(), StabilityMonitor(window=4), interrupt_at(stop))
            trainer = build(*watch, make=make, precision=precision, max_epochs=4)
            if checkpoint:
                trainer.load_state_dict(checkpoint)
            trainer.fit(regression(12), regression(4))
            checkpoint = through_file(trainer.state_dict())
        return frozen(trainer)

    assert_same(run(1, 8), run())


def test_each_evaluation_fires_its_events_and_the_step_is_taken_once() -> None:
    log: list[str] = []
    evaluations: list[int] = []
    count = At("on_before_forward", lambda trainer: evaluations.append(trainer.state.evaluation))
    build(Recorder(log), count, make=sam, max_epochs=1, batching=WHOLE).fit(regression(12))
    of_loss = ["zero_grad", "forward", "backward"]
    once = [f"on_{moment}_{action}" for action in of_loss for moment in ("before", "after")]
    once += ["on_before_optimizer_step"]
    batch = log[log.index("on_train_batch_start") : log.index("on_train_batch_end") + 1]
    assert batch == ["on_train_batch_start", *once, *once, "on_after_optimizer_step", "on_train_batch_end"]
    assert evaluations == [0, 1]


def test_what_a_hook_does_to_the_loss_holds_for_all_evaluations() -> None:
    def double(trainer: Any) -> None:
        trainer.state.loss = 2 * trainer.state.loss

    scaled = build(At("on_before_backward", double), batching=WHOLE)
    twice = build(loss=lambda outputs, targets: 2 * nn.functional.mse_loss(outputs, targets), batching=WHOLE)
    for trainer in (scaled, twice):
        trainer.fit(regression(12))
    assert_same(dict(scaled.model.state_dict()), dict(twice.model.state_dict()))


class Thrice(torch.optim.SGD):
    """SGD that looks at the gradients of three times the weights, and leaves them."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        closure()
        weights = self.param_groups[0]["params"]
        torch._foreach_mul_(weights, 3.0)
        closure()
        torch._foreach_div_(weights, 3.0)


def own_step(model: Any, batch: Any, update: Any) -> Tensor:
    def loss() -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    update(loss)
    return loss().detach()


@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
@pytest.mark.parametrize("options", [{"step": own_step}, {}], ids=["own step", "plain"])
def test_each_evaluation_is_clipped_by_its_own_norm_and_the_first_one_is_the_steps(
    sparse: bool, options: dict[str, Any]
) -> None:
    measured: list[float] = []
    clipped: list[float] = []
    of_batch: list[float] = []

    def norm(trainer: Any) -> float:
        return float(trainer.model[0].weight.grad.to_dense().norm())

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 2, sparse=sparse), nn.Flatten())
    trainer = make_trainer(
        [
            GradientMonitor(),
            At("on_before_optimizer_step", lambda t: measured.append(norm(t)), priority=11),
            GradientClipping(max_norm=1e-3),
            At("on_before_optimizer_step", lambda t: clipped.append(norm(t)), priority=30),
            At("on_train_batch_end", lambda t: of_batch.append(float(t.state.grad_norm))),
        ],
        model=model,
        optimizer=Thrice(model.parameters(), lr=0.0),
        batching=WHOLE,
        max_epochs=1,
        **options,
    )
    trainer.fit(TensorDataset(torch.arange(12)[:, None] % 5, torch.zeros(12, 2)))
    assert measured[1] == pytest.approx(3 * measured[0])
    assert clipped == pytest.approx([1e-3, 1e-3], rel=1e-2)
    assert of_batch == pytest.approx(measured[:1])
    assert trainer.state.metrics["max_grad_norm"] == pytest.approx(measured[0])


def test_a_skipped_step_evaluates_no_more() -> None:
    log: list[str] = []
    skip = At("on_before_optimizer_step", lambda trainer: trainer.state.skip("optimizer_step"))
    state = build(Recorder(log), skip, max_epochs=1, batching=WHOLE).fit(regression(12))
    assert (state.step, log.count("on_before_forward"), state.skipped_step) == (0, 1, True)


def test_in_a_step_of_its_own_it_gets_a_function() -> None:
    manual, plain = build(step=own_step, batching=WHOLE), build(batching=WHOLE)
    for trainer in (manual, plain):
        trainer.fit(regression(12))
    assert_same(dict(manual.model.state_dict()), dict(plain.model.state_dict()))


def test_a_tensor_in_place_of_the_function_is_refused() -> None:
    def step(model: Any, batch: Any, update: Any) -> Tensor:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        update(loss)
        return loss

    with pytest.raises(TypeError, match="update of LBFGS: it evaluates the loss several times: hand"):
        build(step=step).fit(regression(12))


@pytest.mark.parametrize(
    ("callbacks", "options", "message"),
    [
        ([GradientAccumulation(2)], {}, "batches can't be accumulated"),
        ([], {"precision": "fp16"}, "can't have its loss scaled for fp16"),
    ],
)
def test_what_it_can_not_be_together_with_is_refused(callbacks: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(*callbacks, **options).fit(regression(12))


def test_one_of_several_that_step_together_can_not_take_a_closure() -> None:
    def make(model: Any) -> Any:
        return {"a": lbfgs(model[0]), "b": torch.optim.SGD(model[2].parameters(), lr=0.1)}

    with pytest.raises(ValueError, match="optimizer 'a' takes a closure, and can't step together with others"):
        build(make=make)
