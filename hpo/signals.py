"""Lets a process wait for signals and read them when it is ready, handle them in a block, or hold them back."""

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
    """The signals that arrived and have not been read yet.

    Attributes:
        wake: A socket that is readable while signals wait.
    """

    def __init__(self) -> None:
        self.wake, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._presses = 0

    @property
    def insisted(self) -> bool:
        """Whether a person has pressed Ctrl-C at this process's terminal twice.

        A signal that a system, an engine or a script repeats means no more than its first.
        """
        return self._presses > 1

    def wait(self, seconds: float) -> list[signal.Signals]:
        """Wait for signals for at most `seconds`, and return those that arrived, in order."""
        return self.take() if select.select([self.wake], [], [], max(0.0, seconds))[0] else []

    def take(self) -> list[signal.Signals]:
        """Return the signals that arrived, in order; waits until there is one."""
        return [signal.Signals(number) for number in self.wake.recv(64)]

    def send(self, number: int) -> None:
        """Add a signal as if it had arrived.

        It is dropped when the socket is full, with hundreds of unread signals: waiting for room would block the
        thread that reads them for ever.
        """
        self._presses += number == signal.SIGINT and at_terminal()
        with contextlib.suppress(BlockingIOError):
            self._waker.send(bytes([number]))

    def close(self) -> None:
        """Close both sockets."""
        self.wake.close()
        self._waker.close()


@contextlib.contextmanager
def heard(numbers: Collection[signal.Signals]) -> Iterator[Signals]:
    """Collect these signals during the block; handlers are set as by `handled`."""
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
    """Set a handler for these signals during the block; outside of the main thread it does nothing.

    An ignored signal stays ignored: `nohup` relies on that.
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
    """Block these signals in this thread during the block; a process started inside has them blocked, too.

    Another thread may still receive one; Python then runs its handler in the main thread.
    """
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


def at_terminal() -> bool:
    """Whether Ctrl-C at a terminal reaches this process: it is in the foreground of its controlling terminal."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:  # no controlling terminal
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # the terminal has been closed
        return False
    finally:
        os.close(terminal)
