"""What hooks may ask for: actions left out, epochs and runs ended, batch, outputs and loss replaced."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.unit.trainer.support import (
    At,
    Recorder,
    assert_same,
    frozen,
    interrupt_at,
    make_model,
    make_trainer,
    quick,
    regression,
    through_file,
)
from trainer import Callback, TrainState
from trainer.callbacks import EarlyStopping, default_callbacks
from trainer.data.plan import Plan
from trainer.state import SKIPPABLE

BATCH_ACTIONS = sorted(SKIPPABLE - {"batch", "epoch", "validation", "scheduler_step"})


class ScaleLoss(Callback):
    """The callback that Cerebras' documentation builds, whole."""

    def on_before_backward(self, trainer: Any) -> None:
        trainer.state.loss *= 2


def skip(action: str, event: str = "on_train_batch_start", when: Any = lambda trainer: True, **options: Any) -> At:
    return At(event, lambda trainer: trainer.state.skip(action), when, **options)


def linear_trainer(*callbacks: Callback, **options: Any) -> Any:
    torch.manual_seed(0)
    return make_trainer(callbacks, model=nn.Linear(4, 1), **options)


def events_of(*callbacks: Callback, **options: Any) -> list[str]:
    log: list[str] = []
    trainer = linear_trainer(Recorder(log), *callbacks, **options)
    trainer.fit(regression(8), regression(4))
    return log


