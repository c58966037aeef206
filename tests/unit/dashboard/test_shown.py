"""What the dashboard is given of a study: attributes for people, and nothing lost where it copies."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from wsgiref.util import setup_testing_defaults

import optuna_dashboard
import pytest
from optuna.trial import TrialState

from hpo.dashboard.serve import dashboard
from hpo.dashboard.shown import ShownStorage
from hpo.storage.attributes import BEST_ATTR, FORK_ATTR, OUTCOME_ATTR, PAUSED_ATTR, REASON_ATTR
from hpo.study.open_study import OpenStudy
from hpo.study.status import study_best
from tests.support.commands import STUDY
from tests.support.studies import Studies, ask

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

KEPT = {"epoch": 3, "metrics": {"val_loss": 0.123456789, "lr": 0.1, "val_mae": None}, "checkpoint": "a/b.pt"}


def played(view: OpenStudy) -> None:
    trial, _ = ask(view)
    trial.set_user_attr(BEST_ATTR, KEPT)
    trial.set_user_attr("mine", "x")
    view.study.tell(trial, 0.123456789)
    trial, _ = ask(view)
    trial.set_user_attr(OUTCOME_ATTR, "timed_out")
    trial.set_user_attr(REASON_ATTR, "too slow")
    view.study.tell(trial, state=TrialState.FAIL)


def test_attributes_are_those_that_a_person_reads(studies: Studies) -> None:
    with studies.open() as (view,):
        played(view)
        shown = ShownStorage(view.storage)
        first, second = shown.get_all_trials(view.study_id)
        assert first.user_attrs == {"val_loss": 0.123457, "val_mae": None, "best epoch": 3, "mine": "x"}
        assert second.user_attrs == {"outcome": "timed_out", "reason": "too slow"}
        assert first.value == 0.123456789
        for one in (shown.get_trial(first._trial_id), shown.get_best_trial(view.study_id)):
            assert one.user_attrs == first.user_attrs
        (study,) = shown.get_all_studies()
        assert study.user_attrs == {}
        assert study.system_attrs["study:metric_names"] == ["val_loss"]
        assert view.study.trials[0].user_attrs[BEST_ATTR] == KEPT, "what is stored stays"


def test_a_paused_trial_and_a_fork_say_so(studies: Studies) -> None:
    with studies.open() as (view,):
        paused, _ = ask(view)
        paused.set_user_attr(PAUSED_ATTR, 4)
        fork, _ = ask(view)
        fork.set_user_attr(FORK_ATTR, {"parent": 0, "epoch": 4, "replaces": None})
        attrs = [trial.user_attrs for trial in ShownStorage(view.storage).get_all_trials(view.study_id)]
        assert attrs == [{"paused after epoch": 4}, {"fork": "of trial 0 after epoch 4"}]


@pytest.mark.parametrize(("direction", "values"), [("minimize", (1.0, 3.0, 2.0)), ("maximize", (3.0, 1.0, 2.0))])
def test_a_trial_outside_the_bounds_is_shown_as_one_and_is_not_the_best(
    studies: Studies, direction: str, values: tuple[float, ...]
) -> None:
    bounds = ("study.constraints={parameters: '<= 10'}", "callbacks.parameter_count=true", "study.n_trials=4")
    with studies.open(*bounds, "study.metric=val_mae", f"study.direction={direction}") as (view,):
        for value, violation in zip(values, (1.0, -1.0, 0.0), strict=True):
            trial, _ = ask(view)
            trial.set_constraint("parameters", violation)
            view.study.tell(trial, value)
        shown = optuna_dashboard.wsgi(ShownStorage(view.storage))
        found = answer_of(shown, f"/api/studies/{view.study_id}")
    assert [trial["number"] for trial in found["best_trials"]] == [2]
    assert [trial["constraints"] for trial in found["trials"]] == [[1.0], [-1.0], [0.0]]


BOUNDED = (
    "study.objectives={val_loss: minimize, val_mae: minimize}",
    "study.pruner=none",
    "study.constraints={parameters: '<= 10'}",
    "callbacks.parameter_count=true",
    "study.n_trials=9",
)


def test_the_front_of_several_objectives_is_that_within_the_bounds(studies: Studies) -> None:
    """Of trials outside them the dashboard's own has trial 0, which beats trial 2 in everything."""
    with studies.open(*BOUNDED) as (view,):
        for values, violation in (((1, 1), 3.0), ((1, 4), 0.0), ((2, 2), -1.0), ((3, 3), 0.0), ((9, 0), 1.0)):
            trial, _ = ask(view)
            trial.set_constraint("parameters", violation)
            view.study.tell(trial, values)
        app, path = dashboard(view), f"/api/studies/{view.study_id}"
        whole, later = answer_of(app, path), answer_of(app, path, "after=4")
        assert answer_of(app, "/api/studies/99") == {"reason": "study_id=99 is not found"}
        best = study_best(view)
    assert [trial["number"] for trial in whole["best_trials"]] == [1, 2]
    assert {entry["trial"] for entry in best} == {1, 2}
    assert [trial["number"] for trial in whole["trials"]] == [0, 1, 2, 3, 4]
    assert later["best_trials"] == whole["best_trials"]
    assert [trial["number"] for trial in later["trials"]] == [4]


