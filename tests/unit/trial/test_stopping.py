"""A request to stop, as a signal's handler makes it."""

import os
import signal
import sys
from types import FrameType
from typing import Any

from hpo.trial.stopping import StopRequest
from tests.support.commands import PATIENCE
from tests.support.owners import forked


def _asked_while_asked() -> None:
    """A signal comes at each of the first lines of what the handler of an earlier one does."""
    request, left = StopRequest(), 4
    signal.signal(signal.SIGTERM, lambda *_: request.leave())

    def again(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if event == "line" and left:
            left -= 1
            os.kill(os.getpid(), signal.SIGTERM)
        return again

    sys.settrace(again)
    request.leave()
    sys.settrace(None)
    assert request.leaving


def test_a_signal_that_interrupts_the_handler_of_another_one_does_not_stop_the_process_for_ever() -> None:
    process = forked.Process(target=_asked_while_asked)
    process.start()
    process.join(PATIENCE)
    ended = process.exitcode
    process.kill()
    process.join()
    assert ended == 0
