"""Throughput, with a clock that moves where the test says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.unit.trainer.callbacks.unchanged import assert_changes_nothing, assert_survives
from tests.unit.trainer.support import At, interrupt_at, make_trainer, quick, regression, through_file
from trainer import Callback, Trainer
from trainer.callbacks import Evaluator, throughput
from trainer.callbacks.step_metrics import StepMetrics
from trainer.callbacks.throughput import Throughput
from trainer.data.plan import Plan
from trainer.step_log import StepLog

RATES = ("samples_per_second", "batches_per_second", "data_seconds_share")


class Clock:
    """Seconds, and the callbacks that let them go by."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def passing(self, event: str, seconds: float, priority: int = 10, only_step: int | None = None) -> Callback:
        def pass_time(trainer: Any) -> None:
            self.now += seconds

        return At(event, pass_time, lambda trainer: only_step in {None, trainer.state.step}, priority)

    def run(self, wait: float = 1.0, compute: float = 3.0, validation: float = 7.0) -> list[Callback]:
        """A run in which each batch and each validation takes so long."""
        return [
            self.passing("on_train_batch_start", wait),
            self.passing("on_before_forward", compute),
            self.passing("on_validation_start", validation),
        ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "perf_counter", clock)
    return clock


def fit(*callbacks: Callback, samples: int = 12, **options: Any) -> Trainer:
    trainer = make_trainer(callbacks, **options)
    trainer.fit(regression(samples), regression())
    return trainer


def values(trainer: Trainer, name: str) -> list[float]:
    return [metrics[name] for metrics in trainer.state.history]


def test_rates_are_those_of_training_alone(clock: Clock) -> None:
    trainer = fit(Throughput(), *clock.run(), max_epochs=3)
    # Each batch of 4 samples takes 1 s of waiting and 3 s of computing.
    assert values(trainer, "samples_per_second") == [1.0, 1.0, 1.0]
    assert values(trainer, "batches_per_second") == [0.25, 0.25, 0.25]
    assert values(trainer, "data_seconds_share") == [0.25, 0.25, 0.25]


def test_what_is_evaluated_inside_an_epoch_is_no_training(clock: Clock, tmp_path: Path) -> None:
    evaluating = Evaluator(every_n_steps=2)
    slow = clock.passing("on_validation_batch_end", 50.0)
    late = At("on_train_batch_end", lambda trainer: trainer.validate(regression()), priority=70)
    records = StepMetrics(tmp_path, transfer_every_n_steps=4)
    trainer = fit(Throughput(), evaluating, slow, late, records, *clock.run(validation=0.0), max_epochs=3)
    assert values(trainer, "samples_per_second") == [1.0, 1.0, 1.0]
    assert values(trainer, "data_seconds_share") == [0.25, 0.25, 0.25]
    assert {record.values.get("samples_per_second", 1.0) for record in records.log} == {1.0}


def test_a_last_batch_that_is_smaller_counts_what_it_has(clock: Clock) -> None:
    trainer = fit(Throughput(), *clock.run(), samples=10, max_epochs=2)
    assert values(trainer, "samples_per_second") == [6 / 8, 10 / 12]


def test_the_first_step_of_each_fit_is_in_no_rate(clock: Clock) -> None:
    trainer = make_trainer(
        [
            Throughput(),
            *clock.run(),
            clock.passing("on_before_forward", 100.0, only_step=0),
            clock.passing("on_before_forward", 100.0, only_step=6),
        ]
    )
    trainer.fit(regression(), regression())
    trainer.plan = Plan(max_epochs=4)
    trainer.fit(regression(), regression())
    assert values(trainer, "samples_per_second") == [1.0] * 4


def test_a_slow_step_later_is_in_the_rate(clock: Clock) -> None:
    trainer = fit(Throughput(), *clock.run(), clock.passing("on_before_forward", 28.0, only_step=1))
    assert values(trainer, "samples_per_second") == [8 / 36, 1.0]


def test_an_epoch_of_nothing_but_the_first_step_has_no_rate(clock: Clock) -> None:
    trainer = fit(Throughput(), *clock.run(), samples=4)
    first, second = trainer.state.history
    assert not first.keys() & set(RATES)
    assert first["eta_seconds"] == 11.0
    assert [second[name] for name in RATES] == [1.0, 0.25, 0.25]


