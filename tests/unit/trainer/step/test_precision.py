"""bf16 and fp16: what is computed in which type, loss scaling, overflow, resuming; and torch.compile."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_model,
    make_trainer,
    regression,
    through_file,
)
from trainer import BatchOptions
from trainer.callbacks import EMA, GradientAccumulation, GradientMonitor
from trainer.step.precision import Precision

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Watched(nn.Linear):
    """Notes the types of its outputs, in training and evaluation."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.seen: set[tuple[bool, torch.dtype]] = set()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        self.seen.add((self.training, outputs.dtype))
        return outputs


@pytest.mark.parametrize("kind", TYPES)
def test_training_and_evaluation_run_in_the_type_and_weights_stay_as_they_are(kind: Any) -> None:
    model = Watched()
    trainer = make_trainer(model=model, precision=kind)
    trainer.fit(regression(8), regression(4))
    trainer.test(regression(4))
    assert model.seen == {(True, TYPES[kind]), (False, TYPES[kind])}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_it_learns_what_full_precision_learns(kind: Any) -> None:
    def trained(precision: Any) -> dict[str, float]:
        torch.manual_seed(0)
        trainer = make_trainer(model=nn.Linear(4, 1), precision=precision, max_epochs=20)
        return trainer.fit(regression(64), regression(16, seed=9)).metrics

    assert trained(kind)["val_loss"] == pytest.approx(trained("fp32")["val_loss"], abs=0.02)


def test_hooks_before_the_step_see_gradients_of_their_true_size() -> None:
    def first_gradient(kind: Any) -> Tensor:
        seen: list[Tensor] = []
        torch.manual_seed(0)
        watch = At("on_before_optimizer_step", lambda trainer: seen.append(trainer.model.weight.grad.clone()))
        # The scale starts so high that the first steps overflow and change nothing.
        make_trainer([watch], model=nn.Linear(4, 1), precision=kind, max_epochs=4).fit(regression(4))
        return next(gradient for gradient in seen if gradient.isfinite().all())

    torch.testing.assert_close(first_gradient("fp16"), first_gradient("fp32"), rtol=0.02, atol=0.02)


def test_an_overflow_leaves_the_weights_alone_and_lowers_the_scale() -> None:
    def explode(trainer: Any) -> None:
        trainer.state.loss = trainer.state.loss * 1e38 * 1e38

    trainer = make_trainer(
        [At("on_before_backward", explode, lambda trainer: trainer.state.batch_index == 6)],
        model=nn.Linear(4, 1),
        precision="fp16",
        max_epochs=1,
    )
    weights, scales = [trainer.model.weight.clone()], [trainer.precision.state_dict()["scale"]]

    def note(trainer: Any) -> None:
        weights.append(trainer.model.weight.clone())
        scales.append(trainer.precision.state_dict()["scale"])

    trainer.callbacks.register("on_train_batch_end", note)
    trainer.fit(regression(32))
    assert torch.equal(weights[7], weights[6])
    assert scales[7] == scales[6] / 2
    assert not torch.equal(weights[8], weights[7])
    assert scales[8] == scales[7]


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
@pytest.mark.parametrize("step", [1, 3, 4])
def test_it_resumes_to_the_same_bits(kind: Any, step: int) -> None:
    def run(*callbacks: Any) -> Any:
        return make_trainer(callbacks, precision=kind, max_epochs=2)

    whole, stopped, resumed = run(), run(interrupt_at(step)), run()
    whole.fit(regression(12), regression(4))
    stopped.fit(regression(12), regression(4))
    resumed.load_state_dict(through_file(stopped.state_dict()))
    resumed.fit(regression(12), regression(4))
    assert_same(frozen(resumed), frozen(whole))


def test_steps_that_overflow_are_none_to_the_gradient_monitor_and_no_scheduler_warns() -> None:
    torch.manual_seed(0)  # weights of which the first step overflows
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = make_trainer(
        [GradientMonitor()],
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1),
        precision="fp16",
        max_epochs=4,
    )
    before = model.weight.clone()
    trainer.callbacks.register(
        "on_epoch_end", lambda trainer: unchanged.append(torch.equal(trainer.model.weight, before))
    )
    unchanged: list[bool] = []
    norms = [metrics["max_grad_norm"] for metrics in trainer.fit(regression(4)).history]
    assert unchanged[0], "the first step overflows"
    assert norms[0] == 0
    assert not unchanged[-1]
    assert 0 < norms[-1] < 100


def overflow_at(*batches: int) -> At:
    """Makes the gradients of these batches infinite; the scale starts at 1, so that no other step overflows."""
    seen = iter(range(10**6))

    def explode(trainer: Any) -> None:
        if next(seen) in batches:
            trainer.state.loss = trainer.state.loss * 1e38 * 1e38

    return At("on_before_backward", explode)


def in_half(*callbacks: Any, scale: float = 1.0, **options: Any) -> Any:
    model = options.pop("model", None) or nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    options.setdefault("scheduler_interval", "step")
    trainer = make_trainer(
        callbacks, model=model, optimizer=optimizer, scheduler=schedule, precision="fp16", **options
    )
    trainer.precision.load_state_dict({**trainer.precision.state_dict(), "scale": scale})
    return trainer


