"""CallbackRunner: order, what it refuses, registration, and what survives an exception."""

import functools
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.trainer.support import At, Recorder, make_trainer, quick, regression
from trainer import Callback, CallbackRunner, FunctionCallback, register_global_callback
from trainer.callback import global_callbacks
from trainer.callbacks import (
    ConsoleLogging,
    EarlyStopping,
    GradientMonitor,
    LossPrediction,
    NaNDetection,
    OptimizerMode,
    OverfitDetection,
    StepMetrics,
    default_callbacks,
)
from trainer.data.plan import Plan
from trainer.events import EVENTS
from trainer.foreign import FOREIGN

ORIGINS = ("core", "user", "global")


class Writer(Callback):
    priority = 60
    writes = ("score",)


class Reader(Callback):
    priority = 70
    reads = ("score",)


class ReadsAll(Callback):
    priority = 70
    reads = ("*",)


def fails_with(error: BaseException):
    def action(*arguments: object) -> None:
        raise error

    return action


class TestOrder:
    @quick(60)
    @given(st.lists(st.tuples(st.integers(-3, 3), st.sampled_from(ORIGINS)), max_size=12))
    def test_is_by_priority_then_core_user_global_then_insertion(self, specs: list[tuple[int, str]]) -> None:
        log: list[int] = []
        groups: dict[str, list[Callback]] = {origin: [] for origin in ORIGINS}
        for label, (priority, origin) in enumerate(specs):
            groups[origin].append(Recorder(log, label, priority))
        handles = [register_global_callback(callback) for callback in groups["global"]]
        try:
            runner = CallbackRunner(groups["user"], core=groups["core"])
            for hook in runner.resolve()["on_epoch_end"]:
                hook(None)
        finally:
            for handle in handles:
                handle.remove()
        expected = sorted(
            range(len(specs)), key=lambda label: (specs[label][0], ORIGINS.index(specs[label][1]), label)
        )
        assert log == [(label, "on_epoch_end") for label in expected]
        assert [callback.label for callback in runner.callbacks if isinstance(callback, Recorder)] == [
            label for label in expected if specs[label][1] != "global"
        ]

    def test_is_the_same_in_every_event(self) -> None:
        log: list[tuple[int, str]] = []
        trainer = make_trainer([Recorder(log, label, priority) for label, priority in enumerate((9, 1, 5))])
        trainer.fit(regression(), regression())
        for start in range(0, len(log), 3):
            assert [label for label, _ in log[start : start + 3]] == [1, 2, 0]

    def test_of_the_shipped_callbacks_is_the_documented_one(self) -> None:
        shuffled = [EarlyStopping(), *reversed(default_callbacks())]
        assert [type(callback) for callback in CallbackRunner(shuffled).callbacks] == [
            NaNDetection,
            OptimizerMode,
            GradientMonitor,
            LossPrediction,
            OverfitDetection,
            ConsoleLogging,
            EarlyStopping,
        ]

    def test_can_be_printed(self) -> None:
        described = CallbackRunner([EarlyStopping(), NaNDetection()]).describe()
        assert described.split("\n") == ["   5 NaNDetection", "  90 EarlyStopping"]


