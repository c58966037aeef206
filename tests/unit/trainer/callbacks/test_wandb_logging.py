"""WandbLogging with the real package, offline: what it leaves on disk."""

import gc
import json
import logging
import math
import os
import pty
import shutil
import subprocess
import sys
import threading
from bisect import bisect_left
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch
import wandb

from tests.support import wandb_file
from tests.support.commands import PATIENCE
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
from trainer.callbacks import (
    Checkpoint,
    CSVLogging,
    GradientMonitor,
    LossPrediction,
    NaNDetection,
    WandbLogging,
    wandb_logging,
)
from trainer.checkpoint import manager

pytestmark = pytest.mark.full


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb_logging.SERVICE.forget()
    wandb_file.keep_offline(tmp_path, monkeypatch)


def run_files(folder: Path) -> list[Path]:
    wandb.teardown()  # the service has written everything once it has ended
    return sorted(folder.rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def test_one_record_an_epoch_holds_every_metric_and_the_run_its_config_and_group(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    logging_callback = WandbLogging(
        "digits",
        group="study",
        job_type="trial",
        notes="as a test",
        name="trial 3",
        run_id="study-3",
        config={"optimizer.lr": 0.1, "model": {"hidden": 4}},
        folder=folder,
        tags=("test",),
    )
    trainer = make_trainer([logging_callback, GradientMonitor(), LossPrediction(min_epochs=2)], max_epochs=3)
    state = trainer.fit(regression(), regression())
    (file,) = run_files(folder)
    rows = wandb_file.history(file)
    assert [row["epoch"] for row in rows] == [row["_step"] for row in rows] == [1, 2, 3]
    for row, metrics in zip(rows, state.history, strict=True):
        assert {"train_loss", "val_loss", "lr", "max_grad_norm"} <= row.keys()
        assert {name: row[name] for name in metrics} == metrics
    assert "predicted_final_loss" in rows[-1]
    run = wandb_file.run_record(file)
    expected = {"project": "digits", "run_group": "study", "display_name": "trial 3", "run_id": "study-3"}
    assert run.items() >= (expected | {"tags": ["test"], "job_type": "trial", "notes": "as a test"}).items()
    assert wandb_file.config(file) == {"optimizer.lr": 0.1, "model": {"hidden": 4}}


def test_a_run_that_fails_is_closed_with_what_it_had(tmp_path: Path) -> None:
    def fail(trainer: Any) -> None:
        raise ZeroDivisionError

    callbacks = [
        WandbLogging("p", folder=tmp_path),
        At("on_epoch_end", fail, lambda trainer: trainer.state.epoch == 2, priority=90),
    ]
    with pytest.raises(ZeroDivisionError):
        run_scripted(callbacks, [3.0, 2.0, 1.0])
    (file,) = run_files(tmp_path)
    assert [row["val_loss"] for row in wandb_file.history(file)] == [3.0, 2.0]


def test_a_dead_service_is_said_once_training_goes_on_and_the_next_run_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def kill_service(trainer: Any) -> None:
        for process in [item for item in gc.get_objects() if type(item) is subprocess.Popen]:
            if process.poll() is None and psutil.Process(process.pid).name().startswith("wandb"):
                process.kill()
                process.wait()

    callbacks = [
        WandbLogging("p", folder=tmp_path),
        CSVLogging(tmp_path / "metrics.csv"),
        At("on_epoch_end", kill_service, lambda trainer: trainer.state.epoch == 2),
    ]
    with caplog.at_level(logging.WARNING, logger="trainer"):
        trainer = run_scripted(callbacks, [5.0, 4.0, 3.0, 2.0, 1.0])
    assert (trainer.state.epoch, trainer.state.stop_reason) == (5, None)
    assert sum("W&B failed" in record.message for record in caplog.records) == 1
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 6
    run_scripted([WandbLogging("p", folder=tmp_path / "next")], [2.0, 1.0])
    (file,) = run_files(tmp_path / "next")
    assert [row["val_loss"] for row in wandb_file.history(file)] == [2.0, 1.0]


#: What ends a run, its losses, its outcome, and its best epoch.
ENDINGS: list[tuple[Callable[[], list[Any]], list[float], str, tuple[int | None, float | None]]] = [
    (list, [3.0, 1.0, 2.0], "complete", (2, 1.0)),
    (lambda: [fail(RuntimeError(), "pruned")], [3.0, 1.0, 2.0], "pruned", (2, 1.0)),
    (lambda: [fail(ValueError())], [3.0, 1.0, 2.0], "error", (2, 1.0)),
    (lambda: [fail(torch.OutOfMemoryError())], [3.0, 4.0, 2.0], "out_of_memory", (1, 3.0)),
    (lambda: [NaNDetection()], [3.0, math.nan], "diverged", (1, 3.0)),
    (lambda: [NaNDetection()], [math.nan], "diverged", (None, None)),
    (lambda: [interrupt_at(2, now=False)], [3.0, 4.0, 2.0], "interrupted", (1, 3.0)),
]


def test_the_summary_ends_with_the_outcome_and_the_best(tmp_path: Path) -> None:
    """All runs have one service, which takes a second to start."""
    for number, (ends, losses, outcome, _) in enumerate(ENDINGS):
        trainer = scripted_trainer([WandbLogging("p", folder=tmp_path / str(number)), *ends()], losses)
        try:
            trainer.fit(one_batch(), one_batch())
        except (RuntimeError, ValueError):
            assert outcome in {"pruned", "error", "out_of_memory"}
    wandb.teardown()
    for number, (_, _, outcome, best) in enumerate(ENDINGS):
        (file,) = run_files(tmp_path / str(number))
        summary = wandb_file.summary(file)
        assert summary["outcome"] == outcome
        assert (summary.get("best_epoch"), summary.get("best_val_loss")) == best


def attempt(folder: Path, checkpoint: Any, losses: list[float], epochs: int, stop: int = 0) -> Any:
    """An attempt at one run, resumed from a checkpoint; returns its own."""
    earlier = [other for other in folder.parent.glob("attempt-*") if other != folder]
    callback = WandbLogging("p", run_id="one", folder=folder, earlier=earlier)
    others = [
        At("on_epoch_end", lambda trainer: trainer.state.stop("interrupted"), lambda t: t.state.epoch == stop)
    ]
    trainer = scripted_trainer([callback, *others], losses, max_epochs=epochs)
    if checkpoint is not None:
        trainer.load_state_dict(checkpoint)
    trainer.fit(one_batch(), one_batch())
    return through_file(trainer.state_dict())


def steps_by_file(folder: Path) -> list[list[int]]:
    return [wandb_file.steps(file) for file in run_files(folder)]


@pytest.mark.full
def test_the_steps_of_attempts_join_without_overlap(tmp_path: Path) -> None:
    first = attempt(tmp_path / "attempt-1", None, [5.0, 4.0], 5, stop=2)
    wandb.teardown()
    second = attempt(tmp_path / "attempt-2", first, [3.0, 2.0], 5, stop=4)
    wandb.teardown()
    # Of the second attempt only its first checkpoint is left: what it logged after that is trained once more.
    attempt(tmp_path / "attempt-3", first, [3.0, 2.0, 1.0], 5)
    assert steps_by_file(tmp_path) == [[1, 2], [3, 4], [5]]
    assert second["state"]["epoch"] == 4
    files = run_files(tmp_path)
    assert {wandb_file.run_record(file)["run_id"] for file in files} == {"one"}
    assert [wandb_file.summary(file)["outcome"] for file in files] == ["interrupted", "interrupted", "complete"]


@pytest.mark.full
def test_what_a_killed_attempt_did_not_get_to_its_file_is_sent_by_the_next(tmp_path: Path) -> None:
    """Nothing is left, or the header, or all but the last record, which is torn."""
    first = attempt(tmp_path / "attempt-1", None, [5.0, 4.0, 3.0], 5, stop=3)
    (file,) = run_files(tmp_path)
    whole = file.read_bytes()

    def holds_three(length: int) -> bool:
        file.write_bytes(whole[:length])
        return len(wandb_file.steps(file)) == 3

    torn = bisect_left(range(len(whole)), True, key=holds_three) - 1  # one byte short of the third epoch
    cases: list[tuple[int, list[int]]] = [(0, []), (7, []), (torn, [1, 2])]
    for length, kept in cases:
        folder = tmp_path / str(length)
        shutil.copytree(tmp_path / "attempt-1", folder / "attempt-1", symlinks=True)
        (left,) = folder.rglob("*.wandb")
        left.write_bytes(whole[:length])
        assert wandb_file.steps(left) == kept
        attempt(folder / "attempt-2", first, [2.0, 1.0], 5)
    wandb.teardown()
    for length, kept in cases:
        assert steps_by_file(tmp_path / str(length)) == [kept, [step for step in range(1, 6) if step not in kept]]


def test_a_file_of_an_earlier_attempt_that_is_none_of_wandb_s_is_said_and_all_is_sent_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = attempt(tmp_path / "attempt-1", None, [5.0, 4.0], 3, stop=2)
    (file,) = run_files(tmp_path)
    file.write_bytes(b"something else")
    attempt(tmp_path / "attempt-2", first, [1.0], 3)
    (message,) = warnings_of(caplog)
    assert message.startswith(f"W&B can't read {file}; its epochs are sent again: ")
    (new,) = run_files(tmp_path / "attempt-2")
    assert wandb_file.steps(new) == [1, 2, 3]


def test_a_run_without_earlier_files_reads_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_logging, "_logged_steps", None)  # which costs a second
    run_scripted([WandbLogging("p", run_id="one", folder=tmp_path)], [2.0])
    run_scripted([WandbLogging("p", run_id="on", folder=tmp_path)], [2.0])
    assert steps_by_file(tmp_path) == [[1], [1]]


def test_the_best_checkpoint_is_an_artifact_if_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "load_checkpoint", None)  # a file is sent, nothing has to be in memory
    for log_model in (False, True):
        folder = tmp_path / str(log_model)
        callbacks = [
            WandbLogging("p", folder=folder, log_model=log_model, checkpoints=[folder / "checkpoints"]),
            Checkpoint(folder / "checkpoints", max_overhead=1),
        ]
        run_scripted(callbacks, [3.0, 1.0, 2.0])
    without, with_model = (
        wandb_file.records(*run_files(tmp_path / name), "artifact") for name in ("False", "True")
    )
    assert without == []
    (artifact,) = with_model
    assert artifact["type"] == "model"
    assert [entry["path"] for entry in artifact["manifest"]["contents"]] == ["epoch-00002.pt"]


