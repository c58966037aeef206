"""Signals as something to wait for, each of which arrives as a number when somebody looks; or to hold back."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from types import FrameType


class Signals:
    """The signals that came in since somebody last looked.

    Attributes:
        wake: A socket that can be read when there are any.
    """

    def __init__(self) -> None:
        self.wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._presses = 0

    @property
    def insisted(self) -> bool:
        """A person has pressed Ctrl-C at this process's terminal for a second time.

        Systems, engines and scripts repeat a signal, and mean no more than at first.
        """
        return self._presses > 1

    def wait(self, seconds: float) -> list[signal.Signals]:
        """Wait for signals, at most so long; those that came, in their order."""
        return self.take() if select.select([self.wake], [], [], max(0.0, seconds))[0] else []

    def take(self) -> list[signal.Signals]:
        """Those that came, in their order; waits for the first."""
        return [signal.Signals(number) for number in self.wake.recv(64)]

    def send(self, number: int) -> None:
        """Add a signal as if it had come.

        One of the hundreds that wait already is left out where there is no more room: who waits for some to be
        taken, in the thread that takes them, waits for ever.
        """
        self._presses += number == signal.SIGINT and at_terminal()
        with contextlib.suppress(BlockingIOError):
            self._waker.send(bytes([number]))

    def close(self) -> None:
        """Let go of the sockets."""
        self.wake.close()
        self._waker.close()


@contextlib.contextmanager
def heard(numbers: Collection[signal.Signals]) -> Iterator[Signals]:
    """Hear signals for the time of the block, as `handled` does."""
    signals = Signals()
    try:
        with handled(numbers, lambda came, _: signals.send(came)):
            yield signals
    finally:
        signals.close()


@contextlib.contextmanager
def handled(
    numbers: Collection[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Handle signals for the time of the block; handlers exist in the main thread only.

    One that is ignored stays so: `nohup` asks for that.
    """
    ours: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        ours = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    kept = {number: signal.signal(number, handler) for number in ours}
    try:
        yield
    finally:
        for number, before in kept.items():
            signal.signal(number, before)


@contextlib.contextmanager
def held_back(numbers: Collection[signal.Signals]) -> Iterator[None]:
    """Signals that come inside are heard afterwards; a process that is started inside has them blocked.

    In this thread: one that another thread gets is heard by Python's handler, which is run when this one can.
    """
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


def at_terminal() -> bool:
    """Whether Ctrl-C reaches this process from a terminal: it runs in the foreground of its controlling one."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:  # it has none
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # it has been closed
        return False
    finally:
        os.close(terminal)
