"""Handles output that may lose its reader: a pipe into `head`, a terminal that is closed."""

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator

from hpo.errors import StudyError


class UnreadError(BrokenPipeError):
    """The reader of standard output, or of standard error, is gone."""


def ready_streams() -> None:
    """Open standard streams that a shell has closed (`>&-`), as other files would get their descriptors.

    Characters that the encoding of standard output lacks, such as `…` in Latin-1, are escaped, as on stderr.
    """
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)  # for workers, as a shell's streams are
    os.close(opened)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Flush the output of the block at its end.

    Raises:
        OSError: The output can't be written; an `UnreadError` if the reader of a pipe is gone. The output that is
            left is dropped, so that Python reports no error at its exit.
    """
    try:
        yield
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        is_ours = isinstance(error, BrokenPipeError) and _is_unread()  # another pipe of the study may also break
        _mute_unread()
        if is_ours:
            raise UnreadError(*error.args) from error
        raise


@contextlib.contextmanager
def read_by_others() -> Iterator[None]:
    """Print in the block for a reader who may stop reading, as `head` does.

    Raises:
        StudyError: The output can't be written for another reason, so a file of it is cut off.
    """
    try:
        with flushed():
            yield
    except OSError as error:
        if not _is_of_a_reader(error):
            raise StudyError(f"{_unwritable(error)}\n  fix: free some room, or send it elsewhere") from error


class BestEffort:
    """Output that must not end its study: the study continues if a disk is full."""

    def __init__(self) -> None:
        self._has_failed = False

    @contextlib.contextmanager
    def printing(self) -> Iterator[None]:
        """Flush the output of the block; the first time that this fails, warn.

        Raises:
            OSError: The reader is gone, which asks the program to end.
        """
        try:
            with flushed():
                yield
        except OSError as error:
            if _is_of_a_reader(error):
                raise
            if not self._has_failed:
                self._has_failed = True
                with contextlib.suppress(OSError), flushed():
                    print(f"{_unwritable(error)}; the study continues", file=sys.stderr)


def _is_of_a_reader(error: OSError) -> bool:
    """Whether an error means that the other end of a pipe, or the terminal, is closed."""
    return isinstance(error, ConnectionError) or error.errno == errno.EIO


def _unwritable(error: OSError) -> str:
    return f"standard output can't be written: {error.strerror or error}"


def _is_unread() -> bool:
    poll = select.poll()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, TypeError, ValueError):  # not a file, as in a notebook
            poll.register(stream, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def _mute_unread() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # the rest of its buffer must go somewhere
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
