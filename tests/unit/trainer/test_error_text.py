"""Text of exceptions that any code makes."""

from __future__ import annotations

import pytest

from trainer.error_text import error_text, plain_text, shortened, traceback_text


class RaisesError(Exception):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def __str__(self) -> str:
        raise self.error


class ReturnsError(Exception):
    def __str__(self) -> str:
        return self.args[0]  # type: ignore[no-any-return] # what a wrong class does


class Unfriendly(str):
    """Text with methods of its own."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        raise ValueError("no format")

    __getitem__ = __format__  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("plain"), "ValueError: plain"),
        (KeyError(), "KeyError"),
        (RaisesError(ValueError), "RaisesError: (no message: its __str__ raised ValueError)"),
        (RaisesError(KeyboardInterrupt), "RaisesError: (no message: its __str__ raised KeyboardInterrupt)"),
        (RaisesError(RecursionError), "RaisesError: (no message: its __str__ raised RecursionError)"),
        (ReturnsError(3), "ReturnsError: (no message: its __str__ raised TypeError)"),
        (ReturnsError(Unfriendly("odd")), "ReturnsError: odd"),
        (ValueError("half \ud800, end \x00, \x1b[31mred"), r"ValueError: half \ud800, end \x00, \x1b[31mred"),
        (ValueError("two\nlines\tand é 😀"), "ValueError: two\nlines\tand é 😀"),
        (ExceptionGroup("several", [ValueError(1)]), "ExceptionGroup: several (1 sub-exception)"),
        (ValueError("x" * 10_000_000), "ValueError: " + "x" * 1_988),
    ],
)
def test_the_text_of_an_error_can_be_stored_and_shown(error: BaseException, text: str) -> None:
    assert error_text(error) == text
    traceback_text(error).encode()


def test_causes_in_a_circle_are_each_shown_once() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    text = traceback_text(first)
    assert (text.count("ValueError: first"), text.count("KeyError: 'second'")) == (1, 1)


def test_what_is_too_long_loses_its_middle() -> None:
    text = shortened("a" * 50 + "b" * 1000 + "c" * 50, 100)
    assert (text[:50], text[-50:]) == ("a" * 50, "c" * 50)
    assert "(1000 characters left out)" in text
    assert len(traceback_text(ValueError("x" * 10_000_000), 1_000)) < 1_100


def test_plain_text_stays_as_it_is() -> None:
    assert plain_text("über\n\tß 漢字 😀") == "über\n\tß 漢字 😀"