def test_a_clock_that_stands_still_gives_no_rate(clock: Clock) -> None:
    history = fit(Throughput()).state.history
    assert [set(RATES) & metrics.keys() for metrics in history] == [set(), set()]
    assert [metrics["eta_seconds"] for metrics in history] == [0.0, 0.0]


@quick(25)
@given(wait=st.integers(0, 9), compute=st.integers(1, 9), samples=st.integers(5, 20))
def test_what_an_epoch_took_is_waiting_and_the_rest(wait: int, compute: int, samples: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock()
        patch.setattr(throughput, "perf_counter", clock)
        trainer = fit(Throughput(), *clock.run(wait, compute), samples=samples, model=nn.Linear(4, 1))
    metrics = trainer.state.metrics
    batches = -(-samples // 4)
    assert metrics["data_seconds_share"] == wait / (wait + compute)
    assert batches / metrics["batches_per_second"] == pytest.approx(batches * (wait + compute))
    assert samples / metrics["samples_per_second"] == pytest.approx(batches * (wait + compute))


class TestEta:
    def test_is_the_first_epoch_until_there_is_another(self, clock: Clock) -> None:
        warm_up = clock.passing("on_before_forward", 100.0, only_step=0)
        trainer = fit(Throughput(), *clock.run(), warm_up, max_epochs=4)
        # An epoch takes 12 s and its validation 7 s.
        assert values(trainer, "eta_seconds") == [3 * 119.0, 2 * 19.0, 19.0, 0.0]

    def test_is_the_mean_of_the_epochs_after_the_first(self, clock: Clock) -> None:
        slow = clock.passing("on_before_forward", 8.0, only_step=7)
        trainer = fit(Throughput(), *clock.run(), slow, max_epochs=4)
        assert values(trainer, "eta_seconds")[2] == (19 + 27) / 2

    def test_counts_what_runs_after_it_at_the_end_of_an_epoch(self, clock: Clock) -> None:
        trainer = fit(Throughput(), *clock.run(), clock.passing("on_epoch_end", 5.0, priority=95), max_epochs=3)
        assert values(trainer, "eta_seconds") == [2 * 19.0, 24.0, 0.0]

    def test_is_zero_when_the_run_is_to_stop(self, clock: Clock) -> None:
        stop = At("on_train_batch_end", lambda trainer: trainer.state.stop("enough"))
        assert values(fit(Throughput(), *clock.run(), stop, max_epochs=9), "eta_seconds") == [0.0]

    def test_a_resumed_run_counts_its_own_whole_epochs(self, clock: Clock) -> None:
        stopped = fit(Throughput(), *clock.run(compute=50.0), interrupt_at(4), max_epochs=5)
        assert stopped.state.batch_index == 1
        resumed = make_trainer([Throughput(), *clock.run()], max_epochs=5)
        resumed.load_state_dict(through_file(stopped.state_dict()))
        resumed.fit(regression(), regression())
        _, second, *rest = resumed.state.history
        assert "eta_seconds" not in second
        assert [metrics["eta_seconds"] for metrics in rest] == [2 * 19.0, 19.0, 0.0]
        # Of the epoch that was begun elsewhere, one batch was the first of this fit.
        assert [second[name] for name in RATES] == [1.0, 0.25, 0.25]

    def test_a_second_fit_of_the_same_trainer_begins_anew(self, clock: Clock) -> None:
        trainer = fit(Throughput(), *clock.run(), max_epochs=3)
        clock.now += 500
        trainer.plan = Plan(max_epochs=6)
        trainer.fit(regression(), regression())
        assert values(trainer, "eta_seconds")[3:] == [2 * 19.0, 19.0, 0.0]

    def test_a_run_resumed_between_epochs_has_one_at_once(self, clock: Clock) -> None:
        stop = At("on_epoch_end", lambda trainer: trainer.state.stop("interrupted"))
        stopped = fit(Throughput(), *clock.run(compute=50.0), stop, max_epochs=3)
        resumed = make_trainer([Throughput(), *clock.run()], max_epochs=3)
        resumed.load_state_dict(through_file(stopped.state_dict()))
        resumed.fit(regression(), regression())
        assert values(resumed, "eta_seconds")[1:] == [19.0, 0.0]

    def test_follows_the_epochs_that_a_run_of_steps_expects(self, clock: Clock) -> None:
        trainer = fit(Throughput(), *clock.run(), max_epochs=None, max_steps=8, validate_every=2)
        assert values(trainer, "eta_seconds") == [3 * 15.0, 2 * 15.0, 15.0, 0.0]
        assert values(trainer, "samples_per_second") == [1.0] * 4


class TestFlops:
    def test_are_the_samples_times_theirs(self, clock: Clock) -> None:
        metrics = fit(Throughput(flops_per_sample=500.0), *clock.run()).state.metrics
        assert metrics["flops_per_second"] == 500.0
        assert "flops_utilisation" not in metrics

    def test_utilisation_is_their_share_of_the_peak(self, clock: Clock) -> None:
        metrics = fit(Throughput(500.0, peak_flops=2000.0), *clock.run()).state.metrics
        assert metrics["flops_utilisation"] == 0.25

    @pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf")])
    @pytest.mark.parametrize("name", ["flops_per_sample", "peak_flops"])
    def test_numbers_that_make_no_sense_are_refused(self, name: str, value: float) -> None:
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            Throughput(**{"flops_per_sample": 1.0, name: value})

    def test_a_peak_alone_is_refused(self) -> None:
        with pytest.raises(ValueError, match="flops_per_sample is missing"):
            Throughput(peak_flops=1e12)

    @pytest.mark.parametrize(
        ("options", "missing"),
        [
            ({}, {"flops_per_second", "flops_utilisation"}),
            ({"flops_per_sample": 1.0}, {"flops_utilisation"}),
            ({"flops_per_sample": 1.0, "peak_flops": 2.0}, set()),
        ],
    )
    def test_what_is_recorded_is_what_is_declared(
        self, options: dict[str, float], missing: set[str], clock: Clock
    ) -> None:
        callback = Throughput(**options)
        metrics = fit(callback, *clock.run()).state.metrics
        assert metrics.keys() - {"train_loss", "val_loss", "lr"} == set(callback.writes) - missing


def test_a_cuda_device_is_waited_for_once_an_epoch_and_once_a_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[int, torch.device]] = []
    trainer = make_trainer([Throughput()], max_epochs=3)
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append((trainer.state.step, device)))
    # The model stays where it is: only what the callback sees of the device is another.
    seen = At("on_fit_start", lambda trainer: setattr(trainer, "device", device))
    trainer.callbacks.add(seen)
    trainer.fit(regression(), regression())
    assert waits == [(1, device), (3, device), (6, device), (9, device)]