class TestSkipping:
    @pytest.mark.parametrize("action", BATCH_ACTIONS)
    def test_an_action_skipped_before_its_events_fires_none_of_them(self, action: str) -> None:
        log = events_of(skip(action))
        assert f"on_before_{action}" not in log
        assert f"on_after_{action}" not in log
        others = [other for other in BATCH_ACTIONS if other != action]
        assert [log.count(f"on_after_{other}") for other in others] == [4, 4]

    @pytest.mark.parametrize("action", BATCH_ACTIONS)
    @pytest.mark.parametrize("priority", [10, 90])
    def test_skipped_in_its_before_event_it_still_reaches_everyone_there(self, action: str, priority: int) -> None:
        log = events_of(skip(action, f"on_before_{action}", priority=priority))
        assert log.count(f"on_before_{action}") == 4
        assert f"on_after_{action}" not in log

    @pytest.mark.parametrize("precision", ["fp32", "fp16"])
    def test_a_skipped_optimizer_step_leaves_weights_steps_and_schedule_alone(self, precision: str) -> None:
        trainer = linear_trainer(
            skip("optimizer_step", "on_before_optimizer_step"), scheduler_interval="step", precision=precision
        )
        trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
        before = trainer.model.weight.clone()
        trainer.fit(regression(8))
        assert torch.equal(trainer.model.weight, before)
        assert (trainer.state.step, trainer.state.epoch, trainer.optimizer.param_groups[0]["lr"]) == (0, 2, 0.05)

    def test_a_skipped_backward_leaves_no_gradient(self) -> None:
        trainer = linear_trainer(skip("backward"))
        trainer.fit(regression(8))
        assert trainer.model.weight.grad is None

    def test_a_skipped_zero_grad_adds_gradients_up(self) -> None:
        data = regression(8)
        seen: list[torch.Tensor] = []
        trainer = linear_trainer(
            skip("zero_grad", when=lambda trainer: trainer.state.batch_index == 1),
            skip("optimizer_step", when=lambda trainer: trainer.state.batch_index == 0),
            At("on_before_optimizer_step", lambda trainer: seen.append(trainer.model.weight.grad.clone())),
            max_epochs=1,
        )
        model = nn.Linear(4, 1)
        model.load_state_dict(trainer.model.state_dict())
        trainer.fit(data)
        inputs, targets = data.tensors
        (2 * nn.functional.mse_loss(model(inputs), targets)).backward()
        assert len(seen) == 1
        torch.testing.assert_close(seen[0], model.weight.grad)

    def test_a_skip_lasts_one_batch(self) -> None:
        log = events_of(skip("backward", when=lambda trainer: trainer.state.step == 1))
        assert log.count("on_after_backward") == 3

    def test_a_skipped_validation_records_nothing_and_is_due_again_next_epoch(self) -> None:
        log: list[str] = []
        trainer = linear_trainer(Recorder(log), skip("validation", when=lambda trainer: trainer.state.epoch == 0))
        history = trainer.fit(regression(8), regression(4)).history
        assert ["val_loss" in metrics for metrics in history] == [False, True]
        assert log.count("on_validation_start") == 1
        assert log.count("on_epoch_end") == 2

    def test_validation_may_be_skipped_at_the_last_moment(self) -> None:
        trainer = linear_trainer(skip("validation", "on_train_epoch_end"))
        assert all("val_loss" not in metrics for metrics in trainer.fit(regression(8), regression(4)).history)

    def test_a_skip_of_validation_outlives_an_interruption(self) -> None:
        ask = skip("validation", when=lambda trainer: trainer.state.step == 0)
        first = linear_trainer(ask, interrupt_at(1), max_epochs=1)
        first.fit(regression(8), regression(4))
        second = linear_trainer(max_epochs=1)
        second.load_state_dict(through_file(first.state_dict()))
        assert "val_loss" not in second.fit(regression(8), regression(4)).metrics

    def test_a_skipped_scheduler_keeps_the_rate(self) -> None:
        trainer = linear_trainer(
            skip("scheduler_step", "on_train_epoch_end", lambda trainer: trainer.state.epoch == 0), max_epochs=3
        )
        trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, gamma=0.5)
        history = trainer.fit(regression(8)).history
        assert [metrics["lr"] for metrics in history] == [0.05, 0.05, 0.025]

    def test_an_epoch_without_validation_does_not_count_for_early_stopping(self) -> None:
        stopper = EarlyStopping(patience=1)
        trainer = linear_trainer(stopper, skip("validation"), max_epochs=4)
        trainer.fit(regression(8), regression(4))
        assert (trainer.state.epoch, stopper.wait) == (4, 0)

    def test_a_metric_that_nothing_records_is_an_error_all_the_same(self) -> None:
        with pytest.raises(KeyError, match=r"called 'val_los'; recorded are train_loss, val_loss, lr"):
            linear_trainer(EarlyStopping("val_los")).fit(regression(8), regression(4))

    def test_what_can_not_be_skipped_names_the_nearest(self) -> None:
        with pytest.raises(ValueError, match="did you mean 'optimizer_step'"):
            TrainState(max_epochs=1).skip("optimiser_step")
        with pytest.raises(ValueError, match="give one of backward, batch, epoch, optimizer_step"):
            TrainState(max_epochs=1).skip("xyz")

    @quick(25)
    @given(
        asked=st.lists(
            st.tuples(st.sampled_from(BATCH_ACTIONS), st.booleans(), st.integers(-5, 5)), min_size=1, max_size=4
        ),
        order=st.randoms(use_true_random=False),
    )
    def test_the_order_of_those_who_ask_makes_no_difference(
        self, asked: list[tuple[str, bool, int]], order: Any
    ) -> None:
        def callbacks() -> list[Callback]:
            return [
                skip(action, f"on_before_{action}" if late else "on_train_batch_start", priority=priority)
                for action, late, priority in asked
            ]

        def done(callbacks: list[Callback]) -> set[str]:
            return {event for event in events_of(*callbacks, max_epochs=1) if event.startswith("on_after_")}

        shuffled = callbacks()
        order.shuffle(shuffled)
        left_out = {f"on_after_{action}" for action, _, _ in asked}
        assert done(callbacks()) == done(shuffled) == done([]) - left_out


