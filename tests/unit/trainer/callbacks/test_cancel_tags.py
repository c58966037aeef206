"""A tag in the tracker ends a run: asked for in a thread, after a whole, validated epoch, with its reason."""

import threading
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import wandb

from tests.support import mlflow_store
from tests.support.commands import PATIENCE
from tests.unit.trainer.support import At, make_trainer, regression
from trainer import Trainer
from trainer.callbacks import MLflowLogging, WandbLogging, mlflow_logging, wandb_logging
from trainer.callbacks.cancel_tags import CancelTags

pytestmark = pytest.mark.full


class Waiting(CancelTags):
    """Asks all the time, and lets a test wait until the answer was yes."""

    def __init__(self) -> None:
        super().__init__(["cancel"], 0.001)
        self.heard = threading.Event()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_found" and value is not None:
            self.heard.set()


def fit(*callbacks: Any, epochs: int = 50) -> Trainer:
    trainer = make_trainer(callbacks, max_epochs=epochs)
    trainer.fit(regression(16), regression())
    return trainer


def at_step(step: int, *actions: Callable[[], object]) -> At:
    def act(trainer: Any) -> None:
        for action in actions:
            action()

    return At("on_train_batch_end", act, lambda trainer: trainer.state.step == step, priority=1)


def assert_cancelled_in_epoch_2(trainer: Trainer) -> None:
    """After the batch in which it was known; the epoch is validated."""
    assert (trainer.state.stop_reason, trainer.state.epoch, trainer.state.step) == ("cancelled", 2, 6)
    assert "val_loss" in trainer.state.metrics


def test_an_answer_ends_the_run_and_a_failure_to_answer_does_not(caplog: pytest.LogCaptureFixture) -> None:
    cancel, answers = (
        Waiting(),
        iter([ConnectionError("away"), ConnectionError("away"), ["other"], ["a", "cancel"]]),
    )
    asked = threading.Event()

    def ask() -> Collection[str]:
        asked.wait(PATIENCE)
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    trainer = fit(
        At("on_fit_start", lambda trainer: cancel.watch(ask)),
        at_step(6, asked.set, lambda: cancel.heard.wait(PATIENCE)),
        At("on_train_batch_end", cancel.obey, priority=2),
    )
    assert_cancelled_in_epoch_2(trainer)
    assert [record.message for record in caplog.records if "can't ask" in record.message] == [
        "can't ask for the run's tags: away"
    ]
    assert "tagged 'cancel'" in caplog.text


def test_after_the_run_it_asks_no_more_and_without_tags_never() -> None:
    asked: list[int] = []
    none = CancelTags([], 0.001)
    none.watch(lambda: asked.append(1) or ())  # type: ignore[func-returns-value]
    cancel, answered = CancelTags(["cancel"], 0.001), threading.Event()

    def late() -> Collection[str]:
        cancel.close()
        answered.set()
        return ["cancel"]

    cancel.watch(late)
    assert answered.wait(PATIENCE)
    for thread in threading.enumerate():
        if thread.name == "cancel-tags":
            thread.join(PATIENCE)
    cancel.obey(make_trainer())  # would stop it
    assert asked == []


def test_a_tag_that_was_found_too_late_does_not_end_the_next_fit() -> None:
    mlflow_logging.SERVICE.forget()
    callback = MLflowLogging("late", tracking_uri=mlflow_store.uri())
    cancel = callback._cancel = Waiting()

    def find() -> None:
        cancel._over.set()  # the answer of this test is the only one
        cancel._found = "cancel"

    fit(callback, At("on_fit_end", lambda trainer: find()), epochs=1)
    mlflow_logging.SERVICE.failed("it is not there", "away", away=True)
    assert fit(callback, epochs=2).state.stop_reason is None
    mlflow_logging.SERVICE.forget()


def test_a_tag_set_in_mlflow_ends_the_run() -> None:
    mlflow_logging.SERVICE.forget()
    callback = MLflowLogging("cancelled", tracking_uri=mlflow_store.uri())
    cancel = callback._cancel = Waiting()

    def tag() -> None:
        client = mlflow_store.client()
        (run,) = client.search_runs([client.get_experiment_by_name("cancelled").experiment_id])
        client.set_tag(run.info.run_id, "cancel", "")

    trainer = fit(callback, at_step(6, tag, lambda: cancel.heard.wait(PATIENCE)))
    assert_cancelled_in_epoch_2(trainer)
    (run,) = mlflow_store.client().search_runs(
        [mlflow_store.client().get_experiment_by_name("cancelled").experiment_id]
    )
    assert (run.info.status, run.data.tags["outcome"]) == ("FINISHED", "complete")


class OnlineRun:
    """What the callback needs of a run that W&B's server shows."""

    url, path, starting_step = "https://wandb.example/runs/1", "team/digits/1", 0

    def __init__(self) -> None:
        self.summary: dict[str, Any] = {}

    def log(self, record: Any, step: int) -> None: ...
    def finish(self, exit_code: int) -> None: ...


def test_a_tag_on_the_page_of_wandb_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against W&B's public API as it is documented: ``Api(timeout).run(path)``, ``load(force)``, ``tags``."""
    wandb_logging.SERVICE.forget()
    server: list[str] = ["baseline"]

    class ApiRun:
        def __init__(self, path: str) -> None:
            assert path == OnlineRun.path
            self.tags = list(server)

        def load(self, force: bool = False) -> None:
            assert force
            self.tags = list(server)

    class Api:
        def __init__(self, timeout: int) -> None:
            assert timeout == 3

        def run(self, path: str) -> ApiRun:
            return ApiRun(path)

    monkeypatch.setattr(wandb, "Api", Api)
    callback, run = WandbLogging("digits", folder=tmp_path, timeout_s=2.5), OnlineRun()
    monkeypatch.setattr(callback, "_open", lambda config: run)
    cancel = callback._cancel = Waiting()
    trainer = fit(callback, at_step(6, lambda: server.append("cancel"), lambda: cancel.heard.wait(PATIENCE)))
    assert_cancelled_in_epoch_2(trainer)
    assert (run.summary["outcome"], run.summary["stop_reason"]) == ("complete", "cancelled")


@pytest.mark.parametrize("kind", [MLflowLogging, WandbLogging])
@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"cancel_tags": "stop"}, r"give a list, \[stop\]"), ({"cancel_every_s": 0}, "give seconds above 0")],
)
def test_settings_that_make_no_sense_are_refused(kind: Any, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kind("p", **arguments)
