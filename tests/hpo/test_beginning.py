"""What a study begins with: the base config, another study's trials, enqueued trials."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from hpo.beginning import BASELINE_ATTR, ORIGIN_ATTR, begin
from hpo.config import load_spec
from hpo.errors import InputError, StudyError
from hpo.study import CONFIG_ATTR, OpenStudy, _keep_config, load_study, start_study
from tests.acceptance.support import STUDY, hpo, hpo_json, make_study
from tests.hpo.support import Studies, ask

BASELINE = "study.baseline=true"


def own(view: OpenStudy) -> list[optuna.trial.FrozenTrial]:
    return view.study.get_trials(deepcopy=False)


def test_the_base_config_is_the_first_trial(studies: Studies) -> None:
    with studies.open(BASELINE) as (view,):
        trial, params = ask(view)
        assert (trial.number, params) == (0, {"optimizer.lr": 0.01, "model.hidden": 4})
        assert trial.user_attrs[BASELINE_ATTR]
        assert ask(view)[1] != params


def test_it_counts_among_the_studys_trials(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    hpo("run", study, "--workers", 2, "--n-trials", 2, BASELINE)
    hpo("run", study, "--workers", 2, "--n-trials", 3, BASELINE)
    trials = hpo_json("trials", study, BASELINE)
    assert [trial["outcome"] for trial in trials] == ["complete"] * 3
    assert [trial["params"]["model.hidden"] for trial in trials].count(4) >= 1
    assert trials[0]["params"] == {"optimizer.lr": 0.01, "model.hidden": 4}


def test_what_is_under_a_condition_that_does_not_hold_is_left_out(studies: Studies) -> None:
    text = STUDY + (
        "  optimizer._target_: {type: categorical, choices: [torch.optim.AdamW, torch.optim.SGD]}\n"
        "  optimizer.momentum: {type: float, low: 0.0, high: 0.9, when: {optimizer._target_: torch.optim.SGD}}\n"
    )
    with studies.open(BASELINE, text=text) as (view,):
        assert "optimizer.momentum" not in ask(view)[1]


@pytest.mark.parametrize(
    ("override", "path", "fix"),
    [
        ("optimizer.lr=0.5", "optimizer.lr", "from 0.001 to 0.1"),
        ("model.hidden=99", "model.hidden", "from 2 to 8"),
        (
            "search_space={optimizer.eps: {type: float, low: 1e-9, high: 1e-7}}",
            "search_space[optimizer.eps]",
            "eps",
        ),
    ],
)
def test_a_base_config_outside_of_the_space_is_refused(
    studies: Studies, override: str, path: str, fix: str
) -> None:
    spec = studies.spec(BASELINE, override)
    with pytest.raises(InputError) as caught:
        start_study(spec)
    assert caught.value.path == path
    assert fix in caught.value.fix
    assert not (spec.output_dir / "study.db").exists()


def test_processes_that_start_together_begin_once(studies: Studies) -> None:
    with studies.open() as _:  # the tables are there; the study begins below
        pass
    spec = studies.spec(BASELINE, "study.name=together")
    opened: list[OpenStudy] = []
    threads = [threading.Thread(target=lambda: opened.append(start_study(spec))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert [BASELINE_ATTR in trial.user_attrs for trial in own(opened[0])] == [True]
    finally:
        for each in opened:
            each.storage.close()


def test_a_beginning_whose_process_died_is_made_good(studies: Studies, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise RuntimeError("the power is gone")

    monkeypatch.setattr("hpo.beginning._PATIENCE", 0.5)
    spec = studies.spec(BASELINE)
    with monkeypatch.context() as broken:
        broken.setattr(optuna.Study, "enqueue_trial", die)
        with pytest.raises(RuntimeError, match="the power is gone"):
            start_study(spec)
    opened = start_study(spec)
    try:
        assert [trial.state for trial in own(opened)] == [TrialState.WAITING]
        assert begin(spec, opened.space, opened.storage, opened.study) == []
    finally:
        opened.storage.close()


# ---- another study's trials


@pytest.fixture
def pilot(tmp_path: Path) -> Path:
    """A study of six trials that ran."""
    study = make_study(tmp_path / "pilot")
    hpo("run", study, "--workers", 2, "study.name=pilot", "loss.nan=false")
    study.write_text(study.read_text().replace("name: tiny", "name: pilot"))
    return study


def test_trials_of_another_study_are_known_and_do_not_count(pilot: Path, tmp_path: Path) -> None:
    study = make_study(tmp_path / "next")
    warm = ("study.warm_start=../pilot/study.yaml", "search_space[model.hidden].high=6")
    fitting = [trial for trial in hpo_json("trials", pilot) if trial["params"]["model.hidden"] <= 6]
    assert 0 < len(fitting) < 6
    out = hpo("run", study, "--n-trials", 2, "--workers", 1, *warm)
    assert f"{len(fitting)} trials are known from ../pilot/study.yaml; {6 - len(fitting)} more lie outside" in (
        out.stdout + out.stderr
    )
    assert [trial["outcome"] for trial in hpo_json("trials", study, *warm)] == ["complete"] * 2
    opened = load_study(load_spec(study, warm))
    try:
        imported = [trial for trial in own(opened) if ORIGIN_ATTR in trial.system_attrs]
        assert [trial.system_attrs[ORIGIN_ATTR] for trial in imported] == [["pilot", t["trial"]] for t in fitting]
        assert [trial.value for trial in imported] == [trial["value"] for trial in fitting]
        assert all(trial.distributions == opened.space.distributions for trial in imported)
    finally:
        opened.storage.close()
    hpo("run", study, "--n-trials", 3, "--workers", 1, *warm)
    assert len(hpo_json("trials", study, *warm)) == 3


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("study.warm_start=../nothing.yaml", "there is no such file"),
        ("study.warm_start=study.yaml", "is this study"),
        (
            "study.metric=val_mae study.direction=minimize study.warm_start=../pilot/study.yaml",
            "optimises val_loss",
        ),
    ],
)
def test_a_study_that_can_not_be_started_from_is_refused(
    pilot: Path, tmp_path: Path, override: str, problem: str
) -> None:
    study = make_study(tmp_path / "next")
    result = hpo("run", study, *override.split(), code=2)
    assert result.stderr.startswith(("command line: study.warm_start: ", f"{study}"))
    assert problem in result.stderr
    assert not (study.parent / "runs").exists()


def test_a_study_that_never_ran_is_no_start(tmp_path: Path) -> None:
    make_study(tmp_path / "pilot")
    study = make_study(tmp_path / "next")
    spec = load_spec(study, ["study.warm_start=../pilot/study.yaml"])
    with pytest.raises(StudyError, match="hpo run"):
        start_study(spec)
    assert not (study.parent / "runs").exists()


# ---- hpo enqueue


def test_an_enqueued_trial_runs_first(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    assert "trial 0 waits" in hpo("enqueue", study, "optimizer.lr=1e-2", "model.hidden=5").stdout
    told = hpo_json("enqueue", study, "optimizer.lr=1e-2", "model.hidden=5.0")
    assert told == {
        "study": "tiny",
        "trial": 1,
        "params": {"optimizer.lr": 0.01, "model.hidden": 5.0},
        "same_as": [0],
    }
    hpo("enqueue", study, "model.hidden=7")
    hpo("run", study, "--workers", 1, "--n-trials", 4)
    trials = hpo_json("trials", study)
    assert [trial["params"]["model.hidden"] for trial in trials][:3] == [5, 5, 7]
    assert [trial["params"]["optimizer.lr"] for trial in trials][:2] == [0.01, 0.01]
    assert [trial["outcome"] for trial in trials] == ["complete"] * 4
    full = hpo("enqueue", study, "model.hidden=7", "study.n_trials=3", code=2)
    assert "is not searched" in full.stderr


def test_the_budget_holds_for_enqueued_trials(tmp_path: Path) -> None:
    study = make_study(tmp_path, STUDY.replace("n_trials: 6", "n_trials: 1"))
    hpo("enqueue", study, "model.hidden=7")
    result = hpo("enqueue", study, "model.hidden=6", code=3)
    assert "study.n_trials" in result.stderr


@pytest.mark.parametrize(
    ("given", "first", "fix"),
    [
        ("model.hiden=5", "command line: model.hiden: is not searched", "did you mean `model.hidden`?"),
        ("model.hidden=50", "command line: model.hidden: is not in the search space", "from 2 to 8"),
        ("model.hidden=2.5", "command line: model.hidden: is not in the search space", "from 2 to 8"),
        ("model.hidden=many", "command line: model.hidden: is not in the search space", "from 2 to 8"),
        ("model.hidden", "command line: model.hidden: is not a parameter with its value", "path=value"),
        ("model.hidden=[", "command line: model.hidden: not a YAML value", "quote"),
        (
            "optimizer.momentum=0.5",
            "command line: optimizer.momentum: is searched only under",
            "give `optimizer._t",
        ),
    ],
)
def test_what_can_not_be_enqueued_leaves_the_queue_empty(tmp_path: Path, given: str, first: str, fix: str) -> None:
    text = STUDY + (
        "  optimizer._target_: {type: categorical, choices: [torch.optim.AdamW, torch.optim.SGD]}\n"
        "  optimizer.momentum: {type: float, low: 0.0, high: 0.9, when: {optimizer._target_: torch.optim.SGD}}\n"
    )
    study = make_study(tmp_path, text)
    result = hpo("enqueue", study, given, code=2)
    assert result.stderr.startswith(first)
    assert fix in result.stderr
    if (tmp_path / "runs").exists():
        assert hpo_json("status", study)["waiting"] == 0


def test_a_grid_draws_no_single_values(tmp_path: Path) -> None:
    text = STUDY.replace(
        "{type: float, low: 1e-3, high: 1e-1, log: true}", "{type: categorical, choices: [0.1, 0.2]}"
    )
    study = make_study(tmp_path, text.replace("{name: random, seed: 3}", "grid"))
    assert "a grid draws no single values" in hpo("enqueue", study, "model.hidden=3", code=2).stderr
    hpo("enqueue", study, "model.hidden=3", "optimizer.lr=0.1")


def test_a_stored_config_tells_no_password(studies: Studies) -> None:
    spec = studies.spec("study.storage=postgresql://me:s3cret@host/db")
    study = optuna.create_study()
    _keep_config(spec, study)
    assert study.user_attrs[CONFIG_ATTR]["study"]["storage"] == "postgresql://me:***@host/db"
    assert "s3cret" not in str(study.user_attrs)