class TestReadersAndWriters:
    def test_a_reader_after_its_writer_is_accepted(self) -> None:
        CallbackRunner([Reader(), Writer()])

    def test_a_reader_before_its_writer_is_refused(self) -> None:
        reader = Reader()
        reader.priority = 50
        with pytest.raises(ValueError, match=r"Reader \(priority 50.*Writer \(priority 60.*below 50"):
            CallbackRunner([reader, Writer()])

    def test_a_reader_of_everything_before_a_writer_is_refused(self) -> None:
        reader = ReadsAll()
        reader.priority = 59
        with pytest.raises(ValueError, match="ReadsAll"):
            CallbackRunner([reader, Writer()])

    def test_two_readers_of_everything_do_not_wait_for_each_other(self) -> None:
        CallbackRunner([Writer(), ReadsAll(), ReadsAll()])

    def test_a_name_without_the_comma_of_a_tuple_is_one_name(self) -> None:
        class Early(Callback):
            priority = 1
            reads: Any = "score"

        with pytest.raises(ValueError, match="Early"):
            CallbackRunner([Writer(), Early()])

    def test_between_equal_priorities_insertion_decides(self) -> None:
        reader = Reader()
        reader.priority = Writer.priority
        CallbackRunner([Writer(), reader])
        with pytest.raises(ValueError, match="Reader"):
            CallbackRunner([reader, Writer()])

    def test_a_reader_in_an_earlier_event_is_refused_whatever_its_priority(self) -> None:
        class EarlyReader(Reader):
            reads_in = "on_validation_end"
            priority = 99

        with pytest.raises(ValueError, match=r"EarlyReader.*on_validation_end"):
            CallbackRunner([Writer(), EarlyReader()])

    def test_a_writer_in_an_earlier_event_may_have_any_priority(self) -> None:
        class EarlyWriter(Writer):
            writes_in = "on_train_epoch_end"
            priority = 99

        CallbackRunner([Reader(), EarlyWriter()])

    def test_a_reader_of_what_no_callback_writes_is_accepted(self) -> None:
        CallbackRunner([Reader()])

    def test_a_callback_may_read_what_it_writes(self) -> None:
        class Smoother(Callback):
            reads = writes = ("score",)

        CallbackRunner([Smoother()])

    def test_a_global_callback_in_a_wrong_place_is_refused_at_the_fit(self) -> None:
        trainer = make_trainer([Writer()])
        reader = Reader()
        reader.priority = 1
        with register_global_callback(reader), pytest.raises(ValueError, match="Reader"):
            trainer.fit(regression())
        trainer.fit(regression())