class TestAStepThatOverflows:
    """It was not taken: it is no step to the state, the schedule, averages, the plan or the hooks after it."""

    def test_it_is_not_counted_and_the_schedule_and_the_average_wait(self) -> None:
        after: list[int] = []
        average = EMA(0.5)
        trainer = in_half(
            overflow_at(1, 2, 6),
            At("on_after_optimizer_step", lambda trainer: after.append(trainer.state.step)),
            average,
            max_epochs=2,
        )
        rates: list[float] = []
        trainer.callbacks.register(
            "on_train_batch_end", lambda trainer: rates.append(0.01 / trainer.optimizer.param_groups[0]["lr"] - 1)
        )
        state = trainer.fit(regression(16))
        assert state.step == 5
        assert after == [0, 1, 2, 3, 4]
        assert rates == pytest.approx([1, 1, 1, 2, 3, 4, 4, 5])
        assert trainer.scheduler.last_epoch == 5
        assert average.state_dict()["updates"] == 5
        assert (state.epoch, state.data_epoch) == (2, 2)
        assert state.total_steps == 2 + 4

    def test_a_run_of_so_many_steps_takes_so_many(self) -> None:
        seen: list[int] = []
        trainer = in_half(overflow_at(0, 3, 4), max_epochs=None, max_steps=5)
        trainer.callbacks.register("on_train_batch_end", lambda trainer: seen.append(trainer.state.step))
        assert trainer.fit(regression(16)).step == 5
        assert seen == [0, 1, 2, 2, 2, 3, 4, 5]

    def test_it_closes_the_group_of_accumulated_gradients(self) -> None:
        norms: list[float] = []

        def note(trainer: Any) -> None:
            norms.append(float(trainer.model.weight.grad.norm()))

        # The second group overflows in its last batch; the third must hold nothing of it.
        watch = At("on_before_optimizer_step", note)
        trainer = in_half(overflow_at(3), GradientAccumulation(2), watch, scheduler_interval="epoch", max_epochs=1)
        trainer.optimizer.param_groups[0]["lr"] = 0.0
        batching = BatchOptions(batch_size=4, shuffle=False)
        trainer.batching = batching
        data = regression(4)
        state = trainer.fit(TensorDataset(*(tensor.repeat(6, 1) for tensor in data.tensors)))
        assert (state.step, state.batch_index, state.data_epoch) == (2, 0, 1)
        assert norms[0] == norms[2]
        assert not math.isfinite(norms[1])

    def test_the_first_scale_overflows_and_steps_begin_with_the_first_that_fits(self) -> None:
        trainer = in_half(scale=2.0**40, max_epochs=20)
        state = trainer.fit(regression(16))
        missed = 80 - state.step
        assert 20 < missed < 45
        assert trainer.precision.state_dict()["scale"] == 2.0 ** (40 - missed)
        assert trainer.scheduler.last_epoch == state.step

    @pytest.mark.parametrize("length", [{"max_epochs": 100}, {"max_epochs": None, "max_steps": 10}])
    def test_a_run_in_which_every_step_overflows_ends_as_diverged(
        self, length: dict[str, Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        trainer = in_half(overflow_at(*range(1000)), **length)
        before = trainer.model.weight.detach().clone()
        state = trainer.fit(regression(16))
        assert (state.stop_reason, state.step) == ("diverged", 0)
        assert 4 * state.epoch + state.batch_index == 50
        assert torch.equal(trainer.model.weight, before)
        assert "the gradients of 50 steps in a row are not finite in fp16" in caplog.text

    def test_a_resumed_run_counts_on(self) -> None:
        whole, first, second = (in_half(overflow_at(*range(1000)), max_epochs=100) for _ in range(3))
        assert whole.fit(regression(16)).epoch == 12
        first.callbacks.add(
            At("on_epoch_end", lambda t: t.state.stop("interrupted"), lambda t: t.state.epoch == 5)
        )
        first.fit(regression(16))
        second.load_state_dict(through_file(first.state_dict()))
        state = second.fit(regression(16))
        assert (state.stop_reason, 4 * state.epoch + state.batch_index) == ("diverged", 50)

    def test_one_that_does_not_overflow_ends_the_row(self) -> None:
        trainer = in_half(overflow_at(*range(40), *range(41, 81)), max_epochs=21)
        state = trainer.fit(regression(16))
        assert (state.stop_reason, state.step) == (None, 4)


@pytest.mark.parametrize(("before", "then"), [("fp32", "fp16"), ("fp16", "fp32")])
def test_a_checkpoint_of_full_precision_goes_on_in_half_and_the_other_way(before: str, then: str) -> None:
    first, second = make_trainer(precision=before, max_epochs=1), make_trainer(precision=then, max_epochs=2)
    first.fit(regression(8))
    second.load_state_dict(through_file(first.state_dict()))
    assert second.fit(regression(8)).epoch == 2
    assert bool(second.precision.state_dict()) is (then == "fp16")


def test_an_unknown_precision_names_the_known() -> None:
    with pytest.raises(ValueError, match="precision is 'half': give 'fp32', 'bf16' or 'fp16'"):
        make_trainer(precision="half")
    with pytest.raises(ValueError, match="precision is"):
        Precision("fp8", torch.device("cpu"))  # type: ignore[arg-type]


class TestCompile:
    """With torch's eager backend: what is compiled is the same, and no C++ compiler is needed."""

    def test_a_compiled_model_trains_to_the_same_bits_and_its_checkpoint_is_a_plain_one(self) -> None:
        plain, compiled = make_trainer(), make_trainer(compile={"backend": "eager"})
        for trainer in (plain, compiled):
            trainer.fit(regression(12), regression(4))
        assert_same(frozen(compiled), frozen(plain))
        fresh = make_trainer()
        fresh.load_state_dict(through_file(compiled.state_dict()))
        assert_same(frozen(fresh), frozen(plain))

    def test_it_is_the_compiled_model_that_runs(self) -> None:
        compiled: list[Any] = []
        torch.compiler.reset()  # torch compiles one function so many times in a process, and then no more

        def backend(graph: Any, inputs: Any) -> Any:
            compiled.append(graph)
            return graph.forward

        make_trainer(model=make_model(), compile={"backend": backend}).fit(regression(12))
        assert compiled
