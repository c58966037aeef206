"""The schedulers that torch lacks: their formulas, their place in a run, and their states."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

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
from trainer import Trainer
from trainer.lr_schedulers import ExpHyperbolicLR, HyperbolicLR, Warmup, scale_rates, set_rate

Make = Callable[[Optimizer], Any]

MAINS: dict[str, Make] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 9, eta_min=1e-4),
    "step": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "multi-step": lambda optimizer: MultiStepLR(optimizer, [1, 4], 0.3),
    "exponential": lambda optimizer: ExponentialLR(optimizer, 0.9),
    "polynomial": lambda optimizer: PolynomialLR(optimizer, 12, 2.0),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 0.95**step),
    "restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 3),
    "hyperbolic": lambda optimizer: HyperbolicLR(optimizer, 20, 12),
    "exponential hyperbolic": lambda optimizer: ExpHyperbolicLR(optimizer, 20, 12),
}
OTHERS: dict[str, Make] = {
    "one cycle": lambda optimizer: OneCycleLR(optimizer, [0.4, 0.2], total_steps=30, cycle_momentum=False),
    "cyclic": lambda optimizer: CyclicLR(optimizer, [0.1, 0.05], [0.4, 0.2], 3, cycle_momentum=False),
    "chained": lambda optimizer: ChainedScheduler([ConstantLR(optimizer, 0.5, 4), ExponentialLR(optimizer, 0.9)]),
    "sequential": lambda optimizer: SequentialLR(
        optimizer, [ConstantLR(optimizer, 0.5, 9), ExponentialLR(optimizer, 0.9)], [4]
    ),
}


def two_groups(first: float = 0.1, second: float = 0.03) -> SGD:
    """An optimizer with two learning rates, ready for steps that change nothing."""
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (first, second)]
    return SGD(groups, lr=first)


def rates(optimizer: Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def walk(optimizer: Optimizer, scheduler: Any, steps: int) -> list[list[float]]:
    """Learning rates of all groups, from before the first of these steps to after the last."""
    seen = [rates(optimizer)]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        assert scheduler.get_last_lr() == rates(optimizer)
        seen.append(rates(optimizer))
    return seen


# ---- hyperbolic


def test_hyperbolic_may_end_at_zero() -> None:
    optimizer = two_groups()
    assert walk(optimizer, HyperbolicLR(optimizer, upper_bound=5, max_iter=5, infimum_lr=0.0), 5)[-1] == [0.0, 0.0]


def test_hyperbolic_follows_the_papers_formula() -> None:
    optimizer = two_groups()
    seen = walk(optimizer, HyperbolicLR(optimizer, upper_bound=250, max_iter=50, infimum_lr=1e-3), 50)
    for step, pair in enumerate(seen):
        # The paper's h(n; η, N, U), written out with another grouping of the root: (N - n)(2U - N - n) / U².
        change = math.sqrt((50 - step) * (500 - 50 - step)) / 250 - math.sqrt(50 * 450) / 250
        assert pair == pytest.approx([0.1 + (0.1 - 1e-3) * change, 0.03 + (0.03 - 1e-3) * change])


def test_exponential_hyperbolic_follows_the_papers_formula() -> None:
    optimizer = two_groups()
    seen = walk(optimizer, ExpHyperbolicLR(optimizer, upper_bound=250, max_iter=50, infimum_lr=1e-3), 50)
    for step, pair in enumerate(seen):
        change = math.sqrt((50 - step) * (450 - step)) / 250 - math.sqrt(50 * 450) / 250
        assert pair == pytest.approx([0.1 * (0.1 / 1e-3) ** change, 0.03 * (0.03 / 1e-3) ** change])


@pytest.mark.parametrize("make", [HyperbolicLR, ExpHyperbolicLR])
def test_the_longest_run_ends_at_the_infimum_and_stays_there(make: Any) -> None:
    optimizer = two_groups()
    seen = walk(optimizer, make(optimizer, upper_bound=8, max_iter=8, infimum_lr=1e-3), 11)
    assert seen[0] == [0.1, 0.03]
    assert seen[8] == pytest.approx([1e-3, 1e-3])
    assert seen[9] == seen[10] == seen[11] == seen[8]


@quick(60)
@given(
    make=st.sampled_from([HyperbolicLR, ExpHyperbolicLR]),
    steps=st.integers(1, 40),
    spare=st.integers(0, 60),
    infimum=st.floats(1e-8, 0.02),
)
def test_it_falls_all_the_way_and_never_below_the_infimum(
    make: Any, steps: int, spare: int, infimum: float
) -> None:
    optimizer = two_groups()
    seen = walk(optimizer, make(optimizer, steps + spare, steps, infimum), steps)
    for earlier, later in pairwise(seen):
        assert all(after < before for before, after in zip(earlier, later, strict=True))
    assert min(seen[-1]) >= infimum * (1 - 1e-9)


@pytest.mark.parametrize("make", [HyperbolicLR, ExpHyperbolicLR])
def test_a_longer_run_begins_nearly_as_a_short_one(make: Any) -> None:
    def first_drop(steps: int) -> float:
        optimizer = two_groups()
        seen = walk(optimizer, make(optimizer, 1000, steps), 1)
        return seen[0][0] - seen[1][0]

    cosine = [0.05 * (1 - math.cos(math.pi / steps)) for steps in (250, 500)]
    assert cosine[0] / cosine[1] > 3.9
    assert first_drop(250) / first_drop(500) < 1.4


@pytest.mark.parametrize("make", [HyperbolicLR, ExpHyperbolicLR])
def test_last_epoch_begins_in_the_middle_without_a_replay(make: Any) -> None:
    optimizer = two_groups()
    seen = walk(optimizer, make(optimizer, 20, 12), 12)
    resumed = two_groups()
    for group, rate in zip(resumed.param_groups, (0.1, 0.03), strict=True):
        group["initial_lr"] = rate
    make(resumed, 20, 12, last_epoch=6)
    assert rates(resumed) == seen[7]


@pytest.mark.parametrize("make", [HyperbolicLR, ExpHyperbolicLR])
def test_a_learning_rate_in_a_tensor_stays_one(make: Any) -> None:
    rate = torch.tensor(0.1)
    optimizer = AdamW([nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = Warmup(optimizer, make(optimizer, 9, 9, 1e-3), 2, 0.5)
    held = optimizer.param_groups[0]["lr"]
    seen = [float(held)]
    for _ in range(11):
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] is held
        assert scheduler.get_last_lr()[0] is not held
        seen.append(float(held))
    assert seen[:3] == pytest.approx([0.05, 0.075, 0.1])
    assert seen[-1] == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("make", [HyperbolicLR, ExpHyperbolicLR])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_iter": 0}, "max_iter is 0"),
        ({"upper_bound": 9, "max_iter": 10}, "upper_bound is 9: give at least max_iter, which is 10"),
        ({"infimum_lr": 0.03}, r"infimum_lr is 0\.03: give at least 0 and less than .* 0\.03"),
        ({"infimum_lr": -1e-3}, r"infimum_lr is -0\.001"),
    ],
)
def test_hyperbolic_refuses_what_makes_no_curve(make: Any, arguments: dict[str, Any], message: str) -> None:
    optimizer = two_groups()
    with pytest.raises(ValueError, match=message):
        make(optimizer, **arguments)
    assert "initial_lr" not in optimizer.param_groups[0]


def test_only_the_exponential_form_needs_an_infimum_above_zero() -> None:
    optimizer = two_groups()
    assert walk(optimizer, HyperbolicLR(optimizer, 4, 4, 0.0), 4)[-1] == pytest.approx([0.0, 0.0])
    with pytest.raises(ValueError, match=r"infimum_lr is 0\.0: give a number above 0"):
        ExpHyperbolicLR(two_groups(), 4, 4, 0.0)


# ---- warm-up


@pytest.mark.parametrize("name", MAINS)
@pytest.mark.parametrize(("steps", "start"), [(1, 0.1), (4, 0.25), (5, 1.0)])
def test_warm_up_is_torchs_sequence_of_linear_and_main(name: str, steps: int, start: float) -> None:
    ours, theirs = two_groups(), two_groups()
    warm = Warmup(ours, MAINS[name](ours), steps, start)
    sequence = SequentialLR(theirs, [LinearLR(theirs, start, 1.0, steps), MAINS[name](theirs)], [steps])
    mine, torchs = walk(ours, warm, 20), walk(theirs, sequence, 20)
    for one, other in zip(mine, torchs, strict=True):
        assert one == pytest.approx(other, rel=1e-12)
    # From the hand-over on nothing of LinearLR's rounding is left.
    assert mine[steps:] == torchs[steps:]


@pytest.mark.parametrize("name", [*MAINS, *OTHERS])
def test_after_the_warm_up_the_main_scheduler_is_as_if_alone(name: str) -> None:
    make = {**MAINS, **OTHERS}[name]
    alone, warmed = two_groups(), two_groups()
    expected = walk(alone, make(alone), 12)
    seen = walk(warmed, Warmup(warmed, make(warmed), 4, 0.0), 16)
    assert seen[4:] == expected
    for step in range(4):
        assert seen[step] == pytest.approx([rate * step / 4 for rate in expected[0]])


def test_one_cycles_momentum_waits_for_the_end_of_the_warm_up() -> None:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    scheduler = Warmup(optimizer, OneCycleLR(optimizer, 0.4, total_steps=10), 3)
    momenta = []
    for _ in range(5):
        momenta.append(optimizer.param_groups[0]["momentum"])
        optimizer.step()
        scheduler.step()
    assert momenta[:4] == [0.95] * 4
    assert momenta[4] < 0.95


def test_reduce_on_plateau_sees_only_the_metrics_after_the_warm_up() -> None:
    def follow(scheduler: Any, optimizer: Optimizer, metrics: list[float]) -> list[list[float]]:
        seen = []
        for metric in metrics:
            optimizer.step()
            scheduler.step(metric)
            seen.append(rates(optimizer))
        return seen

    metrics = [3.0, 2.0, 2.5, 2.5, 1.0, 1.5]
    alone, warmed = two_groups(), two_groups()
    expected = follow(ReduceLROnPlateau(alone, patience=0), alone, metrics)
    scheduler = Warmup(warmed, ReduceLROnPlateau(warmed, patience=0), 2)
    assert follow(scheduler, warmed, [0.0, 0.1, *metrics])[2:] == expected
    assert expected[-1][0] < expected[0][0]
    assert scheduler.get_last_lr() == rates(warmed)


def test_reduce_on_plateau_asks_for_its_metric_after_the_warm_up_only() -> None:
    optimizer = two_groups()
    scheduler = Warmup(optimizer, ReduceLROnPlateau(optimizer), 1)
    scheduler.step()
    with pytest.raises(ValueError, match="call step with its metric"):
        scheduler.step()


def test_warm_ups_may_stand_in_front_of_each_other() -> None:
    optimizer = two_groups()
    inner = Warmup(optimizer, StepLR(optimizer, 100), 2, 0.5)
    seen = walk(optimizer, Warmup(optimizer, inner, 2, 0.5), 5)
    assert [pair[0] for pair in seen] == pytest.approx([0.025, 0.0375, 0.05, 0.075, 0.1, 0.1])


@pytest.mark.parametrize("name", [*MAINS, *OTHERS])
@pytest.mark.parametrize("stop", [0, 2, 3, 4, 7])
def test_a_warm_up_goes_on_from_its_state(name: str, stop: int) -> None:
    make = {**MAINS, **OTHERS}[name]
    whole = two_groups()
    expected = walk(whole, Warmup(whole, make(whole), 3), 12)
    first, second = two_groups(), two_groups(0.5, 0.5)
    scheduler, other = Warmup(first, make(first), 3), Warmup(second, make(second), 8, 0.7)
    walk(first, scheduler, stop)
    state = through_file(scheduler.state_dict())
    second.load_state_dict(first.state_dict())
    # As the Trainer does: the steps before the checkpoint were taken.
    second._opt_called = stop > 0
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert other.get_last_lr() == expected[stop]
    assert walk(second, other, 12 - stop) == expected[stop:]


def test_loading_leaves_the_state_that_is_loaded_alone() -> None:
    optimizer = two_groups()
    scheduler = Warmup(optimizer, OTHERS["cyclic"](optimizer), 2)
    state = through_file(scheduler.state_dict())
    copy = through_file(state)
    scheduler.load_state_dict(state)
    walk(optimizer, scheduler, 5)
    assert_same(state, copy)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps is 0: give at least 1"),
        ({"steps": 2, "start_factor": -0.1}, r"start_factor is -0\.1"),
        ({"steps": 2, "start_factor": 1.5}, r"start_factor is 1\.5"),
    ],
)
def test_warm_up_refuses_what_is_none(arguments: dict[str, Any], message: str) -> None:
    optimizer = two_groups()
    main = StepLR(optimizer, 2)
    with pytest.raises(ValueError, match=message):
        Warmup(optimizer, main, **arguments)
    assert rates(optimizer) == [0.1, 0.03]


def test_warm_up_refuses_a_main_scheduler_that_is_not_new_or_not_of_this_optimizer() -> None:
    optimizer = two_groups()
    main = StepLR(optimizer, 2)
    with pytest.raises(ValueError, match="another optimizer"):
        Warmup(two_groups(), main, 2)
    walk(optimizer, main, 3)
    with pytest.raises(ValueError, match="main has taken 3 steps"):
        Warmup(optimizer, main, 2)


# ---- in a run


RUNS: dict[str, tuple[str, Make]] = {
    "hyperbolic": ("epoch", lambda optimizer: HyperbolicLR(optimizer, 9, 4)),
    "exponential hyperbolic by step": ("step", lambda optimizer: ExpHyperbolicLR(optimizer, 20, 12)),
    "warm-up by step": ("step", lambda optimizer: Warmup(optimizer, CosineAnnealingLR(optimizer, 7), 5)),
    "warm-up by epoch": ("epoch", lambda optimizer: Warmup(optimizer, StepLR(optimizer, 1), 2)),
    "plateau": (
        "epoch",
        lambda optimizer: Warmup(optimizer, ReduceLROnPlateau(optimizer, patience=0, threshold=0.99), 1),
    ),
}


def run(name: str, *callbacks: Any, checkpoint: dict[str, Any] | None = None) -> Trainer:
    interval, make = RUNS[name]
    model = make_model(99 if checkpoint else 7)
    optimizer = AdamW(model.parameters(), lr=0.1)
    trainer = make_trainer(
        callbacks,
        model=model,
        optimizer=optimizer,
        scheduler=make(optimizer),
        scheduler_interval=interval,
        max_epochs=4,
        seed=3,
    )
    if checkpoint is not None:
        trainer.load_state_dict(checkpoint)
    trainer.fit(regression(), regression(9, seed=8))
    return trainer


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_to_the_same_bits_from_any_batch(name: str) -> None:
    whole = run(name)
    expected = frozen(whole)
    assert len({metrics["lr"] for metrics in whole.state.history}) >= 3
    for step in (1, 2, 3, 4, 8, 9, 12):
        stopped = run(name, interrupt_at(step))
        resumed = run(name, checkpoint=through_file(stopped.state_dict()))
        assert_same(frozen(resumed), expected)


# ---- scaling


LIMITLESS = {
    name: make
    for name, make in {**MAINS, **OTHERS}.items()
    if name not in {"cosine", "hyperbolic", "exponential hyperbolic"}  # their limits are absolute
}


@pytest.mark.parametrize("name", [*LIMITLESS, "warm-up"])
@pytest.mark.parametrize("after", [0, 3, 6])
def test_scaled_rates_are_the_schedulers_times_the_factor_from_then_on(name: str, after: int) -> None:
    def make(optimizer: Optimizer) -> LRScheduler:
        if name != "warm-up":
            found: LRScheduler = LIMITLESS[name](optimizer)
            return found
        return Warmup(optimizer, CosineAnnealingLR(optimizer, 9), 5)

    plain, scaled = two_groups(), two_groups()
    expected = walk(plain, make(plain), 14)
    scheduler = make(scaled)
    before = walk(scaled, scheduler, after)
    scale_rates(scaled, scheduler, 3.0)
    seen = [*before[:-1], *walk(scaled, scheduler, 14 - after)]
    assert seen[:after] == expected[:after]
    for one, other in zip(seen[after:], expected[after:], strict=True):
        assert one == pytest.approx([3 * rate for rate in other], rel=1e-9, abs=1e-15)


def test_absolute_limits_are_not_scaled() -> None:
    optimizer = two_groups()
    scheduler = CosineAnnealingLR(optimizer, 4, eta_min=0.02)
    scale_rates(optimizer, scheduler, 2.0)
    seen = walk(optimizer, scheduler, 4)
    assert seen[0] == [0.2, 0.06]
    assert seen[-1] == pytest.approx([0.02, 0.02])


def test_rates_without_a_scheduler_and_in_tensors_are_scaled() -> None:
    optimizer = AdamW([nn.Parameter(torch.zeros(1))], lr=torch.tensor(0.1))
    held = optimizer.param_groups[0]["lr"]
    scale_rates(optimizer, None, 0.5)
    assert optimizer.param_groups[0]["lr"] is held
    assert float(held) == pytest.approx(0.05)
    set_rate(optimizer.param_groups[0], 0.25)
    assert float(held) == 0.25


def test_a_first_epoch_without_a_step_is_no_wrong_order_of_scheduler_and_optimizer() -> None:
    model = make_model()
    optimizer = SGD(model.parameters(), lr=0.1)
    skip = At("on_train_epoch_start", lambda t: t.state.skip("epoch"), lambda t: t.state.epoch == 0)
    trainer = make_trainer([skip], model=model, optimizer=optimizer, scheduler=StepLR(optimizer, 1))
    state = trainer.fit(regression(), regression())  # torch's warning would be an error here
    assert [epoch["lr"] for epoch in state.history] == pytest.approx([0.1, 0.01])


FORMS: dict[str, Callable[[Any], Any]] = {
    "none": lambda optimizer: None,
    "one": lambda optimizer: StepLR(optimizer, 1, 0.5),
    "a": lambda optimizer: {"a": StepLR(optimizer, 1, 0.5)},
    "b": lambda optimizer: {"b": StepLR(optimizer, 1, 0.5)},
}


def formed(form: str, max_epochs: int) -> Trainer:
    model = make_model()
    optimizer = AdamW(model.parameters(), lr=0.1)
    return make_trainer(model=model, optimizer=optimizer, scheduler=FORMS[form](optimizer), max_epochs=max_epochs)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("one", "a", "the checkpoint has the schedulers of a run with only one, and this run a"),
        ("b", "a", "the checkpoint has the schedulers b, and this run a"),
        ("a", "one", "the checkpoint has the schedulers a, and this run only one"),
    ],
)
def test_the_state_of_other_schedulers_is_refused(before: str, after: str, said: str) -> None:
    trainer = formed(before, 1)
    trainer.fit(regression())
    with pytest.raises(ValueError, match=f"^{said}$"):
        formed(after, 2).load_state_dict(trainer.state_dict())


@pytest.mark.parametrize(
    ("before", "after", "said", "rates"),
    [
        ("none", "a", "the checkpoint has no scheduler: that of this run begins anew", [0.1, 0.1, 0.05]),
        (
            "one",
            "none",
            "the checkpoint has a scheduler, and this run none: the learning rate stays",
            [0.1, 0.05, 0.05],
        ),
    ],
)
def test_a_scheduler_that_comes_or_goes_is_a_warning(
    before: str, after: str, said: str, rates: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = formed(before, 1), formed(after, 3)
    first.fit(regression())
    assert not caplog.messages
    second.load_state_dict(first.state_dict())
    second.fit(regression())
    assert [message.startswith(said) for message in caplog.messages] == [True]
    assert [metrics["lr"] for metrics in second.state.history] == pytest.approx(rates)