class TestLeavingOut:
    def test_a_skipped_batch_counts_and_nothing_of_it_is_computed(self) -> None:
        ends: list[Any] = []
        log: list[str] = []
        trainer = linear_trainer(
            Recorder(log),
            skip("batch", when=lambda trainer: trainer.state.batch_index == 1),
            At("on_train_batch_end", lambda t: ends.append((t.state.loss is None, t.state.skipped_step))),
            max_epochs=1,
        )
        state = trainer.fit(regression(12))
        assert ends == [(False, False), (True, True), (False, False)]
        assert (state.step, state.data_epoch, log.count("on_before_forward")) == (2, 1, 2)

    def test_a_run_with_skipped_batches_resumes_to_the_same_bits(self) -> None:
        def run(*stops: int) -> Any:
            checkpoint = None
            for stop in (*stops, 99):
                ask = skip("batch", when=lambda trainer: trainer.state.data_batch == 1)
                trainer = linear_trainer(ask, interrupt_at(stop), max_epochs=3)
                if checkpoint:
                    trainer.load_state_dict(checkpoint)
                trainer.fit(regression(12), regression(4))
                checkpoint = through_file(trainer.state_dict())
            return frozen(trainer)

        assert_same(run(1, 3), run())

    def test_a_skipped_epoch_counts_with_its_schedule_and_records_nothing(self) -> None:
        log: list[str] = []
        trainer = linear_trainer(
            Recorder(log),
            *default_callbacks(),
            skip("epoch", "on_train_epoch_start", lambda trainer: trainer.state.epoch == 1),
            max_epochs=4,
        )
        trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, gamma=0.5)
        state = trainer.fit(regression(12), regression(4))
        assert [sorted(metrics.keys() & {"lr", "train_loss", "val_loss"}) for metrics in state.history] == [
            ["lr", "train_loss", "val_loss"],
            ["lr"],
            ["lr", "train_loss", "val_loss"],
            ["lr", "train_loss", "val_loss"],
        ]
        assert (state.epoch, state.step, state.history[-1]["lr"]) == (4, 9, 0.05 / 8)
        counts = {
            event: log.count(event) for event in ("on_train_batch_start", "on_epoch_end", "on_validation_start")
        }
        assert counts == {"on_train_batch_start": 9, "on_epoch_end": 4, "on_validation_start": 3}

    def test_the_epochs_after_a_skipped_one_have_the_batches_that_they_would_have_had(self) -> None:
        def run(*callbacks: Callback) -> list[list[Any]]:
            seen: list[list[Any]] = [[], [], []]
            look = At(
                "on_before_forward",
                lambda trainer: seen[trainer.state.epoch].append(
                    (trainer.state.batch[1].flatten().tolist(), torch.rand(1).item())
                ),
            )
            linear_trainer(look, *callbacks, max_epochs=3).fit(regression(12))
            return seen

        whole = run()
        for skipped in (0, 1):
            rest = run(
                skip("epoch", "on_train_epoch_start", lambda trainer, at=skipped: trainer.state.epoch == at)
            )
            assert rest == [[] if epoch == skipped else batches for epoch, batches in enumerate(whole)]

    def test_an_epoch_that_is_no_pass_can_not_be_skipped(self) -> None:
        trainer = linear_trainer(skip("epoch", "on_train_epoch_start"), validate_every=2)
        with pytest.raises(ValueError, match="leaves out a whole pass"):
            trainer.fit(regression(12))


class TestEnding:
    def test_a_stopped_epoch_is_validated_and_counted_and_the_next_begins_anew(self) -> None:
        trainer = linear_trainer(
            At(
                "on_train_batch_end",
                lambda trainer: trainer.state.stop_epoch(),
                lambda trainer: trainer.state.epoch == 0,
            )
        )
        history = trainer.fit(regression(12), regression(4)).history
        assert (trainer.state.step, trainer.state.epoch, trainer.state.data_epoch) == (1 + 3, 2, 2)
        assert all("val_loss" in metrics for metrics in history)
        assert trainer.state.stop_reason is None

    @pytest.mark.parametrize("now", [False, True])
    def test_a_stopped_run_says_why(self, now: bool) -> None:
        trainer = linear_trainer(At("on_train_batch_end", lambda trainer: trainer.state.stop("enough", now=now)))
        trainer.fit(regression(12), regression(4))
        assert trainer.state.stop_reason == "enough"
        assert (trainer.state.step, trainer.state.epoch) == ((1, 0) if now else (3, 1))

    def test_the_first_reason_stays_but_diverged_outranks_it(self) -> None:
        state = TrainState(max_epochs=1)
        for reason, expected in (("one", "one"), ("two", "one"), ("diverged", "diverged"), ("one", "diverged")):
            state.stop(reason)
            assert state.stop_reason == expected


