"""A driver's parts on real studies, without processes: what it sees, what it settles, when it gives up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from optuna.trial import TrialState

from hpo.config.spec import load_spec
from hpo.console.lines import Reporter
from hpo.console.tally import in_words
from hpo.errors import InputError, LeaseLostError, StudyError
from hpo.execution.driver import Driver
from hpo.execution.engines.engine import (
    AgentOrder,
    Change,
    Ended,
    EngineAwayError,
    NodeGone,
    Placement,
    Preempted,
    Resources,
    Running,
    Waits,
)
from hpo.execution.fleet import Fleet
from hpo.execution.launchers.local import LocalLauncher
from hpo.execution.messages import AgentNews, EpochsEnded, Notice, Started
from hpo.execution.observer import Observer
from hpo.execution.placing import placing_of, run_on, submit
from hpo.execution.registered import Registered
from hpo.execution.run import Listener
from hpo.execution.supervisor import Ending, Supervisor
from hpo.execution.upkeep import Upkeep
from hpo.signals import Signals
from hpo.storage import agents
from hpo.storage.agents import Joining
from hpo.storage.ledger import Lease, Owner
from hpo.storage.outage import DatabaseAwayError
from hpo.storage.settling import Settled
from hpo.study.agents import ask_all_to_leave
from hpo.study.open_study import OpenStudy
from hpo.study.taking import claimable
from hpo.trial.report import TrialReport
from hpo.trial.resources import Slot
from tests.support.commands import hpo, make_study
from tests.support.studies import Studies, ask

SERVER = "postgresql://user@host/db"


class PaperEngine:
    """Places agents that are nothing; what becomes of them is said by the test."""

    agents = 1

    def __init__(self) -> None:
        self.placed: list[Placement] = []
        self.order: AgentOrder | None = None
        self.asked: list[tuple[str, Placement]] = []
        self.news: list[Change] = []
        self.dies = False
        self.away = False

    def place(self, order: AgentOrder, count: int) -> list[Placement]:
        new = [Placement(f"paper:{len(self.placed) + index}") for index in range(count)]
        self.placed += new
        self.order = order
        self.news += [Running(each, "far") for each in new]
        if self.dies:
            self.news += [Ended(each, "exit code 1", in_order=False) for each in new]
        return new

    def changes(self) -> Iterator[Change]:
        if self.away:
            raise EngineAwayError("no route")
        news, self.news = self.news, []
        yield from news

    def find(self, order: AgentOrder) -> list[Placement]:
        return []

    def drain(self, placements: Sequence[Placement]) -> None:
        self.asked += [("drain", each) for each in placements]
        self.news += [Ended(each, "left", in_order=True) for each in placements]

    def kill(self, placements: Sequence[Placement]) -> None:
        if self.away:
            raise EngineAwayError("no route")
        self.asked += [("kill", each) for each in placements]

    def logs(self, placement: Placement) -> str:
        return f"paper logs {placement.id}"

    def script(self, order: AgentOrder, count: int) -> str:
        return ""

    def submit(self, command: Sequence[str], order: AgentOrder) -> str:
        return ""

    def driver_script(self, command: Sequence[str], order: AgentOrder) -> str:
        return ""

    def close(self) -> None:
        self.asked.append(("close", Placement("")))


class Reading(PaperEngine):
    """Reads the URL of the database in the environment, as what it starts would."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def place(self, order: AgentOrder, count: int) -> list[Placement]:
        self.read.append(os.environ["HPO_STORAGE"])
        return super().place(order, count)

    def submit(self, command: Sequence[str], order: AgentOrder) -> str:
        return os.environ["HPO_STORAGE"]


class Saying(PaperEngine):
    """Says the command of a driver that is submitted."""

    def submit(self, command: Sequence[str], order: AgentOrder) -> str:
        return " ".join(command)

    driver_script = submit


def order_of(view: OpenStudy, workers: int | None = 1) -> AgentOrder:
    return AgentOrder(view.spec.path, view.spec.study.name, view.spec.output_dir / "agents", workers=workers)


