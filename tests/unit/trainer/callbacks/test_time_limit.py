"""TimeLimit, with a clock that moves where the test says."""

import math
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trainer.callbacks.unchanged import assert_changes_nothing, assert_survives
from tests.unit.trainer.support import At, interrupt_at, make_trainer, quick, regression, through_file
from trainer import Callback, Trainer
from trainer.callbacks import time_limit
from trainer.callbacks.time_limit import TIME_LIMIT, TimeLimit
from trainer.data.plan import Plan


class Clock:
    """Seconds; one goes by with each batch that is trained."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now

    def passing(self, event: str, seconds: float = 1.0) -> Callback:
        def pass_time(trainer: Any) -> None:
            self.now += seconds

        return At(event, pass_time, priority=1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time_limit, "perf_counter", clock)
    return clock


def make(clock: Clock, limit: TimeLimit, *callbacks: Callback, **options: Any) -> Trainer:
    """Three batches an epoch, a second each."""
    options.setdefault("max_epochs", 9)
    return make_trainer([limit, clock.passing("on_before_forward"), *callbacks], **options)


def fit(trainer: Trainer, checkpoint: dict[str, Any] | None = None) -> Trainer:
    if checkpoint is not None:
        trainer.load_state_dict(checkpoint)
    trainer.fit(regression(), regression())
    return trainer


@pytest.mark.parametrize(
    ("seconds", "steps", "epochs"), [(1, 1, 1), (4, 4, 2), (4.5, 5, 2), (6, 6, 2), (0.1, 1, 1)]
)
def test_the_epoch_ends_after_the_batch_and_is_validated(
    seconds: float, steps: int, epochs: int, clock: Clock
) -> None:
    trainer = fit(make(clock, TimeLimit(seconds)))
    state = trainer.state
    assert (state.step, state.epoch, state.stop_reason) == (steps, epochs, TIME_LIMIT)
    assert len(state.history) == epochs
    assert all("val_loss" in metrics for metrics in state.history)
    assert state.batch_index == 0


def test_the_epoch_goes_on_to_its_end_on_request(clock: Clock) -> None:
    state = fit(make(clock, TimeLimit(4, at="epoch"))).state
    assert (state.step, state.epoch, state.stop_reason) == (6, 2, TIME_LIMIT)


def test_time_that_validation_used_up_starts_no_other_epoch(clock: Clock) -> None:
    state = fit(make(clock, TimeLimit(10), clock.passing("on_validation_start", 20.0))).state
    assert (state.step, state.epoch, state.stop_reason) == (3, 1, TIME_LIMIT)


def test_a_run_that_ends_before_is_left_alone(clock: Clock) -> None:
    state = fit(make(clock, TimeLimit(100))).state
    assert (state.step, state.epoch, state.stop_reason) == (27, 9, None)


def test_the_reason_that_was_first_stays(clock: Clock) -> None:
    stop = At("on_before_forward", lambda trainer: trainer.state.stop("other"))
    assert fit(make(clock, TimeLimit(1), stop)).state.stop_reason == "other"


@pytest.mark.parametrize("every", [2, 0.5])
def test_it_ends_epochs_that_are_no_passes(every: float, clock: Clock) -> None:
    state = fit(make(clock, TimeLimit(4), validate_every=every)).state
    assert (state.step, state.stop_reason) == (4, TIME_LIMIT)
    assert "val_loss" in state.metrics


def test_a_batch_costs_one_look_at_the_clock(clock: Clock) -> None:
    reads: list[int] = []
    watch = At("on_train_batch_end", lambda trainer: reads.append(clock.reads), priority=99)
    fit(make(clock, TimeLimit(100), watch, max_epochs=1))
    assert [after - before for before, after in pairwise(reads)] == [1, 1]


class TestResume:
    @quick(20)
    @given(stops=st.lists(st.integers(1, 9), max_size=4, unique=True), pause=st.integers(0, 1000))
    def test_a_resumed_run_has_what_is_left(self, stops: list[int], pause: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            clock = Clock()
            patch.setattr(time_limit, "perf_counter", clock)
            interruptions = interrupt_at(*stops)
            trainer = fit(make(clock, TimeLimit(10), interruptions))
            for _ in stops:
                assert trainer.state.stop_reason == "interrupted"
                checkpoint = through_file(trainer.state_dict())
                clock.now += pause  # no training meanwhile
                trainer = fit(make(clock, TimeLimit(10), interruptions), checkpoint)
        assert (trainer.state.step, trainer.state.stop_reason) == (10, TIME_LIMIT)

    def test_the_same_trainer_goes_on_with_what_is_left(self, clock: Clock) -> None:
        trainer = make(clock, TimeLimit(7), interrupt_at(4))
        for expected in (4, 7):
            fit(trainer)
            assert trainer.state.step == expected
            clock.now += 100

    def test_a_checkpoint_inside_a_fit_knows_the_time_so_far(self, clock: Clock) -> None:
        seen: list[float] = []
        limit = TimeLimit(100)
        watch = At("on_epoch_end", lambda trainer: seen.append(limit.state_dict()["used"]), priority=95)
        fit(make(clock, limit, watch, max_epochs=3))
        assert seen == [3.0, 6.0, 9.0]
        assert limit.state_dict() == {"used": 9.0}
        clock.now += 50
        assert limit.used == 9.0

    def test_a_run_that_had_its_time_does_not_go_on(self, clock: Clock) -> None:
        checkpoint = through_file(fit(make(clock, TimeLimit(4))).state_dict())
        resumed = fit(make(clock, TimeLimit(4)), checkpoint)
        assert resumed.state.step == 4
        assert resumed.state.stop_reason == TIME_LIMIT

    def test_time_spent_before_an_error_is_spent(self, clock: Clock) -> None:
        def fail(trainer: Any) -> None:
            raise ZeroDivisionError

        limit = TimeLimit(100)
        with pytest.raises(ZeroDivisionError):
            fit(make(clock, limit, At("on_after_forward", fail, lambda trainer: trainer.state.step == 4)))
        assert limit.used == 5.0

    def test_going_back_inside_a_fit_gives_no_time_back(self, clock: Clock) -> None:
        limit = TimeLimit(100)
        back = At(
            "on_epoch_end",
            lambda trainer: limit.load_state_dict({"used": 0.0}),
            lambda trainer: trainer.state.epoch == 2,
        )
        trainer = fit(make(clock, limit, back, max_epochs=1))
        trainer.plan = Plan(max_epochs=3)
        assert fit(trainer).state.epoch == 3
        assert limit.used == 9.0

    def test_another_run_has_all_of_its_time(self, clock: Clock) -> None:
        limit = TimeLimit(4)
        for _ in range(2):
            assert fit(make(clock, limit)).state.step == 4

    def test_a_fork_has_all_of_its_time_and_resumes_with_what_is_left(self, clock: Clock) -> None:
        parent = fit(make(clock, TimeLimit(5), max_epochs=1))
        fork = make(clock, TimeLimit(5), interrupt_at(5))
        fork.load_state_dict(through_file(parent.state_dict()), fork=True)
        fit(fork)
        assert (fork.state.inherited, fork.state.epoch, fork.state.step) == (1, 1, 5)
        resumed = fit(make(clock, TimeLimit(5)), through_file(fork.state_dict()))
        assert (resumed.state.step, resumed.state.stop_reason) == (3 + 5, TIME_LIMIT)

    def test_validating_alone_takes_no_time(self, clock: Clock) -> None:
        limit = TimeLimit(4)
        trainer = make(clock, limit, clock.passing("on_validation_start", 50.0), max_epochs=1)
        trainer.validate(regression())
        assert limit.used == 0.0
        limit.teardown(trainer)
        assert limit.used == 0.0

    def test_a_larger_limit_lets_a_run_go_on_that_is_told_to(self, clock: Clock) -> None:
        stopped = fit(make(clock, TimeLimit(4)))
        resumed = make(clock, TimeLimit(6))
        resumed.load_state_dict(through_file(stopped.state_dict()))
        resumed.state.stop_reason = None
        resumed.fit(regression(), regression())
        assert (resumed.state.step, resumed.state.stop_reason) == (6, TIME_LIMIT)


@pytest.mark.parametrize(
    "seconds", [0, -1.0, math.nan, math.inf, True, "60", None, timedelta(seconds=60)], ids=repr
)
def test_a_time_that_makes_no_sense_is_refused(seconds: Any) -> None:
    with pytest.raises(ValueError, match=r"seconds is .*: give a finite number above 0"):
        TimeLimit(seconds)


def test_another_place_to_end_is_refused() -> None:
    with pytest.raises(ValueError, match="at is 'step': give 'epoch' or 'batch'"):
        TimeLimit(1, at="step")  # type: ignore[arg-type]


def test_nothing_that_is_learnt_changes_while_there_is_time() -> None:
    assert_changes_nothing(lambda: TimeLimit(1e6))


def test_survives_any_use() -> None:
    assert_survives(lambda: TimeLimit(1e6))
