"""`hpo status --watch`: from the database alone."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from hpo.console.snapshot import Look, Looks
from hpo.console.watch import _as_line, _look, _view, study_view
from hpo.errors import StudyError
from hpo.storage.agents import Joining, end, register
from hpo.storage.ledger import Owner
from hpo.storage.outage import DatabaseAwayError
from hpo.study.open_study import OpenStudy
from hpo.study.thinning import evenly
from tests.support.commands import hpo, make_study
from tests.support.owners import dead_owner
from tests.support.studies import Studies, ask

pytestmark = pytest.mark.full


def report(view: OpenStudy, values: list[float]) -> int:
    """A running trial with a curve."""
    trial, _ = ask(view)
    for step, value in enumerate(values, start=1):
        trial.report(value, step)
    return trial.number


def test_a_look_tells_how_far_running_trials_are(studies: Studies) -> None:
    with studies.open(views=2) as (view, other):
        report(view, [3.0, math.nan, 1.0])
        found = Looks(other).look()
        (entry,) = found.status["running_trials"]
        assert (entry["trial"], entry["epoch"], entry["max_epochs"], entry["value"]) == (0, 3, 3, 1.0)
        assert [point[0] for point in entry["curve"]] == [1, 2, 3]
        assert (entry["worker"], entry["attempt"]) == ("worker-0", 1)
        assert entry["seconds"] >= 0
        assert (found.outcomes, found.seconds) == ({}, {})
        assert not found.ended
        view.study.tell(0, 1.0)
        found = Looks(other).look()
        assert found.status["running_trials"] == []
        assert found.outcomes == {0: "complete"}
        assert found.seconds[0] > 0


@pytest.mark.parametrize("ahead", [-3600.0, 3600.0])
def test_how_long_a_trial_has_run_is_known_though_the_clocks_differ(
    ahead: float, studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time that is left is estimated from it."""
    with studies.open() as (view,):
        with monkeypatch.context() as patch:
            patch.setattr("hpo.storage.ledger.time.time", lambda now=time.time: now() + ahead)
            report(view, [3.0])
            view.storage.excused_s = lambda: -100.0  # it has run for so long
            view.storage.beat()
        (entry,) = Looks(view).look().status["running_trials"]
        assert 100 <= entry["seconds"] < 120


def test_a_look_becomes_a_picture(studies: Studies) -> None:
    with studies.open() as (view,):
        picture = study_view(view, Looks(view).look())
        assert (picture.progress, picture.workers) == ((0, 6, "trials"), [])
        assert picture.notices == ["no trial is running"]
        report(view, [3.0, 2.0])
        (worker,) = study_view(view, Looks(view).look()).workers
        assert (worker.worker, worker.trial, worker.epoch, worker.curve) == ("worker-0", 0, 2, (3.0, 2.0))
        away = study_view(view, Look({}, {}, set(), {}, {}), "the database is away")
        assert (away.progress[1], away.notices) == (6, ["the database is away"])


def test_workers_of_several_machines_are_told_apart(studies: Studies) -> None:
    with studies.open() as (view,):
        report(view, [1.0])
        report(view, [2.0])
        found = Looks(view).look()
        found.status["running_trials"][1]["host"] = "elsewhere"
        names = [worker.worker for worker in study_view(view, found).workers]
        assert names[0].startswith("worker-0@")
        assert names[1] == "worker-0@elsewhere"


def test_several_objectives_have_a_front(studies: Studies) -> None:
    overrides = ("study={name: tiny, n_trials: 2, objectives: {val_loss: minimize, val_mae: minimize}}",)
    with studies.open(*overrides) as (view,):
        for values in ([1.0, 2.0], [2.0, 1.0]):
            trial, _ = ask(view)
            view.study.tell(trial, values)
        found = Looks(view).look()
        picture = study_view(view, found)
        assert (picture.front, len(picture.best)) == (2, 2)
        assert _as_line(view, found, "").endswith("2 complete, Pareto front trials 0, 1")


@pytest.mark.parametrize(("count", "kept"), [(3, [1, 3, 6]), (7, [0, 1, 2, 3, 4, 5, 6]), (1, [6])])
def test_a_long_curve_is_thinned_out_to_its_last_point(count: int, kept: list[int]) -> None:
    assert evenly(range(7), count) == kept


