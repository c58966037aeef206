"""Processes that a study's code forks while it trains: they run their own work, and nothing of the trial.

A fork is a copy of the process that holds the trial's lease. Where the study's code returns in both, or raises in
the fork, the fork would train the trial a second time, write into its folder and end it. It is ended as soon as it
comes back from the study's code; pools and loaders, whose processes never do, are left alone.
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
    """End this process, immediately and without a trace, where it is a fork of ``process``; its log says so.

    Args:
        process: Id of the process whose work it is.
        error: What the fork raised; the code of a SystemExit is its exit code, which is 1 otherwise.
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
    """Let only ``process`` leave this block; what is forked inside ends at its end."""
    try:
        yield
    except BaseException as error:
        end_fork(process, error)
        raise
    end_fork(process)


def die_like(exitcode: int) -> NoReturn:
    """End as another process has, without a word: it may have died inside one.

    Args:
        exitcode: As `multiprocessing.Process.exitcode`.
    """
    if exitcode < 0:
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler, and a thread can't set one
            signal.signal(-exitcode, signal.SIG_DFL)
        os.kill(os.getpid(), -exitcode)
    os._exit(max(exitcode, 0))
