"""Models with their weights: the very numbers that training measured, and clear words where there are none."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from optuna.trial import TrialState

from hpo.errors import StudyError
from hpo.final.models import best_weights, load_model
from hpo.study.open_study import OpenStudy
from hpo.trial.builder import Builder
from tests.support.attempts import run
from tests.support.finished import finished_study
from tests.support.studies import Studies


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory, ready_sqlite_file: Path) -> Iterator[OpenStudy]:
    with finished_study(tmp_path_factory.mktemp("study"), ready_sqlite_file) as opened:
        yield opened


@pytest.mark.parametrize("which", ["best", "1"])
def test_the_model_gives_the_loss_that_was_measured(view: OpenStudy, which: str) -> None:
    model = load_model(view.spec, which)
    found = best_weights(view, which)
    assert not model.training
    assert model.layers[0].out_features == found.params["model.hidden"]
    inputs, targets = Builder(view.spec).data(found.config)["val"].tensors
    with torch.no_grad():
        loss = ((model(inputs) - targets) ** 2).mean()
    assert loss.item() == pytest.approx(found.metrics["val_loss"], abs=1e-6)


def test_it_draws_nothing_from_the_callers_generators(view: OpenStudy) -> None:
    torch.manual_seed(1)
    random.seed(1)
    kept = torch.get_rng_state(), random.getstate()
    load_model(view.spec)
    assert torch.equal(torch.get_rng_state(), kept[0])
    assert random.getstate() == kept[1]


def test_the_model_is_where_it_is_asked_to_be(view: OpenStudy) -> None:
    assert {tensor.device.type for tensor in load_model(view.spec, device="meta").parameters()} == {"meta"}


def test_weights_of_another_model_are_refused_with_a_fix(view: OpenStudy) -> None:
    code = view.spec.folder / "parts.py"
    other = view.spec.folder / "others.py"
    other.write_text(code.read_text().replace("nn.Tanh()", "nn.Tanh(), nn.Linear(hidden, hidden)"))
    spec = Studies(view.spec.folder, code).spec("model._target_=others.Net")
    with pytest.raises(StudyError, match=r"(?s)do not fit others\.Net.*fix: bring the model's code"):
        load_model(spec)


def test_another_config_than_the_trials_is_said(view: OpenStudy) -> None:
    said: list[str] = []
    load_model(view.spec, warn=said.append)
    assert not said
    changed = Studies(view.spec.folder, view.spec.folder / "parts.py").spec(
        "loader.batch_size=7", "study.n_trials=99"
    )
    load_model(changed, warn=said.append)
    before = view.spec.loader.batch_size
    expected = f"the trials ran with another config than the one here:\n    loader.batch_size: {before} → 7"
    assert said == [expected]


@pytest.mark.parametrize("which", ["7", "00"])
def test_a_trial_that_is_not_there_is_named(view: OpenStudy, which: str) -> None:
    with pytest.raises(StudyError, match=rf"has no trial {which}"):
        load_model(view.spec, which)


def test_a_study_without_a_complete_trial_says_so(studies: Studies) -> None:
    with studies.open() as (view,), pytest.raises(StudyError, match="no complete trial yet"):
        load_model(view.spec)


def test_a_trial_that_has_not_completed_gives_its_best_so_far(studies: Studies) -> None:
    with studies.open("search_space={model.hidden: {type: int, low: 4, high: 4}}") as (view,):
        run(view)
        best = load_model(view.spec).state_dict()
        pruned = view.study.ask()
        view.space.suggest(pruned)
        trials = view.spec.output_dir / "trials"
        (trials / "0").rename(trials / "1")
        view.study.tell(pruned, state=TrialState.PRUNED)
        found = load_model(view.spec, "1").state_dict()
        assert all(torch.equal(tensor, found[name]) for name, tensor in best.items())


def test_a_trial_that_took_over_a_result_has_the_weights_of_the_one_that_was_trained(studies: Studies) -> None:
    space = "search_space={model.hidden: {type: int, low: 4, high: 4}}"
    with studies.open("study.duplicates=reuse", space) as (view,):
        run(view)
        run(view)
        assert not list((view.spec.output_dir / "trials" / "1").rglob("*.pt"))
        first, second = best_weights(view, "0"), best_weights(view, "1")
        assert (second.trial, second.seed) == (1, first.seed)
        assert all(torch.equal(tensor, second.weights[name]) for name, tensor in first.weights.items())
