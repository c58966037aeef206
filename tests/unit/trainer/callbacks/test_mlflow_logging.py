"""MLflowLogging with the real package: what a SQLite file of its tracking holds."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import mlflow_store
from tests.unit.trainer.support import (
    At,
    fail,
    interrupt_at,
    make_trainer,
    one_batch,
    regression,
    run_scripted,
    scripted_trainer,
    through_file,
    warnings_of,
)
from trainer.callbacks import MLflowLogging, NaNDetection, mlflow_logging


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow_logging.SERVICE.forget()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def experiment(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses: all tests share the file."""
    return str(request.node.name)


def mlflow(experiment: str, **arguments: Any) -> MLflowLogging:
    return MLflowLogging(experiment, **{"tracking_uri": mlflow_store.uri(), **arguments})


def runs(experiment: str, client: Any = None) -> list[Any]:
    client = client or mlflow_store.client()
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else list(client.search_runs([found.experiment_id]))


def points(run: Any, metric: str = "val_loss") -> list[tuple[int, float]]:
    history = mlflow_store.client().get_metric_history(run.info.run_id, metric)
    return [(point.step, point.value) for point in history]


def test_a_run_has_its_parameters_tags_and_every_metric_at_its_epoch(experiment: str) -> None:
    callback = mlflow(
        experiment,
        name="trial-3",
        run_key="k",
        params={"optimizer.lr": 0.1, "model.layers[0]": "a"},
        tags={"group": "digits", "n": 1},
    )
    state = make_trainer([callback], max_epochs=3).fit(regression(), regression())
    (run,) = runs(experiment)
    assert (run.info.run_name, run.info.status) == ("trial-3", "FINISHED")
    assert run.data.params == {"optimizer.lr": "0.1", "model.layers_0_": "a"}
    assert run.data.tags.items() >= {"group": "digits", "n": "1", "outcome": "complete"}.items()
    for name in state.metrics:
        assert points(run, name) == [(epoch, metrics[name]) for epoch, metrics in enumerate(state.history, 1)]


@pytest.mark.parametrize(
    ("ends", "losses", "status", "outcome", "best"),
    [
        (lambda: fail(RuntimeError(), "pruned"), [3.0, 1.0, 2.0], "KILLED", "pruned", "2"),
        (lambda: fail(ValueError()), [3.0, 1.0, 2.0], "FAILED", "error", "2"),
        (lambda: fail(torch.OutOfMemoryError()), [3.0, 4.0], "FAILED", "out_of_memory", "1"),
        (NaNDetection, [3.0, math.nan], "FAILED", "diverged", "1"),
        (NaNDetection, [math.nan], "FAILED", "diverged", None),
        (lambda: interrupt_at(2, now=False), [3.0, 1.0, 2.0], "KILLED", "interrupted", "2"),
    ],
)
def test_status_and_tags_say_how_it_ended(
    ends: Callable[[], Any], losses: list[float], status: str, outcome: str, best: str | None, experiment: str
) -> None:
    trainer = scripted_trainer([mlflow(experiment), ends()], losses)
    try:
        trainer.fit(one_batch(), one_batch())
    except (RuntimeError, ValueError):
        assert outcome in {"pruned", "error", "out_of_memory"}
    (run,) = runs(experiment)
    assert (run.info.status, run.data.tags["outcome"], run.data.tags.get("best_epoch")) == (status, outcome, best)


def test_a_resumed_run_goes_on_in_its_run_and_sends_nothing_twice(experiment: str) -> None:
    kept: list[Any] = []
    keep = At("on_epoch_end", lambda t: kept.append(through_file(t.state_dict())), lambda t: t.state.epoch == 1)
    stop = interrupt_at(3, now=False)
    run_scripted([mlflow(experiment, run_key="it's"), keep, stop], [5.0, 4.0, 3.0], max_epochs=5)
    again = scripted_trainer([mlflow(experiment, run_key="it's")], [4.0, 3.0, 2.0, 1.0], max_epochs=5)
    again.load_state_dict(kept[0])  # from before what was logged last
    again.fit(one_batch(), one_batch())
    (run,) = runs(experiment)
    assert points(run) == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0), (5, 1.0)]
    assert [step for step, _ in points(run, "epoch")] == [1, 2, 3, 4, 5]
    assert (run.info.status, run.data.tags["outcome"]) == ("FINISHED", "complete")