def test_a_cpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cuda, "synchronize")
    assert fit(Throughput()).state.epoch == 2


def test_with_the_real_clock_the_numbers_are_plausible() -> None:
    metrics = fit(Throughput(), max_epochs=3).state.metrics
    assert metrics["samples_per_second"] == pytest.approx(4 * metrics["batches_per_second"])
    assert 0 <= metrics["data_seconds_share"] <= 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    model = torch.nn.Linear(4, 1)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.nn.functional.mse_loss,
        callbacks=[Throughput()],
        max_epochs=2,
        device="cuda",
    )
    trainer.fit(regression(256), regression())
    assert trainer.state.metrics["samples_per_second"] > 0


def test_nothing_that_is_learnt_changes() -> None:
    assert_changes_nothing(Throughput)


def test_survives_any_use() -> None:
    assert_survives(Throughput)


def test_tokens_are_counted_where_asked_for_and_the_rate_of_the_latest_steps_is_recorded(
    clock: Clock, tmp_path: Path
) -> None:
    slow = clock.passing("on_before_forward", 4.0, only_step=3)
    steps = StepMetrics(tmp_path, transfer_every_n_steps=2, metrics=["none"])
    trainer = fit(Throughput(unit="tokens"), *clock.run(), slow, steps)
    # Each batch of 4 samples of 4 numbers takes 4 s, the fourth 8 s.
    assert values(trainer, "tokens_per_second") == [4.0, 48 / 16]
    rates = [(record.step, record.values.get("tokens_per_second")) for record in StepLog(tmp_path / "steps.csv")]
    assert rates == [(1, None), (2, 4.0), (3, 4.0), (4, 2.0), (5, None), (6, 4.0)]
    own = fit(Throughput(unit="words", count=lambda batch: 2), *clock.run())
    assert values(own, "words_per_second") == [0.5, 0.5]
    with pytest.raises(ValueError, match="count is given, but not what it counts"):
        Throughput(count=len)
    with pytest.raises(ValueError, match="no function: give one"):
        Throughput(unit="tokens", count="parts.count")  # type: ignore[arg-type]


