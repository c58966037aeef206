"""What resumes after something went wrong, or was asked for at an odd moment."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from schedulefree import AdamWScheduleFree
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.unit.trainer.support import (
    At,
    assert_same,
    frozen,
    interrupt_at,
    make_model,
    make_trainer,
    one_batch,
    regression,
    scripted_trainer,
    through_file,
)
from trainer import BatchOptions, Callback, Trainer
from trainer.callbacks import (
    EMA,
    Checkpoint,
    EarlyStopping,
    GradientAccumulation,
    NaNDetection,
    OptimizerMode,
    TimeLimit,
)
from trainer.checkpoint.files import list_checkpoints
from trainer.data.plan import Plan
from trainer.data.stream import TrainStream
from trainer.declared import UndeclaredState


class BoomError(Exception):
    """Has a length, so that it is false."""

    def __len__(self) -> int:
        return 0


def boom(*arguments: Any) -> None:
    raise BoomError


def once(event: str, action: Callable[..., None], when: Callable[[Any], bool] = lambda trainer: True) -> At:
    left = [action]
    return At(event, lambda *arguments: left.pop()(*arguments), lambda trainer: bool(left) and when(trainer))


def fails(trainer: Trainer, train: Any = None) -> Trainer:
    with pytest.raises(BoomError):
        trainer.fit(train or regression(), regression())
    return trainer


class TestAFailureAfterTheLastBatch:
    @pytest.mark.parametrize(
        "event", ["on_train_epoch_end", "on_validation_start", "on_validation_batch_end", "on_validation_end"]
    )
    @pytest.mark.parametrize(
        ("options", "steps"),
        [({"max_epochs": 2}, 6), ({"max_epochs": 2, "validate_every": 2}, 6), ({"max_epochs": 1}, 3)],
    )
    def test_trains_no_batch_twice(self, event: str, options: dict[str, Any], steps: int) -> None:
        trainer = fails(make_trainer([once(event, boom)], **options))
        trainer.fit(regression(), regression())
        whole = make_trainer(**options)
        whole.fit(regression(), regression())
        assert trainer.state.step == steps
        assert_same(frozen(trainer)["model"], frozen(whole)["model"])
        assert trainer.state.history == whole.state.history

    def test_nor_with_averaged_weights(self) -> None:
        trainer = fails(make_trainer([EMA(0.5), once("on_validation_start", boom)]))
        trainer.fit(regression(), regression())
        whole = make_trainer([EMA(0.5)])
        whole.fit(regression(), regression())
        assert_same(frozen(trainer), frozen(whole))

    def test_a_state_taken_there_goes_on_behind_the_batches(self) -> None:
        taken: list[Any] = []
        keep = once("on_train_epoch_end", lambda trainer: taken.append(through_file(trainer.state_dict())))
        whole = make_trainer([keep])
        whole.fit(regression(), regression())
        resumed = make_trainer()
        resumed.load_state_dict(taken[0])
        resumed.fit(regression(), regression())
        assert_same(frozen(resumed), frozen(whole))

    def test_an_epoch_that_was_stopped_early_is_finished(self) -> None:
        stop = once("on_train_batch_end", lambda trainer: trainer.state.stop_epoch())
        trainer = fails(make_trainer([stop, once("on_validation_start", boom)]))
        trainer.fit(regression(), regression())
        assert (trainer.state.step, trainer.state.epoch) == (1 + 3, 2)

    def test_a_scheduler_that_failed_leaves_history_and_epochs_together(self) -> None:
        trainer = make_trainer([once("on_before_scheduler_step", boom)])
        trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
        fails(trainer).fit(regression(), regression())
        assert trainer.state.epoch == len(trainer.state.history) == 2


class TestAnErrorAndAStopRequest:
    def test_a_metric_that_nothing_records_is_said_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        with caplog.at_level(logging.WARNING):
            make_trainer([Checkpoint(tmp_path, monitor="val_acc")]).fit(regression(), regression())
        assert caplog.text.count("nothing records 'val_acc', so no epoch is kept as the best") == 1

    def test_no_checkpoint_is_made_of_what_an_error_left(self, tmp_path: Path) -> None:
        fails(make_trainer([Checkpoint(tmp_path), TimeLimit(1e-9), once("on_validation_start", boom)]))
        assert list_checkpoints([tmp_path]) == []

    def test_the_run_goes_on_at_the_next_fit(self) -> None:
        stop = once("on_train_batch_end", lambda trainer: trainer.state.stop("enough"))
        trainer = fails(make_trainer([stop, once("on_validation_start", boom)]))
        assert trainer.state.stop_reason == "error"
        assert trainer.fit(regression(), regression()).epoch == 2

    @pytest.mark.parametrize("reason", ["diverged", "pruned"])
    def test_these_reasons_stay(self, reason: str) -> None:
        stop = once("on_epoch_end", lambda trainer: trainer.state.stop(reason))
        last = At("on_epoch_end", boom, priority=90)
        assert fails(make_trainer([stop, last])).state.stop_reason == reason

    def test_a_stop_asked_for_after_the_checkpoint_is_in_it(self, tmp_path: Path) -> None:
        late = At("on_epoch_end", lambda trainer: trainer.state.stop("enough"), priority=97)
        make_trainer([late, Checkpoint(tmp_path, max_overhead=1)]).fit(regression(), regression())
        (file,) = list_checkpoints([tmp_path])
        assert torch.load(file.path, weights_only=True)["state"]["stop_reason"] == "enough"

    def test_both_ways_to_stop_at_one_batch_are_remembered(self) -> None:
        def stop(trainer: Any) -> None:
            trainer.state.stop_epoch()
            trainer.state.stop("interrupted", now=True)

        first, second = make_trainer([once("on_train_batch_end", stop)]), make_trainer()
        first.fit(regression(), regression())
        second.load_state_dict(through_file(first.state_dict()))
        for trainer in (first, second):
            assert trainer.fit(regression(), regression()).step == 1 + 3


class TestSkips:
    def test_do_not_outlive_an_error(self) -> None:
        ask = once("on_train_batch_start", lambda trainer: trainer.state.skip("optimizer_step"))
        trainer = fails(make_trainer([ask, once("on_before_forward", boom)], max_epochs=1))
        assert trainer.fit(regression(), regression()).step == 3

    def test_asked_for_in_an_evaluation_alone_or_too_late_mean_nothing(self) -> None:
        alone = once("on_validation_end", lambda trainer: trainer.state.skip("validation"))
        trainer = make_trainer([alone, At("on_epoch_end", lambda trainer: trainer.state.skip("backward"))])
        trainer.validate(regression())
        history = trainer.fit(regression(), regression()).history
        assert all("val_loss" in metrics for metrics in history)
        assert trainer.model[0].weight.grad is not None

    @pytest.mark.parametrize(
        ("event", "failing"),
        [("on_epoch_end", "on_epoch_end"), ("on_train_epoch_end", "on_before_scheduler_step")],
    )
    def test_of_an_epoch_that_counts_mean_nothing_after_an_error(self, event: str, failing: str) -> None:
        skip = once(event, lambda trainer: trainer.state.skip("validation"))
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        options: Any = {"model": model, "optimizer": optimizer, "scheduler": schedule, "max_epochs": 2}
        trainer = fails(make_trainer([skip, once(failing, boom)], scheduler_interval="epoch", **options))
        assert "val_loss" in trainer.fit(regression(), regression()).history[1]

    @pytest.mark.parametrize("batch", [0, 1])
    def test_of_a_backward_pass_work_with_scaled_losses(self, batch: int) -> None:
        ask = At(
            "on_train_batch_start",
            lambda trainer: trainer.state.skip("backward"),
            lambda trainer: trainer.state.batch_index == batch,
        )
        trainer = make_trainer([ask], precision="fp16")
        trainer.precision.load_state_dict({**trainer.precision.state_dict(), "scale": 1.0})  # nothing overflows
        assert trainer.fit(regression()).step == 6

    def test_an_error_in_a_scaled_step_is_forgotten(self) -> None:
        trainer = fails(make_trainer([once("on_before_optimizer_step", boom)], precision="fp16"))
        assert trainer.fit(regression()).epoch == 2


class TestEvaluatingInTheMiddle:
    @pytest.mark.parametrize(
        "event", ["on_train_batch_start", "on_after_forward", "on_before_backward", "on_train_batch_end"]
    )
    def test_of_an_epoch_changes_nothing_of_it(self, event: str) -> None:
        watching = make_trainer([At(event, lambda trainer: trainer.validate(regression(6, seed=9)))])
        plain = make_trainer()
        for trainer in (watching, plain):
            trainer.fit(regression(), regression())
        assert_same(frozen(watching), frozen(plain))

    def test_a_skip_asked_for_after_it_holds(self) -> None:
        evaluate = At("on_before_backward", lambda trainer: trainer.validate(regression(4)), priority=10)
        ask = At("on_before_backward", lambda trainer: trainer.state.skip("backward"), priority=20)
        trainer = make_trainer([evaluate, ask])
        trainer.fit(regression())
        assert trainer.model[0].weight.grad is None

    def test_an_optimizer_with_two_sets_of_weights_goes_back_to_training(self) -> None:
        model = nn.Linear(4, 1)
        optimizer = AdamWScheduleFree(model.parameters(), lr=0.01)
        evaluate = At("on_train_batch_end", lambda trainer: trainer.test(regression(4)))
        trainer = make_trainer([OptimizerMode(), evaluate, interrupt_at(2)], model=model, optimizer=optimizer)
        trainer.fit(regression(), regression())
        trainer.validate(regression())
        assert trainer.fit(regression(), regression()).epoch == 2

    def test_a_fit_in_a_hook_is_refused(self) -> None:
        trainer = make_trainer()
        trainer.callbacks.register("on_epoch_end", lambda trainer: trainer.fit(regression()))
        with pytest.raises(RuntimeError, match="this trainer is running"):
            trainer.fit(regression())

    def test_a_batch_size_can_not_change_inside_a_pass(self) -> None:
        trainer = make_trainer([At("on_train_batch_end", lambda trainer: trainer.set_batch_size(2))])
        with pytest.raises(ValueError, match="can't change inside a pass"):
            trainer.fit(regression())


class TestRecording:
    def test_a_value_that_changes_in_place_later_is_recorded_as_it_was(self) -> None:
        class Scaled(nn.Linear):
            def __init__(self) -> None:
                super().__init__(4, 1)
                self.scale = nn.Parameter(torch.ones(()))

        def step(model: nn.Module, batch: Any) -> dict[str, Tensor]:
            seen.append(model.scale.item())
            return {"loss": (model(batch[0]) * model.scale - 3 * batch[1]).square().mean(), "scale": model.scale}

        seen: list[float] = []
        history = make_trainer(model=Scaled(), step=step, max_epochs=1).fit(regression()).history
        assert len(set(seen)) == 3
        assert history[0]["train_scale"] == pytest.approx(sum(seen) / 3)

    def test_a_validation_done_again_counts_once(self) -> None:
        trainer = scripted_trainer([once("on_validation_end", boom)], [3.0, 5.0], max_epochs=1)
        with pytest.raises(BoomError):
            trainer.fit(one_batch(), one_batch())
        assert trainer.fit(one_batch(), one_batch()).metrics["val_loss"] == 5

    @pytest.mark.parametrize("wrap", [lambda item: {"x": item[0], "y": item[1]}, lambda item: item[0]])
    def test_a_batch_that_is_no_pair_says_what_to_do(self, wrap: Callable[[Any], Any]) -> None:
        data = [wrap(item) for item in regression(8)]
        with pytest.raises(TypeError, match="give the Trainer a `step` of your own"):
            make_trainer().fit(DataLoader(data, 4))

    def test_metrics_of_a_mapping_say_what_to_do(self) -> None:
        def step(model: nn.Module, batch: Any) -> dict[str, Tensor]:
            return {"loss": model(batch["x"]).square().mean()}

        data = [{"x": inputs} for inputs, _ in regression(8)]
        trainer = make_trainer(step=step, metrics={"mae": nn.functional.l1_loss})
        with pytest.raises(TypeError, match="compute them in the step"):
            trainer.fit(DataLoader(data, 4))

    def test_metrics_of_a_step_without_outputs_say_what_to_do(self) -> None:
        def step(model: nn.Module, batch: Any) -> Tensor:
            return nn.functional.mse_loss(model(batch[0]), batch[1])

        trainer = make_trainer(step=step, metrics={"mae": nn.functional.l1_loss})
        with pytest.raises(TypeError, match="the step returned no outputs: return them beside the loss"):
            trainer.fit(regression())


class TestOrder:
    @pytest.mark.parametrize("step", [1, 2, 4, 5])
    def test_a_hook_that_draws_at_an_epochs_start_does_not_change_it(self, step: int) -> None:
        def make(*callbacks: Callback) -> Trainer:
            return make_trainer([At("on_train_epoch_start", lambda trainer: torch.rand(3)), *callbacks])

        def fit(trainer: Trainer) -> Trainer:
            trainer.fit(DataLoader(regression(), 4, shuffle=True), regression())
            return trainer

        stopped, resumed = fit(make(interrupt_at(step))), make()
        resumed.load_state_dict(through_file(stopped.state_dict()))
        assert_same(frozen(fit(resumed)), frozen(fit(make())))

    @pytest.mark.parametrize("stop", [None, 3])
    def test_the_number_of_steps_is_the_same_after_a_resume(self, stop: int | None) -> None:
        totals: list[Any] = []

        def make(*callbacks: Callback) -> Trainer:
            watch = At("on_fit_start", lambda trainer: totals.append(trainer.state.total_steps))
            return make_trainer([GradientAccumulation(4), watch, *callbacks], max_epochs=3, validate_every=10)

        data = regression(20)
        at_batch = At(
            "on_train_batch_end",
            lambda trainer: trainer.state.stop("interrupted", now=True),
            lambda trainer: trainer.state.data_batch == stop,
        )
        trainer = make(at_batch)
        trainer.fit(data, data)
        if stop:
            resumed = make()
            resumed.load_state_dict(through_file(trainer.state_dict()))
            resumed.fit(data, data)
        assert set(totals) == {4}


class TestLoading:
    def test_one_loaded_checkpoint_serves_twice(self) -> None:
        def make() -> Trainer:
            model = nn.Linear(4, 1)
            return make_trainer(
                [At("on_train_batch_end", lambda t: t.state.user_state.setdefault("steps", []).append(1))],
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            )

        first = make()
        first.fit(regression())
        checkpoint, results = through_file(first.state_dict()), []
        for _ in range(2):
            trainer = make()
            trainer.load_state_dict(checkpoint)
            trainer.plan = Plan(max_epochs=3)
            trainer.fit(regression())
            results.append(frozen(trainer))
        assert_same(*results)

    def test_state_that_no_callback_takes_is_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        with_average = make_trainer([EMA(0.9)])
        with_average.fit(regression())
        with caplog.at_level(logging.WARNING):
            make_trainer().load_state_dict(through_file(with_average.state_dict()))
        assert "the checkpoint holds state of EMA, which this run does not have" in caplog.text

    def test_empty_state_is_state(self) -> None:
        class Notes(Callback):
            def __init__(self) -> None:
                self.notes: dict[str, int] = {}

            def state_dict(self) -> dict[str, Any]:
                return dict(self.notes)

            def load_state_dict(self, state: Any) -> None:
                self.notes = dict(state)

        notes = Notes()
        trainer = make_trainer([notes])
        start = through_file(trainer.state_dict())
        notes.notes["a"] = 1
        trainer.load_state_dict(start)
        assert notes.notes == {}


class TestGivenWrongly:
    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"scheduler_interval": "batch"}, ValueError, "scheduler_interval is 'batch'"),
            ({"max_epochs": 2.5}, ValueError, "max_epochs is 2.5"),
            ({"max_epochs": "3"}, ValueError, "max_epochs is '3'"),
            ({"validate_every": "often"}, ValueError, "validate_every is 'often'"),
            ({"compile": "max-autotune"}, ValueError, "compile is 'max-autotune'"),
            ({"callbacks": [EMA]}, TypeError, r"is not a callback: write EMA\(…\)"),
            ({"callbacks": [print]}, TypeError, "derive it from Callback"),
            ({"callbacks": EarlyStopping()}, TypeError, r"write \[EarlyStopping\(…\)\]"),
        ],
    )
    def test_arguments_are_named_with_their_value(
        self, options: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            make_trainer(**options)

    @pytest.mark.parametrize(
        "options", [{"batch_size": 0}, {"batch_size": -4}, {"num_workers": -1}, {"batch_size": 2.0}]
    )
    def test_batch_options_are_named_with_their_value(self, options: dict[str, Any]) -> None:
        ((name, value),) = options.items()
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            BatchOptions(**options)

    def test_another_models_optimizer_is_refused(self) -> None:
        other = nn.Linear(4, 1)
        with pytest.raises(ValueError, match="no parameter of the model"):
            make_trainer(optimizer=torch.optim.SGD(other.parameters(), lr=0.1))

    def test_one_name_is_not_a_list_of_letters(self) -> None:
        with pytest.raises(TypeError, match=r"give a list of names, such as \['train_loss'\]"):
            NaNDetection("train_loss")

    @pytest.mark.parametrize("kind", ["inference", "itself"])
    def test_odd_attributes_do_no_harm(self, kind: str, tmp_path: Path) -> None:
        class Odd(Callback):
            def __init__(self) -> None:
                self.held: Any = []
                if kind == "inference":
                    with torch.inference_mode():
                        self.held = torch.ones(1)
                else:
                    self.held.append(self.held)

        UndeclaredState([Odd(), Checkpoint(tmp_path)]).check()
        data = TensorDataset(torch.zeros(4, 4), torch.zeros(4, 1))
        make_trainer([Odd(), Checkpoint(tmp_path)], max_epochs=1).fit(data)


class Counting:
    """A step, or a loss, that counts its calls."""

    def __init__(self) -> None:
        self.calls, self.past = 0, [0.0]

    def __call__(self, one: Any, other: Any) -> Tensor:
        self.calls += 1
        outputs, targets = (one(other[0]), other[1]) if isinstance(one, nn.Module) else (one, other)
        return (outputs - targets).square().mean()


class Saved(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Harmless(Counting):
    transient = ("calls",)


class TestStateOfAStep:
    @pytest.mark.parametrize("as_loss", [False, True])
    @pytest.mark.parametrize(("kind", "is_forgotten"), [(Counting, True), (Saved, False), (Harmless, False)])
    @pytest.mark.parametrize("saves", [False, True])
    def test_what_a_resumed_run_would_forget_is_warned_about_once(
        self,
        kind: Any,
        is_forgotten: bool,
        as_loss: bool,
        saves: bool,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        model = make_model()
        options = {"loss": kind()} if as_loss else {"step": kind()}
        callbacks = [Checkpoint(tmp_path)] if saves else []
        Trainer(model, torch.optim.SGD(model.parameters(), 0.1), callbacks=callbacks, max_epochs=2, **options).fit(
            regression()
        )
        warned = caplog.text.count(f"the step or loss, a {kind.__name__}, changed `calls` while training")
        assert warned == int(
            saves and (is_forgotten or (as_loss and kind is Saved))
        )  # a loss is saved as a module


class TestTheTrainersOwnEndFails:
    """As with a GPU that is lost, where whatever asks it fails."""

    @pytest.fixture
    def lost(self, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
        lost: list[bool] = []

        def ask(*_: Any) -> list[Any]:
            if lost:
                raise RuntimeError("the device is lost")
            return []

        for name in ("get_rng_state_all", "set_rng_state_all"):
            monkeypatch.setattr(torch.cuda, name, ask)
        for name in ("is_initialized", "is_available"):
            monkeypatch.setattr(torch.cuda, name, lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        return lost

    def test_the_error_stays_the_first_and_the_last_hooks_run(
        self, lost: list[bool], caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(trainer: Any) -> None:
            lost.append(True)
            raise BoomError

        ended: list[str] = []
        ends = ("on_exception", "on_fit_end", "teardown")
        at_ends = [At(event, lambda *_, event=event: ended.append(event)) for event in ends]
        trainer = make_trainer([once("on_train_batch_end", fail), *at_ends], max_epochs=1)
        with caplog.at_level(logging.ERROR), pytest.raises(BoomError) as caught:
            trainer.fit(regression())
        assert ended == list(ends)
        assert (trainer.running, trainer.state.stop_reason) == (False, "error")
        assert caught.value.__notes__ == ["and the random generators could not be put back: the device is lost"]
        (record,) = caplog.records
        assert record.exc_info is not None
        assert str(record.exc_info[1]) == "the device is lost"
        lost.clear()
        assert trainer.fit(regression()).epoch == 1

    def test_generators_that_are_not_put_back_after_a_good_fit_are_an_error(self, lost: list[bool]) -> None:
        trainer = make_trainer([At("teardown", lambda *_: lost.append(True))], max_epochs=1)
        with pytest.raises(RuntimeError, match="the device is lost"):
            trainer.fit(regression())
        assert not trainer.running

    def test_data_that_can_not_be_closed_hides_no_error(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*_: Any) -> None:
            raise OSError("not closed")

        closed: list[object] = []
        trainer = make_trainer([once("on_train_batch_end", boom)], max_epochs=1)
        monkeypatch.setattr(TrainStream, "close", fail)
        monkeypatch.setattr(type(trainer.evaluation), "close", lambda evaluation: closed.append(evaluation))
        with caplog.at_level(logging.ERROR):
            fails(trainer)
        assert closed == [trainer.evaluation]
        assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["not closed"]