class TestRefusals:
    def test_an_unknown_hook_names_the_nearest_event(self) -> None:
        class Typo(Callback):
            def on_epoch_ends(self, trainer) -> None: ...

        with pytest.raises(TypeError, match=r"Typo\.on_epoch_ends.*did you mean 'on_epoch_end'"):
            CallbackRunner([Typo()])

    def test_an_unknown_hook_like_no_other_lists_the_events(self) -> None:
        class Odd(Callback):
            def on_zzz(self, trainer) -> None: ...

        with pytest.raises(TypeError, match=r"the events are setup, "):
            CallbackRunner([Odd()])

    def test_an_unknown_hook_is_refused_when_added_and_the_runner_stays_whole(self) -> None:
        class Typo(Callback):
            def on_epoch_ends(self, trainer) -> None: ...

        runner = CallbackRunner([NaNDetection()])
        with pytest.raises(TypeError):
            runner.add(Typo())
        assert [type(callback) for callback in runner.callbacks] == [NaNDetection]

    def test_registering_for_an_unknown_event_names_the_nearest(self) -> None:
        with pytest.raises(ValueError, match=r"'on_fit_ends'; did you mean 'on_fit_end'"):
            CallbackRunner().register("on_fit_ends", print)

    @pytest.mark.parametrize(
        ("foreign", "event"),
        [
            ("on_train_end", "on_fit_end"),  # whose nearest name is on_train_epoch_end
            ("on_train_begin", "on_fit_start"),
            ("on_train_step_end", "on_train_batch_end"),
            ("on_val_end", "on_validation_end"),
            ("on_step_begin", "on_before_optimizer_step"),
            ("pre_optim_step", "on_before_optimizer_step"),
            ("post_train", "on_fit_end"),
        ],
    )
    def test_a_hook_of_another_system_names_the_event_that_is_meant(self, foreign: str, event: str) -> None:
        ported = type("Ported", (Callback,), {foreign: lambda self, trainer: None})
        with pytest.raises(TypeError, match=rf"Ported\.{foreign} is not .*; what happens there is '{event}' here"):
            CallbackRunner([ported()])
        for make in (CallbackRunner().register, FunctionCallback):
            with pytest.raises(ValueError, match=rf"'{foreign}'; what happens there is '{event}' here"):
                make(foreign, print)

    def test_the_names_of_other_systems_mean_events_and_are_none(self) -> None:
        assert set(FOREIGN.values()) <= EVENTS.keys()
        assert not set(FOREIGN) & EVENTS.keys()

    @pytest.mark.parametrize(
        ("event", "returned", "words"),
        [
            ("on_epoch_end", True, r"trainer\.state\.stop\(\"reason\"\)"),
            ("on_epoch_end", {"stop_training": True}, r"trainer\.state\.stop\(\"reason\"\)"),
            (
                "on_after_backward",
                {"skip_step": True, "skip_zero": True},
                r"trainer\.state\.skip\(\"optimizer_step\"\), trainer\.state\.skip\(\"zero_grad\"\)",
            ),
            ("on_epoch_end", {"score": 0.5}, r"trainer\.state\.metrics\['score'\] = …"),
            ("on_fit_end", True, r"trainer\.state\.stop"),
        ],
    )
    def test_a_returned_flag_is_refused_with_the_call_that_is_meant(
        self, event: str, returned: object, words: str
    ) -> None:
        class Returns(Callback): ...

        def hook(self: Callback, trainer: object) -> object:
            return returned

        hook.__qualname__ = f"Returns.{event}"
        setattr(Returns, event, hook)
        message = rf"Returns\.{event} returned .*, and what a hook returns is not read; write {words}"
        with pytest.raises(TypeError, match=message):
            make_trainer([Returns()]).fit(regression())

    def test_a_hook_that_can_not_take_the_trainer_is_refused_when_it_is_registered(self) -> None:
        class Ported(Callback):
            def on_epoch_end(self, **kwargs: Any) -> None: ...  # type: ignore[override]

        class Demands(Callback):
            def on_after_save_checkpoint(self, trainer: Any, path: Any, metrics: Any) -> None: ...  # type: ignore[override]

        for callback, said in (
            (Ported(), r"Ported\.on_epoch_end can't be called at on_epoch_end: .* let it take \(self, trainer\)"),
            (Demands(), r"on_after_save_checkpoint: .*'metrics'; let it take \(self, trainer, path\)"),
            (FunctionCallback("on_log_metrics", lambda trainer: None), r"on_log_metrics: .* \(trainer, metrics\)"),
        ):
            with pytest.raises(TypeError, match=said):
                CallbackRunner([callback])

    def test_a_static_hook_takes_no_self(self) -> None:
        seen: list[int] = []

        class Static(Callback):
            @staticmethod
            def on_epoch_end(trainer: Any) -> None:
                seen.append(trainer.state.epoch)

        make_trainer([Static()]).fit(regression())
        assert seen == [1, 2]

        class Wrong(Callback):
            @staticmethod
            def on_epoch_end(self: Any, trainer: Any) -> None: ...

        with pytest.raises(TypeError, match=r"Wrong\.on_epoch_end .*; let it take \(trainer\)$"):
            CallbackRunner([Wrong()])

    def test_a_hook_that_can_take_it_in_its_own_way_is_accepted(self) -> None:
        class Own(Callback):
            def on_epoch_end(self, *arguments: Any, **kwargs: Any) -> None: ...
            def on_train_batch_end(self, trainer: Any, scale: float = 1.0) -> None: ...

        runner = CallbackRunner([Own()])
        for function in (
            print,
            functools.partial(print, "here"),
            lambda *arguments: None,
            lambda trainer, at=1: None,
        ):
            runner.register("on_epoch_end", function)
        assert len(runner.list_callbacks("on_epoch_end")) == 5

    def test_what_a_function_happens_to_return_does_no_harm(self) -> None:
        trainer = make_trainer(max_epochs=1)
        for returned in (False, 3.5, {}, torch.ones(2), "text"):
            trainer.callbacks.register("on_epoch_end", lambda trainer, returned=returned: returned)
        assert trainer.fit(regression()).epoch == 1

    @pytest.mark.parametrize("method", ["has_callbacks", "list_callbacks"])
    def test_asking_about_an_unknown_event_names_the_nearest(self, method: str) -> None:
        with pytest.raises(ValueError, match=r"on_epoch_stop.*did you mean 'on_"):
            getattr(CallbackRunner(), method)("on_epoch_stop")

    def test_two_stateful_callbacks_need_two_names(self) -> None:
        with pytest.raises(ValueError, match="EarlyStopping"):
            CallbackRunner([EarlyStopping(), EarlyStopping("train_loss")])

    def test_two_stateful_callbacks_of_different_names_keep_their_own_state(self) -> None:
        class OfTraining(EarlyStopping):
            name = "of training"

        one, other = EarlyStopping(), OfTraining("train_loss")
        runner = CallbackRunner([one, other])
        one.wait, other.wait = 3, 8
        fresh = CallbackRunner([OfTraining(), EarlyStopping()])
        fresh.load_state_dict(runner.state_dict())
        assert [callback.wait for callback in fresh.callbacks] == [8, 3]

    def test_state_of_a_callback_that_is_gone_is_passed_over(self) -> None:
        CallbackRunner([NaNDetection()]).load_state_dict({"EarlyStopping": {"best": 1.0, "wait": 0}})