def test_a_run_that_resumes_with_other_parameters_keeps_those_it_began_with(experiment: str) -> None:
    for epochs, more in ((1, {}), (2, {"model.width[0]": 8})):
        params = {"max_epochs": epochs, "model.depth[0]": epochs, **more}
        run_scripted([mlflow(experiment, run_key="k", params=params)], [2.0, 1.0][:epochs])
    (run,) = runs(experiment)
    assert run.data.params == {"max_epochs": "1", "model.depth_0_": "1", "model.width_0_": "8"}
    assert (run.info.status, [epoch for epoch, _ in points(run)]) == ("FINISHED", [1, 2])


def test_another_key_or_none_is_another_run(experiment: str) -> None:
    for key in ("a", "b", None, None):
        run_scripted([mlflow(experiment, run_key=key)], [1.0])
    assert len(runs(experiment)) == 4


def test_what_was_lost_with_the_process_before_is_sent(experiment: str) -> None:
    before = run_scripted([], [3.0, 2.0])
    after = scripted_trainer([mlflow(experiment, run_key="k")], [1.0], max_epochs=3)
    after.load_state_dict(through_file(before.state_dict()))
    after.fit(one_batch(), one_batch())
    (run,) = runs(experiment)
    assert points(run) == [(1, 3.0), (2, 2.0), (3, 1.0)]


def test_more_metrics_and_parameters_than_go_at_once(experiment: str) -> None:
    metrics = {f"m{number}": float(number) for number in range(1200)}
    many = At("on_epoch_end", lambda trainer: trainer.state.metrics.update(metrics))
    run_scripted([mlflow(experiment, params={f"p{number}": 1 for number in range(150)}), many], [1.0])
    (run,) = runs(experiment)
    assert metrics.items() <= run.data.metrics.items()
    assert len(run.data.params) == 150


def test_without_an_address_it_is_a_file_in_the_folder(tmp_path: Path) -> None:
    mlflow_store.put_copy(tmp_path)
    run_scripted([MLflowLogging("here", folder=tmp_path)], [2.0, 1.0])
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]
    (run,) = runs("here", mlflow_store.client(f"sqlite:///{tmp_path / 'mlflow.db'}"))
    assert run.info.status == "FINISHED"


