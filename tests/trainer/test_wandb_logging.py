"""WandbLogging with the real package, offline: what it leaves on disk."""

import gc
import logging
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import wandb

from tests.trainer import wandb_file
from tests.trainer.support import At, make_trainer, regression, run_scripted
from trainer.callbacks import CSVLogging, GradientMonitor, LossPrediction, WandbLogging


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))


def run_files(folder: Path) -> list[Path]:
    wandb.teardown()  # the service has written everything once it has ended
    return sorted(folder.rglob("*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def test_one_record_an_epoch_holds_every_metric_and_the_run_its_config_and_group(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    logging_callback = WandbLogging(
        "digits",
        group="study",
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
    assert (run.project, run.run_group, run.display_name, run.run_id) == ("digits", "study", "trial 3", "study-3")
    assert list(run.tags) == ["test"]
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
