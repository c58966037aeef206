"""The supervisor: starts workers, receives their messages, enforces limits, and passes on requests to stop."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable
from enum import Enum
from typing import Final

from hpo.errors import StudyError
from hpo.execution.failures import Failures
from hpo.execution.launchers.launcher import Launcher, Said, WorkerEnded
from hpo.execution.limits import Limits
from hpo.execution.messages import REQUESTS, Heard, Leaving, Notice, Order, Ready, Tick, Warned
from hpo.execution.registered import FAILED, Registered
from hpo.execution.supervised import Supervised
from hpo.execution.upkeep import Upkeep
from hpo.signals import Signals, at_terminal, heard
from hpo.storage import agents
from hpo.storage.outage import DatabaseError
from hpo.study.open_study import OpenStudy
from hpo.trial.report import TrialReport
from hpo.wording import duration

#: Longest time between two checks of the limits, in seconds.
_TICK: Final = 1.0
#: If a wait takes this many seconds longer than it should, this process was stopped meanwhile.
_STOPPED: Final = 5.0
#: Seconds that a worker has to end a trial that broke a limit.
_GRACE: Final = 30.0
#: If each trial spends at least this many seconds on loading, the person is notified.
_LONG_LOADING: Final = 1.0
_LIVES_ON: Final = "it waits inside the kernel; a run after its end resumes what it holds"
_SIGNALS: Final = (signal.SIGINT, *REQUESTS)


#: Called with a label (who says it) and a message, and with a `Tick` every second.
Reporter = Callable[[str, Heard], None]


class Ending(Enum):
    """Why the supervisor's run ended."""

    DONE = agents.DONE
    TIMEOUT = "timeout"
    GOAL = "goal"
    INTERRUPTED = "interrupted"
    STOPPED = "stopped"
    IDLE = "idle"
    DETACHED = "detached"
    LEFT = "left"