def as_agent(view: OpenStudy, placement: str) -> None:
    """Let the view take trials as a worker of a registered agent."""
    joining = Joining(placement, "cpu", 1, "", "", "", 60.0)
    with view.storage.transaction() as session:
        row = agents.register(session, view.study_id, Owner.current(), joining)
    assert view.storage.owner is not None
    view.storage.owner = replace(view.storage.owner, agent=row.agent_id)


def test_what_happens_is_seen_from_the_database_alone(studies: Studies) -> None:
    with studies.open(views=2) as (watching, working):
        before = ask(working)[0]
        observer = Observer(watching)
        assert list(observer.look()) == []
        before.report(2.0, 1)
        first = ask(working)[0]
        first.report(3.0, 1)
        first.report(1.5, 2)
        owner = working.storage.owner
        assert owner is not None
        label = f"worker-1@{owner.host}"
        assert list(observer.look()) == [
            (label, EpochsEnded(0, 1, (2.0,), 3)),
            (label, Started(1, Lease(first._trial_id, 1), 0.0, 0, ())),
            (label, EpochsEnded(1, 1, (3.0, 1.5), 3)),
        ]
        assert list(observer.look()) == []
        working.study.tell(first, 1.5)
        quick = ask(working)[0]
        working.study.tell(quick, state=TrialState.PRUNED)
        working.storage.requeue(before._trial_id, "interrupted")
        said = {each.number: (who, each) for who, each in observer.look() if isinstance(each, TrialReport)}
        assert {number: (who, each.outcome, each.value) for number, (who, each) in said.items()} == {
            0: (label, None, None),
            1: (label, "complete", 1.5),
            2: (label, "pruned", None),
        }
        assert said[0][1].reason == "interrupted"
        assert said[1][1].params == first.params
        assert list(observer.look()) == []


