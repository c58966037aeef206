"""Prints what a command is doing if a step takes long, so that a person knows what they wait for."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from hpo.signals import held_back

#: A step's line is printed after this many seconds.
SILENCE = 1.5


@contextlib.contextmanager
def slow_steps(*, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Yield a function to call with the name of each step that begins; the name is printed if the step takes long.

    The lines go to stderr, so that they don't mix with a command's output; with --json there are none.

    Args:
        shown: Print them.
    """
    stream, timers = sys.stderr, list[threading.Timer]()

    def stop() -> None:
        while timers:
            timers.pop().cancel()

    def fire(step: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is closed
            print(f"{step} …", file=stream, flush=True)

    def say(step: str) -> None:
        stop()
        if shown and "--json" not in sys.argv:
            timers.append(threading.Timer(SILENCE, fire, [step]))
            timers[-1].daemon = True
            with held_back(signal.valid_signals()):  # so that the main thread gets all signals
                timers[-1].start()

    try:
        yield say
    finally:
        stop()
