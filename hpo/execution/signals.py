"""Signals as something to wait for: each arrives as a number, when somebody looks."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import threading
from collections.abc import Collection, Iterator


class Signals:
    """The signals that came in since somebody last looked."""

    def __init__(self) -> None:
        self._wake, self._waker = socket.socketpair()

    def wait(self, seconds: float) -> list[int]:
        """Wait for signals, at most so long; their numbers in their order."""
        if not select.select([self._wake], [], [], max(0.0, seconds))[0]:
            return []
        return list(self._wake.recv(64))

    def send(self, number: int) -> None:
        """Add a signal as if it had come."""
        self._waker.send(bytes([number]))

    def close(self) -> None:
        """Let go of the sockets."""
        self._wake.close()
        self._waker.close()


@contextlib.contextmanager
def heard(numbers: Collection[signal.Signals]) -> Iterator[Signals]:
    """Hear signals for the time of the block; handlers exist in the main thread only.

    One that is ignored stays so: `nohup` asks for that.
    """
    ours: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    signals = Signals()
    kept = {number: signal.signal(number, lambda came, _: signals.send(came)) for number in ours}
    try:
        yield signals
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        signals.close()
