"""The model of how likely a trial is to end best: each quantity pushes the way it should."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpo.search.predicted_loss.curves import Population
from hpo.search.predicted_loss.promise import promise
from trainer.prediction.final_loss import Prediction, predict_final_loss

CURVE = np.array([1.0, 0.9, 0.82, 0.76])
AMONG = Population(
    ended=20,
    values=np.linspace(0.6, 1.0, 15),
    falls=np.linspace(0.0, 0.3, 15),
    best_fall=0.3,
    best_drop=0.25,
    to_beat=0.35,
    drops=np.array([0.25, 0.1, 0.15]),
    agreement=0.8,
    compared=2,
    settling=0.0,
)


def of(among: Population = AMONG, curve: np.ndarray = CURVE, step: int = 4, top_k: int = 1) -> float:
    return promise(curve, predict_final_loss(curve, 20, min_epochs=1), among, step, 20, top_k=top_k)


@pytest.mark.parametrize(
    ("what", "worse", "better"),
    [
        ("values", np.linspace(0.5, 0.7, 15), np.linspace(0.8, 1.2, 15)),
        ("best_drop", 0.05, 0.5),
        ("to_beat", 0.2, 0.5),
        ("settling", 0.0, 4.0),
        ("agreement", 1.0, 0.5),
    ],
    ids=["rank", "late falls", "the best", "annealed", "unreliable order"],
)
def test_what_makes_a_trial_more_promising(what: str, worse: object, better: object) -> None:
    known = replace(AMONG, compared=10)
    assert of(replace(known, **{what: worse})) < of(replace(known, **{what: better}))  # type: ignore[arg-type]


def test_a_trial_that_moves_is_more_promising_than_one_that_stands_still_at_the_same_value() -> None:
    still = np.full(4, CURVE[-1])
    assert of(curve=still) < of(curve=CURVE)


def test_more_places_are_easier_to_reach() -> None:
    assert of(top_k=1) < of(top_k=5)


def test_an_agreement_seen_once_counts_for_less_than_one_seen_often() -> None:
    usual, once, often = (of(replace(AMONG, agreement=0.4, compared=count)) for count in (0, 1, 20))
    assert usual < once < often


def test_a_prediction_below_the_best_helps() -> None:
    low, high = (Prediction(mean, 0.05, mean - 0.06, mean + 0.06, "power", 1.0) for mean in (0.3, 0.6))
    assert promise(CURVE, high, AMONG, 4, 20) < promise(CURVE, low, AMONG, 4, 20)
    assert 0 < promise(CURVE, None, AMONG, 4, 20) < 1


numbers = st.floats(-1e6, 1e6)


@given(
    curve=st.lists(numbers, min_size=2, max_size=12),
    values=st.lists(numbers | st.just(math.inf), max_size=12),
    drops=st.lists(numbers, max_size=6),
    scalars=st.tuples(numbers, st.floats(0, 1e6), numbers, st.floats(0, 1), st.floats(-2, 6)),
    step=st.integers(2, 99),
)
@settings(max_examples=200, deadline=None)
def test_it_is_a_probability_whatever_the_numbers(
    curve: list[float],
    values: list[float],
    drops: list[float],
    scalars: tuple[float, float, float, float, float],
    step: int,
) -> None:
    among = Population(
        ended=len(values),
        values=np.array(values, np.float64),
        falls=np.where(np.isinf(values), -np.inf, 1.0),
        best_fall=scalars[0],
        best_drop=scalars[1],
        to_beat=scalars[2],
        drops=np.array(drops, np.float64),
        agreement=scalars[3],
        compared=max(len(drops) - 1, 0),
        settling=scalars[4],
    )
    found = promise(np.array(curve), predict_final_loss(curve, 100, min_epochs=1), among, step, 100)
    assert 0 <= found <= 1