def test_the_operations_of_a_batch_are_counted_in_the_first(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))
    trainer = fit(Throughput("measure", peak_flops=480.0), *clock.run(), model=model)
    # A layer multiplies [in x out] forward, twice as much backward, but for the gradient of the inputs.
    per_sample = 2 * (4 * 6 + 6 * 1) + 2 * (4 * 6 + 2 * 6 * 1)
    assert values(trainer, "flops_per_second") == [per_sample, per_sample]
    assert values(trainer, "flops_utilisation") == [per_sample / 480] * 2
    own = nn.Linear(4, 1)
    nothing = fit(Throughput("measure"), *clock.run(), model=own, step=lambda model, batch: own.bias.sum())
    assert "flops_per_second" not in nothing.state.metrics
    assert "none were counted" in caplog.text


@pytest.mark.parametrize("known", [False, True], ids=["new", "compiled before"])
def test_the_count_leaves_a_compiled_model_compiled_from_the_second_batch_on(known: bool) -> None:
    compiled_at: list[int] = []

    def keep(graph: Any, inputs: Any) -> Any:
        compiled_at.append(trainer.state.step)
        return lambda *inputs: runs.append(trainer.state.step) or graph(*inputs)

    runs: list[int] = []
    torch.compiler.reset()
    model = torch.compile(nn.Sequential(nn.Linear(4, 1)), backend=keep)
    trainer = make_trainer([Throughput("measure")], model=model, max_epochs=1)
    if known:
        trainer.model(torch.zeros(4, 4))
        runs.clear()
    per_sample = 2 * 4 + 2 * 4
    trainer.fit(regression(16))
    metrics = trainer.state.metrics
    assert metrics["flops_per_second"] == pytest.approx(per_sample * metrics["samples_per_second"])
    assert compiled_at == ([0] if known else [1])
    assert runs == [1, 2, 3]


def test_all_updates_of_a_step_of_its_own_are_counted(clock: Clock) -> None:
    def step(model: Any, batch: Any, update: Any) -> Any:
        for _ in range(3):
            loss = nn.functional.mse_loss(model(batch[0]), batch[1])
            update(loss)
        return loss

    trainer = fit(Throughput("measure"), *clock.run(), model=nn.Linear(4, 1), step=step)
    assert values(trainer, "flops_per_second") == [3 * (2 * 4 + 2 * 4)] * 2


def test_counting_changes_nothing_and_ends_with_an_error() -> None:
    assert_changes_nothing(lambda: Throughput("measure"))

    def fail(trainer: Any) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(Throughput("measure"), At("on_after_forward", fail))
    assert not torch._C._len_torch_dispatch_stack()
    skip = At("on_before_backward", lambda trainer: trainer.state.skip("backward"))
    fit(Throughput("measure"), skip)
    assert not torch._C._len_torch_dispatch_stack()


@pytest.mark.parametrize("event", ["on_after_forward", "on_before_backward"])
def test_each_fit_counts_its_own_first_batch_and_one_that_failed_counts_nothing(event: str, clock: Clock) -> None:
    def fail(trainer: Any) -> None:
        failed.append(True)
        raise ZeroDivisionError

    failed: list[bool] = []
    measures = Throughput("measure")
    callbacks = [At(event, fail, lambda trainer: not failed), measures, *clock.run()]
    trainer = make_trainer(callbacks, model=nn.Linear(4, 1), max_epochs=3)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(regression())
    trainer.plan = Plan(max_epochs=2)
    whole = fit(Throughput("measure"), *clock.run(), model=nn.Linear(4, 1)).state.metrics["flops_per_second"]
    assert trainer.fit(regression()).metrics["flops_per_second"] == whole
    trainer.plan = Plan(max_epochs=3)
    trainer.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    assert trainer.fit(regression()).metrics["flops_per_second"] > whole
