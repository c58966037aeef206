"""Untried points of a space that is nearly used up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from optuna.distributions import IntDistribution

from hpo.config.conditions import Condition
from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from hpo.search.schedulers.freeze_thaw.proposals import Proposals


def proposals(encoding: Encoding, tried: list[dict[str, Any]], seed: int = 0) -> Proposals:
    return Proposals(encoding, {encoding.key(each) for each in tried}, np.random.default_rng(seed))


@pytest.mark.parametrize("seed", range(5))
def test_the_last_point_is_found_and_then_none(seed: int) -> None:
    text = "a % b == 0"
    space = {name: IntDistribution(1, 4) for name in "ab"}
    encoding = Encoding(space, {}, [Condition(text, "where[0]", text)])
    valid = [{"a": a, "b": b} for a in range(1, 5) for b in range(1, 5) if a % b == 0]
    assert proposals(encoding, valid[:3] + valid[4:], seed).any_left() == valid[3]
    assert proposals(encoding, valid, seed).any_left() is None


def test_any_point_that_is_left_may_come() -> None:
    encoding = Encoding({"a": IntDistribution(1, 5)}, {})
    tried = [{"a": 2}, {"a": 4}]
    assert {proposals(encoding, tried, seed).any_left()["a"] for seed in range(40)} == {1, 3, 5}  # type: ignore[index]


def test_not_every_point_is_looked_at_where_many_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = Encoding({"a": IntDistribution(1, 100), "b": IntDistribution(1, 100)}, {})
    looked: list[Any] = []
    params = encoding.params
    monkeypatch.setattr(encoding, "params", lambda point: looked.append(point) or params(point))
    assert proposals(encoding, [{"a": 1, "b": 1}]).any_left() is not None
    assert len(looked) <= 2
