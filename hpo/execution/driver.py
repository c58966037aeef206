"""The driver of a study (`hpo run --on`): has an engine place agents, replaces lost ones, and ends the study.

It trains nothing and holds no trial. Agents work without it, so a driver that dies or leaves loses nothing; the
next driver asks the engine for the agents that are there.
"""

from __future__ import annotations

import math
import signal
import time
from dataclasses import replace
from typing import Final

from optuna.trial import TrialState

from hpo.errors import StudyError
from hpo.execution.engines.engine import AgentOrder, Engine
from hpo.execution.failures import Failures
from hpo.execution.fleet import Fleet
from hpo.execution.messages import EpochsEnded, Heard, Message, Notice, Started, Tick
from hpo.execution.observer import Observer
from hpo.execution.supervisor import Ending, Reporter
from hpo.execution.upkeep import Upkeep
from hpo.signals import Signals, at_terminal, heard
from hpo.storage.agents import stop_request
from hpo.storage.attributes import DEADLINE_ATTR
from hpo.storage.outage import DatabaseAwayError
from hpo.storage.settling import LOST, STOPPED, Settled, Verdict
from hpo.study.open_study import OpenStudy
from hpo.trial.report import TrialReport

#: Seconds between two looks at the engine and the study.
_TICK: Final = 1.0
#: Looking at the study takes at most 1/20 of the time: the pause after a look is this many times its duration.
_LOOK_SHARE: Final = 20
_STOPPING: Final = "stopping: agents checkpoint their trials and leave"
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Driver:
    """Runs a study with agents that an engine places.

    Args:
        opened: The study; this process owns no trial.
        engine: Places the agents; closed at the end.
        order: What each agent does.
        agents: The smallest and the largest number of agents while trials wait for a worker.
        report: Called with a label (who says it) and a message, and with a `Tick` every second. An OSError means
            that the reader is gone: the driver leaves.
        detach: Leave as soon as agents are placed.
        submission: Id of the `hpo submit` that started this driver; the time limit counts from its first start.
    """

    def __init__(
        self,
        opened: OpenStudy,
        engine: Engine,
        order: AgentOrder,
        agents: tuple[int, int],
        report: Reporter,
        *,
        detach: bool = False,
        submission: str | None = None,
    ) -> None:
        self._opened = opened
        self._engine = engine
        self._workers = order.workers or 1
        self._fewest, self._most = agents
        self._reporter = report
        self._detach = detach
        self._deadline = time.monotonic() + _time_left(opened, submission)
        self._upkeep = Upkeep(opened, self._of_upkeep)
        with opened.storage.engine.connect() as conn:
            self._stop_seen = stop_request(conn, opened.study_id)
        # So an agent that has waited for its machine notices a request to stop that came in the meantime.
        order = replace(order, arguments=(*order.arguments, f"--stop-seen={self._stop_seen}"))
        retries = opened.spec.run.max_retries
        self._fleet = Fleet(engine, order, self._most, lambda news: self._notify("", news), retries)
        self._failures = Failures(opened, self._most)
        self._observer: Observer | None = None
        self._ending: Ending | None = None
        self._leaving: Ending | None = None
        self._next_look = 0.0

    def run(self) -> Ending:
        """Have agents work until every trial has ended, the time limit is reached, or a signal comes.

        The first Ctrl-C drains the agents; a second one at a terminal kills them. Agents stay at work after
        SIGTERM and SIGHUP, and if their engine does not answer at the second Ctrl-C.

        Raises:
            DatabaseError: The database fails permanently; the agents stay.
            StudyError: Agents keep dying, or the first trials fail alike; the remaining agents have been asked to
                leave.
        """
        with heard(_SIGNALS) as signals:
            try:
                for note in self._opened.notes:
                    self._notify("", Notice(note))
                self._fleet.adopt()
                while not self._leaving and not self._is_over():
                    self._step(signals)
            finally:
                self._engine.close()
        return self._leaving or self._ending or Ending.DONE

    def _step(self, signals: Signals) -> None:
        self._take_changes()
        self._upkeep.look(time.monotonic())
        now = time.monotonic()  # upkeep may have taken long
        if now >= self._next_look:
            self._observe()
            self._next_look = time.monotonic() + max(_TICK, _LOOK_SHARE * (time.monotonic() - now))
        if self._ending is None:
            self._stop_early(now)
        if self._ending is None:
            self._fleet.grow(self._wanted())
            if self._detach and self._fleet.count > 0:
                self._leaving = Ending.DETACHED
        self._notify("", Tick())
        for number in [] if self._leaving else signals.wait(_TICK):
            self._hear(number, insisted=signals.insisted)

    def _take_changes(self) -> None:
        try:
            gone = self._fleet.take_changes()
        except BaseException:
            self._fleet.drain()
            raise
        for change in gone:
            self._upkeep.settle_agent(change.placement.id, Verdict(LOST, f"its machine {change.host} is gone"))

    def _observe(self) -> None:
        """Report what has happened in the study."""
        try:
            with self._opened.storage.patience.whole():
                if self._observer is None:
                    self._observer = Observer(self._opened)
                for label, said in self._observer.look():
                    self._notify(label, said)
                    self._judge(said)
        except DatabaseAwayError:  # the upkeep says so
            return

    def _judge(self, said: Message | Settled) -> None:
        """Note progress, and failures that mean that the study is broken."""
        if isinstance(said, Started):
            self._fleet.started()
        elif isinstance(said, EpochsEnded) or _ends_a_trial(said):
            self._fleet.progressed()
        if self._ending is not None:
            return
        try:
            if isinstance(said, Settled):
                self._failures.settled([said])
            elif isinstance(said, TrialReport):
                self._failures.hear(said, self._opened.spec.output_dir)
        except StudyError:
            self._fleet.drain()
            raise

    # ---- the end

    def _is_over(self) -> bool:
        """Whether the run is ending and no agent is left; at the study's end this prunes its paused trials."""
        if self._ending is None and not self._upkeep.is_more_to_come():
            self._stop(Ending.DONE)
        if self._ending is None or self._fleet.count:
            return False
        if self._ending is Ending.DONE:
            budgets = self._upkeep.budgets()
            if self._upkeep.is_more_to_come():  # an agent has requeued a trial that it took at the last moment
                self._ending = None
                self._fleet.resume()
                return False
            if not self._upkeep.end_study(budgets):
                return False
        self._observe()
        return True

    def _wanted(self) -> int:
        """How many agents are needed for the trials that they train and those that wait; 0 if none waits."""
        # Running trials first: a trial that is taken between the two counts is in neither, rather than in both.
        trained = self._upkeep.running_on(self._fleet.placements)
        claimable = self._upkeep.claimable()
        if not claimable:
            return 0
        return max(self._fewest, min(self._most, math.ceil((trained + claimable) / self._workers)))

    def _stop_early(self, now: float) -> None:
        if now >= self._deadline:
            self._stop(Ending.TIMEOUT)
        elif self._is_stopped():
            self._notify("", Notice("stopping: `hpo stop` asks all agents to leave"))
            self._stop(Ending.STOPPED)
        elif (reached := self._upkeep.goal_reached()) is not None:
            self._notify("", Notice(reached))
            self._stop(Ending.GOAL)

    def _is_stopped(self) -> bool:
        """Whether a person has asked all agents to leave (`hpo stop`) since this driver started."""
        return self._upkeep.stop_request() not in (None, self._stop_seen)

    def _stop(self, ending: Ending) -> None:
        self._ending = ending
        self._fleet.drain()

    def _hear(self, number: signal.Signals, *, insisted: bool) -> None:
        if number is not signal.SIGINT:
            self._leave(Ending.LEFT)
        elif insisted:
            self._kill()
        elif self._ending is not Ending.INTERRUPTED:
            self._stop(Ending.INTERRUPTED)
            more = "; a second Ctrl-C stops them immediately" if at_terminal() else ""
            self._notify("", Notice(_STOPPING + more))

    def _leave(self, how: Ending) -> None:
        """Leave before the agents do; the ending stays what it is where they have been asked to leave early."""
        self._leaving = how if self._ending in (None, Ending.DONE) else self._ending

    def _kill(self) -> None:
        """Kill all agents; if their engine does not answer, leave without them."""
        killed = self._fleet.kill()
        for placement in killed:
            self._upkeep.settle_agent(placement.id, Verdict(STOPPED, "its agent was stopped immediately"))
        if self._fleet.count > len(killed):
            self._notify("", Notice("leaving: the engine does not answer, and stops no agents"))
            self._leaving = Ending.DETACHED

    # ---- what is said

    def _of_upkeep(self, label: str, said: Settled | Notice) -> None:
        if isinstance(said, Notice):  # the observer reports what becomes of trials
            self._notify(label, said)

    def _notify(self, label: str, message: Heard) -> None:
        try:
            self._reporter(label, message)
        except OSError:  # the terminal has been closed, or what read our output has ended
            self._reporter = lambda *_: None
            self._leave(Ending.DETACHED)


def _time_left(opened: OpenStudy, submission: str | None) -> float:
    """Seconds until the time limit; a submitted driver stores the deadline at its first start for later ones."""
    timeout = opened.spec.run.timeout
    if timeout is None or submission is None:
        return math.inf if timeout is None else timeout
    storage, study_id, key = opened.storage, opened.study_id, f"{DEADLINE_ATTR}{submission}"
    now = time.time()  # the monotonic clock means nothing on another machine
    deadline: float | None = storage.get_study_system_attrs(study_id).get(key)
    if deadline is None:
        deadline = now + timeout
        storage.set_study_system_attr(study_id, key, deadline)
    return deadline - now


def _ends_a_trial(said: Message | Settled) -> bool:
    """Whether a trial has ended or is paused; False if only an attempt at it has ended."""
    if isinstance(said, Settled):
        return said.state != TrialState.WAITING
    return isinstance(said, TrialReport) and (said.outcome is not None or said.paused)
