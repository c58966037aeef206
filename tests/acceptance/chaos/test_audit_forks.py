"""The audit of a study that forks trials: each fault that is planted in a lineage is found and named."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hpo.config.spec import load_spec
from tests.acceptance.chaos.audit import audit
from tests.acceptance.chaos.planted import Finished
from tests.acceptance.chaos.study import make_study
from tests.support.commands import hpo

PBT = (
    "study.scheduler={name: pbt, population: 4, every: 1, quantile: 0.5}",
    "study.pruner=none",
    "study.n_trials=40",
    "trainer.max_epochs=6",
    "callbacks.early_stopping.patience=50",
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = make_study(tmp_path_factory.mktemp("forks"), PBT)
    hpo("run", file, "--workers", 1)
    return file


@pytest.fixture
def finished(sound: Path, tmp_path: Path) -> Finished:
    shutil.copytree(sound.parent, tmp_path / "study")
    return Finished(load_spec(tmp_path / "study" / sound.name))


def forks(study: Finished) -> dict[int, dict[str, Any]]:
    """Forks that replaced a pruned trial, by number."""
    numbers = [
        row[0]
        for row in study.sql(
            "SELECT number FROM trials JOIN trial_user_attributes USING (trial_id) WHERE key = 'hpo:fork'"
        )
    ]
    return {number: study.attr(number, "hpo:fork") for number in sorted(numbers)}


def last(study: Finished) -> tuple[int, dict[str, Any]]:
    """The last fork: none begins from it."""
    return max(forks(study).items())


def test_a_sound_study_has_no_problems(finished: Finished) -> None:
    found = forks(finished)
    assert len(found) >= 2, "the study does not show what it is to show"
    assert any(each["parent"] in found for each in found.values()), "no fork is forked once more"
    assert audit(finished.spec) == []
    assert audit(finished.spec, retrain=False) == []


def a_parent_that_is_not_there(study: Finished) -> list[str]:
    number, fork = last(study)
    study.set_attr(number, "hpo:fork", {**fork, "parent": 99})
    return [f"trial {number} is a fork of trial 99 after epoch {fork['epoch']}, which is not before it"]


def an_epoch_that_the_parent_has_not_trained(study: Finished) -> list[str]:
    number, fork = last(study)
    study.set_attr(number, "hpo:fork", {**fork, "epoch": 60})
    return [f"trial {number} is a fork of trial {fork['parent']} after epoch 60, which that has not trained"]


def an_epoch_at_which_the_parent_has_not_paused(study: Finished) -> list[str]:
    number, fork = last(study)
    grants = [each for each in study.attr(fork["parent"], "hpo:grants") if each["until"] != fork["epoch"]]
    study.set_attr(fork["parent"], "hpo:grants", grants)
    begins = f"trial {number} is a fork of trial {fork['parent']} after epoch {fork['epoch']}"
    return [f"{begins}, where that has not paused"]


def two_forks_in_one_place(study: Finished) -> list[str]:
    (_, one), (number, other) = sorted(forks(study).items())[:2]
    study.set_attr(number, "hpo:fork", {**other, "replaces": one["replaces"]})
    return [
        f"several forks stand in the place of trial {one['replaces']}",
        f"nothing stands in the place of trial {other['replaces']}, which was pruned",
    ]


def an_empty_place(study: Finished) -> list[str]:
    number, fork = last(study)
    study.set_attr(number, "hpo:fork", {**fork, "replaces": None})
    return [f"nothing stands in the place of trial {fork['replaces']}, which was pruned"]


def a_complete_trial_is_replaced(study: Finished) -> list[str]:
    number, fork = last(study)
    (whole,) = study.sql("SELECT min(number) FROM trials WHERE state = 'COMPLETE'")[0]
    study.set_attr(number, "hpo:fork", {**fork, "replaces": whole})
    return [
        f"trial {number} stands in the place of trial {whole}, which is complete",
        f"nothing stands in the place of trial {fork['replaces']}, which was pruned",
    ]


def an_epoch_of_the_parent_is_another(study: Finished) -> list[str]:
    _, fork = last(study)
    row = (study.id(fork["parent"]), fork["epoch"])
    where = "WHERE trial_id = ? AND step = ?"
    (value,) = study.sql(f"SELECT intermediate_value FROM trial_intermediate_values {where}", *row)[0]
    other = math.nextafter(value, math.inf)
    study.sql(f"UPDATE trial_intermediate_values SET intermediate_value = ? {where}", other, *row)
    return [f"from trial {fork['parent']}, of which it is a fork", f"step {fork['epoch']} is reported as"]


def the_forks_checkpoint_has_another_beginning(study: Finished) -> list[str]:
    number, _ = last(study)
    file = study.newest(number)
    held = torch.load(file, weights_only=True)
    held["state"]["inherited"] += 1
    torch.save(held, file)
    return [f"trial {number}: attempt-1/checkpoints/{file.name} has"]


@pytest.mark.parametrize(
    "plant",
    [
        a_parent_that_is_not_there,
        an_epoch_that_the_parent_has_not_trained,
        an_epoch_at_which_the_parent_has_not_paused,
        two_forks_in_one_place,
        an_empty_place,
        a_complete_trial_is_replaced,
        an_epoch_of_the_parent_is_another,
        the_forks_checkpoint_has_another_beginning,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_fault_is_named(finished: Finished, plant: Callable[[Finished], list[str]]) -> None:
    """A fault in a lineage may show at several places; it is named at the one where it is."""
    expected = plant(finished)
    found = audit(finished.spec, retrain=False)
    for problem in expected:
        assert any(problem in each for each in found), found


def test_parameters_of_a_parent_that_were_changed_afterwards(finished: Finished) -> None:
    """Trained alone, along its lineage, a fork comes to other numbers then."""
    number, fork = last(finished)
    statement = "UPDATE trial_params SET param_value = 0.5 WHERE param_name = 'optimizer.lr' AND trial_id = ?"
    finished.sql(statement, finished.id(fork["parent"]))
    found = audit(finished.spec)
    assert any(problem.startswith(f"trial {number}: step ") for problem in found), found
