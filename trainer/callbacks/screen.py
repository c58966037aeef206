"""Screen: writes text for users to a standard stream; a stream that fails never ends a run."""

from __future__ import annotations

import logging
import sys
from typing import Final, Literal

logger = logging.getLogger(__name__)

# What a stream raises that is full, closed, or not a complete stream object.
_UNUSABLE: Final = (AttributeError, OSError, ValueError)


class Screen:
    """Writes to a standard stream, looked up at each write, as other code may replace or close it.

    While the stream can't be written, text is lost, with one warning.

    Args:
        stream: The name of the stream.
    """

    def __init__(self, stream: Literal["stdout", "stderr"]) -> None:
        self._stream = stream
        self._refused = False

    @property
    def is_terminal(self) -> bool:
        """Whether the stream is a terminal, on which a line can be redrawn."""
        try:
            return bool(getattr(sys, self._stream).isatty())
        except _UNUSABLE:
            return False

    def write(self, text: str) -> None:
        """Write the text, and flush; characters that the stream's encoding lacks are escaped."""
        stream = getattr(sys, self._stream)
        if stream is None:  # in a program without a console
            return
        try:
            try:
                stream.write(text)
            except UnicodeEncodeError as error:
                stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
            stream.flush()
            self._refused = False
        except _UNUSABLE as error:
            if not self._refused:
                logger.warning("%s can't be written, and lacks lines until it can: %s", self._stream, error)
            self._refused = True
