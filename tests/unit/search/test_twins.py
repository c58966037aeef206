"""Trials with the same losses: which of them stands for the others, and what that spares a study."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from hpo.search.schedulers.curves import curves_of
from hpo.search.schedulers.freeze_thaw.scheduler import FreezeThaw
from hpo.search.schedulers.freeze_thaw.twins import twins
from hpo.search.schedulers.scheduler import Resume
from tests.support.standings import grown, seen, standing


def stood_for(*trials: Any) -> set[int]:
    return twins(curves_of(standing(trials)))


def test_the_trial_that_has_come_furthest_stands_for_those_with_the_same_losses() -> None:
    curve = [3.0, 2.0, 1.0, 0.5]
    assert stood_for(seen(0, curve[:3]), seen(1, curve), seen(2, curve[:3]), seen(3, [3.0, 2.0, 1.1])) == {0, 2}
    assert stood_for(seen(0, curve), seen(1, curve), seen(2, curve[:2])) == {1}  # two reports are too few


def test_curves_that_part_later_are_two() -> None:
    start = [3.0, 2.0, 1.0]
    assert stood_for(seen(0, [*start, 0.5, 0.4]), seen(1, [*start, 0.6]), seen(2, start)) == {2}


def test_a_metric_that_starts_constant_or_is_not_finite_makes_no_twins() -> None:
    for losses in ([1.0] * 5, [1.0, 1.0, 0.5, 0.4], [math.nan] * 4, [2.0, math.inf, 1.0], [3.0, 2.0]):
        assert stood_for(seen(0, losses), seen(1, losses)) == set()


def test_one_that_has_ended_early_stands_for_none_unless_it_diverged() -> None:
    curve = [3.0, 2.0, 1.0]
    assert stood_for(seen(0, [*curve, 0.5], "ended"), seen(1, curve)) == set()
    assert stood_for(seen(0, [*curve, 0.5], "ended", whole=True), seen(1, curve)) == {1}
    assert stood_for(seen(0, [*curve, math.nan], "ended"), seen(1, curve)) == {1}


def row_of(params: Mapping[str, Any]) -> int:
    return round(math.log10(params["optimizer.lr"]))


def steps(params: Mapping[str, Any], epoch: int) -> float:
    """A table of five rows: the learning rate, rounded, is all that has an effect."""
    row = row_of(params)
    return float((row + 3) ** 2 + (7 + row) / epoch)


@pytest.mark.full
def test_of_trials_with_the_same_losses_one_trains_on() -> None:
    end, answers = grown(FreezeThaw(), standing(n_epochs=300), steps)
    rows = [row_of(trial.params) for trial in end.trials]
    assert len(rows) > len(set(rows))
    resumed = {
        (rows[answer.number], answer.number)
        for answer in answers
        if isinstance(answer, Resume) and (answer.until or 27) > 3  # before, nothing shows it
    }
    assert len(resumed) == len(dict(resumed))
    whole = [row for row, trial in zip(rows, end.trials, strict=True) if trial.whole]
    assert -3 in whole
    assert len(whole) == len(set(whole))
