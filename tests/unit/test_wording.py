"""How numbers, sizes, counts and lengths of time become text."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hpo import wording


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0123, "12.3 ms"),
        (0.9997, "1 s"),
        (1, "1 s"),
        (59.94, "59.9 s"),
        (90, "1.5 min"),
        (3590, "1 h 0 min"),
        (7500, "2 h 5 min"),
    ],
)
def test_a_length_of_time(seconds: float, text: str) -> None:
    assert wording.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (None, 6, "-"),
        (1 / 3, 4, "0.3333"),
        (1e-7, 6, "1e-07"),
        (123456, 4, "123456"),
        (1234567.0, 4, "1234567"),
        (1e30, 4, "1e+30"),
        ("a", 6, "a"),
        (True, 6, "True"),
    ],
)
def test_a_value(value: Any, digits: int, text: str) -> None:
    assert wording.shown(value, digits) == text
    assert wording.shown(math.nan) == "nan"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_999, "1000 kB"),
        (12_345_678, "12.35 MB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_bytes_on_a_disk(count: int, text: str) -> None:
    assert wording.file_size(count) == text


@pytest.mark.parametrize(("gib", "text"), [(0.25, "0.25 GiB"), (15.63, "15.6 GiB"), (1024, "1024 GiB")])
def test_bytes_of_memory(gib: float, text: str) -> None:
    assert wording.gib(gib * 2**30) == text


def test_counts_and_lists() -> None:
    assert [wording.count_of(number, "trial") for number in (0, 1, 2)] == ["0 trials", "1 trial", "2 trials"]
    assert wording.listed([1, 2, 3], 3) == "1, 2, 3"
    assert wording.listed(["`a`", "`b`", "`c`"], 1) == "`a` and 2 more"
    assert wording.percent(0.125) == "12 %"
