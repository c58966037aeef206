"""EMA: what is evaluated and saved is the average, and training does not notice."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

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
from trainer import Callback, Trainer
from trainer.callbacks.best_weights import BestWeights
from trainer.callbacks.checkpoint import Checkpoint
from trainer.callbacks.ema import EMA
from trainer.callbacks.gradient_accumulation import GradientAccumulation
from trainer.callbacks.weight_averaging import WeightAveraging
from trainer.checkpoint.manager import newest_checkpoint, snapshot
from trainer.data.plan import Plan
from trainer.step.compute import Compute
from trainer.step.graph import make_capturable

EPOCHS, BATCHES = 3, 3
STEPS = EPOCHS * BATCHES


def build(*callbacks: Callback, seed: int = 7, **options: Any) -> Trainer:
    model = options.pop("model", None) or make_model(seed)
    optimizer = options.pop("optimizer", None) or torch.optim.AdamW(model.parameters(), lr=0.05)
    return make_trainer(callbacks, model=model, optimizer=optimizer, **{"max_epochs": EPOCHS, **options})


def fit(trainer: Trainer) -> Trainer:
    trainer.fit(regression(), regression(9, seed=8))
    return trainer


def weights(trainer: Trainer) -> dict[str, Tensor]:
    taken: dict[str, Tensor] = snapshot(trainer.model.state_dict())
    return taken


@cache
def whole() -> dict[str, Any]:
    return frozen(fit(build(EMA(0.8))))


class Reference(Callback):
    """The same average, by torch's AveragedModel."""

    priority = 11

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)  # type: ignore[no-untyped-call]
        self.ends: list[dict[str, Tensor]] = []

    def on_after_optimizer_step(self, trainer: Any) -> None:
        self.averaged.update_parameters(trainer.model)

    def on_epoch_end(self, trainer: Any) -> None:
        self.ends.append(snapshot(self.averaged.module.state_dict()))


def without_counters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if value.is_floating_point()}


def test_the_average_is_that_of_torch_statistics_included() -> None:
    model = make_model()
    reference, ends = Reference(model, 0.8), []
    keep = At("on_epoch_end", lambda trainer: ends.append(weights(trainer)))
    fit(build(EMA(0.8, warmup=False), reference, keep, model=model))
    assert len(ends) == EPOCHS
    for ours, theirs in zip(ends, reference.ends, strict=True):
        assert_same(without_counters(ours), without_counters(theirs))
        assert not torch.equal(ours["1.running_mean"], torch.zeros(6))
    assert ends[-1]["1.num_batches_tracked"] == STEPS


def test_training_does_not_notice() -> None:
    def run(*callbacks: Callback) -> list[dict[str, Tensor]]:
        steps: list[dict[str, Tensor]] = []
        keep = At("on_train_batch_end", lambda trainer: steps.append(weights(trainer)))
        fit(build(keep, *callbacks))
        return steps

    assert_same(run(EMA(0.8)), run())


def test_the_evaluated_weights_are_the_saved_ones(tmp_path: Path) -> None:
    evaluated: list[dict[str, Tensor]] = []
    keep = At("on_validation_start", lambda trainer: evaluated.append(weights(trainer)))
    trainer = fit(build(EMA(0.8), Checkpoint(tmp_path, max_overhead=1), keep))
    newest = newest_checkpoint([tmp_path])
    assert newest is not None
    assert_same(dict(newest[1]["model"]), evaluated[-1])
    assert_same(weights(trainer), evaluated[-1])
    metrics = trainer.validate(regression(9, seed=8))
    assert metrics["val_loss"] == trainer.state.metrics["val_loss"]
    assert trainer.test(regression(9, seed=8))["test_loss"] == metrics["val_loss"]
    assert_same(weights(trainer), evaluated[-1])


def test_parameters_stay_the_objects_that_the_optimizer_knows() -> None:
    trainer = build(EMA(0.8))
    before = list(trainer.model.parameters())
    fit(trainer)
    assert all(one is other for one, other in zip(before, trainer.model.parameters(), strict=True))
    assert {id(item) for item in trainer.optimizer.param_groups[0]["params"]} == {id(item) for item in before}


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_run_stopped_at_any_batch_goes_on_to_the_same_bits(step: int) -> None:
    stopped = fit(build(EMA(0.8), interrupt_at(step)))
    saved = through_file(stopped.state_dict())
    resumed = build(EMA(0.8), seed=99)
    resumed.load_state_dict(saved)
    assert_same(frozen(fit(resumed)), whole())
    assert_same(frozen(fit(stopped)), whole())


