"""A LightningModule is no model of the Trainer: `hpo check` says what to do with it."""

from __future__ import annotations

import pytest
import torch

from hpo.checks.checks import check_imports, check_study
from hpo.errors import InputError
from hpo.trial.builder import Builder
from hpo.trial.place import RunPlace
from tests.support.commands import MODEL, STUDY
from tests.support.studies import Studies

pytestmark = pytest.mark.full

LIT = (
    MODEL
    + """

from lightning.pytorch import LightningModule


class Lit(LightningModule):
    def __init__(self, hidden=4, delay=0.0, dropout=0.1):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, inputs):
        return self.layer(inputs)


def make(hidden=4, delay=0.0, dropout=0.1):
    return Lit()
"""
)


def test_a_lightning_module_is_refused_before_anything_runs(studies: Studies) -> None:
    searched = "search_space:\n  model._target_: {type: categorical, choices: [parts.Net, parts.Lit]}"
    base = studies.spec("model._target_=parts.Lit", code=LIT, at="base")
    others = studies.spec(code=LIT, text=STUDY.replace("search_space:", searched), at="searched")
    for spec in (base, others):
        with pytest.raises(InputError, match=r"model\._target_: is a LightningModule: its training_step") as error:
            check_study(spec)
        assert "objective: {_target_: train.run}" in str(error.value)


def test_what_makes_one_is_refused_where_it_is_made(studies: Studies) -> None:
    spec = studies.spec("model._target_=parts.make", code=LIT)
    check_study(spec)
    place = RunPlace(spec.output_dir, "trial-0")
    with pytest.raises(InputError, match="is a LightningModule") as error:
        Builder(spec).trainer(spec.resolve(), place, seed=1, device=torch.device("cpu"))
    assert "from-lightning" in str(error.value)


CHOICES = "search_space[trainer.weights.path]={type: categorical, choices: [null, nowhere.pt]}"


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("trainer.weights.path=nowhere.pt", "trainer.weights.path"),
        ("trainer.weights.path=runs", "trainer.weights.path"),
        (CHOICES, "search_space[trainer.weights.path].choices[1]"),
    ],
)
def test_a_file_of_weights_that_is_not_there_is_refused_before_anything_runs(
    studies: Studies, override: str, path: str
) -> None:
    with pytest.raises(InputError, match="there is no file ") as refused:
        check_imports(studies.spec(override))
    assert refused.value.path == path
    assert "from the study file's folder" in refused.value.fix


def test_a_file_of_weights_that_is_there_is_not_refused(studies: Studies) -> None:
    check_imports(studies.spec("trainer.weights.path=parts.py"))


def test_a_file_of_weights_may_lie_in_the_home_folder(studies: Studies, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = studies.spec("trainer.weights.path=~/parts.py")
    monkeypatch.setenv("HOME", str(spec.folder))
    check_imports(spec)
    place = RunPlace(spec.output_dir, "trial-0")
    with pytest.raises(InputError, match="no readable weights"):  # it has been found
        Builder(spec).trainer(spec.resolve(), place, seed=1, device=torch.device("cpu"))
