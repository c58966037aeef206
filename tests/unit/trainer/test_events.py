"""The events: what they are, how often and in which order they fire."""

import inspect
from pathlib import Path

import pytest
import torch

from tests.unit.trainer.support import At, Recorder, interrupt_at, make_trainer, regression, through_file
from trainer import Callback
from trainer.callbacks import Checkpoint
from trainer.events import EVENT_ORDER, EVENTS

BATCH = [
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_after_zero_grad",
    "on_before_forward",
    "on_after_forward",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_after_optimizer_step",
]
SCHEDULER = ["on_before_scheduler_step", "on_after_scheduler_step"]
VALIDATION = [
    "on_validation_start",
    *[
        "on_validation_batch_start",
        "on_before_validation_forward",
        "on_after_validation_forward",
        "on_validation_batch_end",
    ]
    * 2,
    "on_validation_end",
]
LOG = ["on_before_log_metrics", "on_log_metrics"]
SAVE = ["on_save_checkpoint", "on_after_save_checkpoint"]


def test_every_event_is_a_method_of_callback_and_every_hook_is_an_event() -> None:
    hooks = {name for name in vars(Callback) if name.startswith("on_") or name in {"setup", "teardown"}}
    assert hooks == set(EVENTS)


def test_every_hook_takes_the_trainer_first_and_does_nothing() -> None:
    for event in EVENTS:
        parameters = list(inspect.signature(getattr(Callback, event)).parameters)
        assert parameters[:2] == ["self", "trainer"], event
        assert getattr(Callback(), event)(*[None] * (len(parameters) - 1)) is None


def test_event_order_is_the_order_of_the_table() -> None:
    assert sorted(EVENT_ORDER, key=EVENT_ORDER.__getitem__) == list(EVENTS)


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        EVENTS["on_new"] = ""  # type: ignore[index]


def _events(interval: str, folder: Path) -> list[str]:
    log: list[str] = []
    trainer = make_trainer([Recorder(log), Checkpoint(folder, max_overhead=1)], max_epochs=2)
    trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1)
    trainer.scheduler_interval = interval
    trainer.batching = type(trainer.batching)(batch_size=4, eval_batch_size=4)
    trainer.fit(regression(12), regression(7))
    return log


def test_a_run_with_a_scheduler_per_epoch_fires_exactly_these_events(tmp_path: Path) -> None:
    epoch = [
        "on_train_epoch_start",
        *[*BATCH, "on_train_batch_end"] * 3,
        "on_train_epoch_end",
        *VALIDATION,
        *SCHEDULER,
        "on_epoch_end",
        *LOG,
        *SAVE,
    ]
    assert _events("epoch", tmp_path) == ["setup", "on_fit_start", *epoch, *epoch, "on_fit_end", "teardown"]


def test_a_run_with_a_scheduler_per_step_fires_exactly_these_events(tmp_path: Path) -> None:
    epoch = [
        "on_train_epoch_start",
        *[*BATCH, *SCHEDULER, "on_train_batch_end"] * 3,
        "on_train_epoch_end",
        *VALIDATION,
        "on_epoch_end",
        *LOG,
        *SAVE,
    ]
    assert _events("step", tmp_path) == ["setup", "on_fit_start", *epoch, *epoch, "on_fit_end", "teardown"]


@pytest.mark.parametrize("scope", ["validation", "test"])
def test_an_evaluation_alone_fires_exactly_these_events(scope: str) -> None:
    log: list[str] = []
    trainer = make_trainer([Recorder(log)])
    (trainer.validate if scope == "validation" else trainer.test)(regression())
    forward = [f"on_before_{scope}_forward", f"on_after_{scope}_forward"]
    batch = [f"on_{scope}_batch_start", *forward, f"on_{scope}_batch_end"]
    assert log == ["setup", f"on_{scope}_start", *batch, f"on_{scope}_end", "teardown"]


def test_loading_fires_before_and_after() -> None:
    log: list[str] = []
    trainer = make_trainer([Recorder(log)])
    trainer.load_state_dict(through_file(make_trainer().state_dict()))
    assert log == ["on_before_load_checkpoint", "on_load_checkpoint"]


def test_loading_reaches_a_callback_that_was_added_after_construction() -> None:
    log: list[str] = []
    trainer = make_trainer()
    trainer.callbacks.add(Recorder(log))
    trainer.load_state_dict(through_file(make_trainer().state_dict()))
    assert log == ["on_before_load_checkpoint", "on_load_checkpoint"]


def test_a_checkpoint_may_be_changed_before_it_is_applied() -> None:
    def forget_progress(trainer: object, checkpoint: dict) -> None:
        checkpoint["state"]["epoch"] = 0

    trained = make_trainer()
    trained.fit(regression())
    trainer = make_trainer([At("on_before_load_checkpoint", forget_progress)])
    trainer.load_state_dict(through_file(trained.state_dict()))
    assert trainer.state.epoch == 0


def test_a_run_interrupted_inside_an_epoch_fires_no_epoch_end_and_no_second_epoch_start() -> None:
    log: list[str] = []
    first = make_trainer([Recorder(log), interrupt_at(2)], max_epochs=1)
    first.fit(regression(12), regression(4))
    assert log[-3:] == ["on_train_batch_end", "on_fit_end", "teardown"]
    assert log.count("on_train_batch_end") == 2
    second_log: list[str] = []
    second = make_trainer([Recorder(second_log)], max_epochs=1)
    second.load_state_dict(through_file(first.state_dict()))
    second.fit(regression(12), regression(4))
    assert "on_train_epoch_start" not in second_log
    assert second_log.count("on_train_batch_end") == 1
    assert second_log.count("on_epoch_end") == 1


def test_what_the_table_says_about_each_moment_holds() -> None:
    seen: dict[str, object] = {}

    def look(event: str, view) -> At:
        return At(event, lambda trainer: seen.setdefault(event, view(trainer)))

    trainer = make_trainer(
        [
            look("on_after_zero_grad", lambda t: all(p.grad is None for p in t.model.parameters())),
            look(
                "on_before_backward", lambda t: t.state.loss is not None and "train_loss" in t.recorder.compute()
            ),
            look("on_after_backward", lambda t: all(p.grad is not None for p in t.model.parameters())),
            look("on_after_optimizer_step", lambda t: t.state.step),
            look("on_train_batch_end", lambda t: (t.state.step, t.state.batch_index)),
            look("on_validation_start", lambda t: (t.model.training, torch.is_grad_enabled())),
            look("on_epoch_end", lambda t: (t.state.epoch, t.state.batch_index, "val_loss" in t.state.metrics)),
        ]
    )
    trainer.fit(regression(), regression())
    assert seen == {
        "on_after_zero_grad": True,
        "on_before_backward": True,
        "on_after_backward": True,
        "on_after_optimizer_step": 0,
        "on_train_batch_end": (1, 1),
        "on_validation_start": (False, False),
        "on_epoch_end": (1, 0, True),
    }


def test_the_scheduler_steps_after_this_epochs_learning_rate_was_recorded() -> None:
    trainer = make_trainer(max_epochs=3)
    trainer.scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, gamma=0.5)
    trainer.fit(regression())
    assert [metrics["lr"] for metrics in trainer.state.history] == [0.05, 0.025, 0.0125]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.00625
