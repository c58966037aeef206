"""The main job, run as a person runs it."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import (
    CRAWLING,
    HELD,
    LONG,
    PATIENCE,
    STUDY,
    epochs_trained,
    held,
    hpo,
    hpo_json,
    kill_all,
    make_study,
    start_hpo,
    wait_until,
)

STATUS_KEYS = [
    "study",
    "n_trials",
    "epochs",
    "finished",
    "running",
    "paused",
    "waiting",
    "outcomes",
    "best",
    "outside",
    "code",
    "goal",
    "sampler",
    "pruning",
    "running_trials",
    "agents",
]
BEST_KEYS = ["study", "trial", "value", "params", "epoch", "metrics", "checkpoint", "internals"]
TRIAL_KEYS = ["trial", "outcome", "value", "params", "metrics", "epochs", "duration_s", "reason", "traceback"]
TRIAL_KEYS += ["internals"]
INTERNALS = ["metrics", "prediction", "seed", "grants", "fork", "replaced_by", "worker", "device", "attempts"]
OUTCOMES = ["complete", "pruned", "diverged", "out_of_memory", "error", "timed_out", "lost"]


def curves(study: Path, output: Path) -> dict[int, list[list[str]]]:
    """Each trial's metrics.csv, from its latest attempt."""
    found: dict[int, list[list[str]]] = {}
    for folder in sorted((output / "trials").iterdir()):
        latest = max(folder.glob("attempt-*"), key=lambda item: int(item.name.split("-")[1]))
        with (latest / "metrics.csv").open() as file:
            found[int(folder.name)] = list(csv.reader(file))[1:]
    return found


def finished(study: Path) -> int:
    """Finished trials so far; 0 before there is a study."""
    result = hpo("status", study, "--json", code=None)
    return int(json.loads(result.stdout)["finished"]) if result.returncode == 0 else 0


def evaluate(checkpoint: str, params: dict[str, Any]) -> float:
    """The validation loss of a checkpoint, computed without this project's code."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(96, 4, generator=generator)
    targets = (inputs @ torch.tensor([1.0, -2.0, 0.5, 0.0])).unsqueeze(1)
    hidden = params["model.hidden"]
    layers = torch.nn.Sequential(
        torch.nn.Linear(4, hidden), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(hidden, 1)
    )
    weights = torch.load(checkpoint, weights_only=True)["model"]
    layers.load_state_dict({name.removeprefix("layers."): value for name, value in weights.items()})
    with torch.no_grad():
        return float(((layers.eval()(inputs[64:]) - targets[64:]) ** 2).mean())


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A study that has run to its end, and what was printed."""
    study = make_study(tmp_path_factory.mktemp("study"))
    return study, hpo("run", study, "--workers", 2).stdout


def test_a_study_runs_to_its_end_and_says_what_to_do_next(done: tuple[Path, str]) -> None:
    study, printed = done
    status = hpo_json("status", study)
    assert list(status) == STATUS_KEYS
    assert list(status["outcomes"]) == OUTCOMES
    assert (status["n_trials"], status["finished"], status["running"], status["waiting"]) == (6, 6, 0, 0)
    best = hpo_json("best", study)
    assert list(best) == BEST_KEYS
    assert status["best"] == best
    assert best["checkpoint"] in printed
    assert f"hpo train {study} --trial best" in printed


def test_the_best_checkpoint_evaluates_to_the_best_value(done: tuple[Path, str]) -> None:
    best = hpo_json("best", done[0])
    assert best["metrics"]["val_loss"] == best["value"]
    assert evaluate(best["checkpoint"], best["params"]) == pytest.approx(best["value"], abs=1e-6)
    trials = hpo_json("trials", done[0])
    assert min(entry["value"] for entry in trials) == best["value"]


def test_trials_are_listed_with_their_own_seeds_and_folders(done: tuple[Path, str]) -> None:
    study, _ = done
    trials = hpo_json("trials", study)
    assert [list(entry) for entry in trials] == [TRIAL_KEYS] * 6
    assert [list(entry["internals"]) for entry in trials] == [INTERNALS] * 6
    assert [entry["trial"] for entry in trials] == list(range(6))
    assert len({entry["internals"]["seed"] for entry in trials}) == 6
    for number, rows in curves(study, study.parent / "runs" / "tiny").items():
        assert [row[0] for row in rows] == ["1", "2", "3"]
        folder = study.parent / "runs" / "tiny" / "trials" / str(number) / "attempt-1"
        assert {"config.yaml", "log.txt", "metrics.csv", "checkpoints"} <= {item.name for item in folder.iterdir()}
    assert [item.name for item in (study.parent / "runs" / "tiny").glob("*.db")] == ["study.db"]