class Supervisor:
    """Runs a study with its own workers until all trials have ended.

    Args:
        opened: The study; this process owns no trial.
        launcher: Places the workers.
        report: Called with a worker's label and each of its messages. An OSError means that the reader is gone,
            which is a request to stop.
        timeout: Seconds until workers are asked to checkpoint their trials and stop; None for no limit.
        grace: Seconds that a worker has to end a trial that broke a limit, or whose study has failed, before
            it is killed.
        registered: This process as an agent of the study; None for a supervisor without a row.
        leave_when_idle: Seconds without a trial to take after which the supervisor leaves, without waiting for
            trials that run elsewhere; None to wait for them.
    """

    def __init__(
        self,
        opened: OpenStudy,
        launcher: Launcher,
        report: Reporter,
        timeout: float | None = None,
        grace: float = _GRACE,
        *,
        registered: Registered | None = None,
        leave_when_idle: float | None = None,
    ) -> None:
        self._opened = opened
        self._launcher = launcher
        self._reporter = report
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._grace = grace
        self._limits = Limits.of(opened.spec.run)
        self._registered = registered
        self._leave_when_idle = math.inf if leave_when_idle is None else leave_when_idle
        self._idle_since: float | None = None
        self._upkeep = Upkeep(opened, self._notify, registered)
        self._failures = Failures(opened, len(launcher.slots))
        self._workers: dict[str, Supervised] = {}
        self._ending = Ending.DONE
        self._ended_one = False
        self._noted: set[str] = set()
        self._next_tick = 0.0
        self._failed: StudyError | None = None
        self._kill_at = math.inf

    def run(self) -> Ending:
        """Work until every trial has ended, the time limit is reached, or a signal comes.

        Unless it leaves when idle, it waits for trials that run elsewhere: they resume here if their worker dies.
        Paused trials are pruned when nothing is left to do; any other ending leaves them paused for a later run.

        Raises:
            StudyError: The database fails permanently (`DatabaseError`), or the study failed: its trials fail
                alike from the start, or workers keep dying. Workers have been asked to checkpoint and leave.
        """
        with heard(_SIGNALS) as signals:
            try:
                for note in self._opened.notes:
                    self._notify("", Notice(note))
                self._stop_at_goal()
                self._stop_on_request()
                self._refill()
                while self._is_needed():
                    try:
                        self._wait(signals)
                    except StudyError as error:
                        self._give_up(error)
            finally:
                self._kill_all()
            self._upkeep.leave(self._ending.value if self._failed is None else FAILED)
        if self._failed is not None:
            raise self._failed
        return self._ending

    def _is_needed(self) -> bool:
        """Whether there is a worker to wait for, or something left to do."""
        # A killed worker that lives on may do so for ever: it is not waited for, and a later run takes its lease.
        waits = any(not worker.was_killed for worker in self._workers.values())
        return waits or (self._ending is Ending.DONE and not self._has_ended())

    def _has_ended(self) -> bool:
        """Whether nothing is left to do in the study; if so, this prunes its paused trials."""
        budgets = self._upkeep.budgets()
        return not self._upkeep.waits() and self._upkeep.end_study(budgets)

    def _refill(self) -> None:
        """Start workers as far as there is room for them and something to do."""
        agent = 0 if self._registered is None else self._registered.agent.agent_id
        order = Order(self._opened.spec, self._opened.scheduler, agent=agent, pooler=self._opened.storage.pooler)
        if self._ending is Ending.DONE and self._launcher.room:
            for worker in self._launcher.place(order, self._upkeep.claimable()):
                self._workers[worker.label] = Supervised(worker)

    # ---- what happens

    def _wait(self, signals: Signals) -> None:
        """Wait for the next event, and handle everything that has happened."""
        began = time.monotonic()
        until = max(began, self._next_tick)
        signalled = self._launcher.wait(until - began, signals.wake)
        now = time.monotonic()
        if now - until > _STOPPED:
            self._excuse(now, now - until)
        if signalled:
            self._hear_signals(signals)
        self._take_changes()
        if self._ending is not Ending.DONE:
            self._kill_loading()
        if self._ended_one:
            self._stop_at_goal()
        if time.monotonic() >= self._next_tick:
            self._tick()

    def _excuse(self, now: float, stopped_s: float) -> None:
        """Extend all limits by the time in which this process was stopped: its workers were stopped with it."""
        self._kill_at += stopped_s
        for worker in self._workers.values():
            worker.excuse(now, stopped_s)

    def _tick(self) -> None:
        """Check what no message reports: limits of trials, the run's time limit, workers elsewhere."""
        now = time.monotonic()
        self._next_tick = now + min(_TICK, self._upkeep.interval)
        if self._ending is Ending.DONE and now >= self._deadline:
            self._ask_to_stop(Ending.TIMEOUT)
        if now >= self._kill_at:
            self._kill_all()
        self._take_changes()  # a trial that has just ended can no longer break a limit
        for worker in self._workers.values():
            if self._upkeep.away:
                worker.excuse(now)
            worker.hold_to(self._limits, self._grace, now)
        self._take_changes()
        self._opened.storage.check()
        self._upkeep.look(now, [each.worker for each in self._workers.values()])
        self._failures.settled(self._upkeep.settled())
        self._stop_at_goal()
        self._stop_on_request()
        self._refill()
        self._leave_if_idle()
        self._notify("", Tick())

    def _take_changes(self) -> None:
        """Handle the workers' messages, settle the trials of those that have ended, and replace them."""
        have_ended = False
        for change in self._launcher.changes():
            if isinstance(change, Said):
                self._hear(change)
            else:
                have_ended = True
                self._reap(change)
        if have_ended:
            self._refill()

    def _hear(self, said: Said) -> None:
        self._pass_on(said)
        if self._failed is None:
            self._failures.hear(said.message, self._launcher.logs(said.worker.label))

    def _pass_on(self, said: Said) -> None:
        """Note a worker's message, and report it if it matters to the listener."""
        self._workers[said.worker.label].hear(said.message)
        if isinstance(said.message, Ready):
            self._note_loading(said.message)
        elif isinstance(said.message, Warned):
            self._note(f"trial {said.message.number}: ", said.message.what, f": {said.message.why}")
        if isinstance(said.message, Ready | Warned | Leaving):
            return
        self._idle_since = None
        self._notify(said.worker.label, said.message)
        self._ended_one |= isinstance(said.message, TrialReport) and said.message.outcome is not None

    def _note_loading(self, ready: Ready) -> None:
        if ready.left is not None and ready.loading_s >= _LONG_LOADING:
            took, left = duration(ready.loading_s), ready.left
            after = f" ({took}): these leave behind {left}, with which no process is forked"
            self._note("", "each trial imports the study's modules and loads its data anew", after)

    def _note(self, before: str, what: str, after: str) -> None:
        """Report something that holds for many workers or trials once, for the first of them."""
        if what not in self._noted:
            self._noted.add(what)
            self._notify("", Notice(before + what + after))

    def _reap(self, ended: WorkerEnded) -> None:
        verdict = self._workers.pop(ended.worker.label).verdict(ended)
        if verdict is None:
            return
        self._upkeep.settle(ended.worker.label, ended.worker.trial_pid, verdict)
        self._failures.settled(self._upkeep.settled())
        # A worker that finished an epoch before it died (its GPU was preempted, say) does not count as a failure.
        if self._ending is Ending.DONE and not ended.worker.advanced:
            self._failures.died(verdict, self._launcher.logs(ended.worker.label))

    def _notify(self, label: str, message: Heard) -> None:
        try:
            self._reporter(label, message)
        except OSError:  # the terminal has been closed, or what read our output has ended
            self._reporter = lambda *_: None
            self._interrupt()

    # ---- stopping

    def _stop_at_goal(self) -> None:
        """Stop if the study has reached its goal; running trials are interrupted and could resume."""
        self._ended_one = False
        if self._ending is Ending.DONE and (reached := self._upkeep.goal_reached()) is not None:
            self._notify("", Notice(reached))
            self._ask_to_stop(Ending.GOAL)

    def _stop_on_request(self) -> None:
        """Stop if a person has asked all agents of the study to leave."""
        if self._ending is Ending.DONE and self._registered is not None and self._registered.is_to_leave:
            self._notify("", Notice("`hpo stop`: stopping; each worker finishes its batch and checkpoints"))
            self._ask_to_stop(Ending.STOPPED)

    def _leave_if_idle(self) -> None:
        """Leave if there has been nothing to do for long enough; idle workers may wait for trials elsewhere.

        A single look is not enough: a worker may just have taken a trial without having reported it yet.
        """
        if self._ending is not Ending.DONE or self._leave_when_idle == math.inf:
            return
        if any(worker.is_busy for worker in self._workers.values()) or self._upkeep.is_claimable_or_unknown():
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = time.monotonic()
        elif time.monotonic() - self._idle_since >= self._leave_when_idle:
            self._notify("", Notice("nothing to do: leaving"))
            self._ask_to_stop(Ending.IDLE)

    def _give_up(self, error: StudyError) -> None:
        """Ask workers to checkpoint, also what can no longer be stored; afterwards the error ends the run."""
        if self._failed is None:
            self._failed, self._kill_at = error, time.monotonic() + self._grace
            self._notify("", Notice(f"stopping: {str(error).partition(chr(10))[0].removesuffix(':')}"))
            self._ask_to_stop(Ending.INTERRUPTED)

    def _ask_to_stop(self, ending: Ending) -> None:
        self._ending = ending
        self._launcher.drain()

    def _kill_loading(self) -> None:
        """Kill workers that still load modules and data: they handle no request until then, and hold no trial."""
        for worker in self._workers.values():
            if not worker.ready:
                worker.kill()

    def _hear_signals(self, signals: Signals) -> None:
        signals.take()
        if signals.insisted:
            self._ending = Ending.INTERRUPTED
            self._kill_all()
        else:
            self._interrupt()

    def _interrupt(self) -> None:
        if self._ending is not Ending.INTERRUPTED:
            self._ask_to_stop(Ending.INTERRUPTED)
            more = "; a second Ctrl-C stops them immediately" if at_terminal() else ""
            self._notify("", Notice(f"stopping: each worker finishes its batch and checkpoints{more}"))

    def _kill_all(self) -> None:
        """Kill every remaining worker with its child processes, and requeue the trials of those that are gone."""
        for worker in self._workers.values():
            worker.kill()
        for change in self._launcher.changes():
            if isinstance(change, Said):
                self._pass_on(change)
                continue
            verdict = self._workers.pop(change.worker.label).verdict(change)
            with contextlib.suppress(DatabaseError):  # a full disk, say; the other trials are still settled
                if verdict is not None:
                    self._upkeep.settle(change.worker.label, change.worker.trial_pid, verdict)
        for label, worker in self._workers.items():
            self._note("", f"{label} was killed, and process {worker.worker.pid} lives on: ", _LIVES_ON)