def test_a_worker_that_was_faster_in_making_the_file_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes its own aside meanwhile, which takes seconds, and leaves nothing of it."""
    path, made = tmp_path / "deep" / "mlflow.db", []

    from mlflow import MlflowClient

    class Slow(MlflowClient):  # type: ignore[misc]
        def search_experiments(self, **options: Any) -> Any:
            made.extend(path.parent.iterdir())
            path.write_text("the other's")
            return super().search_experiments(**options)

    aside = path.with_name(".mlflow.db.aside")
    monkeypatch.setattr(mlflow_logging, "aside_name", lambda _: aside)
    mlflow_store.put_copy(aside.parent)
    (aside.parent / "mlflow.db").rename(aside)
    mlflow_logging._make_database(Slow, f"sqlite:///{path}")
    assert made == [aside]
    assert path.read_text() == "the other's"
    assert list(path.parent.iterdir()) == [path]
    mlflow_logging._make_database(Slow, f"sqlite:///{path}")
    assert len(made) == 1


@pytest.mark.parametrize("variable", [True, False])
def test_a_server_that_does_not_answer_costs_one_time_out_and_one_warning(
    variable: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    address = "http://127.0.0.1:9"
    if variable:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    for _ in range(2):
        trainer = run_scripted([mlflow("p", tracking_uri=None if variable else address)], [2.0, 1.0])
        assert trainer.state.epoch == 2
    (message,) = warnings_of(caplog)
    assert message.startswith("this run is not shown in MLflow, which could not be started")
    assert "127.0.0.1" in message


def test_names_that_mlflow_refuses_are_shown_under_others(
    experiment: str, caplog: pytest.LogCaptureFixture
) -> None:
    names = {"lr/": 1, "a//b": 2, "/x/./y": 3, "..": 4, "": 5, "k" * 300: 6}
    odd = At("on_epoch_end", lambda trainer: trainer.state.metrics.update({n: float(v) for n, v in names.items()}))
    run_scripted([mlflow(experiment, params=names, tags={"t//": 1}), odd], [2.0, 1.0])
    (run,) = runs(experiment)
    shown = {"lr": 1, "a/b": 2, "x/y": 3, "_": 5, "k" * 250: 6}
    assert run.data.params == {name: str(value) for name, value in shown.items()}
    assert run.data.metrics.items() >= shown.items()
    assert run.data.tags.items() >= {"t": "1", "outcome": "complete"}.items()
    assert warnings_of(caplog) == []


def test_a_run_that_mlflow_refuses_is_closed_and_the_next_one_is_shown(
    experiment: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    def refuse(*arguments: Any, **options: Any) -> None:
        raise MlflowException("refused")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_batch", refuse)
        run_scripted([mlflow(experiment, name="refused", params={"a": 1})], [1.0])
    run_scripted([mlflow("e" * 600)], [1.0])
    run_scripted([mlflow(experiment, name="next", params={"a": 1})], [1.0])
    assert {run.info.run_name: run.info.status for run in runs(experiment)} == {
        "refused": "FAILED",
        "next": "FINISHED",
    }
    assert "refused" in warnings_of(caplog)[0]


def test_a_database_that_fails_in_the_middle_is_said_once_and_the_next_fit_sends_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow_store.put_copy(tmp_path)
    database, away = tmp_path / "mlflow.db", tmp_path / "away"

    def spoil(trainer: Any) -> None:
        away.write_bytes(database.read_bytes())
        database.write_bytes(b"no database" * 1000)

    uri = f"sqlite:///{database}"
    spoils = At("on_epoch_end", spoil, lambda trainer: trainer.state.epoch == 1, priority=90)
    first = run_scripted([mlflow("p", tracking_uri=uri, run_key="k"), spoils], [3.0, 2.0, 1.0])
    assert first.state.epoch == 3
    (message,) = warnings_of(caplog)
    assert message.startswith("MLflow failed and gets nothing more of this run")
    database.write_bytes(away.read_bytes())
    again = scripted_trainer([mlflow("p", tracking_uri=uri, run_key="k")], [], max_epochs=3)
    again.load_state_dict(through_file(first.state_dict()))
    again.fit(one_batch(), one_batch())
    client = mlflow_store.client(uri)
    (run,) = runs("p", client)
    assert sorted(point.step for point in client.get_metric_history(run.info.run_id, "val_loss")) == [1, 2, 3]


def test_where_mlflow_is_away_nothing_holds_the_error_that_ended_training() -> None:
    mlflow_logging.SERVICE.failed("it is not there", "away", away=True)
    callback = mlflow("p")
    with pytest.raises(ValueError, match="ended"):
        run_scripted([callback, fail(ValueError("ended"))], [2.0, 1.0])
    assert callback._error is None


def test_without_mlflow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ImportError, match=r"pip install 'hpo-service\[mlflow\]'"):
        run_scripted([MLflowLogging("p")], [1.0])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"tags": "a"}, "tags is 'a': give names"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"mode": "minimize"}, "mode is 'minimize': give 'min' or 'max'"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        MLflowLogging("p", **arguments)


def test_a_metric_called_epoch_is_refused(experiment: str) -> None:
    odd = At("on_epoch_end", lambda trainer: trainer.state.metrics.update(epoch=1.0))
    with pytest.raises(ValueError, match="give it another name"):
        run_scripted([mlflow(experiment), odd], [1.0])