def test_more_trials_later_run_the_difference(done: tuple[Path, str], tmp_path: Path) -> None:
    study = make_study(tmp_path)
    hpo("run", study, "--n-trials", 2)
    hpo("run", study, "--n-trials", 4, "--workers", 2)
    assert hpo_json("status", study)["finished"] == 4
    # With the same seeds it is the same study, however it was cut.
    values = [entry["value"] for entry in hpo_json("trials", done[0])]
    assert [entry["value"] for entry in hpo_json("trials", study)] == values[:4]


def test_final_training_ends_at_least_as_good(done: tuple[Path, str], tmp_path: Path) -> None:
    study, _ = done
    best = hpo_json("best", study)
    final = hpo_json("train", study, "--trial", "best", "--epochs", 5)
    assert final["value"] <= best["value"]
    assert final["epochs"] == best_epoch(best) + 5
    assert {"val_loss", "test_loss", "test_mae"} <= final["metrics"].keys()
    assert final["metrics"]["val_loss"] == pytest.approx(final["value"], abs=1e-6)
    folder = study.parent / "runs" / "tiny" / "final"
    assert {"model.pt", "metrics.json", "config.yaml"} <= {item.name for item in folder.iterdir()}
    weights = torch.load(folder / "model.pt", weights_only=True)
    torch.save({"model": weights}, tmp_path / "again.pt")
    assert evaluate(str(tmp_path / "again.pt"), best["params"]) == pytest.approx(final["value"], abs=1e-6)


def best_epoch(best: dict[str, Any]) -> int:
    return int(Path(best["checkpoint"]).stem.split("-")[1])


def test_final_training_starts_anew_when_asked(done: tuple[Path, str]) -> None:
    printed = hpo("train", done[0], "--trial", 0, "--from-scratch", "--epochs", 2).stdout
    assert "trial 0, from scratch" in printed
    assert "learning rate over 2 epochs, CosineAnnealingLR" in printed


def test_sigkill_of_everything_loses_and_doubles_nothing(tmp_path: Path) -> None:
    study = make_study(tmp_path, code=HELD)
    for number in range(2):
        (tmp_path / f"pass-{number}").touch()
    process = start_hpo("run", study, "--workers", 3, "--n-trials", 9)
    wait_until(lambda: finished(study) == 2 and len(held(study)) == 3)
    kill_all(process)
    assert finished(study) == 2
    (tmp_path / "go").touch()
    hpo("run", study, "--workers", 3, "--n-trials", 9)
    status = hpo_json("status", study)
    assert (status["finished"], status["running"], status["waiting"]) == (9, 0, 0)
    undisturbed = make_study(tmp_path / "undisturbed")
    hpo("run", undisturbed, "--workers", 2, "--n-trials", 9)
    output = tmp_path / "runs" / "tiny"
    assert curves(study, output) == curves(undisturbed, tmp_path / "undisturbed" / "runs" / "tiny")


def test_workers_put_their_trials_down_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    study = make_study(tmp_path, code=CRAWLING)
    process = start_hpo("run", study, "--workers", 2, *LONG)
    wait_until(lambda: epochs_trained(study) == [1, 1])
    process.kill()
    process.communicate()
    wait_until(lambda: hpo_json("status", study)["running"] == 0)
    assert hpo_json("status", study)["waiting"] == 2


def test_a_killed_worker_is_replaced(tmp_path: Path) -> None:
    study = make_study(tmp_path, code=HELD)
    process = start_hpo("run", study, "--workers", 2)
    wait_until(lambda: len(held(study)) == 2)
    os.kill(max(held(study)), signal.SIGKILL)
    wait_until(lambda: len(held(study)) == 3)  # the trial of the other one
    (tmp_path / "go").touch()
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert hpo_json("status", study)["outcomes"]["complete"] == 6


def test_two_runs_at_once_share_the_total(tmp_path: Path, postgres_url: str) -> None:
    study = make_study(tmp_path)
    storage = ("--storage", postgres_url)
    both = [start_hpo("run", study, "--workers", 2, "--n-trials", 12, *storage) for _ in range(2)]
    for process in both:
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, errors
    status = hpo_json("status", study, *storage)
    assert (status["finished"], status["outcomes"]["complete"], status["running"]) == (12, 12, 0)


