"""Programs that run studies, as people start them: a script, `python -c`, and an interrupt."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import CRAWLING, MODEL, PATIENCE, hpo, hpo_json, make_study, wait_until
from tests.support.forked_program import ForkedProgram

PLAIN = """
    import hpo
    print("the script runs")
    result = hpo.run("study.yaml", ["trainer.max_epochs=1"], workers=2, n_trials=2, progress=False)
    print(result.finished, "trials", type(hpo.load_best_model("study.yaml", ["trainer.max_epochs=1"])).__name__)
"""
OWN = """
    import hpo
    import torch

    print("the top level of", __name__)
    study = hpo.Study(
        "own",
        n_trials=2,
        sampler={"name": "random", "seed": 0},
        pruner="none",
        data=load,
        model=Net,
        loss=torch.nn.MSELoss,
        optimizer=hpo.Call(torch.optim.AdamW, lr=1e-2),
        metrics={"mae": mae},
        trainer={"max_epochs": 1},
        search_space={"model.hidden": hpo.Int(2, 8)},
    )
    if __name__ == "__main__":
        result = hpo.run(study, workers=2, progress=False)
        print(result.finished, "trials", type(hpo.load_best_model(study)).__name__)
"""


SERVED = """
    import multiprocessing
    import hpo

    def say(what):
        process = multiprocessing.get_context("forkserver").Process(target=print, args=(what,))
        process.start()
        process.join()

    if __name__ == "__main__":
        say("before")
        result = hpo.run("study.yaml", ["trainer.max_epochs=1"], n_trials=2, progress=False)
        print(result.finished, "trials", flush=True)
        say("after")
"""


def python(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def started(folder: Path, text: str) -> ForkedProgram:
    """A script that runs, where the start of a program is not the point; a warning is an error here, too."""
    with contextlib.chdir(folder):
        return ForkedProgram([str(script(folder, f"import warnings\nwarnings.simplefilter('error')\n{text}"))])


def printed(program: ForkedProgram) -> str:
    out, said = program.communicate(PATIENCE)
    assert program.returncode == 0, f"{out}\n{said}"
    return out


def script(folder: Path, text: str, *, model: str = "") -> Path:
    path = folder / "train.py"
    path.write_text(model + textwrap.dedent(text))
    return path


@pytest.mark.parametrize("how", ["script", "-c"])
def test_no_guard_is_needed_for_a_study_file(tmp_path: Path, how: str) -> None:
    """Workers run nothing of the calling program: it says its first line once."""
    make_study(tmp_path)
    path = script(tmp_path, PLAIN)
    done = python(tmp_path, *([str(path)] if how == "script" else ["-c", path.read_text()]))
    assert done.stdout.splitlines() == ["the script runs", "2 trials Net"]
    assert done.stderr == ""
    logs = "".join(log.read_text() for log in (tmp_path / "runs/tiny/logs").iterdir())
    assert "the script runs" not in logs


def test_a_script_has_a_fork_server_of_its_own(tmp_path: Path) -> None:
    make_study(tmp_path)
    done = python(tmp_path, str(script(tmp_path, SERVED)))
    assert done.stdout.splitlines() == ["before", "2 trials", "after"]


def test_a_study_with_the_scripts_own_classes(tmp_path: Path) -> None:
    """The script is imported for them, under its own name; then the command line resumes the study."""
    path = script(tmp_path, OWN, model=MODEL)
    first, *imported, last = python(tmp_path, str(path)).stdout.splitlines()
    assert first == "the top level of __main__"
    assert imported
    assert all(line.endswith(".train") for line in imported)
    assert last == "2 trials Net"
    written = tmp_path / "own.yaml"
    assert written.read_text().startswith("# Written by hpo.Study")
    assert hpo_json("status", written)["finished"] == 2
    hpo("run", written, "--n-trials", 3)
    assert hpo_json("status", written)["finished"] == 3
    again = "import hpo, train; print(hpo.run(train.study, n_trials=4, progress=False))"
    assert "4 trials" in python(tmp_path, "-c", again).stdout


@pytest.mark.parametrize("named_by", ["hpo.Study", "a study file"])
def test_a_script_that_is_imported_must_not_start_the_study_then(tmp_path: Path, named_by: str) -> None:
    if named_by == "hpo.Study":
        text, start = OWN.replace('if __name__ == "__main__":', "if True:"), "hpo.run("
    else:
        study = make_study(tmp_path)
        study.write_text(study.read_text().replace("parts.", "train."))
        text, start = PLAIN, "hpo.run("
    path = script(tmp_path, text, model=MODEL)
    line = 1 + next(at for at, each in enumerate(path.read_text().splitlines()) if start in each)
    said = python(tmp_path, str(path), code=1).stderr.splitlines()
    problem = next(
        each for each in said if "`train` starts a study whenever it is imported, as workers do" in each
    )
    assert f"{path}:{line}" in problem
    assert any('put what starts the study under `if __name__ == "__main__":`' in each for each in said)
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "own.yaml").exists()


FUNCTION = """
    import hpo


    def fit(lr, hidden=4):
        return (lr - 0.1) ** 2 + hidden


    def objective(trial):
        return trial.suggest_float("x", -1, 1) ** 2


    if __name__ == "__main__":
        space = {"lr": hpo.Float(1e-3, 1.0, log=True), "hidden": hpo.Int(1, 8)}
        result = hpo.run(hpo.Call(fit, hidden=2), search_space={"lr": space["lr"]}, n_trials=3, workers=2)
        print(result.finished, sorted(result.best["params"]), result.best["value"] >= 2)
        result = hpo.run(objective, direction="minimize", n_trials=3, workers=2, progress=False)
        print(result.finished, sorted(result.best["params"]), result.best["value"] < 1)
