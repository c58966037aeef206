"""Ends processes that a study's code forks while it trains, before they continue the trial.

Such a process is a copy of the one that holds the trial's lease. If the study's code returned or raised in it too,
it would train the trial a second time, write into its folder and end it. So it is ended as soon as it returns from
the study's code. Processes of pools and data loaders never return from there and are left alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import NoReturn

from hpo.study.folders import print_error
from trainer.error_text import traceback_text


def end_fork(process: int, error: BaseException | None = None) -> None:
    """End this process immediately, without cleanup, if it is a fork of ``process``; the trial's log says so.

    Args:
        process: Id of the process that holds the trial.
        error: What the fork raised. A SystemExit gives the exit code, which else is 1.
    """
    if os.getpid() == process:
        return
    code = 1
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        print_error(traceback_text(error))
    else:
        print_error(
            f"process {os.getpid()}, forked by this study's code, would have done the work of process {process} a "
            "second time: it ends here. Let a fork end by itself, with os._exit()."
        )
    os._exit(code & 0xFF)


@contextlib.contextmanager
def only_in(process: int) -> Iterator[None]:
    """Let only ``process`` leave this block; a process that is forked inside is ended where it would leave it."""
    try:
        yield
    except BaseException as error:
        end_fork(process, error)
        raise
    end_fork(process)


def die_like(exitcode: int) -> NoReturn:
    """End this process with another one's exit code or signal, without any output.

    Args:
        exitcode: As in `multiprocessing.Process.exitcode`.
    """
    if exitcode < 0:
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler, and a thread can't set one
            signal.signal(-exitcode, signal.SIG_DFL)
        os.kill(os.getpid(), -exitcode)
    os._exit(max(exitcode, 0))
