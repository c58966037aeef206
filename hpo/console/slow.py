"""A line on what takes long: a person who waits for more than two seconds reads what for."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from hpo.signals import held_back

#: Seconds of silence after which a step says what it is.
SILENCE = 1.5


@contextlib.contextmanager
def slow_steps(*, shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Give a function that names the step which begins; its line is printed once the step has taken long.

    The lines go to stderr, so that what a command prints for others stays as it is; with --json there are none.

    Args:
        shown: Print them.
    """
    stream, timers = sys.stderr, list[threading.Timer]()

    def stop() -> None:
        while timers:
            timers.pop().cancel()

    def fire(step: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone
            print(f"{step} …", file=stream, flush=True)

    def say(step: str) -> None:
        stop()
        if shown and "--json" not in sys.argv:
            timers.append(threading.Timer(SILENCE, fire, [step]))
            timers[-1].daemon = True
            with held_back(signal.valid_signals()):  # they stay the main thread's
                timers[-1].start()

    try:
        yield say
    finally:
        stop()
