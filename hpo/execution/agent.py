"""An agent: a supervisor with its local workers that joins a study, works on it, and leaves.

Engines and people place agents on machines (`hpo worker`). All that one knows of the others is in the study's
database.
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
    """Work on a study that exists until there is nothing to do here, or this process is asked to leave.

    Args:
        spec: The study.
        listen: Called once, with the study when it is open.
        warn: Called with what the checks find that stops nothing.
        leave_when_idle: Seconds without a trial that could be taken after which it leaves; it does not wait for
            trials that run elsewhere.
        stop_seen: As of `hpo.execution.registered.Registered`.

    Returns:
        Why it ended.

    Raises:
        InputError: The study does not fit the code that it names; or it was started with another config or other
            code than there is here.
        StudyError: There is no such study, or it failed.
    """

    def opened() -> OpenStudy:
        from hpo.study.joining import join_study

        return join_study(spec)

    # Before this process holds anything it ends at once; later `registered` and the supervisor hear a signal.
    with handled(REQUESTS, lambda *_: os._exit(LEFT_EARLY)):
        _leave_with_standard_input()
        try:
            return work_on(spec, opened, listen, warn, leave_when_idle=leave_when_idle, stop_seen=stop_seen)
        except KeyboardInterrupt:
            from hpo.execution.supervisor import Ending

            return Ending.INTERRUPTED


def _leave_with_standard_input() -> None:
    """Take the end of standard input for a SIGTERM, where it is a pipe or a socket.

    Engines end their direct child, and what that has started notices its end by the pipe between them. A terminal,
    a file and /dev/null say nothing about who has started this process; nor does a pipe that has ended already,
    as cron gives one, where no engine has placed it.
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
    """Whether the other end of a pipe or of a socket is closed; what was written before may be left to be read."""
    looked = select.poll()
    looked.register(descriptor, 0)
    return any(event & select.POLLHUP for _, event in looked.poll(0))


def _wait_for_its_end(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 4096):
            pass
    with contextlib.suppress(OSError):  # not by `print`: what it can't write stays in a buffer until the exit
        os.write(2, b"leaving: the pipe that is standard input has closed\n")
    os.kill(os.getpid(), signal.SIGTERM)
