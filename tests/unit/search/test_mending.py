"""Which bounds training may mend, by what a study's trials have shown of them."""

from __future__ import annotations

import pytest

from hpo.search.schedulers.mending import Mending, may_mend


@pytest.mark.parametrize(
    ("shown", "mends"),
    [
        ([], True),
        ([False], True),
        ([False, False], True),
        ([False, False, False], False),
        ([False, False, True, False], True),
    ],
)
def test_one_trial_that_came_no_nearer_to_a_bound_does_not_settle_it(shown: list[bool], mends: bool) -> None:
    mending = Mending()
    for _ in range(2):  # a running trial is read at each look
        for number, nearer in enumerate(shown):
            mending.learn(number, {"acc": nearer, "parameters": False})
    lasting = mending.lasting()
    assert may_mend(["acc"], lasting) == mends
    assert may_mend(["acc", "parameters"], lasting) == (len(shown) < 3)
    assert not may_mend([], lasting)


def test_a_trial_that_comes_nearer_later_counts_as_it_does_now() -> None:
    mending = Mending()
    for number in range(3):
        mending.learn(number, {"acc": False})
    assert mending.lasting() == {"acc"}
    mending.learn(1, {"acc": True})
    assert not mending.lasting()
