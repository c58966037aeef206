"""Turns an exception's message and traceback into text that any file, database and terminal accepts.

An exception may come from any code: its ``__str__`` may raise, return 100 MB, or hold characters that can't be
encoded (lone surrogates), stored (NUL) or shown (a terminal's escape sequences).
"""

import re
import traceback
from typing import Final

#: The most characters that are kept of a message, and of a traceback.
LONGEST_MESSAGE: Final = 2_000
LONGEST_TRACEBACK: Final = 200_000

# Control characters except newline and tab, and lone surrogates.
_ODD: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def error_text(error: BaseException, longest: int = LONGEST_MESSAGE) -> str:
    """The exception's type and message, ``ValueError: what it says``.

    Args:
        error: Any exception.
        longest: The most characters to keep.
    """
    said, name = error_message(error)[:longest], type(error).__name__
    return plain_text(f"{name}: {said}" if said else name)[:longest]


def traceback_text(error: BaseException, longest: int = LONGEST_TRACEBACK) -> str:
    """The exception's traceback with those of its causes, as Python prints it.

    Args:
        error: Any exception.
        longest: The most characters to keep; more are cut out of the middle.
    """
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException as problem:  # noqa: BLE001 - the exception's own methods may raise anything
        text = f"{error_text(error)}\n(its traceback can't be shown: {error_text(problem)})\n"
    return plain_text(shortened(text, longest))


def shortened(text: str, longest: int) -> str:
    """The text, without its middle if it has more than ``longest`` characters."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters left out)\n{text[-half:]}"


def plain_text(text: str) -> str:
    """The text with characters that can't be encoded, stored or shown written as escapes, such as ``\\x00``."""
    return _ODD.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def error_message(error: BaseException) -> str:
    """The exception's message as it is, without its type; never raises."""
    try:
        # Converted, as `__str__` may return a subclass of str with overridden methods.
        return str.__str__(str(error))
    except BaseException as problem:  # noqa: BLE001 - `__str__` may raise anything
        return f"(no message: its __str__ raised {type(problem).__name__})"
