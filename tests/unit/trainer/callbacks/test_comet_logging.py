"""CometLogging with the real package, offline: what an archive holds; and online against what Comet's API is."""

import json
import math
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.trainer.support import (
    At,
    interrupt_at,
    make_trainer,
    regression,
    run_scripted,
    through_file,
    warnings_of,
)
from trainer.callbacks import CometLogging, ConfigSaver, NaNDetection, StepMetrics, comet_logging
from trainer.callbacks.cancel_tags import CancelTags


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    comet_logging.SERVICE.forget()
    monkeypatch.setenv("COMET_START_ONLINE", "false")
    monkeypatch.delenv("COMET_API_KEY", raising=False)


class Archive:
    """The newest archive of a folder."""

    def __init__(self, folder: Path) -> None:
        newest = max(folder.glob("*.zip"), key=lambda path: path.stat().st_mtime_ns)
        with zipfile.ZipFile(newest) as file:
            self.facts = json.loads(file.read("experiment.json"))
            self.messages = [json.loads(line) for line in file.read("messages.json").splitlines()]

    def points(self, name: str) -> list[tuple[int, Any]]:
        metrics = [message["payload"]["metric"] for message in self.messages if message["type"] == "metric_msg"]
        return [(metric["step"], metric["metricValue"]) for metric in metrics if metric["metricName"] == name]

    @property
    def params(self) -> dict[str, Any]:
        params = [message["payload"]["param"] for message in self.messages if message["type"] == "parameter_msg"]
        return {param["paramName"]: param["paramValue"] for param in params if param["source"] == "manual"}

    @property
    def others(self) -> dict[str, Any]:
        found = [message["payload"] for message in self.messages if message["type"] == "log_other"]
        return {payload["key"]: payload["value"] for payload in found}


def test_an_archive_has_parameters_every_metric_at_its_epoch_and_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    callback = CometLogging("digits", name="trial-3", run_key="k", params={"lr": 0.1}, tags=["a"], folder=folder)
    run_scripted([callback, NaNDetection()], [3.0, 2.0, math.nan])
    found = Archive(folder)
    assert (found.facts["project_name"], found.facts["tags"]) == ("digits", ["a"])
    assert found.facts["offline_id"] == callback.key
    assert found.params == {"lr": 0.1}
    assert found.points("val_loss") == [(1, 3.0), (2, 2.0), (3, "NaN")]
    assert found.others["Name"] == "trial-3"
    ends = ("outcome", "stop_reason", "best_epoch", "best_val_loss")
    assert [found.others[name] for name in ends] == ["diverged", "diverged", 2, 2.0]


def test_a_resumed_run_has_all_of_its_history_under_one_key_and_the_config_of_a_saver(tmp_path: Path) -> None:
    def build(*others: Any) -> Any:
        comet = CometLogging("digits", run_key="k", folder=tmp_path)
        steps = StepMetrics(tmp_path / "steps", every_n_steps=2)
        return make_trainer([comet, steps, ConfigSaver(tmp_path / "c.json", {"a": {"b": 1}}), *others])

    stopped = build(interrupt_at(4))
    stopped.fit(regression(), regression())
    first = Archive(tmp_path)
    assert first.others["outcome"] == "interrupted"
    resumed = build()
    resumed.load_state_dict(through_file(stopped.state_dict()))
    resumed.fit(regression(), regression())
    found = Archive(tmp_path)
    assert first.facts["offline_id"] == found.facts["offline_id"]
    assert found.points("epoch") == [(1, 1), (2, 2)]
    assert [step for step, _ in found.points("step/train_loss")] == [2, 4, 6]
    assert found.params == {"a.b": 1}
    assert found.others["outcome"] == "complete"


def test_an_error_is_tagged(tmp_path: Path) -> None:
    def fail(trainer: Any) -> None:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        run_scripted([CometLogging("digits", folder=tmp_path), At("on_epoch_end", fail)], [1.0])
    found = Archive(tmp_path)
    assert (found.others["outcome"], found.others["stop_reason"]) == ("out_of_memory", "error")
    assert found.facts["tags"] == ["failed"]


