"""A search space that is widened in a started study: what is accepted, what is kept, and what others see of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import optuna
import pytest
from optuna.trial import TrialState

import hpo as package
from hpo.config.identity import identity
from hpo.config.study_modules import forget_modules
from hpo.config.widening import not_wider, widenings
from hpo.errors import InputError, OtherCodeError, StudyError
from hpo.search.as_predicted import as_predicted
from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.storage.attributes import CONFIG_ATTR, HASH_ATTR, WIDENED_ATTR
from hpo.storage.cache import StudyCache
from hpo.storage.ledger import Owner
from hpo.storage.optuna_private import storage_of
from hpo.storage.study_attrs import replace_study_attrs
from hpo.study import open_study
from hpo.study.open_study import OpenStudy, load_study, start_study
from hpo.study.taking import Taker
from tests.support.commands import STUDY, hpo, hpo_json, make_study
from tests.support.studies import Studies, ask

pytestmark = pytest.mark.full

#: The study's: optimizer.lr from 1e-3 to 0.1, model.hidden from 2 to 8.
CHOICES = (
    "  loader.batch_size: {type: categorical, choices: [16, 32]}\nwhere: [model.hidden <= 8, optimizer.lr > 0]\n"
)
TEXT = STUDY + CHOICES
WIDER = (
    "search_space[optimizer.lr].high=1.0",
    "search_space[loader.batch_size].choices=[8, 16, 32]",
    "where=[optimizer.lr > 0]",
)


def told(view: OpenStudy, count: int) -> None:
    for number in range(count):
        trial, _ = ask(view)
        view.study.tell(trial, float(number), state=TrialState.COMPLETE)


def test_what_was_learnt_is_kept(studies: Studies) -> None:
    with studies.open(text=TEXT) as (view,):
        told(view, 6)
        before = [trial.params for trial in view.study.trials]
    opened = start_study(studies.spec(*WIDER, "study.n_trials=20"), widen=True)
    assert opened.notes[0].startswith("search space widened at trial 6: ")
    assert "optimizer.lr: 0.001 to 0.1 → 0.001 to 1.0; loader.batch_size: also 8; no longer" in opened.notes[0]
    opened.storage.close()
    view = load_study(studies.spec(*WIDER), Owner.current(worker="w"))
    assert [trial.params for trial in view.study.trials] == before
    # Samplers see one space in all trials, so none of it is drawn by itself.
    shown = as_predicted(view.study, Encoding(view.space.distributions, view.space.conditions))
    space = optuna.search_space.intersection_search_space(shown.get_trials(deepcopy=False))
    assert space == view.space.distributions
    told(view, 2)
    trials = view.study.get_trials(deepcopy=False)
    assert len(trials) == 8
    assert all(view.space.contains(trial.params) for trial in trials)
    view.storage.close()
    start_study(studies.spec(*WIDER)).storage.close()  # from now on this is the study's space


@pytest.mark.parametrize(
    ("choices", "said"),
    [([2, 1], "the same values, written in another way"), ([1, 2, True], "model.width: also true")],
)
def test_what_has_become_wider_is_never_nothing(choices: list[Any], said: str) -> None:
    entries = [{"search_space": {"model.width": {"choices": each}}} for each in ([1, 2], choices)]
    assert widenings(*entries) == [said]


def test_a_trial_that_was_drawn_before_resumes_with_its_values(studies: Studies) -> None:
    with studies.open(text=TEXT) as (view,):
        trial, params = ask(view)
    start_study(studies.spec(*WIDER), widen=True).storage.close()
    view = load_study(studies.spec(*WIDER), Owner.current(worker="w"))
    assert view.space.suggest(optuna.Trial(view.study, trial._trial_id)) == params
    view.storage.close()


def test_no_trial_is_read_before_pruned_ones_are_paused_again(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a process has read as finished it does not read again: with more epochs it would wait for ever."""
    with studies.open(text=TEXT) as (view,):
        told(view, 1)
    read = []
    whole = open_study._set_budgets
    monkeypatch.setattr(open_study, "_set_budgets", lambda opened: (read.append(_has_read(opened)), whole(opened)))
    start_study(studies.spec(*WIDER), widen=True).storage.close()
    assert read == [False]


def _has_read(opened: OpenStudy) -> bool:
    return bool(cast("StudyCache", storage_of(opened.study))._seen)