class TestRegistration:
    def test_a_function_is_called_until_its_handle_is_removed(self) -> None:
        epochs: list[int] = []
        trainer = make_trainer(max_epochs=2)
        handle = trainer.callbacks.register("on_epoch_end", lambda trainer: epochs.append(trainer.state.epoch))
        trainer.fit(regression())
        handle.remove()
        handle.remove()
        trainer.plan = Plan(max_epochs=4)
        trainer.fit(regression())
        assert epochs == [1, 2]

    def test_a_function_has_its_priority(self) -> None:
        log: list[str] = []
        trainer = make_trainer(max_epochs=1)
        trainer.callbacks.register("on_epoch_end", lambda trainer: log.append("late"), priority=60)
        trainer.callbacks.register("on_epoch_end", lambda trainer: log.append("early"), priority=40)
        trainer.fit(regression())
        assert log == ["early", "late"]

    def test_an_added_callback_takes_part_in_all_events_until_it_is_removed(self) -> None:
        log: list[str] = []
        trainer = make_trainer(max_epochs=1)
        with trainer.callbacks.add(Recorder(log)):
            trainer.fit(regression())
        assert {"setup", "on_epoch_end", "teardown"} <= set(log)
        before = list(log)
        trainer.fit(regression())
        assert log == before

    def test_several_are_added_and_removed_together(self) -> None:
        runner = CallbackRunner([EarlyStopping()])
        handle = runner.add([Writer(), Reader()])
        assert [callback.name for callback in runner.callbacks] == ["Writer", "Reader", "EarlyStopping"]
        handle.remove()
        assert [callback.name for callback in runner.callbacks] == ["EarlyStopping"]

    def test_of_several_none_is_added_where_one_is_refused(self) -> None:
        runner = CallbackRunner()
        with pytest.raises(ValueError, match="two callbacks keep state"):
            runner.add([Writer(), EarlyStopping(), EarlyStopping("train_loss")])
        assert runner.callbacks == ()

    def test_a_class_in_place_of_a_callback_is_refused(self) -> None:
        with pytest.raises(TypeError, match=r"write Writer\(…\)"):
            CallbackRunner().add(Writer)  # type: ignore[arg-type]

    def test_a_runner_built_before_is_handed_over(self) -> None:
        log: list[str] = []
        runner = CallbackRunner([FunctionCallback("on_epoch_end", lambda trainer: log.append("listed"), 60)])
        trainer = make_trainer(runner, max_epochs=1)
        runner.register("on_epoch_end", lambda trainer: log.append("added to it"))
        handle = trainer.callbacks.register("on_epoch_end", lambda trainer: log.append("added here"), 70)
        trainer.fit(regression())
        assert log == ["added to it", "listed", "added here"]
        handle.remove()
        assert len(runner.list_callbacks("on_epoch_end")) == 2
        make_trainer(runner, max_epochs=1).fit(regression())
        assert log[3:] == ["added to it", "listed"]

    def test_the_owners_callbacks_stay_out_of_a_runner_that_is_handed_over(self) -> None:
        runner = CallbackRunner([EarlyStopping()], core=[Writer()])
        trainer = make_trainer(runner, core_callbacks=[Reader()])
        assert {"Reader", "Writer", "EarlyStopping"} <= {each.name for each in trainer.callbacks.callbacks}
        assert "Reader" not in {each.name for each in runner.callbacks}

    def test_a_callback_reaches_every_trainer_inside_its_block(self) -> None:
        trainer = make_trainer(max_epochs=3)
        with NaNDetection() as detection:
            assert isinstance(detection, NaNDetection)
            assert trainer.callbacks.has_callbacks("on_epoch_end")
            state = make_trainer(loss=lambda outputs, targets: (outputs * math.nan).sum()).fit(regression())
            assert (state.epoch, state.stop_reason) == (1, "diverged")
        state = make_trainer(loss=lambda outputs, targets: (outputs * math.nan).sum()).fit(regression())
        assert (state.epoch, state.stop_reason) == (2, None)

    def test_a_block_ends_with_an_error_too(self) -> None:
        with pytest.raises(ZeroDivisionError), NaNDetection():
            raise ZeroDivisionError
        assert global_callbacks() == ()

    def test_a_callback_that_is_registered_globally_is_not_again(self) -> None:
        with NaNDetection() as detection, pytest.raises(ValueError, match="NaNDetection is registered for every"):
            register_global_callback(detection)

    def test_global_callbacks_reach_every_trainer_of_the_process(self) -> None:
        log: list[str] = []
        before = make_trainer(max_epochs=1)
        with register_global_callback(Recorder(log)):
            after = make_trainer(max_epochs=1)
            before.fit(regression())
            after.fit(regression())
        assert log.count("on_epoch_end") == 2

    def test_global_callbacks_stop_after_their_handle_is_removed(self) -> None:
        log: list[str] = []
        handle = register_global_callback(Recorder(log))
        trainer = make_trainer(max_epochs=1)
        handle.remove()
        trainer.fit(regression())
        make_trainer(max_epochs=1).fit(regression())
        assert log == []

    def test_removing_one_global_callback_leaves_the_others(self) -> None:
        log: list[tuple[str, str]] = []
        with register_global_callback(Recorder(log, "stays")):
            with register_global_callback(Recorder(log, "goes")):
                pass
            make_trainer(max_epochs=1).fit(regression())
        assert {label for label, _ in log} == {"stays"}

    def test_listeners_can_be_asked_for(self) -> None:
        early_stopping = EarlyStopping()
        runner = CallbackRunner([early_stopping])
        assert runner.events == frozenset(EVENTS)
        assert runner.has_callbacks("on_epoch_end")
        assert not runner.has_callbacks("on_train_batch_end")
        assert runner.list_callbacks("on_epoch_end") == (early_stopping,)


