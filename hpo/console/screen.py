"""Redraws a picture at the bottom of a terminal; lines that are printed meanwhile scroll above it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Final

from rich.console import Console, RenderableType
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment

#: The least seconds between two drawings, and the largest share of the time that drawing may take.
_PAUSE: Final = 0.25
_SHARE: Final = 20
#: The fewest columns of a terminal for a picture.
_NARROWEST: Final = 20


def is_drawable() -> bool:
    """Whether standard output is a terminal that a picture can be redrawn on."""
    console = Console()
    return sys.stdout.isatty() and not console.is_dumb_terminal and console.width >= _NARROWEST


class Screen:
    """Draws on standard output between `open` and `close`.

    It changes only the bottom lines of the terminal, and does not hide the cursor, so a process that is killed
    leaves nothing to restore.
    """

    def __init__(self) -> None:
        self._live: Live | None = None
        self._size = Console().size
        self._drawn: RenderableType = ""
        self._next = 0.0

    def open(self) -> None:
        """Begin drawing; from now on, printed lines appear above the picture."""
        console = Console()
        self._size = console.size
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            # Errors that go to a file stay there.
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()
        console.show_cursor(True)

    def show(self, make: Callable[[], RenderableType], *, now: bool = False) -> None:
        """Draw a picture, unless one was drawn a moment ago.

        Args:
            make: Creates the picture.
            now: Draw it in any case.

        Raises:
            OSError: The terminal is closed.
        """
        began = time.monotonic()
        if self._live is None or (began < self._next and not now):
            return
        self._fit(self._live.console)
        self._drawn = make()
        self._live.update(self._drawn, refresh=True)
        ended = time.monotonic()
        self._next = ended + max(_PAUSE, _SHARE * (ended - began))

    def close(self, last: RenderableType | None = None) -> None:
        """Remove the picture, or leave this last one in its place."""
        live, self._live = self._live, None
        if live is None:
            return
        with contextlib.suppress(OSError):  # the terminal is closed
            self._fit(live.console)
            live.stop()
            if last is not None:
                live.console.print(last)

    def _fit(self, console: Console) -> None:
        """After the terminal became narrower and broke the lines, move up to where the picture begins now."""
        before, self._size = self._size, console.size
        if self._size.width >= before.width:
            return
        lines = console.render_lines(self._drawn, console.options.update(width=before.width), pad=False)
        broken = sum(max(0, Segment.get_line_length(line) - 1) // self._size.width for line in lines)
        for _ in range(broken):
            console.control(Control((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)))