def test_what_a_database_that_goes_away_keeps_from_being_seen_is_said_by_the_next_look(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise DatabaseAwayError("no route")

    with studies.open(views=2) as (watching, working):
        observer = Observer(watching)
        ended, requeued = ask(working)[0], ask(working)[0]
        assert len(list(observer.look())) == 2
        working.study.tell(ended, 1.5)
        working.storage.requeue(requeued._trial_id, "interrupted")
        with monkeypatch.context() as patch:
            patch.setattr("hpo.storage.ledger.attempts_of_trial", away)
            for _ in range(2):
                with pytest.raises(DatabaseAwayError):
                    list(observer.look())
        reports = [said for _, said in observer.look() if isinstance(said, TrialReport)]
        assert [(each.number, each.outcome) for each in reports] == [(0, "complete"), (1, None)]


def test_a_trial_that_resumes_as_the_database_goes_away_is_seen_by_the_next_look(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object, **__: object) -> None:
        raise DatabaseAwayError("no route")

    with studies.open(views=2) as (watching, working):
        trial = ask(working)[0]
        trial.report(2.0, 1)
        working.storage.pause(trial._trial_id, 1)
        observer = Observer(watching)
        assert list(observer.look()) == []
        assert working.storage.resume(trial._trial_id)
        with monkeypatch.context() as patch:
            patch.setattr(watching.storage, "read_changes", away)
            with pytest.raises(DatabaseAwayError):
                list(observer.look())
        assert [type(said) for _, said in observer.look()] == [Started]
        working.study.tell(trial, 1.5)
        assert [type(said) for _, said in observer.look()] == [TrialReport]


def test_the_leases_of_a_machine_that_is_gone_are_settled_at_once_and_a_false_alarm_is_fenced(
    studies: Studies,
) -> None:
    heard: list[Any] = []
    engine = PaperEngine()
    with studies.open("study.n_trials=2", views=3) as (watching, gone, other):
        driver = Driver(watching, engine, order_of(watching), (2, 2), lambda _, said: heard.append(said))
        driver._fleet.grow(2)
        as_agent(gone, engine.placed[0].id)
        as_agent(other, engine.placed[1].id)
        lost, kept = ask(gone)[0], ask(other)[0]
        driver._observe()
        engine.news.append(NodeGone(engine.placed[0], "far"))
        driver._take_changes()
        driver._observe()
        (settled,) = (each for each in heard if isinstance(each, Settled))
        assert settled == Settled(lost.number, 1, TrialState.WAITING, "lost", "its machine far is gone")
        assert [each.what for each in heard if isinstance(each, AgentNews)][-1] == "lost"
        with pytest.raises(LeaseLostError):  # it lives, and finds that it has lost the trial
            lost.report(1.0, 1)
        kept.report(1.0, 1)
        again = ask(other)[0]
        assert again.number == lost.number
        with watching.storage.engine.connect() as conn:
            found = agents.open_agents(conn, watching.study_id)
        assert [each.placement for each in found] == [engine.placed[1].id]


def test_a_trial_that_is_taken_while_all_are_counted_keeps_the_study_open(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    with studies.open("study.n_trials=1", views=2) as (watching, working):

        def taken_meanwhile(opened: OpenStudy, most: int) -> int:
            ask(working)
            return claimable(opened, most)

        monkeypatch.setattr("hpo.execution.upkeep.claimable", taken_meanwhile)
        assert Upkeep(watching, lambda *_: None).is_more_to_come()


def test_an_agent_that_waited_for_its_machine_hears_a_stop_from_before_it_began(studies: Studies) -> None:
    engine = PaperEngine()
    with studies.open() as (view,):
        assert Driver(view, engine, order_of(view), (1, 1), lambda *_: None, detach=True).run() is Ending.DETACHED
        assert engine.order is not None
        (seen,) = engine.order.arguments
        assert seen.startswith("--stop-seen=")
        ask_all_to_leave(view)
        assert not Registered(view, []).is_to_leave
        late = Registered(view, [], seen.partition("=")[2])
        launcher = LocalLauncher([Slot("cpu", "cpu", None, 1)], view.spec.output_dir)
        supervisor = Supervisor(view, launcher, lambda *_: None, registered=late, leave_when_idle=60.0)
        assert supervisor.run() is Ending.STOPPED
        assert view.study.get_trials() == [], "it takes no trial first"


def test_a_second_ctrl_c_leaves_agents_whose_engine_does_not_answer(studies: Studies) -> None:
    """Otherwise only a kill ends a driver whose engine is away."""
    heard: list[Any] = []
    engine = PaperEngine()
    with studies.open() as (view,):
        driver = Driver(view, engine, order_of(view), (1, 1), lambda _, said: heard.append(said))
        driver._fleet.grow(1)
        engine.away = True
        driver._hear(signal.SIGINT, insisted=False)
        assert not driver._leaving
        driver._hear(signal.SIGINT, insisted=True)
        assert driver.run() is Ending.DETACHED
    assert Notice("leaving: the engine does not answer, and stops no agents") in heard


@pytest.mark.parametrize(
    ("stop", "ending"), [(None, Ending.LEFT), (Ending.DONE, Ending.LEFT), (Ending.INTERRUPTED, Ending.INTERRUPTED)]
)
def test_a_driver_that_has_asked_its_agents_to_leave_does_not_say_that_they_stay(
    studies: Studies, stop: Ending | None, ending: Ending
) -> None:
    with studies.open() as (view,):
        driver = Driver(view, PaperEngine(), order_of(view), (1, 1), lambda *_: None)
        driver._fleet.grow(1)
        if stop is not None:
            driver._stop(stop)
        driver._hear(signal.SIGTERM, insisted=False)
        assert driver.run() is ending


def test_agents_that_die_with_nothing_done_end_the_run(studies: Studies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpo.execution.fleet._FIRST_PAUSE", 0.0)
    monkeypatch.setattr("hpo.execution.driver._TICK", 0.0)
    engine = PaperEngine()
    engine.dies = True
    with studies.open() as (view,), pytest.raises(StudyError) as raised:
        Driver(view, engine, order_of(view), (1, 2), lambda *_: None).run()
    assert str(raised.value).startswith("6 agents died with nothing done in the study meanwhile\n")
    assert "the last one: exit code 1" in str(raised.value)
    assert "fix: see paper logs paper:" in str(raised.value)
    assert len(engine.placed) == 6
    assert engine.asked[-1][0] == "close"


@pytest.mark.parametrize(("retries", "deaths"), [(0, 3), (3, 5)])
def test_trials_that_start_and_are_requeued_do_not_excuse_the_deaths_of_agents(
    studies: Studies, monkeypatch: pytest.MonkeyPatch, retries: int, deaths: int
) -> None:
    class Dying(PaperEngine):
        """Its agents take a trial, which is seen, and then die."""

        held, looks = 0, 0

        def place(self, order: AgentOrder, count: int) -> list[Placement]:
            self.held, self.looks = ask(working)[0]._trial_id, 0
            assert len(self.placed) < 9
            return super().place(order, count)

        def changes(self) -> Iterator[Change]:
            self.looks += 1
            if self.looks == 2:
                working.storage.requeue(self.held, "interrupted")
                self.news.append(Ended(self.placed[-1], "exit code 1", in_order=False))
            return super().changes()

    monkeypatch.setattr("hpo.execution.fleet._FIRST_PAUSE", 0.0)
    monkeypatch.setattr("hpo.execution.driver._TICK", 0.0)
    monkeypatch.setattr("hpo.execution.driver._LOOK_SHARE", 0)
    heard: list[Any] = []
    with studies.open(f"run.max_retries={retries}", views=2) as (view, working):
        driver = Driver(view, Dying(), order_of(view), (1, 1), lambda _, said: heard.append(said))
        with pytest.raises(StudyError, match=f"{deaths} agents died with nothing done in the study meanwhile"):
            driver.run()
    assert len([said for said in heard if isinstance(said, Started)]) == deaths


def test_first_trials_that_are_lost_alike_end_the_run(studies: Studies) -> None:
    engine = PaperEngine()
    with studies.open("run.max_retries=0", views=2) as (watching, working):
        driver = Driver(watching, engine, order_of(watching), (1, 1), lambda *_: None)
        driver._observe()

        def lose_a_trial() -> None:
            driver._fleet.grow(1)
            as_agent(working, engine.placed[-1].id)
            ask(working)
            engine.news.append(NodeGone(engine.placed[-1], "far"))
            driver._take_changes()
            driver._fleet.grow(1)
            driver._observe()

        lose_a_trial()
        lose_a_trial()
        with pytest.raises(StudyError, match=r"the first 3 trials failed alike:\n  .*its machine far is gone"):
            lose_a_trial()
        assert ("drain", engine.placed[-1]) in engine.asked


def test_upkeep_that_takes_long_does_not_put_off_the_looks_at_the_study(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does where the quota walks through a large folder."""
    now, looks = 0.0, list[float]()

    def long(_: float) -> None:
        nonlocal now
        now += 30.0

    with studies.open() as (view,), closing(Signals()) as signals:
        driver = Driver(view, PaperEngine(), order_of(view), (1, 1), lambda *_: None)
        monkeypatch.setattr("hpo.execution.driver.time", SimpleNamespace(monotonic=lambda: now))
        monkeypatch.setattr("hpo.execution.driver._TICK", 0.0)
        monkeypatch.setattr(driver._upkeep, "look", long)
        monkeypatch.setattr(driver, "_observe", lambda: looks.append(now))
        for _ in range(3):
            driver._step(signals)
    assert looks == [30.0, 60.0, 90.0]


@pytest.mark.parametrize(
    ("agents_", "workers", "placed"), [((1, 2), 1, 2), ((1, 9), 4, 2), ((3, 9), 6, 3), ((1, 9), None, 6)]
)
def test_there_are_as_many_agents_as_trials_want(
    studies: Studies, agents_: tuple[int, int], workers: int | None, placed: int
) -> None:
    engine = PaperEngine()
    with studies.open() as (view,):  # six trials
        driver = Driver(view, engine, order_of(view, workers), agents_, lambda *_: None, detach=True)
        assert driver.run() is Ending.DETACHED
    assert len(engine.placed) == placed
    assert [what for what, _ in engine.asked] == ["close"]


def test_no_agent_is_placed_for_trials_that_others_train(studies: Studies) -> None:
    engine = PaperEngine()
    with studies.open(views=3) as (view, elsewhere, working):  # six trials
        driver = Driver(view, engine, order_of(view), (1, 9), lambda *_: None)
        for _ in range(4):
            ask(elsewhere)
        assert driver._wanted() == 2
        driver._fleet.grow(1)
        as_agent(working, engine.placed[0].id)
        ask(working)
        assert driver._wanted() == 2, "one trains, and one trial is left for another"


def test_a_trial_that_is_taken_while_all_are_counted_wants_one_agent(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = PaperEngine()
    with studies.open("study.n_trials=2", views=2) as (view, working):
        driver = Driver(view, engine, order_of(view), (1, 9), lambda *_: None)
        driver._fleet.grow(1)
        as_agent(working, engine.placed[0].id)

        def taken_next(opened: OpenStudy) -> int:
            found = claimable(opened)
            ask(working)
            return found

        monkeypatch.setattr("hpo.execution.upkeep.claimable", taken_next)
        assert driver._wanted() == 2


def test_an_engine_that_is_away_is_asked_again_and_what_it_requeues_is_drained_again(tmp_path: Path) -> None:
    heard: list[AgentNews | Notice] = []
    engine = PaperEngine()
    fleet = Fleet(engine, AgentOrder(tmp_path, "s", tmp_path), 2, heard.append)
    fleet.grow(2)
    first, second = engine.placed
    engine.away = True
    fleet.take_changes()
    fleet.take_changes()
    assert [each.text for each in heard if isinstance(each, Notice)] == [
        "the engine does not answer, and is asked again: no route"
    ]
    engine.away = False
    fleet.drain()
    engine.news = [Preempted(first, requeued=True), Preempted(second, requeued=False)]
    fleet.take_changes()
    assert fleet.count == 1
    fleet.take_changes()
    fleet.take_changes()
    assert engine.asked == [("drain", first), ("drain", second), ("drain", first)]
    assert fleet.count == 0


def test_a_person_hears_why_an_agent_waits(tmp_path: Path) -> None:
    heard: list[AgentNews | Notice] = []
    engine = PaperEngine()
    fleet = Fleet(engine, AgentOrder(tmp_path, "s", tmp_path), 1, heard.append)
    fleet.grow(1)
    engine.news = [Waits(engine.placed[0], "no node is free")]
    fleet.take_changes()
    assert fleet.count == 1
    said = heard[-1]
    assert isinstance(said, AgentNews)
    assert in_words(said) == f"agent {engine.placed[0].id} waits: no node is free"


def test_an_agent_that_another_one_asked_to_leave_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not died; the next one waits as after a death: something may ask each of them to leave."""
    monkeypatch.setattr("hpo.execution.fleet.time.monotonic", lambda: 0.0)
    heard: list[AgentNews | Notice] = []
    engine = PaperEngine()
    fleet = Fleet(engine, AgentOrder(tmp_path, "s", tmp_path), 1, heard.append)
    fleet.grow(1)
    engine.news = [Ended(engine.placed[0], "its job is CANCELLED, signal 15", in_order=False, asked=True)]
    fleet.take_changes()
    said = heard[-1]
    assert isinstance(said, AgentNews)
    assert in_words(said) == f"agent {engine.placed[0].id} has ended: its job is CANCELLED, signal 15"
    fleet.grow(1)
    assert (fleet.count, len(engine.placed)) == (0, 1)


def test_what_an_engine_has_said_before_it_is_away_is_known(tmp_path: Path) -> None:
    class Breaking(PaperEngine):
        def changes(self) -> Iterator[Change]:
            yield from super().changes()
            raise EngineAwayError("no route")

    fleet = Fleet(Breaking(), AgentOrder(tmp_path, "s", tmp_path), 2, lambda _: None)
    fleet.grow(2)
    engine = fleet._engine
    assert isinstance(engine, PaperEngine)
    first, second = engine.placed
    engine.news += [Ended(first, "left", in_order=True), NodeGone(second, "far")]
    assert fleet.take_changes() == [NodeGone(second, "far")]
    assert fleet.count == 0


def test_the_pause_before_another_agent_grows_though_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One machine of two is broken: an agent there dies at once, each time."""
    now = 0.0
    monkeypatch.setattr("hpo.execution.fleet.time.monotonic", lambda: now)
    engine = PaperEngine()
    fleet = Fleet(engine, AgentOrder(tmp_path, "s", tmp_path), 2, lambda _: None)
    fleet.grow(2)

    def seconds_to_the_next(after: float) -> float:
        nonlocal now
        now += after
        died, placed = now, len(engine.placed)
        engine.news = [Ended(engine.placed[-1], "it can't start", in_order=False)]
        fleet.take_changes()
        fleet.progressed()
        while len(engine.placed) == placed:
            fleet.grow(2)
            now += 0.5
        return now - 0.5 - died

    assert [seconds_to_the_next(0.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert seconds_to_the_next(after=100.0) == 1


def test_what_an_agent_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HPO_STORAGE", raising=False)
    monkeypatch.setenv("PGPASSWORD", "word")
    monkeypatch.setenv("HPO_PLACEMENT", "the driver's own")
    monkeypatch.setenv("HPO_DASHBOARD_TOKEN", "the dashboard's")
    study = make_study(tmp_path)
    given = ["run.on=slurm:partition=gpu", "run.resources={gpu: 0.5, memory: 1GiB}", "run.storage=" + SERVER]
    spec = load_spec(study, given).with_options(
        n_trials=9, workers=4, devices="cuda:0", output_dir=tmp_path / "out"
    )
    order = placing_of(spec, given).order
    assert order.resources == Resources(gpu=2.0, cpu=None, memory=2**32)
    assert "PGPASSWORD" in order.environment
    assert not {"HPO_PLACEMENT", "HPO_DASHBOARD_TOKEN"} & set(order.environment)
    assert order.command("hpo") == [
        *("hpo", "worker", str(study), "--workers", "4", *given[:2]),
        *("study.n_trials=9", "--devices", "cuda:0", "--output-dir", str(tmp_path / "out"), "--storage", SERVER),
    ]


def test_an_engine_is_closed_though_no_driver_has_run(studies: Studies, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: OpenStudy) -> Listener:
        raise StudyError("nothing listens")

    engine = PaperEngine()
    monkeypatch.setattr("hpo.execution.placing.engine_of", lambda _: engine)
    monkeypatch.setattr("hpo.execution.run.prepared", lambda *_, **__: [])
    with studies.open("run.on=local"):
        placing = placing_of(studies.spec("run.on=local"))
        placing.script()
        with pytest.raises(StudyError, match="nothing listens"):
            run_on(placing, refuse, lambda _: None)
    assert [what for what, _ in engine.asked] == ["close", "close"]


def test_the_time_limit_of_a_submitted_driver_counts_from_its_first_start(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1e9
    monkeypatch.setattr("hpo.execution.driver.time.time", lambda: now)
    with studies.open("run.timeout=1h", "run.on=local") as (view,):

        def driver(by: str | None, engine: PaperEngine) -> Driver:
            return Driver(view, engine, order_of(view), (1, 1), lambda *_: None, detach=True, submission=by)

        assert driver("a", PaperEngine()).run() is Ending.DETACHED
        now += 3599
        assert driver("a", PaperEngine()).run() is Ending.DETACHED
        now += 2
        late = PaperEngine()
        assert driver("a", late).run() is Ending.TIMEOUT
        assert late.placed == []
        for other in ("b", None):  # submitted later, and a person's
            assert driver(other, PaperEngine()).run() is Ending.DETACHED
        monkeypatch.undo()
        given = ("--on", "local", "--timeout", "1h", "--submission=a")
        assert "the time limit is reached" in hpo("run", view.spec.path, *given).stdout


def test_each_submission_has_a_time_limit_of_its_own_and_a_script_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpo.execution.placing.engine_of", lambda _: Saying())
    placing = placing_of(load_spec(make_study(tmp_path), ["run.on=local", "run.timeout=1h"]))
    first, second = (submit(placing, dry_run=False) for _ in range(2))
    assert "--timeout 3600 --submission=" in first
    assert first != second
    assert submit(placing, dry_run=True).endswith("--timeout 3600")


def test_a_password_reaches_agents_by_the_environment_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPO_STORAGE", "")
    study = make_study(tmp_path)
    secret = SERVER.replace("user@", "user:hunter2@")
    on = load_spec(study, ["run.on=slurm"])
    placing = placing_of(on.with_options(storage=secret), [f"run.storage={secret}"])
    assert "hunter2" not in " ".join(placing.order.command())
    assert "HPO_STORAGE" in placing.order.environment
    monkeypatch.setattr("hpo.execution.placing.engine_of", lambda _: Reading())
    assert submit(placing, dry_run=False) == secret
    assert os.environ["HPO_STORAGE"] == "", "what this process runs later is none of that database's"
    inside = ["run.on=slurm", f"run={{storage: '{secret}', on: slurm}}"]
    with pytest.raises(InputError, match=r"^run.storage: has a password(.|\n)*`run.storage=…`") as raised:
        placing_of(load_spec(study, inside), inside)
    assert "hunter2" not in str(raised.value)
    study.write_text(study.read_text() + f"run: {{storage: '{SERVER}'}}\n")
    with pytest.raises(InputError, match=r"^--storage: has a password(.|\n)*HPO_STORAGE"):
        placing_of(load_spec(study, ["run.on=slurm"]).with_options(storage=secret))


def test_a_url_with_a_password_is_in_the_environment_while_agents_are_placed_and_no_longer(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, secret = Reading(), SERVER.replace("user@", "user:hunter2@")
    monkeypatch.delenv("HPO_STORAGE", raising=False)
    monkeypatch.setattr("hpo.execution.placing.engine_of", lambda _: engine)
    monkeypatch.setattr("hpo.execution.run.prepared", lambda *_, **__: [])
    spec = studies.spec("run.on=local", f"run.storage=sqlite:///{studies.folder}/study.db")
    placing = replace(placing_of(spec.with_options(storage=secret)), spec=spec)
    assert run_on(placing, Reporter, lambda _: None, detach=True) is Ending.DETACHED
    assert engine.read == [secret]
    assert "HPO_STORAGE" not in os.environ


@pytest.mark.parametrize("on", ["ray:auto,ship=study", "k8s:image=i,volume-claim=c,files=configmap"])
def test_a_password_in_the_study_file_is_not_sent_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: str
) -> None:
    monkeypatch.delenv("HPO_STORAGE", raising=False)
    study = make_study(tmp_path)
    study.write_text(study.read_text() + f"run: {{storage: '{SERVER.replace('user@', 'user:hunter2@')}'}}\n")
    with pytest.raises(InputError, match=r"run.storage: has a password, which would be sent") as raised:
        placing_of(load_spec(study, [f"run.on={on}"]))
    assert "hunter2" not in str(raised.value)
    assert placing_of(load_spec(study, [f"run.on={on.partition(',ship')[0].partition(',files')[0]}"]))


@pytest.mark.parametrize(
    ("on", "problem"),
    [
        (
            "slurm:partition=gpu",
            "command line: run.storage: a SQLite file can't be shared",
        ),
        ("slurm:partitoin=gpu", "command line: run.on: the engine `slurm` has no key 'partitoin'"),
        ("slrum", "command line: run.on: there is no engine named 'slrum'"),
    ],
)
def test_what_can_not_be_placed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: str, problem: str
) -> None:
    monkeypatch.delenv("HPO_STORAGE", raising=False)
    study = make_study(tmp_path)
    storage = "run.storage=sqlite:///here.db"
    with pytest.raises(InputError) as raised:
        placing_of(load_spec(study, [f"run.on={on}", storage]))
    assert str(raised.value).startswith(problem)
    for command in ("check", "run", "submit"):
        refused = hpo(command, study, f"run.on={on}", storage, code=2)
        assert problem in refused.stdout + refused.stderr


def test_agents_are_not_left_to_an_engine_that_ends_with_the_command(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    refused = hpo("run", study, "--on", "ray:local", "--detach", code=2)
    assert "--on: this Ray ends with the command, and takes its agents with it" in refused.stderr
    assert not study.with_name("runs").exists()


def test_what_is_about_agents_needs_an_engine(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    for option in (("--agents", "2..4"), ("--detach",), ("--dry-run",)):
        refused = hpo("run", study, *option, code=2).stderr
        assert refused.startswith(f"{option[0]}: is about agents that an engine places")
    assert hpo("submit", study, code=2).stderr.startswith("--on: no engine is given")