"""


def test_functions_of_a_script_are_studies(tmp_path: Path) -> None:
    lines = printed(started(tmp_path, textwrap.dedent(FUNCTION))).splitlines()
    assert lines[-2:] == ["3 ['objective.lr'] True", "3 ['x'] True"]
    trials = hpo_json("trials", tmp_path / "train-fit.yaml")
    assert [each["value"] for each in trials] == [
        (each["params"]["objective.lr"] - 0.1) ** 2 + 2 for each in trials
    ]
    assert hpo_json("status", tmp_path / "train-objective.yaml")["outcomes"]["complete"] == 3


def test_an_interrupted_script_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    study = make_study(tmp_path, code=CRAWLING)
    overrides = ["loader.batch_size=1"]
    run = f'hpo.run("study.yaml", {overrides}, workers=2, n_trials=2, progress=False)'
    text = f"import hpo\nprint({run}.outcomes['complete'])\n"
    process = started(tmp_path, text)
    try:
        wait_until(lambda: list(tmp_path.glob("runs/tiny/trials/*/attempt-1/metrics.csv")))
        os.kill(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()
    assert said.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode in (1, -signal.SIGINT)
    status = hpo_json("status", study, *overrides)
    assert status["running"] == 0
    assert status["waiting"] > 0
    # A worker that has not heard yet may take what another has just put back, and put it back too.
    before = _attempts(hpo_json("trials", study, *overrides))
    assert {how for ends in before.values() for how in ends} == {("requeued", "interrupted")}
    (tmp_path / "go").touch()
    assert printed(started(tmp_path, text)) == "2\n"
    assert _attempts(hpo_json("trials", study, *overrides)) == {
        number: [*before.get(number, []), ("complete", None)] for number in (0, 1)
    }


def _attempts(trials: list[dict[str, Any]]) -> dict[int, list[tuple[str, str | None]]]:
    """How each trial's attempts ended, and why."""
    return {
        trial["trial"]: [(attempt["outcome"], attempt["reason"]) for attempt in trial["internals"]["attempts"]]
        for trial in trials
    }