def test_where_no_trial_is_within_the_bounds_the_front_is_that_of_all(studies: Studies) -> None:
    with studies.open(*BOUNDED) as (view,):
        for values in ((1, 4), (2, 2), (3, 3)):
            trial, _ = ask(view)
            trial.set_constraint("parameters", 1.0)
            view.study.tell(trial, values)
        found = answer_of(dashboard(view), f"/api/studies/{view.study_id}")
    assert sorted(trial["number"] for trial in found["best_trials"]) == [0, 1]


def answer_of(app: WSGIApplication, path: str, query: str = "") -> Any:
    environ: dict[str, Any] = {"PATH_INFO": path, "QUERY_STRING": query}
    setup_testing_defaults(environ)
    return json.loads(b"".join(app(environ, lambda *_: lambda _: None)))


FUNCTION = """
study: {name: own, n_trials: 2, pruner: none}
objective: {_target_: parts.train, a: 1}
search_space: {objective.a: {type: int, low: 1, high: 9}}
"""


@pytest.mark.parametrize(
    ("text", "overrides"),
    [(FUNCTION, ()), (STUDY, ("study.constraints={lr: '<= 1'}",))],
    ids=["a function's own", "bounded"],
)
def test_an_lr_that_was_asked_for_is_shown(studies: Studies, text: str, overrides: tuple[str, ...]) -> None:
    with studies.open(*overrides, text=text) as (view,):
        played(view)
        shown = ShownStorage(view.storage)
        trial = shown.get_all_trials(view.study_id)[0]
        assert trial.user_attrs["lr"] == 0.1
        assert shown.get_trial(trial._trial_id).user_attrs == trial.user_attrs


def test_a_copied_trial_has_all_that_is_stored(studies: Studies) -> None:
    """As the dashboard renames a study."""
    with studies.open() as (view,):
        played(view)
        shown = ShownStorage(view.storage)
        copy = shown.create_new_study(view.study.directions, "renamed")
        for trial in shown.get_all_trials(view.study_id):
            shown.create_new_trial(copy, template_trial=trial)
        assert [trial.user_attrs for trial in view.storage.get_all_trials(copy)] == [
            trial.user_attrs for trial in view.study.trials
        ]


def test_a_study_of_several_objectives_names_them(studies: Studies) -> None:
    with studies.open("study.objectives={val_loss: minimize, val_mae: maximize}", "study.pruner=none") as (view,):
        names = view.storage.get_study_system_attrs(view.study_id)["study:metric_names"]
        assert names == ["val_loss", "val_mae"]