@pytest.mark.parametrize("epoch", range(1, EPOCHS + 1))
def test_a_run_stopped_at_an_epochs_end_goes_on_to_the_same_bits(epoch: int) -> None:
    stopped = fit(build(EMA(0.8), interrupt_at(epoch * BATCHES, now=False)))
    resumed = build(EMA(0.8), seed=99)
    resumed.load_state_dict(through_file(stopped.state_dict()))
    assert_same(frozen(fit(resumed)), whole())
    assert_same(frozen(fit(stopped)), whole())


@pytest.mark.parametrize("reason", ["interrupted", "enough"])
@pytest.mark.parametrize("epoch", range(1, EPOCHS))
def test_a_run_stopped_at_an_epochs_start_saves_what_was_evaluated(
    epoch: int, reason: str, tmp_path: Path
) -> None:
    def stop(trainer: Any) -> None:
        trainer.state.stop(reason, now=True)

    evaluated: list[dict[str, Tensor]] = []
    keep = At("on_validation_start", lambda trainer: evaluated.append(weights(trainer)))
    halt = At("on_train_epoch_start", stop, lambda trainer: trainer.state.epoch == epoch)
    stopped = fit(build(EMA(0.8), Checkpoint(tmp_path, max_overhead=1), keep, halt))
    newest = newest_checkpoint([tmp_path])
    assert newest is not None
    assert newest[0].progress == (epoch, 0)
    assert_same(dict(newest[1]["model"]), evaluated[-1])
    assert_same(weights(stopped), evaluated[-1])
    if reason == "interrupted":
        resumed = build(EMA(0.8), seed=99)
        resumed.load_state_dict(newest[1])
        assert_same(frozen(fit(resumed)), whole())


def test_a_skipped_epoch_keeps_the_trained_weights() -> None:
    def run(*callbacks: Callback) -> list[dict[str, Tensor]]:
        steps: list[dict[str, Tensor]] = []
        keep = At("on_train_batch_end", lambda trainer: steps.append(weights(trainer)))
        skip = At("on_train_epoch_start", lambda t: t.state.skip("epoch"), lambda t: t.state.epoch == 1)
        fit(build(keep, skip, *callbacks))
        return steps

    assert_same(run(EMA(0.8)), run())


def test_a_loaded_state_is_a_copy() -> None:
    one, other = EMA(0.8), EMA(0.8)
    stopped = fit(build(one, interrupt_at(BATCHES, now=False)))
    other.load_state_dict(one.state_dict())
    before = snapshot(other.state_dict())
    fit(stopped)
    assert before["updates"] == BATCHES
    assert before["training"]
    assert_same(other.state_dict(), before)


def test_a_validation_that_failed_leaves_an_epoch_that_goes_on_with_its_own_weights() -> None:
    def fail(trainer: Any) -> None:
        failures.append(trainer.state.step)
        raise OSError("no data")

    failures: list[int] = []
    seen: list[dict[str, Tensor]] = []
    failing = At("on_validation_start", fail, lambda trainer: trainer.state.epoch == 2 and not failures)
    keep = At("on_train_batch_end", lambda trainer: seen.append(weights(trainer)))
    trainer = build(EMA(0.8), keep, failing)
    with pytest.raises(OSError, match="no data"):
        fit(trainer)
    started: list[dict[str, Tensor]] = []
    trainer.callbacks.register("on_train_batch_start", lambda t: started.append(weights(t)))
    trainer.plan = Plan(max_epochs=EPOCHS + 1)
    fit(trainer)
    assert_same(started[0], seen[STEPS - 1])