def test_one_worker_and_one_seed_give_the_same_study_twice(tmp_path: Path) -> None:
    text = STUDY.replace("{name: random, seed: 3}", "{name: tpe, seed: 3, n_startup_trials: 3}").replace(
        "pruner: none", "pruner: {name: median, n_startup_trials: 2}"
    )
    seen = []
    for name in ("first", "second"):
        study = make_study(tmp_path / name, text)
        hpo("run", study, "--n-trials", 8)
        trials = hpo_json("trials", study)
        for entry in trials:
            del entry["duration_s"], entry["internals"]["attempts"]
        seen.append(trials)
    assert seen[0] == seen[1]
    assert {entry["outcome"] for entry in seen[0]} == {"complete", "pruned"}


def test_four_workers_start_at_four_points(tmp_path: Path) -> None:
    study = make_study(tmp_path, STUDY.replace("name: random", "name: tpe"))
    hpo("run", study, "--workers", 4, "--n-trials", 8)
    points = [tuple(entry["params"].values()) for entry in hpo_json("trials", study)]
    assert len(set(points)) == 8


def test_ctrl_c_interrupts_trials_and_they_resume(tmp_path: Path) -> None:
    study = make_study(tmp_path, code=CRAWLING)
    options = ("--workers", 2, *LONG, "trainer.max_epochs=3")
    process = start_hpo("run", study, *options)
    wait_until(lambda: epochs_trained(study) == [1, 1])
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert f"resume with:\n  {sys.executable} -m hpo run {study} --workers 2" in errors
    status = hpo_json("status", study)
    assert status["running"] == 0
    assert status["waiting"] == 2
    (tmp_path / "go").touch()
    hpo("run", study, *options)
    assert hpo_json("status", study)["outcomes"]["complete"] == 6
    for rows in curves(study, tmp_path / "runs" / "tiny").values():
        assert all(int(after[0]) == int(before[0]) + 1 for before, after in pairwise(rows))


