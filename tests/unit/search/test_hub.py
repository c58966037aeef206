"""Samplers and pruners of OptunaHub, from a folder that is laid out as its registry is."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpo.config.space import SearchSpace
from hpo.errors import InputError
from hpo.search.pruners import make_pruner
from hpo.search.samplers import make_sampler
from tests.support.commands import hpo, hpo_json, make_study
from tests.support.studies import Studies

SAMPLER = '''
from optuna.samplers import BaseSampler, RandomSampler

__all__ = ["LowestSampler"]


class LowestSampler(RandomSampler):
    """Draws as RandomSampler does, and moves reals towards their lower end."""

    def __init__(self, share=0.5, seed=None):
        super().__init__(seed=seed)
        self.share = share

    def sample_independent(self, study, trial, name, distribution):
        value = super().sample_independent(study, trial, name, distribution)
        if isinstance(value, float):
            return distribution.low + self.share * (value - distribution.low)
        return value
'''
PRUNER = '''
from optuna.pruners import BasePruner, ThresholdPruner


class FirstPruner(BasePruner):
    """Prunes at once."""

    def prune(self, study, trial):
        return True


class SecondPruner(FirstPruner):
    pass
'''


@pytest.fixture
def registry(tmp_path: Path) -> Path:
    for package, text in {"samplers/lowest": SAMPLER, "pruners/two": PRUNER, "samplers/broken": "1 / 0"}.items():
        folder = tmp_path / "registry" / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(text)
    return tmp_path / "registry"


def sampler(name: str, more: str = "") -> str:
    return f'study.sampler={{name: "optunahub:{name}", registry: registry{more}}}'


@pytest.mark.usefixtures("in_process")
def test_a_study_is_drawn_by_a_sampler_of_the_hub(registry: Path) -> None:
    study = make_study(registry.parent)
    overrides = (sampler("samplers/lowest", ", share: 0.0, seed: 4"),)
    hpo("run", study, "--workers", 2, "--n-trials", 4, *overrides)
    trials = hpo_json("trials", study, *overrides)
    assert [trial["params"]["optimizer.lr"] for trial in trials] == [1e-3] * 4
    assert len({trial["params"]["model.hidden"] for trial in trials}) > 1  # each trial has a seed of its own


@pytest.mark.usefixtures("in_process")
def test_a_pruner_of_the_hub_is_chosen_among_several(registry: Path) -> None:
    study = make_study(registry.parent)
    overrides = ('study.pruner={name: "optunahub:pruners/two#FirstPruner", registry: registry}',)
    hpo("run", study, "--workers", 1, "--n-trials", 2, *overrides, code=3)
    assert [(t["outcome"], t["epochs"]) for t in hpo_json("trials", study, *overrides)] == [("pruned", 1)] * 2


@pytest.mark.parametrize(
    ("name", "more", "problem", "fix"),
    [
        ("samplers/lowest", ", shaer: 1", "LowestSampler takes no such argument", "did you mean `share`?"),
        ("samplers/lowest#Lowest", "", "and no `Lowest`", "optunahub:samplers/lowest#LowestSampler"),
        ("samplers/none", "", "can't be loaded from OptunaHub: FileNotFoundError", "registry: DIR"),
        ("samplers/broken", "", "can't be loaded from OptunaHub: ZeroDivisionError", "registry: DIR"),
        ("pruners/two", "", "has 0 classes of this kind", "BaseSampler"),
    ],
)
def test_what_the_hub_has_not_is_refused(
    studies: Studies, registry: Path, name: str, more: str, problem: str, fix: str
) -> None:
    spec = studies.spec(sampler(name, more))
    with pytest.raises(InputError) as caught:
        make_sampler(spec, SearchSpace.from_spec(spec))
    assert problem in caught.value.problem
    assert fix in caught.value.fix
    assert caught.value.path.startswith("study.sampler")


def test_several_classes_need_a_choice(studies: Studies, registry: Path) -> None:
    spec = studies.spec('study.pruner={name: "optunahub:pruners/two", registry: registry}')
    with pytest.raises(InputError, match="2 classes") as caught:
        make_pruner(spec)
    assert "`optunahub:pruners/two#SecondPruner`" in caught.value.fix
