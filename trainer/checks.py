"""Checks of arguments that many classes take."""

from __future__ import annotations


def check_mode(mode: str) -> None:
    """Refuse what says neither that smaller nor that larger is better.

    Raises:
        ValueError: ``mode`` is neither ``"min"`` nor ``"max"``.
    """
    if mode not in {"min", "max"}:
        raise ValueError(f"mode is {mode!r}: give 'min' or 'max'")