def test_without_the_flag_it_is_refused_and_named(studies: Studies) -> None:
    with studies.open(text=TEXT) as (view,):
        told(view, 1)
        stored = dict(view.study.user_attrs)
        with pytest.raises(InputError, match=r"fix: keep what .*--widen` \(in Python `widen=True`\), undo"):
            start_study(studies.spec(*WIDER))
        with pytest.raises(InputError) as caught:
            start_study(studies.spec("search_space[optimizer.lr].high=0.05"))
        assert "--widen" not in str(caught.value)
        assert view.study.user_attrs == stored


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("search_space[optimizer.lr].high=0.05", r"\[optimizer.lr\]: 0.001 to 0.1 → 0.001 to 0.05 is narrower"),
        ("search_space[optimizer.lr].log=false", "`log` is another"),
        ("search_space[loader.batch_size].choices=[16, 64]", r"\[loader.batch_size\]: 32 is gone"),
        ("search_space[model.hidden]={type: float, low: 1, high: 9}", "its type, or when it is searched"),
        ("search_space[model.hidden]={type: int, low: 2, high: 10, step: 2}", "steps of 2 from 2 leave out"),
        ("search_space[optimizer.lr].high=model.hidden / 8", "high: model.hidden / 8 may leave out"),
        ("search_space[optimizer.weight_decay]={type: float, low: 0, high: 1}", "weight_decay]: is new"),
        ("where=[model.hidden <= 8, optimizer.lr > 0, model.hidden > 2]", "`model.hidden > 2` is new"),
        ("trainer.max_epochs=9", "lr_scheduler.T_max: 3 → 9"),
    ],
)
def test_what_is_no_wider_space_changes_nothing(studies: Studies, override: str, said: str) -> None:
    with studies.open(text=TEXT) as (view,):
        told(view, 1)
        stored = dict(view.study.user_attrs)
        with pytest.raises(
            InputError, match=f"is no wider version of the study's search space:\n.*{said}"
        ) as caught:
            start_study(studies.spec(override), widen=True)
        assert "warm_start" in str(caught.value)
        assert view.study.user_attrs == stored


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "{type: float, low: 0, high: 4}",
            "{type: float, low: 0, high: 4, step: 1}",
            "steps of 1.0 from 0.0",
        ),
        ("{type: categorical, choices: [1, 2]}", "{type: categorical, choices: [true, 2, 3]}", "1 is gone"),
    ],
)
def test_values_that_are_left_out_are_found(studies: Studies, old: str, new: str, said: str) -> None:
    before, after = (studies.spec(f"search_space[optimizer.lr]={entry}") for entry in (old, new))
    (problem,) = not_wider(after, identity(before.base_config()), identity(after.base_config()))
    assert said in problem


@pytest.mark.parametrize("base", [False, True])
@pytest.mark.parametrize("name", ["cmaes", "CmaEsSampler"])
def test_a_sampler_that_is_laid_out_over_its_space_is_refused(studies: Studies, name: str, base: bool) -> None:
    named = f"name: partial_fixed, fixed_params: {{}}, base_sampler: {name}" if base else f"name: {name}"
    sampler = f"study.sampler={{{named}, allow_pickle: true}}"
    with studies.open(sampler, text=TEXT):
        pass
    with pytest.raises(InputError, match=f"{name} keeps to the space that it began with"):
        start_study(studies.spec(sampler, *WIDER), widen=True)


def test_a_wider_space_beside_other_code_is_refused_whole(studies: Studies) -> None:
    with studies.open(text=TEXT) as (view,):
        told(view, 1)
        stored = dict(view.study.user_attrs)
        parts = studies.folder / "parts.py"
        parts.write_text(parts.read_text() + "\n\nEXTRA = 1\n")
        forget_modules(studies.folder)  # as a process of its own
        with pytest.raises(InputError, match=r"(?s)the study's code is .*--accept-code-change"):
            start_study(studies.spec(*WIDER), widen=True)
        assert view.study.user_attrs == stored
    opened = start_study(studies.spec(*WIDER), widen=True, accept_code_change=True)
    assert [note.partition(" ")[0] for note in opened.notes] == ["search", "accepted:"]
    opened.storage.close()


def test_a_worker_with_the_older_file_stops(studies: Studies) -> None:
    with studies.open(text=TEXT) as (view,):
        told(view, 1)
        start_study(studies.spec(*WIDER), widen=True).storage.close()
        with pytest.raises(OtherCodeError, match="this worker has the study file from before"):
            Taker(view).take()
        with pytest.raises(OtherCodeError, match="bring the widened file here"):
            load_study(studies.spec(), Owner.current(worker="w"))
        assert len(view.study.trials) == 1


def test_one_of_two_that_widen_at_once_is_refused_whole(studies: Studies) -> None:
    with studies.open(text=TEXT) as (view,):
        attrs = dict(view.study.user_attrs)
        new = {HASH_ATTR: "x", WIDENED_ATTR: [], CONFIG_ATTR: {}}
        with pytest.raises(StudyError, match="another process has changed"):
            replace_study_attrs(view.storage.engine, view.study_id, new, (HASH_ATTR, "of another"))
        assert view.study.user_attrs == attrs
        replace_study_attrs(view.storage.engine, view.study_id, new, (HASH_ATTR, attrs[HASH_ATTR]))
        assert {key: view.study.user_attrs[key] for key in new} == new


@pytest.mark.usefixtures("in_process")
def test_a_person_widens_a_study(tmp_path: Path) -> None:
    study = make_study(tmp_path, TEXT)
    hpo("run", study, "--n-trials", 2)
    assert "--widen" in hpo("run", study, "--n-trials", 4, *WIDER, code=2).stderr
    widened = hpo("run", study, "--n-trials", 4, *WIDER, "--widen")
    assert "search space widened at trial 2" in widened.stdout + widened.stderr
    assert len(hpo_json("trials", study, *WIDER)) == 4
    hpo("report", study, *WIDER)
    pages = list(tmp_path.rglob("report.html"))
    assert pages
    assert "widened at trial 2" in pages[0].read_text()
    wider_yet = [*WIDER, "search_space[optimizer.lr].low=1e-4"]
    with pytest.raises(InputError, match="widen=True"):
        package.run(study, wider_yet, n_trials=4)
    assert package.run(study, wider_yet, n_trials=4, widen=True).finished == 4
    assert len(package.load_study(study, wider_yet).trials) == 4
