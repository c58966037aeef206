"""Output that may lose its reader: a pipe into `head`, a terminal that is closed."""

import contextlib
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Bring what is printed inside to its reader.

    Raises:
        OSError: There is none any more. What is printed from then on goes nowhere, and Python has nothing to
            complain of when it exits.
    """
    try:
        yield
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        _mute_unread()
        raise


@contextlib.contextmanager
def read_by_others() -> Iterator[None]:
    """The reader of what is printed inside may stop reading, as `head` does."""
    with contextlib.suppress(OSError), flushed():
        yield


def _mute_unread() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # what is left in its buffer has to go somewhere
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
