"""What the state says after each step: the step's scalars, the gradients' norm, whether the step was taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.unit.trainer.support import At, make_trainer, regression
from trainer import Callback
from trainer.callbacks import GradientAccumulation, GradientClipping, GradientMonitor, StabilityMonitor


def _by_hand(trainer: Any) -> Tensor:
    gradients = [parameter.grad.double().flatten() for parameter in trainer.model.parameters()]
    return torch.cat(gradients).square().sum().sqrt()


def test_the_scalars_of_a_step_are_on_the_state_until_the_next_batch() -> None:
    def step(model: nn.Module, batch: Any) -> dict[str, Any]:
        outputs = model(batch[0])
        loss = nn.functional.mse_loss(outputs, batch[1])
        return {"loss": loss, "outputs": outputs, "mean": outputs.mean().detach(), "two": 2.0}

    seen: list[dict[str, Any]] = []
    look = At("on_train_batch_end", lambda trainer: seen.append(dict(trainer.state.scalars)))
    state = make_trainer([look], step=step, max_epochs=1).fit(regression())
    assert [sorted(each) for each in seen] == [["mean", "two"]] * 3
    mean = torch.stack([each["mean"] for each in seen]).double().mean()
    assert state.metrics["train_mean"] == pytest.approx(float(mean))


@pytest.mark.parametrize(
    "callbacks",
    [
        [GradientMonitor()],
        [StabilityMonitor()],
        [GradientMonitor(), StabilityMonitor(), GradientClipping(max_norm=0.01)],
        [GradientClipping(max_norm=0.01)],
        [GradientAccumulation(1), GradientMonitor()],
    ],
    ids=lambda callbacks: " ".join(callback.name for callback in callbacks),
)
def test_the_gradients_norm_is_the_one_before_clipping(callbacks: list[Callback]) -> None:
    norms: list[Tensor] = []
    expected: list[Tensor] = []
    before = At("on_before_optimizer_step", lambda trainer: expected.append(_by_hand(trainer)), priority=3)
    after = At("on_train_batch_end", lambda trainer: norms.append(trainer.state.grad_norm))
    make_trainer([*callbacks, before, after], max_epochs=2).fit(regression())
    torch.testing.assert_close(torch.stack(norms).double(), torch.stack(expected), rtol=1e-5, atol=0)


def test_norms_are_measured_once_a_step_and_by_nobody_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    measure = torch._foreach_norm

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return measure(*arguments)

    monkeypatch.setattr(torch, "_foreach_norm", counted)
    seen: list[Any] = []
    look = At("on_train_batch_end", lambda trainer: seen.append(trainer.state.grad_norm))
    make_trainer([look], max_epochs=1).fit(regression())
    assert (calls, seen) == (0, [None] * 3)
    make_trainer([GradientMonitor(), StabilityMonitor()], max_epochs=1).fit(regression())
    assert calls == 3


def test_a_step_that_a_hook_leaves_out_is_a_skipped_one() -> None:
    skipped: list[tuple[bool, bool]] = []
    skip = At(
        "on_train_batch_start",
        lambda trainer: trainer.state.skip("optimizer_step"),
        lambda trainer: trainer.state.batch_index == 1,
    )
    look = At(
        "on_train_batch_end",
        lambda trainer: skipped.append((trainer.state.skipped_step, trainer.state.grad_norm is None)),
    )
    make_trainer([skip, look, GradientMonitor()], max_epochs=1).fit(regression())
    assert skipped == [(False, False), (True, True), (False, False)]


def test_a_batch_that_only_accumulates_takes_no_step() -> None:
    skipped: list[bool] = []
    look = At("on_train_batch_end", lambda trainer: skipped.append(trainer.state.skipped_step))
    make_trainer([look, GradientAccumulation(2)], max_epochs=1).fit(regression(16))
    assert skipped == [True, False, True, False]


def test_a_step_that_overflows_in_fp16_is_a_skipped_one_with_a_norm_that_is_not_finite() -> None:
    rows: list[tuple[bool, bool, int]] = []

    def look(trainer: Any) -> None:
        norm = trainer.state.grad_norm
        rows.append((trainer.state.skipped_step, bool(norm.isfinite()), trainer.state.step))

    def explode(trainer: Any) -> None:
        trainer.state.loss = trainer.state.loss * 1e38 * 1e38

    blow = At("on_before_backward", explode, lambda trainer: trainer.state.batch_index == 2)
    callbacks = [blow, GradientMonitor(), At("on_train_batch_end", look)]
    trainer = make_trainer(callbacks, model=nn.Linear(4, 1), precision="fp16", max_epochs=1)
    trainer.precision.load_state_dict({**trainer.precision.state_dict(), "scale": 8.0})
    trainer.fit(regression(16))
    assert rows == [(False, True, 1), (False, True, 2), (True, False, 2), (False, True, 3)]
