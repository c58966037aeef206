"""What a run says that is nobody's message."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Notice:
    """Something that a person should read.

    Attributes:
        text: One line.
    """

    text: str


@dataclass(frozen=True)
class Tick:
    """Time has passed: whoever shows it may show it."""