def test_a_model_without_a_checkpoint_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_scripted([WandbLogging("p", folder=tmp_path, log_model=True)], [3.0])
    assert warnings_of(caplog) == ["W&B gets no model: there is no checkpoint of the best epoch"]


def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **environment: str) -> None:
    """As on a machine of its own, with this environment."""
    wandb.teardown()
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), "NETRC": str(tmp_path / "netrc"), **environment}.items():
        monkeypatch.setenv(name, value)


def test_without_a_login_it_is_said_once_what_to_do_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    online(monkeypatch, tmp_path)
    with caplog.at_level(logging.WARNING, logger="trainer"):
        for _ in range(2):
            assert run_scripted([WandbLogging("p", folder=tmp_path)], [2.0, 1.0]).state.epoch == 2
    (message,) = warnings_of(caplog)
    assert "not logged in; run `wandb login`, or set WANDB_MODE to offline" in message
    assert run_files(tmp_path) == []


ON_A_TERMINAL = """
from tests.unit.trainer.support import run_scripted
from trainer.callbacks import WandbLogging
print("trained", run_scripted([WandbLogging("p", folder="wandb-here")], [2.0, 1.0]).state.epoch)
"""


@pytest.mark.full
def test_a_terminal_does_not_ask_for_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    online(monkeypatch, tmp_path, PYTHONPATH=str(Path(__file__).parents[4]))
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", ON_A_TERMINAL], stdin=child, stderr=child, stdout=subprocess.PIPE, cwd=tmp_path
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        os.close(parent)
        os.close(child)
    assert output.splitlines()[-1] == b"trained 2"


