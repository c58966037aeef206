"""An agent: a supervisor with its local workers that joins a study, works on it, and leaves.

Engines and people place agents on machines (`hpo worker`). An agent learns about the other agents only from the
study's database.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpo.config.spec import StudySpec
from hpo.execution.engines.engine import LEFT_EARLY, PLACEMENT_ENV
from hpo.execution.messages import REQUESTS
from hpo.execution.run import Listener, work_on
from hpo.signals import handled

if TYPE_CHECKING:
    from hpo.checks.findings import Finding
    from hpo.execution.supervisor import Ending
    from hpo.study.open_study import OpenStudy


def join(
    spec: StudySpec,
    listen: Callable[[OpenStudy], Listener],
    warn: Callable[[Finding], None],
    leave_when_idle: float,
    stop_seen: str | None = None,
) -> Ending:
    """Work on an existing study until there is nothing to do here, or this process is asked to leave.

    Args:
        spec: The study.
        listen: Called once, with the open study.
        warn: Called with each warning of the checks.
        leave_when_idle: The agent leaves after this many seconds without a trial to take; it does not wait for
            trials that run elsewhere.
        stop_seen: See `hpo.execution.registered.Registered`.

    Returns:
        Why it ended.

    Raises:
        InputError: The study does not fit the code that it names, or it was started with another config or other
            code than this machine has.
        StudyError: There is no such study, or it failed.
    """

    def opened() -> OpenStudy:
        from hpo.study.joining import join_study

        return join_study(spec)

    # Until this process holds anything, a signal ends it at once; later `registered` and the supervisor handle it.
    with handled(REQUESTS, lambda *_: os._exit(LEFT_EARLY)):
        _leave_with_standard_input()
        try:
            return work_on(spec, opened, listen, warn, leave_when_idle=leave_when_idle, stop_seen=stop_seen)
        except KeyboardInterrupt:
            from hpo.execution.supervisor import Ending

            return Ending.INTERRUPTED


def _leave_with_standard_input() -> None:
    """Treat the end of standard input as a SIGTERM, where standard input is a pipe or a socket.

    An engine ends only its direct child; this process may have been started by that child, and notices its end
    because the pipe between them closes. A terminal, a file or /dev/null says nothing about the parent. Nor does a
    pipe that has already ended (cron gives one), unless an engine has placed this process.
    """
    if is_a_line(0) and (PLACEMENT_ENV in os.environ or not has_ended(0)):
        threading.Thread(target=_wait_for_its_end, args=(0,), daemon=True).start()


def is_a_line(descriptor: int) -> bool:
    """Whether a descriptor is an end of a pipe or of a socket."""
    try:
        mode = os.fstat(descriptor).st_mode
    except OSError:  # it is closed
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def has_ended(descriptor: int) -> bool:
    """Whether the other end of a pipe or of a socket is closed; there may still be data to read."""
    looked = select.poll()
    looked.register(descriptor, 0)
    return any(event & select.POLLHUP for _, event in looked.poll(0))


def _wait_for_its_end(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 4096):
            pass
    with contextlib.suppress(OSError):  # not `print`: text that it can't write stays in its buffer until the exit
        os.write(2, b"leaving: the pipe that is standard input has closed\n")
    os.kill(os.getpid(), signal.SIGTERM)
