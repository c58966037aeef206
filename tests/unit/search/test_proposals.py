"""Untried points of a space that is nearly used up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from optuna.distributions import FloatDistribution, IntDistribution

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


@pytest.mark.parametrize("text", ["a <= b", "a + b <= 0.5", "a <= 0.2"])
@pytest.mark.parametrize("seed", range(3))
def test_trials_that_ask_at_the_same_time_get_points_apart(text: str, seed: int) -> None:
    """None of them knows another's point. They are at least as even as drawn ones."""
    space = {name: FloatDistribution(0.0, 1.0) for name in "ab"}
    encoding = Encoding(space, {}, [Condition(text, "where[0]", text)])
    found = [proposals(encoding, [], index).spread(index, seed) for index in range(64)]
    points = np.array([list(point.values()) for point in found if point is not None])
    assert len(np.unique(points.round(6), axis=0)) == 64
    valid = np.random.default_rng(0).random((20_000, 2))
    valid = valid[[encoding.allows({"a": a, "b": b}) for a, b in valid]]
    for quarter in (0.25, 0.5, 0.75):
        for column in (0, 1):
            below = np.quantile(valid[:, column], quarter)
            assert abs((points[:, column] <= below).mean() - quarter) < 0.2


def test_not_every_point_is_looked_at_where_many_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = Encoding({"a": IntDistribution(1, 100), "b": IntDistribution(1, 100)}, {})
    looked: list[Any] = []
    params = encoding.params
    monkeypatch.setattr(encoding, "params", lambda point: looked.append(point) or params(point))
    assert proposals(encoding, [{"a": 1, "b": 1}]).any_left() is not None
    assert len(looked) <= 2