class Online:
    """Comet as this run sees it online: an experiment, and what its page has by now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logged: list[tuple[int, set[str]]] = []
        self.tags: list[str] = []
        self.ended = 0
        monkeypatch.setenv("COMET_START_ONLINE", "true")
        monkeypatch.setattr("comet_ml.start", self.start)
        monkeypatch.setattr("comet_ml.APIExperiment", lambda previous_experiment: self)

    def start(self, **arguments: Any) -> Any:
        assert arguments["online"]
        nothing = lambda *arguments: None  # noqa: E731
        names = ("log_parameters", "log_others", "add_tag")
        calls = {"log_metrics": self.log, "end": self.end}
        return SimpleNamespace(get_key=lambda: "k", **calls, **dict.fromkeys(names, nothing))

    def end(self) -> None:
        self.ended += 1

    def log(self, record: dict[str, float], step: int) -> None:
        if self.tags == ["break"]:
            raise ConnectionError("gone")
        self.logged.append((step, set(record)))

    def get_metrics(self, metric: str) -> list[dict[str, Any]]:
        return [{"step": step} for step, names in self.logged if metric in names]

    def get_tags(self) -> list[str]:
        return self.tags


def test_online_a_resumed_run_sends_what_comet_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    comet = Online(monkeypatch)
    before = run_scripted([], [3.0, 2.0])
    after = make_trainer([CometLogging("digits", run_key="k", folder=tmp_path)], max_epochs=3)
    after.state.load_state_dict(before.state.state_dict())
    comet.logged = [(1, {"epoch", "val_loss"})]
    after.fit(regression(), regression())
    assert [step for step, _ in comet.logged] == [1, 2, 3]


def test_online_a_run_that_resumes_inside_its_first_epoch_sends_each_step_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    comet = Online(monkeypatch)

    def build(*others: Any) -> Any:
        logging_to = CometLogging("digits", run_key="k", folder=tmp_path, cancel_tags=[])
        return make_trainer([logging_to, StepMetrics(tmp_path / "steps", transfer_every_n_steps=1), *others])

    stopped = build(interrupt_at(2))
    stopped.fit(regression(), regression())
    assert comet.get_metrics("step") == [{"step": 1}, {"step": 2}]
    resumed = build()
    resumed.load_state_dict(through_file(stopped.state_dict()))
    resumed.fit(regression(), regression())
    assert comet.get_metrics("step") == [{"step": step} for step in range(1, 7)]


def test_a_tag_on_its_page_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    comet, callback = Online(monkeypatch), CometLogging("digits", folder=tmp_path, cancel_every_s=0.001)
    found: list[Any] = []

    def wait(cancel: CancelTags, trainer: Any) -> None:
        comet.tags = ["cancel"]
        while cancel._found is None:
            threading.Event().wait(0.001)
        found.append(cancel._found)

    trainer = make_trainer(
        [callback, At("on_train_batch_end", lambda trainer: wait(callback._cancel, trainer), priority=1)],
        max_epochs=9,
    )
    trainer.fit(regression(), regression())
    assert (trainer.state.stop_reason, trainer.state.epoch, found) == ("cancelled", 1, ["cancel"])


def test_what_fails_is_said_once_and_training_continues(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Online(monkeypatch).tags = ["break"]
    trainer = run_scripted([CometLogging("digits", folder=tmp_path, cancel_tags=[])], [3.0, 2.0])
    assert trainer.state.epoch == 2
    assert warnings_of(caplog) == ["Comet failed and gets nothing more of this run: gone"]


@pytest.mark.parametrize(("error", "away"), [(ValueError("refused"), False), (ConnectionError("gone"), True)])
def test_an_experiment_that_could_not_be_opened_whole_is_ended(
    error: Exception, away: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    comet = Online(monkeypatch)

    def fail(previous_experiment: str) -> Any:
        raise RuntimeError from error

    monkeypatch.setattr("comet_ml.APIExperiment", fail)
    run_scripted([CometLogging("digits", folder=tmp_path)], [1.0])
    assert (comet.ended, comet_logging.SERVICE.is_away) == (1, away)


def test_without_a_key_it_is_said_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("COMET_START_ONLINE", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    run_scripted([CometLogging("digits", folder=tmp_path)], [3.0])
    run_scripted([CometLogging("digits", folder=tmp_path)], [3.0])  # which says it no more
    (said,) = warnings_of(caplog)
    assert "run `comet login`, or set COMET_START_ONLINE=false" in said


def test_without_comet_ml_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    with pytest.raises(ImportError, match=r"pip install 'hpo-service\[comet\]'"):
        run_scripted([CometLogging("digits")], [1.0])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tags": "a"}, r"give a list, \[a\]"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"mode": "minimize"}, "mode is 'minimize': give 'min' or 'max'"),
        ({"cancel_every_s": 0}, "above 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CometLogging("p", **arguments)
