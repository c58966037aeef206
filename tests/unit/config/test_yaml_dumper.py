"""A config that is written down is read as the same values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from hpo.config.yaml_dumper import to_line, to_yaml
from hpo.config.yaml_loader import Loader
from tests.unit.trainer.support import quick

NUMBERLIKE = st.sampled_from(
    ["1e-3", "1_000", "0x1f", ".5", "1.", "null", "yes", "~", "2026-11-22", "- a", "", "é: ü"]
)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8) | NUMBERLIKE,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def read(text: str) -> Any:
    return yaml.load(text, Loader=Loader)


@quick(60)
@given(st.dictionaries(st.sampled_from(["model", "1", "on"]), PLAIN, max_size=3))
def test_what_is_written_is_read_as_it_was(config: dict[str, Any]) -> None:
    assert read(to_yaml(config)) == config


@pytest.mark.parametrize(
    "value", [" ".join(["word"] * 99), "a, b", "a]: {b", "two\nlines", "\u2028", "a\x85", "\r\n", "'", '"\n"', "#"]
)
def test_a_text_of_one_line_is_read_as_it_was_after_a_key_and_in_a_list(value: str) -> None:
    line = to_line(value)
    assert len(line.splitlines()) == 1
    assert read(f"a: {line}   # note\nb: {{c: [{line}, 1]}}") == {"a": value, "b": {"c": [value, 1]}}


@quick(60)
@given(PLAIN)
def test_any_plain_value_is_read_as_it_was_from_a_line(value: Any) -> None:
    assert read(f"a: {to_line(value)}") == {"a": value}


def test_a_value_that_stands_twice_is_written_twice_and_the_order_stays() -> None:
    shared = [1, 2]
    assert to_yaml({"b": shared, "a": shared}) == "b:\n- 1\n- 2\na:\n- 1\n- 2\n"


@pytest.mark.parametrize("value", [1e-5, 3e22, math.inf, -math.inf, 0.1])
def test_omegaconf_reads_the_same_numbers(value: float, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml({"lr": value, "text": "1e-5"}))
    assert OmegaConf.load(tmp_path / "config.yaml") == {"lr": value, "text": "1e-5"}