def test_a_timeout_interrupts_trials_and_is_no_failure(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    printed = hpo("run", study, "--timeout", "3", "model.delay=0.2", "trainer.max_epochs=4000").stdout
    assert "the time limit is reached" in printed
    status = hpo_json("status", study)
    assert (status["running"], status["finished"]) == (0, 0)


def test_a_grid_is_run_through_once_and_said_to_be_exhausted(tmp_path: Path) -> None:
    text = STUDY.replace("name: random", "name: grid").replace(
        "{type: float, low: 1e-3, high: 1e-1, log: true}", "{type: categorical, choices: [0.01, 0.1]}"
    )
    study = make_study(tmp_path, text.replace("low: 2, high: 8", "low: 2, high: 4"))
    printed = hpo("run", study, "--workers", 3, "--n-trials", 40).stdout
    assert "the grid is exhausted: it has 6 points" in printed
    points = {tuple(entry["params"].values()) for entry in hpo_json("trials", study)}
    assert points == {(lr, hidden) for lr in (0.01, 0.1) for hidden in (2, 3, 4)}


def test_a_population_that_has_trained_to_its_end_is_said_to_have(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    scheduler = "study.scheduler={name: pbt, population: 4, every: 1}"
    printed = hpo("run", study, "--n-trials", 40, scheduler, "trainer.max_epochs=2", "study.epochs=60").stdout
    trained = hpo_json("status", study)["epochs"]["trained"]
    said = "the scheduler starts no more trials: those that it has started have trained to their ends"
    assert f"{said}; {60 - trained} epochs of the budget not used" in printed


def test_diverged_is_neither_pruned_nor_best(tmp_path: Path) -> None:
    text = STUDY + "  loss.nan: {type: categorical, choices: [true, false]}\n"
    study = make_study(tmp_path, text.replace("pruner: none", "pruner: {name: successive_halving}"))
    hpo("run", study, "--workers", 2, "--n-trials", 8)
    trials = hpo_json("trials", study)
    diverged = [entry for entry in trials if entry["outcome"] == "diverged"]
    assert [entry["params"]["loss.nan"] for entry in diverged] == [True] * len(diverged)
    assert diverged
    assert all(entry["value"] is None for entry in diverged)
    assert not any(entry["params"]["loss.nan"] for entry in trials if entry["outcome"] != "diverged")
    assert hpo_json("best", study)["params"]["loss.nan"] is False


def test_some_failing_trials_do_not_stop_a_study(tmp_path: Path) -> None:
    text = STUDY + "  loss.fail: {type: categorical, choices: [true, false]}\n"
    study = make_study(tmp_path, text)
    printed = hpo("run", study, "--n-trials", 6, "study.sampler.seed=1").stdout
    outcomes = hpo_json("status", study, "study.sampler.seed=1")["outcomes"]
    assert outcomes["complete"] + outcomes["error"] == 6
    assert outcomes["error"] > 0
    assert "ValueError: this loss fails" in printed


def test_a_study_whose_trials_all_fail_alike_stops_with_the_error(tmp_path: Path) -> None:
    study = make_study(tmp_path, STUDY.replace("parts.load}", "parts.load, broken: true}"))
    result = hpo("run", study, "--workers", 2, code=3)
    assert "the first 3 trials failed alike:\n  RuntimeError: the data is broken" in result.stderr
    assert "Traceback" not in result.stderr
    assert "no complete trial yet" in hpo("best", study, code=3).stderr


def test_a_changed_config_is_refused_with_the_ways_out(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    hpo("run", study, "--n-trials", 1)
    refused = hpo("run", study, "--n-trials", 3, "optimizer.lr=0.5", code=2).stderr
    assert "optimizer.lr: 0.01 → 0.5" in refused
    assert "n_trials" not in refused
    assert "study.name=tiny-2" in refused
    assert "hpo delete" in refused
    assert "Traceback" not in refused
    hpo("run", study, "--n-trials", 2, "--timeout", "1h", "--workers", 2, "--devices", "cpu")
    hpo("delete", study, code=2)
    hpo("delete", study, "--yes")
    hpo("run", study, "--n-trials", 1, "optimizer.lr=0.5")
    assert hpo_json("status", study)["finished"] == 1


@pytest.mark.parametrize(
    ("change", "first_line"),
    [
        (("study.metric=val_los", "study.direction=minimize"), "command line: study.metric: nothing records"),
        (("study.sampler.name=tpee",), "command line: study.sampler.name: no sampler has this name"),
        (("study.pruner={name: median, warmup: 3}",), "command line: study.pruner.warmup: MedianPruner takes no"),
        (
            ("study.sampler={name: tpe, n_startup_trials: many}",),
            "command line: study.sampler.n_startup_trials: must be",
        ),
        (
            ("study.pruner={name: median, n_warmup_steps: [1]}",),
            "command line: study.pruner.n_warmup_steps: must be",
        ),
        (("study.sampler.name=cmaes",), "command line: study.sampler.name: CMA-ES unpickles"),
        (("study.sampler.name=grid",), "optimizer.lr"),
        (("callbacks={early_stoping: {}}",), "command line: callbacks.early_stoping: "),
        (("callbacks={checkpoint: false}",), "command line: callbacks.checkpoint: can't be switched off"),
        (("--devices", "cuda:7"), "command line: run.devices: no such device here"),
    ],
)
def test_bad_input_ends_with_2_and_leaves_nothing(
    tmp_path: Path, change: tuple[str, ...], first_line: str
) -> None:
    study = make_study(tmp_path)
    result = hpo("run", study, *change, code=2)
    assert first_line in result.stderr.splitlines()[0]
    assert "fix: " in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "runs").exists()


def test_looking_at_a_study_that_was_not_run_leaves_nothing(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    for command in ("status", "best", "trials"):
        assert "hpo run" in hpo(command, study, code=3).stderr
    assert not (tmp_path / "runs").exists()


def test_output_and_storage_go_where_the_options_say(tmp_path: Path) -> None:
    study = make_study(tmp_path / "study")
    options = ("--storage", f"sqlite:///{tmp_path}/elsewhere/all.db", "--output-dir", tmp_path / "out")
    hpo("run", study, "--n-trials", 1, *options)
    assert (tmp_path / "elsewhere" / "all.db").exists()
    assert Path(hpo_json("best", study, *options)["checkpoint"]).is_relative_to(tmp_path / "out")
    assert not (tmp_path / "study" / "runs").exists()


def test_help_needs_neither_torch_nor_optuna() -> None:
    code = (
        "import sys\nfrom hpo.cli.app import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'optuna', 'sqlalchemy', 'pydantic', 'omegaconf', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
