"""W&B, MLflow and TensorBoard beside a study whose machine fails: one run, one curve, and how it ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import mlflow_store, wandb_file
from tests.support.commands import CRAWLING, STUDY, hpo, hpo_json, kill_all, make_study, start_hpo, wait_until

FRIENDS = "callbacks: {wandb: {tags: [tests]}, mlflow: {}, tensorboard: {}}\nsearch_space:"
EPOCHS = 30


def test_a_trial_that_is_killed_and_goes_on_is_one_run_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It takes seconds to import, in each process that collects the tests.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    study = make_study(tmp_path, STUDY.replace("search_space:", FRIENDS), CRAWLING)
    output = tmp_path / "runs" / "tiny"
    mlflow_store.put_copy(output)
    trial = output / "trials" / "0"
    command = ("run", study, "--n-trials", 1, f"trainer.max_epochs={EPOCHS}")

    process = start_hpo(*command)
    files = "attempt-*/wandb/offline-run-*/run-*.wandb"
    wait_until(lambda: any(map(wandb_file.steps, trial.glob(files))))
    kill_all(process)
    (tmp_path / "go").touch()
    hpo(*command)

    logged = sorted(trial.glob(files))
    assert len(logged) == 2
    assert {wandb_file.run_record(file)["run_id"] for file in logged} == {(trial / "run_key").read_text()}
    steps = [wandb_file.steps(file) for file in logged]
    assert all(steps)
    assert [step for each in steps for step in each] == list(range(1, EPOCHS + 1))
    run = wandb_file.run_record(logged[-1])
    assert (run["run_group"], run["job_type"], run["tags"]) == ("tiny", "trial", ["tests"])
    summary, best = wandb_file.summary(logged[-1]), hpo_json("best", study)
    assert (summary["outcome"], summary["best_val_loss"]) == ("complete", best["value"])

    client = mlflow_store.client(f"sqlite:///{output / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    (mirrored,) = client.search_runs([experiment.experiment_id])
    assert (mirrored.info.run_name, mirrored.info.status) == ("trial-0", "FINISHED")
    points = client.get_metric_history(mirrored.info.run_id, "val_loss")
    assert [point.step for point in points] == list(range(1, EPOCHS + 1))

    events = EventAccumulator(str(trial / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in events.Scalars("val_loss")] == list(range(1, EPOCHS + 1))
    assert not list(trial.glob("attempt-*/tensorboard"))
