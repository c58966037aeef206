"""What `import hpo` gives: running, reading, and models, from Python."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

import hpo
from hpo.execution.placing import Placing
from hpo.execution.supervisor import Ending
from hpo.study.open_study import load_study
from hpo.study.status import study_best, study_status
from tests.support.commands import CRAWLING, STUDY, hpo_json, make_study, wait_until
from tests.support.studies import Studies, ask

SEVERAL = STUDY.replace("  n_trials: 6", "  n_trials: 2\n  objectives: {val_loss: minimize, val_mae: minimize}")


@dataclass(frozen=True)
class Done:
    """A study that `hpo.run` has brought to its end, and what was printed meanwhile."""

    path: Path
    result: hpo.RunResult
    printed: str


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    path = make_study(tmp_path_factory.mktemp("api"))
    before = optuna.logging.get_verbosity()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = hpo.run(str(path), {"trainer.max_epochs": 1, "model.dropout": 0.0}, workers=2, n_trials=3)
    assert optuna.logging.get_verbosity() == before
    return Done(path, result, printed.getvalue())


OVERRIDES = ["trainer.max_epochs=1", "model.dropout=0.0"]


def test_an_engine_that_the_study_names_gets_what_the_call_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Placing, Any]] = []

    def run_on(placing: Placing, listen: object, warn: object, **how: bool) -> Ending:
        asked.append((placing, how))
        raise hpo.StudyError("there is no engine in a test")

    monkeypatch.setattr("hpo.execution.placing.run_on", run_on)
    path = make_study(tmp_path)
    overrides = {"run.on": "local", "run.agents": 3, "model.hidden": 3}
    with pytest.raises(hpo.StudyError, match="no engine in a test"):
        hpo.run(path, overrides, n_trials=2, workers=2, widen=True)
    ((placing, how),) = asked
    assert how == {"accept_code_change": False, "widen": True}
    assert (placing.address.kind, placing.spec.run.agents, placing.order.workers) == ("local", (3, 3), 2)
    assert placing.order.arguments == ('run.on="local"', "run.agents=3", "model.hidden=3", "study.n_trials=2")
    with pytest.raises(hpo.InputError, match="a SQLite file can't be shared"):
        hpo.run(path, {"run.on": "slurm"})
    with pytest.raises(hpo.InputError, match="widen: must be true or false"):
        hpo.run(path, widen="no")  # type: ignore[arg-type]


def test_a_run_says_what_it_has_come_to(done: Done) -> None:
    result = done.result
    assert (result.n_trials, result.finished, result.ending) == (3, 3, "done")
    assert {name: count for name, count in result.outcomes.items() if count} == {"complete": 3}
    assert result.best == hpo_json("best", done.path, *OVERRIDES)
    assert result.best["value"] == result.study.best_value
    assert repr(result) == (
        f"<RunResult tiny: 3 of 3 trials, 3 complete; best: trial {result.best['trial']}, "
        f"{result.best['value']:.6g}>"
    )


def test_a_run_prints_a_line_a_trial(done: Done) -> None:
    lines = [line for line in done.printed.splitlines() if line.startswith("[")]
    assert len(lines) == 3
    assert done.printed.startswith("study tiny: 3 trials, 2 workers on ")


def test_the_study_is_optunas_own(done: Done) -> None:
    study = hpo.load_study(done.path, OVERRIDES)
    assert type(study) is optuna.Study
    assert [trial.number for trial in study.trials] == [0, 1, 2]
    assert list(study.trials_dataframe()["params_model.hidden"]) == [
        each.params["model.hidden"] for each in study.trials
    ]
    assert study.best_params == hpo.best_params(done.path, OVERRIDES)
    figure = optuna.visualization.plot_optimization_history(study)
    assert list(figure.data[0].y) == [trial.value for trial in study.trials]
    assert set(optuna.importance.get_param_importances(study)) == {"optimizer.lr", "model.hidden"}
    copied = optuna.create_study()
    copied.add_trials(study.trials)
    assert copied.best_params == study.best_params


def writes() -> dict[str, Any]:
    return {
        "ask": lambda study: study.ask(),
        "optimize": lambda study: study.optimize(lambda _: 1.0, n_trials=1),
        "enqueue": lambda study: study.enqueue_trial({"model.hidden": 4}),
        "add": lambda study: study.add_trial(study.trials[0]),
        "user attribute": lambda study: study.set_user_attr("hpo:budget", 100),
        "delete": lambda study: optuna.delete_study(study_name=study.study_name, storage=study._storage),
        "create": lambda study: optuna.create_study(study_name="other", storage=study._storage),
        "trial's attribute": lambda study: study._storage.set_trial_user_attr(1, "hpo:outcome", "complete"),
        "trial's state": lambda study: study._storage.set_trial_state_values(1, optuna.trial.TrialState.FAIL),
        "trial's value": lambda study: study._storage.set_trial_intermediate_value(1, 1, 0.0),
    }


@pytest.mark.parametrize("write", writes().values(), ids=writes())
def test_it_can_not_be_written_to(done: Done, write: Any) -> None:
    study = hpo.load_study(done.path, OVERRIDES)
    before = [(trial.state, trial.values, trial.user_attrs) for trial in study.trials]
    attributes = study.user_attrs
    with pytest.raises(hpo.StudyError, match="for reading only"):
        write(study)
    study = hpo.load_study(done.path, OVERRIDES)
    assert [(trial.state, trial.values, trial.user_attrs) for trial in study.trials] == before
    assert study.user_attrs == attributes
    assert optuna.get_all_study_names(study._storage) == ["tiny"]


def test_a_running_study_can_be_looked_at(studies: Studies) -> None:
    with studies.open("study.n_trials=4") as (view,):
        trial, params = ask(view)
        study = hpo.load_study(studies.folder / "study.yaml", {"study.n_trials": 4})
        assert [(each.state.name, each.params) for each in study.trials] == [("RUNNING", params)]
        trial.report(2.5, 1)
        assert study.trials[0].intermediate_values == {1: 2.5}
        with pytest.raises(hpo.StudyError, match="for reading only"):
            study.tell(0, 1.0)
        view.study.tell(trial, 2.5)
        assert study.best_value == 2.5


def test_the_best_model_comes_with_its_weights(done: Done) -> None:
    best = done.result.best
    model = hpo.load_best_model(done.path, OVERRIDES)
    assert not model.training
    assert model.layers[0].out_features == best["params"]["model.hidden"]
    kept = torch.load(best["checkpoint"], weights_only=True)["model"]
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    other = next(number for number in range(3) if number != best["trial"])
    other_params = hpo.best_params(done.path, OVERRIDES, trial=other)
    assert other_params == done.result.study.trials[other].params
    loaded = hpo.load_best_model(done.path, OVERRIDES, trial=other, device=torch.device("cpu"))
    assert loaded.layers[0].out_features == other_params["model.hidden"]
    for device in ("gpu", "cuda:99"):
        with pytest.raises(hpo.InputError, match=f"device: can't hold the model: .*\n  value: {device}\n"):
            hpo.load_best_model(done.path, OVERRIDES, device=device)


def test_best_params_are_overrides(done: Done, tmp_path: Path) -> None:
    params = hpo.best_params(done.path, OVERRIDES)
    path = make_study(tmp_path)
    spec_params = hpo.api.functions._spec(path, params).resolve()
    assert spec_params["model"]["hidden"] == params["model.hidden"]
    assert spec_params["optimizer"]["lr"] == params["optimizer.lr"]


@pytest.mark.usefixtures("in_process")
def test_a_study_that_has_ended_runs_no_further(done: Done, capfd: pytest.CaptureFixture[str]) -> None:
    again = hpo.run(done.path, OVERRIDES, n_trials=3, progress=False)
    assert (again.finished, again.best) == (3, done.result.best)
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("in_process")
def test_several_objectives_have_a_front(tmp_path: Path) -> None:
    path = make_study(tmp_path, SEVERAL)
    result = hpo.run(path, ["trainer.max_epochs=1"], progress=False)
    with load_study(hpo.api.functions._spec(path, ["trainer.max_epochs=1"])) as opened:
        assert result.best == study_best(opened) == study_status(opened)["best"]
    numbers = [entry["trial"] for entry in result.best]
    assert numbers == [trial.number for trial in result.study.best_trials]
    assert f"; best: trials {', '.join(map(str, numbers))}>" in repr(result)
    with pytest.raises(hpo.StudyError, match="no single best trial"):
        hpo.best_params(path, ["trainer.max_epochs=1"])


@pytest.mark.parametrize(
    ("call", "said", "fix"),
    [
        (
            lambda path: hpo.run(path, ["model.hiden=3"]),
            "this call: model.hiden: `parts.Net` takes no",
            "`hidden`",
        ),
        (
            lambda path: hpo.run(path, {"model.hiden": 3}),
            "this call: model.hiden: `parts.Net` takes no",
            "`hidden`",
        ),
        (lambda path: hpo.run(path, "a=1"), "overrides: is one text", "give a list of them, or a mapping"),
        (
            lambda path: hpo.run(path, {"model.hidden": torch.nn.Tanh()}),
            "model.hidden: Object of type Tanh",
            "text",
        ),
        (
            lambda path: hpo.run(path, {"optimizer.lr": float("nan")}),
            "optimizer.lr: Out of range",
            "finite number",
        ),
        (
            lambda path: hpo.run(path, [3]),
            "overrides: holds something that is not text",
            "a list of texts such as",
        ),
        (lambda path: hpo.run(path, None), "overrides: holds something that is not text", "or a mapping"),
        (lambda path: hpo.run(path, output_dir=3), "this call: run.output_dir: must be text", "value: 3"),
        (lambda path: hpo.run(path, storage=3), "this call: run.storage: must be text", "value: 3"),
        (lambda path: hpo.run(path, devices=3), "this call: run.devices: must be names of devices", "[cpu]"),
        (lambda path: hpo.best_params(None), "study: is an object of NoneType", "give a study file"),
        (lambda path: hpo.run(path, workers=0), "this call: run.workers: must be at least 1", "run.workers"),
        (lambda path: hpo.run(path, timeout="soon"), "this call: run.timeout: is not a duration", '"2h"'),
        (lambda path: hpo.run(path.parent / "no.yaml"), "", "did you mean `"),
        (lambda path: hpo.run(path, {"search_space": {}}), "this call: search_space: there is nothing", "add for"),
        (lambda path: hpo.best_params(path, trial="first"), "trial: is neither `best` nor a number", "hpo trials"),
        (lambda path: hpo.load_best_model(path, trial=-1), "trial: is neither `best` nor a number", "hpo trials"),
        (
            lambda path: hpo.run(str(path.with_name("a\0b"))),
            "is not a file path (embedded null byte)",
            "give the path of a YAML file",
        ),
        (
            lambda path: hpo.run(path, output_dir="a\0b"),
            "this call: run.output_dir: holds the character NUL",
            "leave it out",
        ),
        (
            lambda path: hpo.run(path, storage="sqlite:///a\0b"),
            "this call: run.storage: holds the character NUL",
            "leave it out",
        ),
        (
            lambda path: hpo.run(path, devices="cuda:99"),
            "this call: run.devices: no such device here",
            "there are cpu",
        ),
    ],
)
def test_errors_name_what_is_wrong_and_leave_nothing(tmp_path: Path, call: Any, said: str, fix: str) -> None:
    path = make_study(tmp_path)
    with pytest.raises(hpo.InputError) as error:
        call(path)
    assert str(error.value).startswith(said), str(error.value)
    assert fix in str(error.value), str(error.value)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["parts.py", "study.yaml"]


@pytest.mark.parametrize("question", [hpo.load_study, hpo.best_params, hpo.load_best_model])
def test_a_study_that_was_never_started(tmp_path: Path, question: Any) -> None:
    with pytest.raises(hpo.StudyError):
        question(make_study(tmp_path))
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("in_process")
def test_warnings_are_warnings_at_the_line_that_calls(tmp_path: Path) -> None:
    text = STUDY.replace("{name: random, seed: 3}", "tpe").replace("n_trials: 6", "n_trials: 1")
    path = make_study(tmp_path, text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hpo.run(path, {"trainer.max_epochs": 1}, progress=False)
    warned = [
        each for each in caught if issubclass(each.category, UserWarning) and "study.sampler" in str(each.message)
    ]
    assert [each.filename for each in warned] == [__file__]


def test_other_threads_are_refused(tmp_path: Path) -> None:
    path, caught = make_study(tmp_path), []

    def call() -> None:
        try:
            hpo.run(path)
        except hpo.StudyError as error:
            caught.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in caught[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("in_process")
def test_changed_code_is_refused_until_it_is_accepted(tmp_path: Path) -> None:
    path, overrides = make_study(tmp_path), {"trainer.max_epochs": 1}
    hpo.run(path, overrides, n_trials=1, progress=False)
    code = tmp_path / "parts.py"
    code.write_text(code.read_text().replace("nn.Tanh()", "nn.ReLU()"))
    with pytest.raises(hpo.InputError, match=r"(?s)parts\.py has changed.*accept_code_change=True"):
        hpo.run(path, overrides, n_trials=2, progress=False)
    result = hpo.run(path, overrides, n_trials=2, progress=False, accept_code_change=True)
    assert result.finished == 2


@pytest.mark.usefixtures("in_process")
def test_a_run_without_a_complete_trial_is_an_error(tmp_path: Path) -> None:
    path = make_study(tmp_path)
    with pytest.raises(hpo.StudyError, match=r"no trial of tiny is complete: 2 diverged\n  fix: ") as said:
        hpo.run(path, {"loss.nan": True}, n_trials=2, progress=False)
    assert "retry" not in str(said.value)  # none has failed
    assert len(hpo.load_study(path, {"loss.nan": True}).trials) == 2


@pytest.mark.full
def test_changed_code_counts_at_the_next_call(tmp_path: Path) -> None:
    """As in a notebook, where the module that a study names is written again and again."""
    path = make_study(tmp_path)
    hpo.run(path, {"trainer.max_epochs": 1}, n_trials=1, progress=False)
    code = (tmp_path / "parts.py").read_text()
    (tmp_path / "parts.py").write_text(code.replace("hidden=4, ", "hidden=4, width=1, "))
    text = path.read_text().replace("hidden: 4,", "hidden: 4, width: 2,").replace("name: tiny", "name: wide")
    path.write_text(text)
    result = hpo.run(path, {"trainer.max_epochs": 1}, n_trials=1, progress=False)
    assert result.outcomes["complete"] == 1
    (tmp_path / "parts.py").write_text(
        code.replace("hidden=4, ", "hidden=4, width=1, ").replace("nn.Tanh()", "nn.ReLU()")
    )
    with pytest.warns(UserWarning, match=r"trial 0 ran under the code \w+, and the code here is \w+"):
        assert "ReLU" in str(hpo.load_best_model(path, {"trainer.max_epochs": 1}))


@pytest.mark.full
def test_interrupted_trials_are_put_back_and_go_on(tmp_path: Path) -> None:
    path = make_study(tmp_path, code=CRAWLING)
    overrides = {"loader.batch_size": 1}

    def interrupt() -> None:
        wait_until(lambda: list(tmp_path.glob("runs/tiny/trials/*/attempt-1/metrics.csv")))
        os.kill(os.getpid(), signal.SIGINT)

    asker = threading.Thread(target=interrupt)
    asker.start()
    with pytest.raises(KeyboardInterrupt):
        hpo.run(path, overrides, n_trials=2, progress=False)
    asker.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    states = {trial.state.name for trial in hpo.load_study(path, overrides).trials}
    assert "RUNNING" not in states
    assert "WAITING" in states
    (tmp_path / "go").touch()
    result = hpo.run(path, overrides, n_trials=2, progress=False)
    assert result.finished == result.outcomes["complete"] == 2


@pytest.fixture
def fresh() -> Iterator[Any]:
    def imported(code: str) -> str:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    return imported


def test_the_import_is_light_and_the_names_are_there(fresh: Any) -> None:
    heavy = fresh(
        "import hpo, sys; names = set(dir(hpo)); assert set(hpo.__all__) <= names, names; "
        "print(sorted({'torch', 'optuna', 'pydantic', 'omegaconf', 'numpy', 'rich'} & set(sys.modules)))"
    )
    assert heavy == "[]\n"
    assert fresh("import hpo, sys; hpo.Float(1, 2); hpo.Call; print('optuna' in sys.modules)") == "False\n"


def test_every_public_name_can_be_had() -> None:
    for name in hpo.__all__:
        assert getattr(hpo, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'runn'"):
        hpo.runn  # noqa: B018


@pytest.mark.usefixtures("in_process")
def test_an_sqlite_url_in_place_of_the_studys(tmp_path: Path) -> None:
    path = make_study(tmp_path / "study")
    url, folder = f"sqlite:///{tmp_path}/other.db", tmp_path / "out"
    hpo.run(path, {"trainer.max_epochs": 1}, n_trials=1, storage=url, output_dir=folder, progress=False)
    study = hpo.load_study(path, {"trainer.max_epochs": 1}, storage=url)
    assert len(study.trials) == 1
    assert (folder / "trials/0").is_dir()
    assert not (tmp_path / "study/runs").exists()
    model = hpo.load_best_model(path, {"trainer.max_epochs": 1}, storage=url, output_dir=folder)
    assert isinstance(model, torch.nn.Module)
