"""The processes that a worker has for trials: the one that waits for the next, and those of paused trials.

The one that waits is forked while the trial before trains. A process whose trial has ended is gone before the next
one trains, but not before that is chosen. So as little time as possible lies between two trials.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

from hpo.execution.limits import kill_group
from hpo.execution.trial_process import Orders, TrialProcess, WhyOver
from hpo.storage.ledger import Owner
from hpo.trial.mainless import leave_alone

logger = logging.getLogger(__name__)

#: Seconds that a process may take until it waits for a trial; to start CUDA takes half a second.
_LONGEST_START: Final = 20.0
#: Seconds that a trial's process may take to end when its trial has: threads of the study's may hold it up.
_LINGER: Final = 5.0
#: Seconds that a killed one may take to be gone; a device gives much memory back meanwhile.
_PATIENCE: Final = 30.0
_FORK: Final = multiprocessing.get_context("fork")


@dataclass(eq=False)
class Standby:
    """A process that waits for a trial, and trains it.

    Attributes:
        process: The process.
        line: A trial for it and commands go out; None once it waits, `GrantEnds`, and in the end `Over`, come in.
        owner: The worker, as this process.
        waits: Whether it is known to have come so far that it waited for a trial.
    """

    process: BaseProcess
    line: Connection[Any, Any]
    owner: Owner
    waits: bool = False

    @property
    def pid(self) -> int:
        """Its process id, and its group's."""
        assert self.process.pid is not None
        return self.process.pid

    @property
    def has_died(self) -> bool:
        """Whether it is gone."""
        return self.process.exitcode is not None

    def is_ready(self) -> bool:
        """Whether it waits for a trial; not where it has died, or its device does not answer for long."""
        if not self.waits and self.line.poll(_LONGEST_START):
            with contextlib.suppress(EOFError, OSError):
                self.line.recv()
                self.waits = True
        return self.waits and not self.has_died

    def bury(self) -> None:
        """Wait for its end, and end what its trial has left running.

        One that sleeps inside the kernel, say on a file server that is away, may live on for ever: it never
        returns from there to train, and the next trial does not wait for that.
        """
        self.line.close()
        self.process.join(_LINGER)
        if self.process.exitcode is None:
            self.process.kill()
        kill_group(self.pid, only_group=True)
        self.process.join(_PATIENCE)
        if self.process.exitcode is None:
            logger.warning("process %d was killed, and lives on: it waits inside the kernel", self.pid)
            leave_alone(self.process)
        else:
            self.process.close()


class Processes:
    """A worker's processes for trials.

    Args:
        trial: What each of them runs.
        owner: The worker.
    """

    def __init__(self, trial: TrialProcess, owner: Owner) -> None:
        self._spare = 0  # as in `hpo.execution.trial_process.Over`, as far as is known
        self._leaves_device = False
        self._trial = trial
        self._owner = owner
        self._next: Standby | None = None
        self._kept: dict[int, Standby] = {}
        self._live: list[Standby] = []
        self._ended: list[Standby] = []

    @property
    def owners(self) -> Mapping[int, Owner]:
        """In whose name the paused trials are taken whose processes are kept, by the id of the trial."""
        return {trial_id: kept.owner for trial_id, kept in self._kept.items() if not kept.has_died}

    def standby(self) -> Standby:
        """The process that waits for the next trial; forked where there is none."""
        if self._next is not None and self._next.has_died:
            self.lose(self._next)
            self._next = None
        if self._next is None:
            self._next = self._forked()
        return self._next

    def take(self, trial_id: int) -> Standby:
        """The process that is to train a trial, its own or the one that waits; it is the caller's from now on."""
        self._bury()
        kept = self._kept.pop(trial_id, None)
        if kept is not None:
            return kept
        # The trial was taken in the name of this very process, also where that has died since.
        waiting, self._next = self._next, None
        assert waiting is not None
        return waiting

    def keep(self, trial_id: int, process: Standby, spare: int) -> None:
        """Keep the process of a paused trial, and of those before as many as may be kept: the latest."""
        self._kept[trial_id] = process
        self.fit(spare)

    def fit(self, spare: int) -> None:
        """Note how many may train nothing, and end the oldest processes of paused trials that are more."""
        self._spare = spare
        for oldest in list(self._kept)[: max(0, len(self._kept) - spare)]:
            self.end(self._kept.pop(oldest))

    def lose(self, process: Standby) -> None:
        """End a process that was not ready for its trial.

        None starts its device ahead again where that may be why: what the device does is a trial's end then.
        """
        self._leaves_device |= not process.waits
        if not process.has_died:
            process.process.kill()
        self.end(process)

    def end(self, process: Standby) -> None:
        """End a process whose trial has ended, or is gone; before another one trains it is gone."""
        process.line.close()
        self._live.remove(process)
        self._ended.append(process)

    def _bury(self) -> None:
        while self._ended:
            self._ended.pop().bury()

    def close(self) -> None:
        """End them all, with the one that trains."""
        for process in list(self._live):
            self.end(process)
        self._kept, self._next = {}, None
        self._bury()

    def _forked(self) -> Standby:
        self._trial.opened.storage.close()  # connections can't be shared
        ours, theirs = _FORK.Pipe()
        of_worker = [ours, *(each.line for each in self._live)]
        starts = not self._leaves_device and (self._spare > len(self._kept) or not self._live)
        process = _FORK.Process(target=_in_fork, args=(self._trial, of_worker, theirs, starts))
        process.start()
        theirs.close()
        assert process.pid is not None
        self._live.append(Standby(process, ours, self._owner.in_process(process.pid)))
        return self._live[-1]


def _in_fork(
    trial: TrialProcess, of_worker: list[Connection[Any, Any]], line: Connection[Any, Any], starts: bool
) -> None:
    for end in of_worker:  # one left open here would hide that the worker has closed it
        end.close()
    os.setpgid(0, 0)  # so that all that it starts can be ended with it
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    trial.begin_fork()
    orders = Orders(line, trial.request)
    try:
        if starts:
            trial.start_device()
        with contextlib.suppress(OSError):  # the worker is gone, as is said below
            line.send(None)
        given = orders.assignment()
        while given is not None:
            over = trial.run(given.lease, orders.extend, given.before_s)
            line.send(over)
            given = orders.assignment() if over.ended is WhyOver.KEPT else None
    finally:
        trial.peers.close()
