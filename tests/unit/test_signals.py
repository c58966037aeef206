"""Signals as something to wait for, and whose second Ctrl-C counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from hpo import signals
from hpo.signals import heard
from tests.support.commands import PATIENCE

#: Asks processes in the foreground and the background of a terminal, and one without any.
PROCESSES = """
import os
from hpo.signals import at_terminal

def asked(start, prepare):
    child, *terminal = start()
    if not child:
        prepare()
        os._exit(at_terminal())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

fork = lambda: (os.fork(),)
in_background = lambda: os._exit(asked(fork, lambda: os.setpgid(0, 0)))
print(f"foreground: {asked(os.forkpty, lambda: None)}, background: {asked(os.forkpty, in_background)}", end="")
print(f", without a terminal: {asked(fork, os.setsid)}")
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_second_ctrl_c_at_a_terminal_means_more_than_the_first(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signals, "at_terminal", lambda: terminal)
    with heard([signal.SIGINT, signal.SIGTERM]) as came:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert not came.insisted
        os.kill(os.getpid(), signal.SIGINT)
        assert came.insisted is terminal
        assert came.wait(PATIENCE) == [signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT]
        assert came.wait(0) == []


def test_any_number_of_signals_comes_before_somebody_looks() -> None:
    """As where a script repeats one until the process has ended, which waits for an engine's answer."""
    came = signals.Signals()

    def send() -> None:
        for _ in range(1000):
            came.send(signal.SIGTERM)

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    sending.join(5)
    assert not sending.is_alive()
    assert set(came.wait(PATIENCE)) == {signal.SIGTERM}
    came.close()


def test_handlers_are_put_back_and_what_is_ignored_stays_so() -> None:
    kept = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        with heard([signal.SIGUSR1, signal.SIGUSR2]) as came:
            os.kill(os.getpid(), signal.SIGUSR2)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert came.wait(PATIENCE) == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGUSR1) is before
    finally:
        signal.signal(signal.SIGUSR2, kept)


def test_the_foreground_of_a_terminal_is_one_and_no_other_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROCESSES], capture_output=True, text=True, check=True)
    assert done.stdout == "foreground: 1, background: 0, without a terminal: 0\n"
