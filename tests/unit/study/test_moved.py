"""A run in another output folder than before says that its trials begin again."""

from __future__ import annotations

import pytest

from hpo.storage import ledger
from hpo.storage.optuna_private import id_of_trial
from hpo.study.folders import trial_folder
from hpo.study.moved import moved_away
from hpo.study.open_study import OpenStudy
from tests.support.commands import hpo
from tests.support.studies import Studies, ask


def test_unfinished_trials_with_values_and_no_folder_are_named(studies: Studies) -> None:
    with studies.open() as (view,):
        assert moved_away(view) == []
        trials = [id_of_trial(ask(view)[0]) for _ in range(4)]
        for trial in trials[:3]:
            view.storage.set_trial_intermediate_value(trial, 1, 0.5)
        view.storage.pause(trials[0], 1)
        view.storage.requeue(trials[1])
        view.study.tell(2, 0.5)
        view.storage.requeue(trials[3])
        (said,) = moved_away(view)
        assert said.startswith(
            f"the trials 0, 1 begin again, with nothing to resume from in {view.spec.output_dir}:"
        )
        trial_folder(view.spec, 1).mkdir(parents=True)
        assert moved_away(view)[0].startswith("trial 0 begins again, ")
        trial_folder(view.spec, 0).mkdir()
        assert moved_away(view) == []


def test_a_trial_that_is_at_work_elsewhere_does_not_begin_again(studies: Studies) -> None:
    with studies.open() as (view,):
        trial = id_of_trial(ask(view)[0])
        view.storage.set_trial_intermediate_value(trial, 1, 0.5)
        assert moved_away(view) == []
        _set_owner(view, pid=2**22 + 1)
        assert moved_away(view)[0].startswith("trial 0 begins again, ")
        _set_owner(view, host="elsewhere")
        assert moved_away(view) == []


def _set_owner(view: OpenStudy, **values: object) -> None:
    with view.storage.engine.begin() as conn:
        conn.execute(ledger.ATTEMPTS.update().values(**values))


@pytest.mark.usefixtures("in_process")
def test_a_run_says_so(studies: Studies) -> None:
    with studies.open("study.n_trials=1") as (view,):
        trial = id_of_trial(ask(view)[0])
        view.storage.set_trial_intermediate_value(trial, 1, 0.5)
        view.storage.requeue(trial)
        file, folder = view.spec.path, view.spec.output_dir
    said = hpo("run", file, "study.n_trials=1", "run.devices=cpu").stderr
    assert f"trial 0 begins again, with nothing to resume from in {folder}" in said