def test_a_hook_that_no_callback_overrides_costs_nothing() -> None:
    class Silent(Callback):
        pass

    hooks = CallbackRunner([Callback(), Silent(), OverfitDetection()]).resolve()
    assert {event: len(found) for event, found in hooks.items() if found} == {"on_epoch_end": 1}


def test_a_hook_set_on_the_object_is_called_as_one_of_its_class() -> None:
    class Both(Callback):
        def setup(self, trainer: object) -> None:
            """One of the class."""

    both, calls = Both(), []
    both.on_fit_start = calls.append  # type: ignore[method-assign,assignment]
    runner = CallbackRunner([both])
    assert {event for event, hooks in runner.hooks.items() if hooks} == {"setup", "on_fit_start"}
    runner.hooks["on_fit_start"][0](None)
    assert calls == [None]


class TestExceptions:
    @pytest.mark.parametrize(
        "event",
        [
            event
            for event in EVENTS
            if not any(word in event for word in ("checkpoint", "test", "predict", "scheduler"))
        ],
    )
    def test_an_error_in_any_hook_keeps_its_type_and_the_ends_follow(self, event: str, tmp_path: Path) -> None:
        class OddError(Exception):
            pass

        log: list[str] = []
        error = OddError("here")
        if event == "on_exception":
            callbacks = [At("on_epoch_end", fails_with(error)), At(event, fails_with(ValueError("late")))]
        else:
            callbacks = [At(event, fails_with(error))]
        steps = [StepMetrics(tmp_path)] if event == "on_log_steps" else []
        trainer = make_trainer([*steps, *callbacks, Recorder(log, priority=99)], max_epochs=1)
        with pytest.raises(OddError) as caught:
            trainer.fit(regression(), regression())
        assert caught.value is error
        ends = ["on_exception", "on_fit_end", "teardown"]
        assert log[-3:] == ends or (event in {"on_fit_end", "teardown"} and log[-2:] == ends[1:])

    @pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError(), StopIteration()])
    def test_errors_outside_exception_keep_their_type_too(self, error: BaseException) -> None:
        log: list[str] = []
        trainer = make_trainer([At("on_train_batch_end", fails_with(error)), Recorder(log)])
        with pytest.raises(type(error)) as caught:
            trainer.fit(regression())
        assert caught.value is error
        assert log[-3:] == ["on_exception", "on_fit_end", "teardown"]

    def test_on_exception_gets_the_error(self) -> None:
        seen: list[BaseException] = []
        error = ValueError("here")
        trainer = make_trainer(
            [At("on_epoch_end", fails_with(error)), At("on_exception", lambda trainer, error: seen.append(error))]
        )
        with pytest.raises(ValueError, match="here"):
            trainer.fit(regression())
        assert seen == [error]
        assert trainer.state.stop_reason == "error"

    @pytest.mark.parametrize("event", ["on_fit_start", "on_before_backward", "on_epoch_end"])
    def test_ctrl_c_is_an_interruption_and_no_error(self, event: str) -> None:
        trainer = make_trainer([At(event, fails_with(KeyboardInterrupt()))])
        with pytest.raises(KeyboardInterrupt):
            trainer.fit(regression(), regression())
        assert trainer.state.stop_reason == "interrupted"
        assert trainer.state_dict()["state"]["stop_reason"] is None

    def test_a_reason_that_was_set_before_the_error_stays(self) -> None:
        def prune(trainer) -> None:
            trainer.state.stop("pruned")
            raise ValueError

        trainer = make_trainer([At("on_epoch_end", prune)])
        with pytest.raises(ValueError):  # noqa: PT011
            trainer.fit(regression())
        assert trainer.state.stop_reason == "pruned"

    def test_an_error_of_the_model_is_handled_alike(self) -> None:
        log: list[str] = []
        trainer = make_trainer([Recorder(log)], loss=lambda outputs, targets: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trainer.fit(regression())
        assert log[-3:] == ["on_exception", "on_fit_end", "teardown"]

    def test_failures_in_teardown_are_isolated_and_the_first_is_raised(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        log: list[str] = []
        trainer = make_trainer(
            [
                At("teardown", fails_with(OSError("first")), priority=1),
                At("teardown", fails_with(KeyError("second")), priority=2),
                Recorder(log, priority=3),
            ]
        )
        with caplog.at_level(logging.ERROR), pytest.raises(OSError, match="first"):
            trainer.fit(regression())
        assert log[-1] == "teardown"
        assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]

    def test_failures_at_the_end_do_not_hide_the_error_of_training(self, caplog: pytest.LogCaptureFixture) -> None:
        ends = ("on_exception", "on_fit_end", "teardown")
        trainer = make_trainer(
            [
                At("on_epoch_end", fails_with(ZeroDivisionError("cause"))),
                *(At(event, fails_with(OSError(event))) for event in ends),
            ]
        )
        with caplog.at_level(logging.ERROR), pytest.raises(ZeroDivisionError, match="cause"):
            trainer.fit(regression())
        assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == list(ends)

    @pytest.mark.parametrize("evaluate", ["validate", "test"])
    def test_an_evaluation_that_fails_tears_down_and_keeps_the_type(self, evaluate: str) -> None:
        log: list[str] = []
        trainer = make_trainer([Recorder(log)], loss=lambda outputs, targets: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            getattr(trainer, evaluate)(regression())
        assert log[-1] == "teardown"
        assert trainer.state.stop_reason is None

    def test_after_a_clean_run_on_exception_was_not_fired(self) -> None:
        log: list[str] = []
        make_trainer([Recorder(log)]).fit(regression())
        assert "on_exception" not in log
        assert log.count("on_fit_end") == log.count("teardown") == 1


def test_the_same_object_twice_is_refused() -> None:
    twice = At("on_epoch_end", lambda trainer: None)
    with pytest.raises(ValueError, match="the same At is there twice: its hooks would run twice"):
        make_trainer([twice, twice])
