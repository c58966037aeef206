"""A worker as its supervisor sees it: what it does, whether that breaks a limit, and what its end means."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hpo.execution.launchers.launcher import Worker, WorkerEnded
from hpo.execution.limits import Limits
from hpo.execution.messages import End, EpochsEnded, Extended, Leaving, Message, Ready, Started, Warned
from hpo.storage.ledger import Lease
from hpo.storage.settling import LOST, STOPPED, Verdict

_AT_ONCE = Verdict(STOPPED, "its worker was stopped immediately")


@dataclass
class Running:
    """A trial in a worker.

    Attributes:
        lease: The attempt at a trial.
        spent_s: Seconds that the trial took, over all attempts, before ``since``.
        since: The monotonic clock from which its time is counted.
        verdict: How the trial must end, once it has broken a limit; None before.
        kill_at: The monotonic clock when the worker is killed if the trial has not ended by then.
    """

    lease: Lease
    spent_s: float
    since: float
    verdict: Verdict | None = None
    kill_at: float = 0.0


@dataclass
class Supervised:
    """A worker under supervision.

    Attributes:
        worker: The worker.
        running: The trial that it has, according to its messages so far.
        ready: Whether it has loaded the study's modules and data.
        since: The monotonic clock when it was started.
    """

    worker: Worker
    running: Running | None = None
    ready: bool = False
    since: float = field(default_factory=time.monotonic)
    _gone_by: float | None = None
    _killed_for: tuple[Running | None, Verdict] | None = None

    @property
    def is_busy(self) -> bool:
        """Whether it has a trial, or loads what trials need."""
        return self.running is not None or not self.ready

    @property
    def was_killed(self) -> bool:
        """Whether it was killed; if it has still not ended, its supervisor has waited for that in vain."""
        return self._killed_for is not None

    def hear(self, message: Message) -> None:
        """Note a message of the worker."""
        # These come during a trial; every other message means that no trial runs, or another one.
        if not isinstance(message, EpochsEnded | Extended | Warned):
            self.running = None
        if isinstance(message, Ready):
            self.ready = True
        elif isinstance(message, Started):
            self.running = Running(message.lease, message.spent_s, time.monotonic())
        elif isinstance(message, Leaving):
            self._gone_by = time.monotonic() + message.within_s

    def hold_to(self, limits: Limits, grace: float, now: float) -> None:
        """End a trial that exceeds a limit: first ask, later kill the worker.

        Args:
            limits: What a trial may use.
            grace: Seconds between asking and killing.
            now: The monotonic clock.
        """
        if self.running is None:
            self._hold_idle(limits, now)
            return
        running = self.running
        if running.verdict is None:
            spent = running.spent_s + now - running.since
            idle = 0.0 if self.worker.is_deciding else now - max(running.since, self.worker.beat)
            pids = {"pid": self.worker.pid, "trial_pid": self.worker.trial_pid}
            running.verdict = limits.broken(**pids, spent_s=spent, idle_s=idle)
            if running.verdict is not None:
                running.kill_at = now + grace
                self.worker.ask(End(running.lease, running.verdict))
        if running.verdict is not None and now >= running.kill_at:
            self.kill(running.verdict)

    def _hold_idle(self, limits: Limits, now: float) -> None:
        """As `hold_to`, for a worker without a trial: while it loads modules and data, or is about to end."""
        if self._gone_by is not None:
            if now > self._gone_by:
                self.kill()
            return
        broken = None if self.ready else limits.broken(self.worker.pid, spent_s=0.0, idle_s=now - self.since)
        if broken is not None:
            self.kill(Verdict(LOST, f"while it loaded the study's modules and data, {broken.reason}"))

    def excuse(self, now: float, stopped_s: float = 0.0) -> None:
        """Do not count the time since its last batch against its trial, because it could not advance.

        Args:
            now: The monotonic clock.
            stopped_s: Seconds until now in which it was certainly stopped. The limits for loading, and for ending
                when asked to, are extended by these too.
        """
        self.since += stopped_s
        if self._gone_by is not None:
            self._gone_by += stopped_s
        if self.running is None:
            return
        if self.running.verdict is not None:
            self.running.kill_at += stopped_s
            return
        # Time before the trouble counts; the last batch shows when the trouble began.
        before = max(self.running.since, min(now - stopped_s, self.worker.beat)) - self.running.since
        shown = self.worker.held
        if shown is not None and shown.lease == self.running.lease:  # so that no later attempt counts it either
            self.worker.show_excused(now - self.running.since - before)
        self.running.spent_s += before
        self.running.since = now

    def kill(self, verdict: Verdict = _AT_ONCE) -> None:
        """Kill it with all its processes; the first verdict counts."""
        if self._killed_for is None:
            self._killed_for = (self.running, verdict)
        self.worker.kill()

    def verdict(self, ended: WorkerEnded) -> Verdict | None:
        """The verdict on the trial that it held at its end; None if it ended in order and held none."""
        if self._killed_for is not None:
            running, verdict = self._killed_for
            # It may have ended the trial to blame after all, and have taken another one.
            return verdict if running is self.running or not verdict.final else _AT_ONCE
        if ended.in_order and self.running is None:
            return None
        return Verdict(LOST, ended.cause)