class TestReplacing:
    def test_a_scaled_loss_scales_gradients_and_leaves_what_is_recorded(self) -> None:
        plain, scaled = (linear_trainer(*extra, max_epochs=1) for extra in ((), (ScaleLoss(),)))
        for trainer in (plain, scaled):
            trainer.fit(regression(4))
        torch.testing.assert_close(scaled.model.weight.grad, 2 * plain.model.weight.grad)
        assert plain.state.history == scaled.state.history

    def test_a_batch_may_be_replaced_in_training_and_validation(self) -> None:
        def zero(trainer: Any) -> None:
            trainer.state.batch = tuple(torch.zeros_like(part) for part in trainer.state.batch)

        trainer = linear_trainer(At("on_train_batch_start", zero), At("on_validation_batch_start", zero))
        nn.init.zeros_(trainer.model.bias)
        history = trainer.fit(regression(8), regression(4)).history
        assert [(metrics["train_loss"], metrics["val_loss"]) for metrics in history] == [(0, 0)] * 2

    def test_a_loss_replaced_after_the_forward_pass_is_what_is_recorded(self) -> None:
        def flat(trainer: Any) -> None:
            trainer.state.loss = trainer.state.loss * 0 + 3

        trainer = linear_trainer(At("on_after_forward", flat))
        assert [metrics["train_loss"] for metrics in trainer.fit(regression(8)).history] == [3, 3]

    def test_outputs_replaced_after_the_forward_pass_are_what_metrics_get(self) -> None:
        def right(trainer: Any) -> None:
            trainer.state.outputs = trainer.state.batch[1]

        trainer = linear_trainer(At("on_after_forward", right), metrics={"mae": nn.functional.l1_loss})
        assert [metrics["train_mae"] for metrics in trainer.fit(regression(8)).history] == [0, 0]


class TestLogging:
    def test_metrics_changed_before_logging_are_logged_and_kept(self) -> None:
        logged: list[dict[str, float]] = []

        def change(trainer: Any, metrics: dict[str, float]) -> None:
            metrics["perplexity"] = 2.0
            del metrics["lr"]

        trainer = linear_trainer(
            At("on_before_log_metrics", change),
            At("on_log_metrics", lambda trainer, metrics: logged.append(dict(metrics))),
        )
        history = trainer.fit(regression(8)).history
        assert [list(metrics) for metrics in logged] == [["train_loss", "perplexity"]] * 2
        assert logged == history

    def test_they_fire_between_the_hooks_of_the_epochs_end(self) -> None:
        log: list[str] = []

        def note(label: str) -> Any:
            return lambda *arguments: log.append(label)

        trainer = linear_trainer(
            At("on_epoch_end", note("79"), priority=79),
            At("on_epoch_end", note("81"), priority=81),
            At("on_log_metrics", note("log"), priority=1),
            At("on_before_log_metrics", note("before"), priority=99),
            max_epochs=1,
        )
        trainer.fit(regression(4))
        assert log == ["79", "before", "log", "81"]

    def test_a_writer_after_the_log_events_is_refused_whatever_the_loggers_priority(self) -> None:
        class Late(Callback):
            priority = 85
            writes = ("late",)

        class Logger(Callback):
            priority = 99
            reads = ("*",)
            reads_in = "on_log_metrics"

        with pytest.raises(ValueError, match=r"Logger.*reads what Late"):
            linear_trainer(Late(), Logger())


class TestNested:
    def test_an_evaluation_inside_a_fit_sets_nothing_up_and_tears_nothing_down(self) -> None:
        log: list[str] = []
        results: list[dict[str, float]] = []
        trainer = make_trainer(
            [
                Recorder(log),
                At("on_epoch_end", lambda trainer: results.append(trainer.test(regression(4)))),
            ],
            model=make_model(),
        )
        trainer.fit(regression(8), regression(4))
        assert (log.count("setup"), log.count("teardown"), log.count("on_test_end")) == (1, 1, 2)
        assert [list(result) for result in results] == [["test_loss"]] * 2
        assert all("val_loss" in metrics for metrics in trainer.state.history)

    def test_a_callback_added_during_a_fit_takes_part_from_the_next_on(self) -> None:
        log: list[str] = []
        late = Recorder(log)
        trainer = make_trainer()
        handle = trainer.callbacks.register(
            "on_train_epoch_start", lambda trainer: None if trainer.state.epoch else trainer.callbacks.add(late)
        )
        trainer.fit(regression(8))
        assert log == []
        handle.remove()
        trainer.plan = Plan(max_epochs=3)
        trainer.fit(regression(8))
        assert (log[0], log[-1]) == ("setup", "teardown")