def test_a_server_that_does_not_answer_costs_one_time_out_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    online(monkeypatch, tmp_path, WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING, logger="trainer"):
        for _ in range(2):
            callback = WandbLogging("p", folder=tmp_path, timeout_s=0.5)
            assert run_scripted([callback], [2.0, 1.0]).state.epoch == 2
    (message,) = warnings_of(caplog)
    assert message.startswith("this run is not shown in W&B, which could not be started (WANDB_MODE=offline")
    assert wandb_logging.SERVICE.is_away
    wandb.teardown()


@pytest.mark.parametrize("arguments", [{"tags": ["x" * 100]}, {"run_id": "a/b"}])
def test_a_value_that_wandb_refuses_costs_no_other_run(
    arguments: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_scripted([WandbLogging("p", folder=tmp_path, **arguments)], [2.0])
    run_scripted([WandbLogging("p", folder=tmp_path)], [1.0])
    (message,) = warnings_of(caplog)
    assert message.startswith("this run is not shown in W&B, which could not be started: ")
    assert "WANDB_MODE" not in message  # this run is offline
    (file,) = run_files(tmp_path)
    assert [row["val_loss"] for row in wandb_file.history(file)] == [1.0]


class Answers(BaseHTTPRequestHandler):
    """As much of W&B's server as a run needs to begin."""

    asked: ClassVar[list[str]] = []

    def log_message(self, *arguments: Any) -> None:
        """Nothing on the screen."""

    def do_POST(self) -> None:
        query = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode(errors="replace")
        self.asked.append(query)
        data: dict[str, Any] = {}
        if "upsertBucket" in query:
            project = {"id": "p", "name": "p", "entity": {"id": "e", "name": "e"}}
            data = {"upsertBucket": {"bucket": {"id": "x", "name": "one", "project": project}, "inserted": True}}
        elif "viewer" in query:
            data = {"viewer": {"id": "v", "flags": "{}", "entity": "e", "username": "u", "teams": {"edges": []}}}
        body = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_server_that_goes_away_in_the_middle_is_said_once_and_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def go_away(trainer: Any) -> None:
        server.shutdown()
        server.server_close()

    # The start has its time on a busy machine; the end waits for a server that is gone, until this is over.
    settings = wandb.Settings
    monkeypatch.setattr(wandb, "Settings", lambda **given: settings(**given | {"finish_timeout": 1.0}))
    address = f"http://127.0.0.1:{server.server_port}"
    online(monkeypatch, tmp_path, WANDB_API_KEY="0" * 40, WANDB_BASE_URL=address)
    callback = WandbLogging("p", folder=tmp_path, run_id="one")
    leave = At("on_epoch_end", go_away, lambda trainer: trainer.state.epoch == 2)
    try:
        assert run_scripted([callback, leave], [3.0, 2.0, 1.0]).state.epoch == 3
    finally:
        go_away(None)
        thread.join()
    assert any("upsertBucket" in query for query in Answers.asked)
    (message,) = warnings_of(caplog)
    assert message.startswith("W&B failed and gets nothing more of this run")
    (file,) = run_files(tmp_path)  # for `wandb sync`
    assert wandb_file.steps(file) == [1, 2, 3]


def test_a_folder_that_can_not_be_made_is_said_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert run_scripted([WandbLogging("p", folder=tmp_path / "file" / "run")], [2.0, 1.0]).state.epoch == 2
    (message,) = warnings_of(caplog)
    assert "Not a directory" in message


def test_without_wandb_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'hpo-service\[wandb\]'"):
        run_scripted([WandbLogging("p", folder=tmp_path)], [1.0])


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"tags": "a"}, r"tags is 'a': give a list"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"mode": "minimize"}, "mode is 'minimize': give 'min' or 'max'"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        WandbLogging("p", **arguments)
