"""The audit finds each fault that is planted, names it, and finds nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from optuna.distributions import FloatDistribution
from optuna.trial import create_trial

from hpo.config.spec import load_spec
from hpo.study.open_study import start_study
from tests.acceptance.chaos.audit import audit
from tests.acceptance.chaos.planted import FAULTS, FAULTS_OF_TRAINING, N_TRIALS, Finished, make_second
from tests.acceptance.chaos.study import make_study
from tests.support.commands import hpo

REFUSED = {"optimizer.lr": 0.01, "model.hidden": 4, "model.dropout": 0.49, "loader.batch_size": 8}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study with every kind of end, one of its trials enqueued, another imported."""
    file = make_study(tmp_path_factory.mktemp("sound"))
    opened = start_study(load_spec(file, [f"study.n_trials={N_TRIALS}"]))
    opened.study.enqueue_trial(REFUSED)
    space = {"x": FloatDistribution(0.0, 1.0)}
    opened.study.add_trial(create_trial(params={"x": 0.5}, distributions=space, value=1e9))
    opened.storage.close()
    hpo("run", file, "--n-trials", N_TRIALS)
    return file


@pytest.fixture
def finished(sound: Path, tmp_path: Path) -> Finished:
    shutil.copytree(sound.parent, tmp_path / "study")
    return Finished(load_spec(tmp_path / "study" / sound.name))


def test_a_sound_study_has_no_problems(finished: Finished) -> None:
    ends = {row[0] for row in finished.sql("SELECT outcome FROM hpo_attempts")}
    assert {"complete", "pruned", "diverged", "error"} <= ends, "the study does not show what it is to show"
    assert audit(finished.spec) == []
    assert audit(finished.spec, retrain=False) == []


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_a_planted_fault_is_named(finished: Finished, plant: Callable[[Finished], list[str]]) -> None:
    expected = plant(finished)
    _is_named(audit(finished.spec, retrain=False), expected)


@pytest.mark.parametrize("plant", FAULTS_OF_TRAINING, ids=lambda plant: plant.__name__)
def test_a_fault_of_the_training_is_named(finished: Finished, plant: Callable[[Finished], list[str]]) -> None:
    expected = plant(finished)
    _is_named(audit(finished.spec), expected)


def _is_named(found: list[str], starts: list[str]) -> None:
    """Just these problems, in this order."""
    assert len(found) == len(starts), found
    for problem, start in zip(found, starts, strict=True):
        assert problem.startswith(start), found


def test_parameters_that_were_changed_afterwards(finished: Finished) -> None:
    number = finished.number("COMPLETE")
    statement = "UPDATE trial_params SET param_value = 0.5 WHERE param_name = 'optimizer.lr' AND trial_id = ?"
    finished.sql(statement, finished.id(number))
    config = f"trial {number}: attempt 1 trained with another config than its parameters give"
    assert audit(finished.spec, retrain=False) == [config]
    found = audit(finished.spec)
    assert config in found
    assert any(problem.startswith(f"trial {number}: step 1 is reported as ") for problem in found)


def test_parameters_outside_of_the_space(finished: Finished) -> None:
    number = finished.number("COMPLETE")
    statement = "UPDATE trial_params SET param_value = 9.0 WHERE param_name = 'optimizer.lr' AND trial_id = ?"
    finished.sql(statement, finished.id(number))
    found = audit(finished.spec, retrain=False)
    assert found == [
        problem
        for problem in found
        if problem.endswith("do not lie in the search space") and str(number) in problem
    ]
    assert found


def test_more_deaths_than_a_trial_may_have(finished: Finished) -> None:
    number = finished.number("COMPLETE")
    make_second(finished, number, "lost", 0.0)
    assert audit(finished.spec, retrain=False) == []
    strict = load_spec(finished.spec.path, ["run.max_retries=0"])
    assert audit(strict, retrain=False) == [f"trial {number}: its worker died 1 times, which is 1 too many"]
