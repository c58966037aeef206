"""How long attempts took, and what a scheduler makes of it."""

from __future__ import annotations

import pytest

from hpo.search.schedulers.scheduler import Standing
from hpo.search.schedulers.seen import Seen
from hpo.storage.attributes import TIMING_ATTR
from hpo.study.timing import Timing, timing_of
from tests.support.commands import STUDY
from tests.support.studies import Studies
from tests.unit.study.test_granting import run_all, two_by_two


def standing(*switches: float | None) -> Standing:
    return Standing(
        read=lambda: [Seen(number, {}, {}, "paused", switch=each) for number, each in enumerate(switches)]
    )


def test_a_switch_is_measured_in_epochs_of_the_trial() -> None:
    timing = Timing().with_attempt(4, 2.0, 0.75).with_attempt(2, 1.0, 0.25)
    assert timing == Timing(2, 6, 3.0, 1.0)
    assert timing.switch == pytest.approx((1.0 / 2) / (3.0 / 6))
    assert Timing().switch is None


@pytest.mark.parametrize(
    ("switches", "found"),
    [
        ((3.0, 3.0, 3.0), 0.0),  # too few tell
        ((None, 3.0, 3.0, 3.0), 0.0),
        ((3.0, 3.5, 4.0, 5.0), 4.0),
        ((0.9, 1.0, 1.1, 40.0), 1.0),  # the middle counts
        ((0.3, 0.3, 0.3, 0.3), 0.25),
        ((0.1, 0.1, 0.1, 0.1), 0.0),
        ((1e6, 1e6, 1e6, 1e6), 16.0),
    ],
)
def test_a_study_has_the_power_of_four_that_is_nearest_to_the_middle(
    switches: tuple[float | None, ...], found: float
) -> None:
    assert standing(*switches).switch == pytest.approx(found)


def test_attempts_of_a_scheduled_study_are_timed(studies: Studies) -> None:
    with studies.open("study.n_trials=2", "trainer.max_epochs=4", text=STUDY) as (view,):
        run_all(two_by_two(view))
        for trial in view.study.get_trials():
            timing = timing_of(trial)
            assert (timing.attempts, timing.epochs) == (2, 4), "two epochs at a time"
            assert timing.training_s > 0
            assert timing.around_s > 0


def test_trials_without_grants_are_not_timed(studies: Studies) -> None:
    with studies.open("study.n_trials=1", text=STUDY) as (view,):
        run_all(view)
        assert TIMING_ATTR not in view.study.get_trials()[0].user_attrs
