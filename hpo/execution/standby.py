"""A worker's processes for trials: one that waits for the next trial, and those of paused trials.

To keep the time between two trials short, the waiting process is forked while the previous trial trains, and the
process of a trial that has ended ends while the next trial is chosen; it is gone before that one trains.
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

#: Seconds that a process may take until it waits for a trial; starting CUDA takes half a second.
_LONGEST_START: Final = 20.0
#: Seconds that a process may take to end after its trial has ended: threads of the study's code may hold it up.
_LINGER: Final = 5.0
#: Seconds that a killed process may take to be gone; its device may have much memory to free.
_PATIENCE: Final = 30.0
_FORK: Final = multiprocessing.get_context("fork")


@dataclass(eq=False)
class Standby:
    """A process that waits for a trial, and trains it.

    Attributes:
        process: The process.
        line: Out: an `Assignment`, `Extension` and commands. In: None once the process waits, `GrantEnds` at the
            end of a grant, and `Over` at the end.
        owner: The worker as an owner, with this process's id.
        waits: Whether the process is known to have reached the point where it waits for a trial.
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
        """Whether it waits for a trial; False if it has died, or has not got that far in `_LONGEST_START`."""
        if not self.waits and self.line.poll(_LONGEST_START):
            with contextlib.suppress(EOFError, OSError):
                self.line.recv()
                self.waits = True
        return self.waits and not self.has_died

    def bury(self) -> None:
        """Wait for its end, and kill what its trial has left running.

        A killed process that sleeps inside the kernel, say on a file server that is away, may stay for ever. It
        never trains again, so the next trial does not wait for it any longer.
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
        """By trial id, the owner in whose name a paused trial is taken whose process is kept."""
        return {trial_id: kept.owner for trial_id, kept in self._kept.items() if not kept.has_died}

    def standby(self) -> Standby:
        """The process that waits for the next trial; forked if there is none."""
        if self._next is not None and self._next.has_died:
            self.lose(self._next)
            self._next = None
        if self._next is None:
            self._next = self._forked()
        return self._next

    def take(self, trial_id: int) -> Standby:
        """Hand the caller the process to train a trial: the one kept for this trial, or the waiting one."""
        self._bury()
        kept = self._kept.pop(trial_id, None)
        if kept is not None:
            return kept
        # The trial was taken in the name of exactly this process, even if it has died since.
        waiting, self._next = self._next, None
        assert waiting is not None
        return waiting

    def keep(self, trial_id: int, process: Standby, spare: int) -> None:
        """Keep the process of a paused trial; at most ``spare`` processes are kept, the latest ones."""
        self._kept[trial_id] = process
        self.fit(spare)

    def fit(self, spare: int) -> None:
        """Note how many idle processes are allowed, and end the oldest ones of paused trials above that number."""
        self._spare = spare
        for oldest in list(self._kept)[: max(0, len(self._kept) - spare)]:
            self.end(self._kept.pop(oldest))

    def lose(self, process: Standby) -> None:
        """End a process that was not ready for its trial.

        If it never got as far as waiting, starting the device may be the cause: then no later process starts its
        device ahead of its trial, and an error of the device is that trial's.
        """
        self._leaves_device |= not process.waits
        if not process.has_died:
            process.process.kill()
        self.end(process)

    def end(self, process: Standby) -> None:
        """End a process whose trial has ended or is lost; `take` waits until it is gone."""
        process.line.close()
        self._live.remove(process)
        self._ended.append(process)

    def _bury(self) -> None:
        while self._ended:
            self._ended.pop().bury()

    def close(self) -> None:
        """End all processes, also the one that trains."""
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
    for end in of_worker:  # a copy left open here would hide that the worker has closed its end
        end.close()
    os.setpgid(0, 0)  # so that all that it starts can be ended with it
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    trial.begin_fork()
    orders = Orders(line, trial.request)
    try:
        if starts:
            trial.start_device()
        with contextlib.suppress(OSError):  # the worker is gone, which `assignment` notices
            line.send(None)
        given = orders.assignment()
        while given is not None:
            over = trial.run(given.lease, orders.extend, given.before_s)
            line.send(over)
            given = orders.assignment() if over.ended is WhyOver.KEPT else None
    finally:
        trial.peers.close()
