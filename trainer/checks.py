"""Checks of arguments that many classes take."""

from __future__ import annotations

from numbers import Integral


def check_mode(mode: str) -> None:
    """Refuse an invalid ``mode``.

    Raises:
        ValueError: ``mode`` is neither ``"min"`` nor ``"max"``.
    """
    if mode not in {"min", "max"}:
        raise ValueError(f"mode is {mode!r}: give 'min' or 'max'")


def check_count(name: str, value: object, least: int = 1, *, optional: bool = False) -> None:
    """Refuse a value that is no whole number of at least ``least``.

    Args:
        name: The name of the argument.
        value: Its value.
        least: The smallest allowed number.
        optional: Whether None is allowed too.

    Raises:
        ValueError: The value is refused; the text names the argument.
    """
    if optional and value is None:
        return
    if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < least:  # NumPy's integers count
        leave_out = ", or leave it out" if optional else ""
        raise ValueError(f"{name} is {value!r}: give a whole number of at least {least}{leave_out}")
