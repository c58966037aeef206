"""What a study shows about itself: agreement of ranks, the first rung that follows, and whether the model wins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from hpo.search.schedulers.curves import curves_of
from hpo.search.schedulers.freeze_thaw import agreement
from hpo.search.schedulers.seen import Curve
from tests.support.standings import seen, standing

RUNGS = [1, 3, 9, 27]


def curves(*trials: Any) -> list[Curve]:
    return curves_of(standing(trials))


def even(number: int, values: Sequence[float], *kinds: str) -> Any:
    return seen(number, values, kinds=("initial", *kinds))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=2, max_size=12))
def test_rank_correlation_is_scipys_also_with_ties(pairs: list[tuple[int, int]]) -> None:
    one, other = zip(*pairs, strict=True)
    ours = agreement.rank_correlation(one, other)
    if len(set(one)) == 1 or len(set(other)) == 1:
        assert ours == 0
    else:
        assert ours == pytest.approx(spearmanr(one, other).statistic)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["initial"], 9),
        (["breadth", "whole"], 9),
        (["initial", "promotion"], 3),
        (["initial", "whole", "model"], 3),
        (["breadth", "promotion"], 0),
        (["model"], 0),
        (["enqueued"], 0),
        ([], 0),
    ],
)
def test_only_epochs_that_were_granted_blindly_are_unjudged(kinds: list[str], expected: int) -> None:
    (curve,) = curves(seen(0, [1.0] * 9, kinds=kinds))
    assert agreement.unjudged(curve, 3) == expected


def test_agreement_is_the_correlation_drawn_towards_what_is_usual() -> None:
    # Epoch 1 ranks the other way round than epoch 3.
    trials = [even(k, [float(k), 0.0, -float(k)]) for k in range(6)]
    found = agreement.agreements(curves(*trials), RUNGS, 3)
    assert found[1] == pytest.approx((6 * -1 + 3 * 0.5) / 9)
    assert found[3] == found[9] == pytest.approx(0.9)
    # Two that ran on tell nothing yet; three do. Those that were promoted never count.
    further = [even(k, [float(k)] * 9, "whole") for k in range(6, 8)]
    promoted = [even(k, [float(k)] * 8 + [-float(k)], "promotion") for k in range(8, 20)]
    assert agreement.agreements(curves(*trials, *further, *promoted), RUNGS, 3)[3] == pytest.approx(0.9)
    third = even(20, [20.0] * 9, "whole")
    more = agreement.agreements(curves(*trials, *further, *promoted, third), RUNGS, 3)
    assert more[3] == pytest.approx((3 + 3 * 0.9) / 6)


def test_the_first_rung_is_early_where_early_ranks_agree_and_late_where_they_do_not() -> None:
    agreeing = {1: 0.9, 3: 0.9, 9: 0.9}
    assert agreement.first_rung(agreeing, RUNGS, lambda rung: 27 / rung) == 1
    assert agreement.first_rung({**agreeing, 1: 0.4}, RUNGS, lambda rung: 27 / rung) == 3
    assert agreement.first_rung({**agreeing, 1: 0.4, 3: 0.1}, RUNGS, lambda rung: 27 / rung) == 9
    assert agreement.first_rung({**agreeing, 1: 0.9, 3: -0.2}, RUNGS, lambda rung: 27 / rung) == 9
    assert agreement.first_rung({}, [1], lambda rung: 27 / rung) == 1
    assert agreement.to_the_end({1: 0.5, 3: 0.8, 9: 0.9}, 3) == pytest.approx(0.72)
    assert agreement.to_the_end({1: 0.5, 3: -0.8, 9: 0.9}, 1) == 0


def test_the_expected_best_of_some_is_that_of_a_simulation() -> None:
    drawn = np.random.default_rng(0).normal(size=(20_000, 27))
    for count in (3, 9, 27):
        assert agreement._expected_best(count) == pytest.approx(drawn[:, :count].max(1).mean(), abs=0.03)


def test_the_ranks_of_those_that_were_promoted_agree_or_cross() -> None:
    def promoted(ends: Sequence[float], kind: str = "promotion") -> list[Curve]:
        return curves(*(even(k, [float(k)] * 8 + [end], kind) for k, end in enumerate(ends)))

    assert agreement.among_promoted(promoted([0.1, 0.2]), 3, 9) == 0
    assert agreement.among_promoted(promoted([0.1, 0.2, 0.3]), 3, 9) == pytest.approx(1 - 0.5**0.5)
    assert agreement.among_promoted(promoted([0.1, 0.3, 0.2, 0.4]), 3, 9) == pytest.approx(0.8 - 1 / 3**0.5)
    assert agreement.among_promoted(promoted([0.4, 0.3, 0.2, 0.1]), 3, 9) == 0
    # Those that ran on whatever their values, or have not come there, tell nothing of it.
    assert agreement.among_promoted(promoted([0.1, 0.2, 0.3], "whole"), 3, 9) == 0
    assert agreement.among_promoted(promoted([0.1, 0.2, 0.3]), 9, 27) == 0


def test_the_first_trials_pause_at_epoch_3_or_later_in_long_ones() -> None:
    longer = [[1], [1, 2], RUNGS, [1, 3, 9, 27, 81, 243, 1000]]
    assert [agreement.base_rung(rungs, 0.0) for rungs in longer] == [1, 2, 3, 27]


def test_the_first_trials_train_about_as_long_as_one_takes_to_start() -> None:
    assert [agreement.base_rung(RUNGS, switch) for switch in (0.25, 1.0, 4.0, 16.0)] == [3, 3, 3, 9]
    assert agreement.base_rung([1, 3, 9, 20], 16.0) == 9
    assert agreement.base_rung([1, 3, 9, 27, 81, 243, 1000], 16.0) == 27


def test_wins_compare_after_as_many_epochs() -> None:
    even_ones = [even(k, [2.0 - 0.1 * k, 1.0]) for k in range(4)]
    assert agreement.wins(curves(*even_ones)) == 0.75
    ahead = [seen(k, [0.5], kinds=("model",)) for k in range(4, 10)]
    assert agreement.wins(curves(*even_ones, *ahead)) == pytest.approx((6 * 0.75 + 6) / 12)
    behind = [seen(k, [3.0, 1.0], kinds=("model",)) for k in range(4, 10)]  # equal to all at epoch 2
    assert agreement.wins(curves(*even_ones, *behind)) == pytest.approx((6 * 0.75 + 6 * 0.5) / 12)
