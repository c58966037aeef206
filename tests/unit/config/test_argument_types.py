"""What a study file gives a class is held against the types of its signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from hpo.config.argument_types import wrong_types
from tests.support.commands import hpo, make_study

if TYPE_CHECKING:
    from decimal import Decimal


class Taker:
    def __init__(
        self,
        whole: int = 1,
        number: float = 1.0,
        switch: bool = True,
        word: Literal["a", "b"] = "a",
        words: Sequence[str] = (),
        folder: Path | str | None = None,
        sizes: Mapping[int, int] | Mapping[str, int] | None = None,
        function: Callable[[], float] | None = None,
        anything: Any = None,
        unknown: Decimal | None = None,
    ) -> None:
        pass


@pytest.mark.parametrize(
    "value",
    [
        {"whole": 3, "number": 3, "switch": False, "word": "b", "words": ["x"], "folder": "y"},
        {"number": float("inf"), "words": ("x", "y"), "folder": None, "sizes": {1: 2}},
        {"sizes": {"0.5": 2}, "function": "x", "anything": [{}], "unknown": "1", "folder": Path("x")},
        {"not_its": 1},
    ],
)
def test_what_fits_is_let_through(value: dict[str, Any]) -> None:
    assert not list(wrong_types(Taker, value))


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("whole", "3", "a whole number"),
        ("whole", True, "a whole number"),
        ("whole", 2.5, "a whole number"),
        ("whole", None, "a whole number"),
        ("number", "1e-3", "a number"),
        ("number", True, "a number"),
        ("switch", 1, "true or false"),
        ("word", "c", "one of a, b"),
        ("words", "val_loss", "a list, each entry a text"),
        ("words", [1], "a list, each entry a text"),
        ("folder", 5, "a path or a text or null"),
        ("sizes", [1], "a mapping or null"),
    ],
)
def test_what_does_not_fit_is_said_in_words(name: str, value: Any, wanted: str) -> None:
    assert list(wrong_types(Taker, {name: value})) == [(name, wanted)]


@pytest.mark.parametrize(
    ("given", "argument", "wanted"),
    [
        ("early_stopping: {patience: five}", "early_stopping.patience", "a whole number"),
        ("gradient_clipping: {max_norm: [1]}", "gradient_clipping.max_norm", "a number or null"),
        ("checkpoint: {at_steps: 5}", "checkpoint.at_steps", "a list, each entry a whole number"),
        ("evaluator: {at_steps: 5}", "evaluator.at_steps", "a list, each entry a whole number"),
        ("ema: {decay: '0.9'}", "ema.decay", "a number"),
    ],
)
def test_a_wrong_argument_has_line_path_value_and_fix(
    tmp_path: Path, given: str, argument: str, wanted: str
) -> None:
    file = make_study(tmp_path)
    file.write_text(f"callbacks:\n  {given}\n" + file.read_text())
    said = hpo("check", file, code=2).stdout
    assert f"study.yaml:2: callbacks.{argument}: must be {wanted}\n" in said
    assert f"fix: write {wanted}\n" in said


def test_a_text_is_shown_as_one(tmp_path: Path) -> None:
    file = make_study(tmp_path)
    file.write_text("callbacks: {ema: {decay: '0.9'}}\n" + file.read_text())
    assert "value: '0.9'\n" in hpo("check", file, code=2).stdout
