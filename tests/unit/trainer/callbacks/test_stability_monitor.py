"""StabilityMonitor: the steps that leap out, judged as one by one, at no cost in between."""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.unit.trainer.callbacks.reads import no_reads_inside_a_step
from tests.unit.trainer.step.test_graph import StandIn
from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_model,
    make_trainer,
    quick,
    regression,
    through_file,
)
from trainer import BatchOptions, Callback, Trainer
from trainer.callbacks import stability_monitor
from trainer.callbacks.stability_monitor import StabilityMonitor, spike_scores
from trainer.step.compute import Compute
from trainer.step.graph import make_capturable

EPOCHS, BATCHES = 3, 5
STEPS = EPOCHS * BATCHES


def one_by_one(before: list[float], values: list[float], window: int) -> list[float]:
    """The definition, step by step."""
    seen, scores = list(before), []
    for value in values:
        known = [item for item in seen[-window:] if math.isfinite(item)]
        if math.isfinite(value) and len(known) >= max(2, window // 4):
            mean = float(np.mean(known))
            sigma = max(float(np.std(known)), 2.0**-23 * abs(mean))
            scores.append((value - mean) / sigma if sigma else (math.inf if value > mean else math.nan))
        else:
            scores.append(math.nan)
        seen.append(value)
    return scores


def double(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


numbers = st.one_of(
    st.floats(0.5, 100.0), st.sampled_from([math.nan, math.inf, -math.inf, 1e4, -1e4]), st.just(1.0)
)


@quick(150)
@given(before=st.lists(numbers, max_size=9), values=st.lists(numbers, max_size=25), window=st.integers(2, 12))
def test_scores_are_those_of_the_definition(before: list[float], values: list[float], window: int) -> None:
    before = before[-window:]
    scores = spike_scores(double(before), double(values), window).tolist()
    assert scores == pytest.approx(one_by_one(before, values, window), rel=1e-6, abs=1e-6, nan_ok=True)


@quick(30)
@given(values=st.lists(numbers, max_size=60), cut=st.integers(0, 60))
def test_where_an_epoch_ends_makes_no_difference(values: list[float], cut: int) -> None:
    together = spike_scores(double([]), double(values), 8)
    first, second = values[:cut], values[cut:]
    apart = torch.cat(
        [spike_scores(double([]), double(first), 8), spike_scores(double(first[-8:]), double(second), 8)]
    )
    assert_same(apart, together)


def test_blocks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = spike_scores(double([]), values, 8)
    monkeypatch.setattr(stability_monitor, "_BLOCK", 7)
    assert_same(spike_scores(double([]), values, 8), whole)


class Losses:
    """A step whose training losses are given, and so are its gradients, as long as the weight is 1."""

    def __init__(self, losses: list[float]) -> None:
        self.left = iter(losses)

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        value = next(self.left) if model.training else 1.0
        return next(model.parameters()).sum() * value


def given_losses(losses: list[float], *callbacks: Callback, epochs: int = 1, **options: Any) -> Trainer:
    data = TensorDataset(torch.zeros(len(losses) // epochs, 1), torch.zeros(len(losses) // epochs, 1))
    model = nn.Linear(1, 1, bias=False)

    def reset(trainer: Any) -> None:
        nn.init.ones_(model.weight)  # a loss that is not finite makes it so too

    trainer = make_trainer(
        [*callbacks, At("on_train_batch_start", reset)],
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        step=Losses(losses),
        max_epochs=epochs,
        batching=BatchOptions(batch_size=1),
        **options,
    )
    trainer.fit(data, TensorDataset(torch.zeros(1, 1), torch.zeros(1, 1)))
    return trainer


def quiet(count: int) -> list[float]:
    return [1.0 + 0.01 * (index % 3) for index in range(count)]


def spikes(trainer: Trainer, what: str = "loss") -> list[float]:
    return [metrics[f"{what}_spikes"] for metrics in trainer.state.history]


def test_a_spike_is_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    trainer = given_losses([*quiet(40), 5.0, *quiet(9)], StabilityMonitor(32))
    assert spikes(trainer) == spikes(trainer, "grad_norm") == [1.0]
    score = one_by_one([], [*quiet(40), 5.0], 32)[-1]
    loss, norm = (record.getMessage() for record in caplog.records)
    assert loss.startswith(
        f"epoch 1: 1 loss spikes, the largest {score:.1f} standard deviations above the mean of"
    )
    assert norm.startswith("epoch 1: 1 grad norm spikes")


def test_a_quiet_run_and_a_fall_are_no_spikes(caplog: pytest.LogCaptureFixture) -> None:
    trainer = given_losses([*quiet(40), -5.0, *quiet(9)], StabilityMonitor(32))
    assert spikes(trainer) == [0.0]
    # The norm of a gradient of -5 is 5.
    assert spikes(trainer, "grad_norm") == [1.0]
    assert len(caplog.records) == 1


def test_the_window_reaches_over_epochs() -> None:
    losses = [*quiet(30), *quiet(10), 5.0, *quiet(19)]
    assert spikes(given_losses(losses, StabilityMonitor(40), epochs=2)) == [0.0, 1.0]


def test_too_few_steps_give_no_verdict() -> None:
    assert spikes(given_losses([1.0, 1.01, 1.02, 1.0, 1.01, 1.02, 1.0, 50.0], StabilityMonitor(32))) == [0.0]
    assert spikes(given_losses([1.0, 1.01, 1.02, 1.0, 1.01, 1.02, 1.0, 1.0, 50.0], StabilityMonitor(32))) == [1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_no_spike_and_hides_none(bad: float) -> None:
    losses = [*quiet(20), bad, *quiet(5), 5.0, *quiet(4)]
    trainer = given_losses(losses, StabilityMonitor(32))
    assert spikes(trainer) == spikes(trainer, "grad_norm") == [1.0]


def test_rounding_of_a_constant_loss_is_no_spike() -> None:
    losses = [0.1] * 20 + [0.1 + 2e-8] * 3 + [0.2]
    assert spikes(given_losses(losses, StabilityMonitor(16))) == [1.0]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_loss_scaled_for_the_backward_pass_is_judged_as_recorded(in_place: bool) -> None:
    def scale(trainer: Any) -> None:
        loss = trainer.state.loss
        trainer.state.loss = loss.div_(50) if in_place else loss / 50

    scaling = At("on_before_backward", scale, lambda trainer: trainer.state.batch_index == 20)
    trainer = given_losses([*quiet(20), 50.0, *quiet(4)], scaling, StabilityMonitor(16))
    assert (spikes(trainer), spikes(trainer, "grad_norm")) == ([1.0], [0.0])


class Branches(nn.Module):
    """Parameters that come and go, one of them with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3, sparse=True)
        self.one = nn.Linear(3, 1)
        self.other = nn.Linear(3, 1)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        hidden = self.table(inputs[:, 0].abs().long() % 4)
        output: Tensor = self.one(hidden) + (self.other(hidden) if self.calls % 3 else 0)
        return output


def test_sparse_and_changing_gradients_are_measured_as_they_are() -> None:
    norms: list[float] = []

    def keep(trainer: Any) -> None:
        gradients = [item.grad.to_dense() for item in trainer.model.parameters() if item.grad is not None]
        norms.append(torch.nn.utils.get_total_norm(gradients).item())

    monitor = StabilityMonitor()
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    make_trainer([monitor, At("on_before_optimizer_step", keep)], model=model, optimizer=optimizer).fit(
        regression()
    )
    assert monitor.state_dict()["norms"]["before"].tolist() == pytest.approx(norms, rel=1e-6)


def build(*callbacks: Callback, seed: int = 7) -> Trainer:
    model = make_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return make_trainer(
        [StabilityMonitor(4, 1.0), *callbacks], model=model, optimizer=optimizer, max_epochs=EPOCHS
    )


def fit(trainer: Trainer) -> Trainer:
    trainer.fit(regression(4 * BATCHES), regression(9, seed=8))
    return trainer


@cache
def whole(fold: int) -> dict[str, Any]:
    state = frozen(fit(build()))
    assert sum(item["loss_spikes"] for item in state["state"]["history"]) > 0
    assert sum(item["grad_norm_spikes"] for item in state["state"]["history"]) > 0
    return state


@pytest.mark.parametrize("step", range(1, STEPS + 1))
@pytest.mark.parametrize("fold", [2, 256])
def test_a_run_stopped_at_any_batch_goes_on_to_the_same_bits(
    step: int, fold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stability_monitor, "_FOLD", fold)
    stopped = fit(build(interrupt_at(step)))
    resumed = build(seed=99)
    resumed.load_state_dict(through_file(stopped.state_dict()))
    assert_same(frozen(fit(resumed)), whole(fold))
    assert_same(frozen(fit(stopped)), whole(fold))


def test_no_step_reads_from_the_device() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    callbacks = [*no_reads_inside_a_step(), StabilityMonitor()]
    trainer = make_trainer(callbacks, model=model, optimizer=optimizer)
    trainer.fit(regression())
    assert trainer.finished


def test_a_step_that_is_replayed_as_a_graph_is_measured_alike() -> None:
    states = []
    for compute in (Compute, StandIn):
        trainer = build()
        make_capturable(trainer.optimizer, trainer.device)
        trainer._compute_class = lambda *_, kind=compute: kind
        states.append(frozen(fit(trainer))["state"])
    assert_same(states[1], states[0])


def test_a_callback_that_serves_a_second_trainer_begins_anew() -> None:
    monitor = StabilityMonitor(8, 5.0)
    one = given_losses(quiet(12), monitor)
    other = given_losses([50.0, 50.0], monitor)
    assert (spikes(one), spikes(other), spikes(other, "grad_norm")) == ([0.0], [0.0], [0.0])


def test_a_step_of_its_own_whose_updates_have_no_gradients_has_no_norm() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))

    def step(trained: Any, batch: Any, update: Any) -> Tensor:
        loss = (trained[0](batch[0]) - 1.0).square().mean()
        update(loss, "idle")
        return loss

    trainer = make_trainer(
        [StabilityMonitor(8)],
        model=model,
        optimizer={
            "used": torch.optim.SGD(model[0].parameters(), lr=0.1),
            "idle": torch.optim.SGD(model[1].parameters(), lr=0.1),
        },
        step=step,
        max_epochs=1,
    )
    data = TensorDataset(torch.ones(4, 1), torch.ones(4, 1))
    trainer.fit(data, data)
    assert (spikes(trainer), spikes(trainer, "grad_norm")) == ([0.0], [0.0])


def test_an_epoch_without_steps_has_no_spikes() -> None:
    skip = At("on_train_batch_start", lambda trainer: trainer.state.skip("optimizer_step"))
    assert spikes(given_losses(quiet(12), StabilityMonitor(8), skip), "grad_norm") == [0.0]


def test_the_state_of_one_that_never_ran_survives_a_file() -> None:
    fresh = StabilityMonitor()
    fresh.load_state_dict(through_file(StabilityMonitor().state_dict()))
    assert_same(fresh.state_dict(), StabilityMonitor().state_dict())
    make_trainer([fresh]).validate(regression())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 1}, "window is 1"),
        ({"threshold": 0}, "threshold is 0"),
        ({"threshold": math.nan}, "threshold is"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StabilityMonitor(**arguments)


@pytest.mark.parametrize(
    ("latest", "scores"),
    [(60, [None, 1 / 60, 1 / 60, 0.0]), (80, [None, 1 / 80, 2 / 80, 1 / 80]), (79, [None, 1 / 79, 1 / 79, 0.0])],
)
def test_the_scores_are_the_shares_of_spikes_lately_and_in_all(latest: int, scores: list[float | None]) -> None:
    losses = [*quiet(40), 5.0, *quiet(39), 7.0, *quiet(39), *quiet(40)]  # in steps 41 and 81, of epochs of 40
    trainer = given_losses(losses, StabilityMonitor(32, rolling_window=latest), epochs=4)
    history = trainer.state.history
    assert [metrics.get("loss_spike_score") for metrics in history] == scores
    assert [metrics["loss_spike_score_total"] for metrics in history] == [0.0, 1 / 80, 2 / 120, 2 / 160]
    assert history[2]["grad_norm_spike_score"] == scores[2]
    with pytest.raises(ValueError, match="rolling_window is 0: give a whole number of at least 1"):
        StabilityMonitor(rolling_window=0)
