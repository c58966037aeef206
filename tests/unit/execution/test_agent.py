"""When the end of its standard input means that an agent is to leave."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hpo.execution.agent import _wait_for_its_end, has_ended, is_a_line
from hpo.signals import handled, held_back
from tests.support.commands import PATIENCE, wait_until


def _of_socket(_: Path) -> list[int]:
    ours, theirs = socket.socketpair()
    return [ours.detach(), theirs.detach()]


@pytest.mark.parametrize(
    ("opened", "line"),
    [
        (lambda _: os.pipe(), True),
        (_of_socket, True),
        (lambda _: os.openpty(), False),
        (lambda folder: [os.open(folder / "file", os.O_RDONLY | os.O_CREAT)], False),
        (lambda _: [os.open(os.devnull, os.O_RDONLY)], False),
    ],
    ids=["a pipe", "a socket", "a terminal", "a file", "/dev/null"],
)
def test_only_a_pipe_or_a_socket_says_that_who_started_it_is_gone(
    opened: Callable[[Path], list[int]], line: bool, tmp_path: Path
) -> None:
    descriptors = opened(tmp_path)
    try:
        assert is_a_line(descriptors[0]) is line
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    assert not is_a_line(descriptors[0]), "a closed one has said so before"


@pytest.mark.parametrize("opened", [os.pipe, lambda: _of_socket(Path())], ids=["a pipe", "a socket"])
@pytest.mark.parametrize("written", [b"", b"a line\n"], ids=["nothing", "a line"])
def test_a_line_has_ended_where_its_other_end_is_closed(opened: Callable[[], list[int]], written: bytes) -> None:
    ours, theirs = opened()
    try:
        os.write(theirs, written)
        assert not has_ended(ours)
        os.close(theirs)
        assert has_ended(ours)
    finally:
        os.close(ours)


def test_an_end_that_is_seen_while_signals_are_held_back_is_heard_afterwards() -> None:
    """As they are for the time in which the fork server is started."""
    ours, theirs = os.pipe()
    os.close(theirs)
    came: list[int] = []
    with handled([signal.SIGTERM], lambda number, _: came.append(number)):
        with held_back([signal.SIGTERM]):
            waiting = threading.Thread(target=_wait_for_its_end, args=(ours,), daemon=True)
            waiting.start()
            waiting.join(0.2)
        waiting.join(PATIENCE)
        assert not waiting.is_alive()
        wait_until(lambda: came)
    os.close(ours)
    assert came == [signal.SIGTERM]