def test_warmup_lowers_the_first_decays() -> None:
    model = nn.Linear(1, 1, bias=False)
    rates = iter(range(1, 100))

    def set_weight(trainer: Any) -> None:
        with torch.no_grad():
            model.weight.fill_(float(next(rates)))

    change = At("on_after_optimizer_step", set_weight, priority=0)
    data = torch.utils.data.TensorDataset(torch.zeros(12, 1), torch.zeros(12, 1))
    make_trainer([change, EMA(0.25)], model=model, max_epochs=1).fit(data)
    average = 1.0
    for count, value in ((1, 2.0), (2, 3.0)):
        decay = min(0.25, (1 + count) / (10 + count))
        average = decay * average + (1 - decay) * value
    assert model.weight.item() == pytest.approx(average, rel=1e-6)


@quick(20)
@given(values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=12), decay=st.floats(0, 0.99))
def test_the_average_lies_within_the_weights(values: list[float], decay: float) -> None:
    model, left = nn.Linear(1, 1, bias=False), iter(values)

    def set_weight(trainer: Any) -> None:
        with torch.no_grad():
            model.weight.fill_(next(left))

    change = At("on_after_optimizer_step", set_weight, priority=0)
    data = torch.utils.data.TensorDataset(torch.zeros(4 * len(values), 1), torch.zeros(4 * len(values), 1))
    make_trainer([change, EMA(decay)], model=model, max_epochs=1).fit(data)
    slack = 1e-5 * max(map(abs, values))
    assert min(values) - slack <= model.weight.item() <= max(values) + slack


