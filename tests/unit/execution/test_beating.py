"""An agent's beats for its trial processes, and those that a trial process gives itself."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import pytest
import sqlalchemy as sa

from hpo.execution import beating
from hpo.execution.beating import AgentBeats, trial_heartbeat
from hpo.execution.launchers.launcher import Worker
from hpo.execution.messages import Command, Lost
from hpo.execution.pulse import (
    ALIVE,
    BEATEN,
    EXCUSED,
    PULSE_LENGTH,
    Held,
    excused_in,
    held_by,
    show_free,
    show_held,
)
from hpo.execution.registered import Registered
from hpo.storage import ledger
from hpo.storage.ledger import Attempt, Lease
from hpo.storage.study_storage import StudyStorage
from hpo.study.open_study import OpenStudy
from hpo.trial.stopping import StopRequest
from tests.support.studies import Studies

INTERVAL = 10.0


@dataclass
class Shows:
    """What an agent sees of a worker."""

    lease: Lease
    pulse: list[float] = field(default_factory=lambda: [0.0] * PULSE_LENGTH)
    asked: list[Command] = field(default_factory=list)

    def __post_init__(self) -> None:
        show_held(self.pulse, self.lease, time.monotonic() - 1.0)

    @property
    def held(self) -> Held | None:
        return held_by(self.pulse)

    def show_beaten(self, at: float) -> None:
        self.pulse[BEATEN] = at

    def ask(self, command: Command) -> None:
        self.asked.append(command)


def workers(view: OpenStudy, count: int) -> list[Shows]:
    return [Shows(Lease(view.study.ask()._trial_id, 1)) for _ in range(count)]


def give(beats: AgentBeats, shown: list[Shows]) -> None:
    beats.give(cast("list[Worker]", shown))


def attempt(view: OpenStudy, shown: Shows) -> Attempt:
    (only,) = view.storage.attempts_of_trial(shown.lease.trial_id)
    return only


@pytest.mark.parametrize("count", [0, 1, 8])
def test_the_beats_of_all_trials_and_the_agents_own_are_one_transaction(studies: Studies, count: int) -> None:
    with studies.open("study.n_trials=8") as (view,):
        agent = Registered(view, [])
        shown = workers(view, count)
        before = [attempt(view, each) for each in shown]
        done: list[str] = []
        engine = view.storage.engine
        sa.event.listen(engine, "before_cursor_execute", lambda *given: done.append(given[2].split(" ", 1)[0]))
        sa.event.listen(engine, "commit", lambda _: done.append("commit"))
        give(AgentBeats(view.storage, agent, INTERVAL), shown)
        row_and_stop_request = ["UPDATE", "SELECT"]
        assert done == ["BEGIN", *row_and_stop_request, *["UPDATE"] * bool(count), "commit"]
        assert not any(each.asked for each in shown)
        for each, earlier in zip(shown, before, strict=True):
            after = attempt(view, each)
            assert after.beat_at > earlier.beat_at
            assert after.seconds >= 1.0
            assert each.pulse[BEATEN] >= each.pulse[ALIVE]


def test_a_time_in_which_a_trial_could_not_advance_is_not_stored_as_its_attempts(studies: Studies) -> None:
    """By its agent, by itself, and at its end."""
    with studies.open("study.n_trials=8") as (view,):
        (shown,) = workers(view, 1)
        view.storage.excused_s = partial(excused_in, shown.pulse)
        shown.pulse[EXCUSED] += 0.75
        give(AgentBeats(view.storage, None, INTERVAL), [shown])
        assert 0.25 <= attempt(view, shown).seconds < 1.0
        shown.pulse[EXCUSED] -= 1000.0  # of a trial that it has held for so long
        view.storage.beat()
        assert 999 < attempt(view, shown).seconds < 1001
        shown.pulse[EXCUSED] += 500.0
        view.storage.requeue(shown.lease.trial_id, "interrupted")
        assert 499 < attempt(view, shown).seconds < 501


def test_what_has_not_run_for_an_interval_gets_no_beat(studies: Studies) -> None:
    with studies.open("study.n_trials=8") as (view,):
        stopped, runs, free = workers(view, 3)
        stopped.pulse[ALIVE] -= INTERVAL
        show_free(free.pulse)
        before = [attempt(view, each) for each in (stopped, runs, free)]
        give(AgentBeats(view.storage, None, INTERVAL), [stopped, runs, free])
        moved = [
            attempt(view, each) != earlier for each, earlier in zip((stopped, runs, free), before, strict=True)
        ]
        assert moved == [False, True, False]
        assert [each.pulse[BEATEN] > 0 for each in (stopped, runs, free)] == [False, True, False]


def test_a_lost_lease_is_told_once_and_to_its_holder_alone(studies: Studies) -> None:
    with studies.open("study.n_trials=8") as (view,):
        loses, keeps = shown = workers(view, 2)
        with view.storage.one_transaction() as conn:
            ledger.end(conn, *loses.lease, "lost")
        beats = AgentBeats(view.storage, None, INTERVAL)
        for _ in range(3):
            give(beats, shown)
        assert (loses.asked, keeps.asked) == ([Lost(loses.lease)], [])
        assert (loses.pulse[BEATEN], keeps.pulse[BEATEN] > 0) == (0.0, True)


@pytest.mark.parametrize("lease", [Lease(1, 1), Lease(2**31 - 1, 2**20 - 1), Lease(3, 1000)])
def test_a_lease_is_one_number_of_a_pulse(lease: Lease) -> None:
    pulse = [0.0] * PULSE_LENGTH
    assert held_by(pulse) is None
    show_held(pulse, lease, 5.0)
    assert held_by(pulse) == Held(lease, 5.0, 5.0)
    show_free(pulse)
    assert held_by(pulse) is None


class Clock:
    """The monotonic clock that this test sets."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_a_trial_process_beats_for_itself_while_its_agent_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pulse, given = Clock(), [0.0] * PULSE_LENGTH, list[float]()

    class Beats:
        def beat(self) -> list[Lease]:
            given.append(clock.now)
            return []

        def rest_if_idle(self, _: float) -> None:
            pass

    monkeypatch.setattr(beating, "time", clock)
    storage = cast("StudyStorage", Beats())
    heart: Any = trial_heartbeat(storage, pulse, StopRequest(), lost_after=60.0)
    for passed in range(100):
        clock.now = 1000.0 + passed
        if passed % 10 == 5 and not 30 < passed < 70:  # the agent, which is stopped for a while
            pulse[BEATEN] = clock.now
        heart._give()
        assert pulse[ALIVE] == clock.now
    assert given == [1046.0, 1056.0, 1066.0], "from two intervals after the agent's last beat to its next one"
