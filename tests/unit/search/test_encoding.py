"""Spaces as unit cubes and as columns of the curve model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from hpo.search.axes import RealAxis, axis_of
from hpo.search.schedulers.freeze_thaw.encoding import Encoding
from tests.support.standings import CONDITIONS, SPACE, spaces


def drawn(encoding: Encoding, count: int, seed: int = 0) -> Any:
    return encoding.snap(np.random.default_rng(seed).random((count, len(encoding))))


@given(spaces(), st.integers(0, 5))
def test_every_point_is_one_of_the_space_and_comes_back_from_its_parameters(space: Any, seed: int) -> None:
    distributions, conditions = space
    encoding = Encoding(distributions, conditions)
    points = drawn(encoding, 20, seed)
    for point in points:
        params = encoding.params(point)
        for name, value in params.items():
            assert distributions[name]._contains(distributions[name].to_internal_repr(value))
        applies = {
            name
            for name in distributions
            if all(
                other in params and any(params[other] is each or params[other] == each for each in values)
                for other, values in conditions.get(name, {}).items()
            )
        }
        assert set(params) == applies
        back = encoding.point(params)
        np.testing.assert_allclose(back, point, atol=1e-9)
        assert encoding.key(encoding.params(encoding.snap(back[None])[0])) == encoding.key(params)
    features = encoding.features(points)
    assert features.shape == (20, len(encoding.groups))
    assert np.isfinite(features).all()
    assert np.abs(features).max(initial=0.0) <= 1 + 1e-9


def test_a_parameter_that_does_not_apply_adds_no_distance() -> None:
    encoding = Encoding(SPACE, CONDITIONS)
    base = {"optimizer.lr": 1e-3, "model.layers": 2, "optimizer._target_": "AdamW"}
    left, right = encoding.point(base), encoding.point({**base, "optimizer.momentum": 0.9})
    place = encoding.names.index("optimizer.momentum")
    assert math.isnan(left[place])
    assert encoding.features(encoding.snap(np.array([right]))) == pytest.approx(
        encoding.features(np.array([left]))
    )
    # Drawn points without it differ in nothing where all else is equal, whatever was drawn for it.
    units = np.full((2, 4), 0.9)
    units[:, place] = [0.1, 0.8]
    one, two = encoding.features(encoding.snap(units))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("distribution", "values", "apart"),
    [
        (FloatDistribution(1e-4, 1e-2, log=True), [1e-4, 1e-3, 1e-2], 0.5),
        (IntDistribution(1, 9, step=2), [1, 3, 5, 7, 9], 0.5),
        (CategoricalDistribution([2, 8, 4]), [2, 4, 8], 0.5),
        # The corners of a triangle whose sides are 1, from its centre.
        (CategoricalDistribution(["a", "b", "c"]), ["a", "b", "c"], 1 / math.sqrt(3)),
    ],
)
def test_each_value_of_a_parameter_is_as_far_from_a_trial_that_it_does_not_apply_to(
    distribution: BaseDistribution, values: list[Any], apart: float
) -> None:
    space: dict[str, BaseDistribution] = {"kind": CategoricalDistribution(["x", "y"]), "p": distribution}
    encoding = Encoding(space, {"p": {"kind": ["x"]}})
    rows = encoding.features(encoding.points([{"kind": "x", "p": value} for value in values]))
    without = encoding.features(encoding.points([{"kind": "x"}]))
    np.testing.assert_allclose(np.linalg.norm(rows - without, axis=1), apart)
    neighbours = np.linalg.norm(np.diff(rows, axis=0), axis=1)
    np.testing.assert_allclose(neighbours, neighbours[0])
    assert len(set(encoding.groups[-rows.shape[1] + 2 :])) == 1


def test_a_condition_on_a_parameter_that_does_not_apply_does_not_hold() -> None:
    space: dict[str, BaseDistribution] = {
        "outer": CategoricalDistribution(["on", "off"]),
        "inner": CategoricalDistribution(["x", "y"]),
        "deep": FloatDistribution(0, 1),
    }
    encoding = Encoding(space, {"deep": {"inner": ["x", "y"]}, "inner": {"outer": ["on"]}})
    for point in drawn(encoding, 50):
        params = encoding.params(point)
        assert set(params) == ({"outer", "inner", "deep"} if params["outer"] == "on" else {"outer"})


def test_a_condition_on_what_is_not_searched_counts_as_met() -> None:
    encoding = Encoding({"a": FloatDistribution(0, 1)}, {"a": {"config.key": ["x"]}})
    assert set(encoding.params(encoding.snap(np.array([[0.3]]))[0])) == {"a"}


def test_choices_without_order_are_one_apart_and_numbers_stand_in_their_order() -> None:
    encoding = Encoding({"c": CategoricalDistribution(["a", "b", "c"])}, {})
    rows = encoding.features(np.array([encoding.point({"c": each}) for each in "abc"]))
    distances = np.linalg.norm(rows[:, None] - rows, axis=-1)
    np.testing.assert_allclose(distances, 1 - np.eye(3))
    assert encoding.groups.tolist() == [0, 0, 0]
    ordered = Encoding({"b": CategoricalDistribution([128, 32, 64])}, {})
    rows = ordered.features(np.array([ordered.point({"b": each}) for each in (32, 64, 128)]))
    np.testing.assert_allclose(rows[:, 0], [0, 0.5, 1])


def test_true_and_1_are_two_choices() -> None:
    encoding = Encoding({"c": CategoricalDistribution([True, "1", 1.5])}, {})
    values = [encoding.params(encoding.point({"c": each}))["c"] for each in (True, "1", 1.5)]
    assert values == [True, "1", 1.5]
    assert encoding.key({"c": True}) != encoding.key({"c": "1"})
    assert encoding.key({"c": None}) != encoding.key({})
    assert encoding.key({"c": 1}) == encoding.key({"c": 1.0})
    stepped = Encoding({"s": FloatDistribution(0.1, 0.5, step=0.1)}, {})
    assert stepped.key({"s": 0.3}) == stepped.key({"s": 0.1 + 2 * 0.1})
    assert stepped.key({"s": 0.3}) != stepped.key({"s": 0.4})


def test_a_value_outside_the_space_is_brought_in_and_an_unknown_choice_does_not_apply() -> None:
    encoding = Encoding(SPACE, CONDITIONS)
    point = encoding.point({"optimizer.lr": 5.0, "model.layers": -3, "optimizer._target_": "Lion"})
    params = encoding.params(point)
    assert params["optimizer.lr"] == pytest.approx(0.1)
    assert params["model.layers"] == 1
    assert "optimizer._target_" not in params
    assert np.isfinite(encoding.features(point[None])).all()


def test_a_range_of_one_value_has_no_column() -> None:
    encoding = Encoding({"fixed": FloatDistribution(2.0, 2.0), "x": FloatDistribution(0, 1)}, {})
    assert encoding.features(drawn(encoding, 3)).shape == (3, 1)
    assert encoding.params(drawn(encoding, 1)[0])["fixed"] == 2.0


@pytest.mark.parametrize(
    ("distribution", "values"),
    [
        (IntDistribution(1, 4), [1, 2, 3, 4]),
        (IntDistribution(0, 20, step=10), [0, 10, 20]),
        (IntDistribution(1, 8, log=True), list(range(1, 9))),
        (FloatDistribution(0.0, 1.0, step=0.5), [0.0, 0.5, 1.0]),
        (CategoricalDistribution(["a", "b"]), ["a", "b"]),
    ],
)
def test_every_value_is_reached_and_listed(distribution: BaseDistribution, values: list[Any]) -> None:
    encoding = Encoding({"p": distribution}, {})
    assert {encoding.params(point)["p"] for point in drawn(encoding, 500)} == set(values)
    assert [encoding.params(point)["p"] for point in encoding.every_point()] == values
    assert not any(isinstance(encoding.params(point)["p"], np.generic) for point in encoding.every_point())


def test_points_under_conditions_are_listed_once_and_a_real_range_not_at_all() -> None:
    space: dict[str, BaseDistribution] = {
        "kind": CategoricalDistribution(["a", "b"]),
        "size": IntDistribution(1, 3),
    }
    encoding = Encoding(space, {"size": {"kind": ["a"]}})
    listed = [encoding.params(point) for point in encoding.every_point()]
    assert len(listed) == 4
    assert {"kind": "b"} in listed
    assert not len(Encoding(SPACE, CONDITIONS).every_point())


def test_another_kind_of_distribution_is_refused() -> None:
    with pytest.raises(TypeError, match="BaseDistribution"):
        axis_of(BaseDistribution())


def test_a_logarithmic_range_is_even_in_its_logarithm() -> None:
    axis = RealAxis(1e-4, 1e-2, log=True)
    assert axis.value(0.5) == pytest.approx(1e-3)
    assert axis.units([1e-3, 1e-2]) == pytest.approx([0.5, 1.0])
    assert axis.value(1.0) == 1e-2