class Awkward(nn.Module):
    """Weights in several formats, a tied one, and buffers of which only the statistics are to be averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.third = nn.Linear(4, 1, dtype=torch.float64)
        self.table = nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("mask", torch.full((4,), float("-inf")))
        self.register_buffer("factor", torch.ones(()))
        self.register_buffer("running_mean", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.second(self.first(inputs))
        if self.training:
            self.running_mean = 0.5 * self.running_mean + 0.5 * hidden.detach().mean(dim=0)
            self.factor = self.factor + 1
        output: Tensor = self.third(hidden.double()).float()
        return output


def test_buffers_that_are_no_statistics_keep_the_values_of_training() -> None:
    torch.manual_seed(3)
    model = Awkward()
    means: list[Tensor] = []
    keep = At("on_train_batch_end", lambda trainer: means.append(model.running_mean.clone()))
    fit(build(EMA(0.5, warmup=False), keep, model=model, max_epochs=1))
    expected = means[0]
    for mean in means[1:]:
        expected = torch.lerp(expected, mean, 0.5)
    assert torch.allclose(model.running_mean, expected)
    assert not torch.equal(model.running_mean, means[-1])
    assert torch.equal(model.mask, torch.full((4,), float("-inf")))
    assert model.factor == 1 + BATCHES
    assert model.second.weight is model.first.weight
    assert model.table.tolist() == [0, 1, 2]


def test_weights_of_16_bits_are_averaged_in_32() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()

    def add(trainer: Any) -> None:
        with torch.no_grad():
            model.weight.fill_(1.0 if trainer.state.step == 0 else 2.0)

    change = At("on_after_optimizer_step", add, priority=0)
    data = torch.utils.data.TensorDataset(*2 * [torch.zeros(1200, 1, dtype=torch.bfloat16)])
    make_trainer([change, EMA(0.999, warmup=False)], model=model, max_epochs=1).fit(data)
    # In bfloat16 itself, 1 + 0.001 is 1, and the average would never leave it.
    assert model.weight.item() == pytest.approx(2 - 0.999**299, rel=2**-8)


def test_no_step_reads_from_the_device() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer = fit(build(*no_reads_inside_a_step(), EMA(0.8), model=model, optimizer=optimizer))
    assert trainer.finished


def test_a_read_inside_a_step_would_be_found() -> None:
    reading = At("on_after_optimizer_step", lambda trainer: float(next(trainer.model.parameters()).sum()))
    with pytest.raises(AssertionError, match="reads from the device"):
        fit(build(*no_reads_inside_a_step(), reading))


def test_a_step_that_is_replayed_as_a_graph_is_averaged_alike() -> None:
    states = []
    for compute in (Compute, StandIn):
        trainer = build(EMA(0.8))
        make_capturable(trainer.optimizer, trainer.device)
        trainer._compute_class = lambda *_, kind=compute: kind
        states.append(frozen(fit(trainer)))
    assert_same(states[1], states[0])


def test_an_open_group_of_batches_is_closed_before_the_exchange() -> None:
    ema, watch = EMA(0.8), []
    keep = At("on_after_optimizer_step", lambda trainer: watch.append(weights(trainer)), priority=11)
    trainer = build(ema, keep, GradientAccumulation(2), max_epochs=1)
    fit(trainer)
    assert (ema.state_dict()["updates"], len(watch)) == (2, 2)
    trained = ema.state_dict()["training"]
    assert_same(trained, {name: watch[-1][name] for name in trained})


def test_a_skipped_step_is_not_averaged() -> None:
    ema = EMA(0.8)
    skip = At("on_after_backward", lambda t: t.state.skip("optimizer_step"), lambda t: t.state.batch_index == 1)
    fit(build(ema, skip))
    assert ema.state_dict()["updates"] == STEPS - EPOCHS


def test_a_callback_that_serves_a_second_trainer_begins_anew() -> None:
    ema = EMA(0.8)
    fit(build(ema))
    assert_same(frozen(fit(build(ema))), whole())


def test_a_longer_plan_goes_on_as_one_run() -> None:
    trainer = fit(build(EMA(0.8), BestWeights(), max_epochs=2))
    plain = fit(build(EMA(0.8), max_epochs=2))
    for item in (trainer, plain):
        item.plan = Plan(max_epochs=EPOCHS)
        fit(item)
    # Between the two fits, one model had its best weights.
    assert trainer.state.history == plain.state.history == whole()["state"]["history"]


def test_nothing_happens_without_a_fit_or_a_step() -> None:
    ema, model = EMA(0.8), make_model()
    before = copy.deepcopy(model.state_dict())
    trainer = build(ema, model=model, max_epochs=0)
    trainer.validate(regression())
    fit(trainer)
    ema.teardown(trainer)
    ema.teardown(trainer)
    assert_same(dict(model.state_dict()), dict(before))
    fresh = EMA(0.8)
    fresh.load_state_dict(through_file(ema.state_dict()))
    assert fresh.state_dict() == {"updates": 0, "average": {}, "training": {}}


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match=r"decay is .*: give a number from 0 to below 1"):
        EMA(decay)


def test_two_that_average_are_refused() -> None:
    with pytest.raises(
        ValueError, match="EMA averages the weights of this run already: leave WeightAveraging out"
    ):
        fit(build(EMA(), WeightAveraging()))
    stopped = fit(build(EMA(), interrupt_at(4)))
    other = build(WeightAveraging())
    other.load_state_dict(through_file(stopped.state_dict()))
    with pytest.raises(ValueError, match="EMA averages the weights"):
        fit(other)


def test_an_optimizer_that_averages_is_refused() -> None:
    model = make_model()
    trainer = build(EMA(), model=model, optimizer=AdamWScheduleFree(model.parameters()))
    with pytest.raises(ValueError, match=r"the optimizer AdamWScheduleFree averages .*: leave EMA out"):
        fit(trainer)


def test_the_average_of_another_model_is_refused() -> None:
    saved = through_file(fit(build(EMA(), interrupt_at(4))).callbacks.state_dict())
    trainer = build(EMA(), model=nn.Sequential(nn.Linear(4, 1)))
    trainer.callbacks.load_state_dict(saved)
    trainer.state.step = 4
    with pytest.raises(
        ValueError, match=r"saved state of EMA and the model differ in 1\.bias, .*: load a checkpoint"
    ):
        fit(trainer)


def test_an_epoch_that_failed_in_its_validation_and_becomes_longer_trains_on_with_its_own_weights() -> None:
    def run(*limits: int) -> Trainer:
        failures = [OSError("once")]

        def fail(trainer: Any) -> None:
            raise failures.pop()

        trainer = build(
            EMA(0.5),
            At("on_validation_start", fail, lambda trainer: bool(failures)),
            max_epochs=1,
            max_steps=limits[0],
        )
        with pytest.raises(OSError, match="once"):
            fit(trainer)
        trainer.plan = Plan(max_epochs=1, max_steps=limits[1])
        return fit(trainer)

    assert_same(weights(run(2, 3)), weights(run(3, 3)))
