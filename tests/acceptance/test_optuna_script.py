"""An Optuna script as it is: its objective run as a study, killed, looked at and trained, as a person does it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from hpo.config.spec import load_spec
from hpo.study.open_study import load_study
from tests.support.commands import hpo, hpo_json, start_hpo, wait_until

#: Begins at step 0, as Optuna's scripts do; which parameters a trial has depends on the first one.
SCRIPT = """
import os
import time
from pathlib import Path

import optuna
import torch
from sklearn.datasets import load_digits
from torch import nn

EPOCHS = 8


def define_model(trial):
    layers, features = [], 64
    for index in range(trial.suggest_int("n_layers", 1, 2)):
        width = trial.suggest_int(f"n_units_l{index}", 8, 32, log=True)
        dropout = trial.suggest_float(f"dropout_l{index}", 0, 0.5)
        layers += [nn.Linear(features, width), nn.ReLU(), nn.Dropout(dropout)]
        features = width
    return nn.Sequential(*layers, nn.Linear(features, 10))


def die_once(trial, epoch):
    marks = Path(__file__).with_name("deadly")
    if marks.is_dir() and epoch == 3 and not (mark := marks / str(trial.number)).exists():
        mark.touch()
        os._exit(3)


def wait_once(trial, epoch):
    mark = Path(__file__).with_name("process")
    if trial.number == 4 and epoch == 3 and not mark.exists():
        mark.with_suffix(".new").write_text(str(os.getpid()))
        mark.with_suffix(".new").rename(mark)
        time.sleep(600)


def objective(trial):
    torch.manual_seed(0)
    model = define_model(trial)
    name = trial.suggest_categorical("optimizer", ["Adam", "SGD"])
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))
    inputs, targets = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(inputs, dtype=torch.float32) / 16, torch.tensor(targets)
    for epoch in range(EPOCHS):
        die_once(trial, epoch)
        wait_once(trial, epoch)
        model.train()
        for batch in torch.randperm(1200).split(300):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[batch]), targets[batch]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            accuracy = (model(inputs[1200:]).argmax(1) == targets[1200:]).float().mean().item()
        trial.report(accuracy, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned()
    trial.set_user_attr("parameters", sum(each.numel() for each in model.parameters()))
    return accuracy


def resuming(trial):
    x = trial.suggest_float("x", 0, 1)
    state = trial.load_checkpoint() or {"epoch": -1, "value": x}
    for epoch in range(state["epoch"] + 1, EPOCHS):
        die_once(trial, epoch)
        state = {"epoch": epoch, "value": state["value"] * 0.9}
        trial.report(state["value"], epoch)
        trial.save_checkpoint(state)
    return state["value"]


if __name__ == "__main__":
    study = optuna.create_study(direction="maximize")
    study.optimize(objective, n_trials=20)
"""
STUDY = """
study: {name: digits, direction: maximize, n_trials: 4, sampler: {name: random, seed: 2}, pruner: none}
run: {workers: 2}
objective: {_target_: script.objective}
"""


def make(folder: Path, *, deadly: bool = False, waits: bool = False) -> Path:
    folder.mkdir()
    text = SCRIPT if waits else SCRIPT.replace("wait_once(trial, epoch)\n        model", "model")
    (folder / "script.py").write_text(text)
    (folder / "study.yaml").write_text(STUDY)
    if deadly:
        (folder / "deadly").mkdir()
    return folder / "study.yaml"


def trials(study: Path, *overrides: str) -> dict[int, tuple[Any, ...]]:
    """What each trial came to: outcome, value, parameters and curve, by number."""
    with load_study(load_spec(study, overrides)) as opened:
        return {
            trial.number: (
                trial.state.name,
                trial.value,
                trial.params,
                dict(sorted(trial.intermediate_values.items())),
            )
            for trial in opened.study.get_trials(deepcopy=False)
        }


def test_a_script_that_dies_in_each_first_attempt_gets_its_parameters_again_and_is_counted_once(
    tmp_path: Path,
) -> None:
    for target in ("script.objective", "script.resuming"):
        given = (f"objective._target_={target}", "study.n_trials=2")
        undisturbed = make(tmp_path / f"{target}-undisturbed")
        hpo("run", undisturbed, *given)
        expected = trials(undisturbed, *given)
        assert len(expected) == 2
        assert all(list(curve) == list(range(1, 9)) for *_, curve in expected.values())
        assert all(value == curve[8] for _, value, _, curve in expected.values())
        killed = make(tmp_path / target, deadly=True)
        hpo("run", killed, *given)
        assert trials(killed, *given) == expected
        looked = hpo_json("trials", killed, *given)
        assert [(each["outcome"], each["epochs"], len(each["internals"]["attempts"])) for each in looked] == [
            ("complete", 8, 2)
        ] * 2
        logs = sorted(killed.parent.glob("runs/digits/trials/*/attempt-2/log.txt"))
        again = ["attempt 2 starts again" in path.read_text() for path in logs]
        assert again == [target == "script.objective"] * 2


#: Trial 4 trains up to its fourth epoch, for no pruner ends one of the first eight.
PRUNED = "study.pruner={name: median, n_startup_trials: 8}"


def test_four_workers_a_killed_trial_and_all_that_looks_at_the_study(tmp_path: Path) -> None:
    study = make(tmp_path / "digits", waits=True)
    given = ("study.n_trials=12", "study.sampler={seed: 2}", "run.workers=4", PRUNED)
    assert "tpe (auto: the function draws its parameters itself)" in hpo("check", study, *given).stdout
    run = start_hpo("run", study, *given)
    process = study.parent / "process"
    wait_until(process.exists)
    os.kill(int(process.read_text()), signal.SIGKILL)
    assert run.communicate()[0].count("12 of 12 trials finished") == 1
    assert run.returncode == 0
    looked = hpo_json("trials", study, *given)
    assert [each["trial"] for each in looked] == list(range(12))
    assert {each["outcome"] for each in looked} <= {"complete", "pruned"}
    assert [len(each["internals"]["attempts"]) for each in looked] == [
        2 if number == 4 else 1 for number in range(12)
    ]
    best = hpo_json("best", study, *given)
    assert {"n_layers", "n_units_l0", "dropout_l0", "optimizer", "lr"} <= best["params"].keys()
    hpo("train", study, *given, "--trial", "best")
    final = json.loads((study.parent / "runs" / "digits" / "final" / "metrics.json").read_text())
    assert (final["value"], final["epochs"], final["trial"]) == (best["value"], 8, best["trial"])
    hpo("report", study, *given, "-o", tmp_path / "report.html")
    hpo("export", study, *given, "-o", tmp_path / "trials.csv")
    header = (tmp_path / "trials.csv").read_text().partition("\n")[0]
    assert {f"params.{name}" for name in best["params"]} <= set(header.split(","))
    assert "`script.objective` draws its parameters itself" in hpo("train", study, *given, code=2).stderr