@pytest.mark.usefixtures("in_process")
def test_watching_ends_with_the_study(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    hpo("run", study, "--n-trials", 2)
    lines = hpo("status", study, "--watch", "--interval", 0.1).stdout.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("2/2 trials, 2 complete, best trial ")
    (look,) = hpo("status", study, "--watch", "--json").stdout.splitlines()
    data = json.loads(look)
    assert (data["problem"], data["finished"], data["running_trials"]) == (None, 2, [])
    assert data["best"]["value"] is not None


def test_a_study_that_has_reached_its_goal_has_ended(studies: Studies) -> None:
    with studies.open("study.target_value=1.0") as (view,):
        (first, _), _ = ask(view), ask(view)
        view.study.tell(first, 0.5)
        assert not Looks(view).look().ended  # the other one runs
        view.study.tell(1, 2.0)
        view.study.enqueue_trial({})  # no worker takes it
        look = Looks(view).look()
        assert (look.status["waiting"], look.status["finished"]) == (1, 2)
        assert look.ended


def test_a_study_has_ended_where_its_scheduler_starts_no_more_trials(studies: Studies) -> None:
    with studies.open("study.n_trials=4") as (view,):
        view.study.tell(ask(view)[0], 0.5)
        for ending, ended in (("interrupted", False), ("done", True)):
            joining = Joining("", "cpu", 1, "code", "config", "mark", 60.0)
            with view.storage.transaction() as session:
                agent = register(session, view.study_id, Owner.current(), joining)
            assert not Looks(view).look().ended  # it is at work
            with view.storage.transaction() as session:
                end(session, agent.agent_id, ending)
            assert Looks(view).look().ended == ended
        with view.storage.transaction() as session:
            register(session, view.study_id, dead_owner(), joining)
        assert not Looks(view).look().ended  # it died at work


@pytest.fixture
def away() -> Iterator[list[str]]:
    """Statements of any engine fail as long as this list has something to say."""
    problems: list[str] = []

    def fail(*_: object) -> None:
        if problems:
            raise DatabaseAwayError(problems.pop())

    sa.event.listen(sa.Engine, "before_cursor_execute", fail)
    yield problems
    sa.event.remove(sa.Engine, "before_cursor_execute", fail)


def test_a_database_that_is_away_is_waited_for(
    studies: Studies, away: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with studies.open("study.n_trials=1") as (view,):
        view.study.tell(ask(view)[0], 1.0)
        away.append("no route")
        looks = Looks(view)
        assert _look(view, looks) == (None, "the database is unreachable; waiting for it: no route")
        assert _look(view, looks)[1] == ""
        out = _view(view, json_=True)
        for each in (_look(view, looks), (None, "away"), _look(view, looks)):
            out.show(*each)
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["problem"], third["finished"]) == (None, 1)
    assert list(second) == ["time", "problem"]
    assert second["problem"] == "away"


def test_lines_are_printed_where_something_is_new(studies: Studies, capsys: pytest.CaptureFixture[str]) -> None:
    with studies.open() as (view,):
        lines = _view(view, json_=False)
        for _ in range(2):
            lines.show(*_look(view, Looks(view)))
        lines.show(None, "the database is away")
        report(view, [1.0])
        lines.show(*_look(view, Looks(view)))
    assert capsys.readouterr().out.splitlines() == ["0/6 trials", "the database is away", "0/6 trials, 1 running"]


def test_an_error_of_a_look_does_not_say_that_the_study_is_deleted(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Looks) -> None:
        raise KeyError("of a plugin")

    monkeypatch.setattr(Looks, "look", broken)
    with studies.open() as (view,), pytest.raises(KeyError, match="of a plugin"):
        _look(view, Looks(view))


def test_a_study_that_is_deleted_meanwhile_is_an_error(studies: Studies) -> None:
    with studies.open() as (view,):
        view.storage.delete_study(view.study_id)
        with pytest.raises(StudyError, match="the study tiny has been deleted"):
            _look(view, Looks(view))


def test_an_interval_without_a_watch_is_refused(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    assert hpo("status", study, "--interval", 3, code=2).stderr.startswith("--interval: is about `--watch`")
    assert "Invalid value" in hpo("status", study, "--watch", "--interval", 0, code=2).stderr
    assert "there is no such database yet" in hpo("status", study, "--watch", code=3).stderr
