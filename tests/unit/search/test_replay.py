"""Replays worked out by hand, and against a plain loop over a study of Optuna's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import optuna
import pytest
from numpy.typing import NDArray
from optuna import pruners
from optuna.trial import FrozenTrial, TrialState

from hpo.search.predicted_loss.pruner import PredictedLossPruner
from hpo.search.replay import RecordedRun, Replay, ReplayedTrial, Setting, replay, summarize, whole_curves
from hpo.storage.attributes import MAX_EPOCHS_ATTR

NAN, INF = math.nan, math.inf


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without a line for each study."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(before)


class Recorder(pruners.BasePruner):
    """Notes what it is asked, and prunes at (trial, step) pairs."""

    def __init__(self, *prunes: tuple[int, int]) -> None:
        self.prunes = prunes
        self.asked: list[tuple[int, int]] = []
        self.study: optuna.Study | None = None

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        assert trial.last_step is not None
        self.study = study
        self.asked.append((trial.number, trial.last_step))
        return self.asked[-1] in self.prunes

    @property
    def ends(self) -> list[tuple[TrialState, list[float] | None]]:
        assert self.study is not None
        return [(trial.state, trial.values) for trial in self.study.get_trials()]


#: Finals 1, 4, 2, 3: the best is the first one, the median 2.5.
CURVES = whole_curves([[9.0, 5.0, 1.0], [6.0, 5.0, 4.0], [5.0, 4.0, 2.0], [3.5, 3.2, 3.0]])


def test_without_pruning_all_is_used_and_nothing_lost() -> None:
    done = replay(CURVES, pruners.NopPruner())
    assert done.trials == tuple(ReplayedTrial(row, 3, pruned=False) for row in range(4))
    assert (done.epochs_used, done.epochs_in_all, done.epochs_fraction) == (12, 12, 1.0)
    assert (done.found, done.best, done.median, done.regret) == (1.0, 1.0, 2.5, 0.0)
    assert (done.wrongly_pruned, done.top, done.top_pruned) == (0, 1, 0)
    assert 0 < done.decision_s <= done.slowest_decision_s


def test_a_threshold_ends_the_best_and_the_regret_says_so() -> None:
    done = replay(CURVES, pruners.ThresholdPruner(upper=5.5))
    assert [each.epochs for each in done.trials] == [1, 1, 3, 3]
    assert [each.pruned for each in done.trials] == [True, True, False, False]
    assert (done.epochs_used, done.epochs_fraction) == (8, 8 / 12)
    assert (done.found, done.best) == (2.0, 1.0)
    assert done.regret == pytest.approx((2.0 - 1.0) / (2.5 - 1.0))
    assert (done.wrongly_pruned, done.top, done.top_pruned) == (1, 1, 1)


def test_the_other_way_round_more_is_better() -> None:
    done = replay(CURVES, pruners.ThresholdPruner(upper=5.5), Setting(direction="maximize"))
    assert [each.epochs for each in done.trials] == [1, 1, 3, 3]
    assert (done.found, done.best, done.median) == (3.0, 4.0, 2.5)
    assert done.regret == pytest.approx((4.0 - 3.0) / (4.0 - 2.5))
    assert (done.wrongly_pruned, done.top_pruned) == (1, 1)
    mirrored = replay(
        whole_curves([[-value for value in curve.values] for curve in CURVES]), pruners.ThresholdPruner(lower=-5.5)
    )
    assert (mirrored.found, mirrored.regret, mirrored.trials) == (-done.found, done.regret, done.trials)


def test_the_direction_reaches_the_pruner() -> None:
    rows = whole_curves([[1.0, 1.0], [2.0, 2.0], [0.5, 0.5]])
    for direction, pruned in (("minimize", [False, True, False]), ("maximize", [False, False, True])):
        setting = Setting(direction="minimize" if direction == "minimize" else "maximize")
        done = replay(rows, pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=0), setting)
        assert [each.pruned for each in done.trials] == pruned


@pytest.mark.parametrize(("direction", "worst"), [("minimize", INF), ("maximize", -INF)])
def test_what_is_not_finite_is_reported_and_asked_about_and_told_as_the_worst(
    direction: str, worst: float
) -> None:
    curves = whole_curves([[2.0, NAN, NAN], [3.0, INF, 1.0], [2.0, 3.0, 4.0], [4.0, 2.0, -INF]])
    asked = Recorder()
    done = replay(curves, asked, Setting(direction="minimize" if direction == "minimize" else "maximize"))
    assert asked.asked == [(trial, step) for trial in range(4) for step in (1, 2, 3)]
    assert asked.ends == [(TrialState.COMPLETE, [value]) for value in (worst, 1.0, 4.0, worst)]
    assert asked.study is not None
    stored = asked.study.get_trials()[0].intermediate_values
    assert stored[1] == 2.0
    assert math.isnan(stored[2])
    assert done.median == 2.5
    assert done.best == (1.0 if direction == "minimize" else 4.0)


def test_a_pruner_may_end_what_is_no_number() -> None:
    done = replay(whole_curves([[2.0, NAN, NAN], [3.0, 2.0, 1.0]]), pruners.ThresholdPruner(upper=10.0))
    assert done.trials == (ReplayedTrial(0, 2, pruned=True), ReplayedTrial(1, 3, pruned=False))
    assert (done.wrongly_pruned, done.regret, done.median) == (0, 0.0, 1.0)


@pytest.mark.parametrize("pruner", [pruners.MedianPruner(1, 0), pruners.PercentilePruner(25.0, 1, 0)])
def test_optunas_warnings_about_such_values_are_kept_quiet(pruner: pruners.BasePruner) -> None:
    rows = whole_curves([[INF, INF], [NAN, NAN], [INF, 1.0], [2.0, NAN], [NAN, INF], [INF, 3.0]])
    assert len(replay(rows, pruner, Setting(direction="maximize")).trials) == 6


def test_all_diverged_loses_nothing_and_all_pruned_finds_nothing() -> None:
    diverged = replay(whole_curves([[NAN], [INF]]), pruners.NopPruner())
    assert (diverged.regret, diverged.best, diverged.median) == (0.0, INF, INF)
    pruned = replay(CURVES, pruners.ThresholdPruner(upper=0.0))
    assert (pruned.found, pruned.regret, pruned.wrongly_pruned, pruned.epochs_used) == (INF, INF, 4, 4)


def test_curves_of_different_lengths_count_their_own_epochs() -> None:
    done = replay(whole_curves([[1.0], [5.0, 4.0, 3.0, 2.0], [6.0, 9.0]]), pruners.ThresholdPruner(upper=5.5))
    assert [each.epochs for each in done.trials] == [1, 4, 1]
    assert (done.epochs_used, done.epochs_in_all) == (6, 7)
    assert (done.best, done.median) == (1.0, 2.0)


def test_steps_that_were_not_reported_count_as_epochs() -> None:
    asked = Recorder((1, 5))
    done = replay([RecordedRun((3.0, 2.0), (2, 4), 2.0), RecordedRun((3.0, 2.0, 1.0), (1, 5, 6), 1.0)], asked)
    assert asked.asked == [(0, 2), (0, 4), (1, 1), (1, 5)]
    assert (done.epochs_used, done.epochs_in_all) == (9, 10)


def test_an_order_may_leave_rows_out() -> None:
    asked = Recorder((0, 2))
    done = replay(CURVES, asked, order=np.array([2, 0, 1]))
    assert done.trials == (
        ReplayedTrial(2, 2, pruned=True),
        ReplayedTrial(0, 3, pruned=False),
        ReplayedTrial(1, 3, pruned=False),
    )
    assert (done.best, done.median, done.epochs_in_all) == (1.0, 2.0, 9)


def test_what_was_cut_short_ends_as_it_did_and_is_not_judged() -> None:
    curves = [
        RecordedRun((5.0, 2.0), (1, 2), end=TrialState.PRUNED),
        RecordedRun((5.0, 0.1), (1, 2), end=TrialState.FAIL),
        RecordedRun((9.0, 0.2), (1, 2), end=TrialState.PRUNED),
        RecordedRun((3.0, 2.5, 2.0), (1, 2, 3), 2.0),
        RecordedRun((4.0, 3.5, 3.0), (1, 2, 3), 3.0),
    ]
    asked = Recorder((2, 1), (3, 2))
    done = replay(curves, asked)
    assert asked.ends[:2] == [(TrialState.PRUNED, [2.0]), (TrialState.FAIL, None)]
    assert [each.pruned for each in done.trials] == [False, False, True, True, False]
    assert (done.epochs_used, done.epochs_in_all) == (2 + 2 + 1 + 2 + 3, 12)
    assert (done.best, done.found, done.median, done.wrongly_pruned) == (2.0, 3.0, 2.5, 1)
    assert (done.regret, done.top, done.top_pruned) == (2.0, 1, 1)


def test_what_violates_a_bound_is_told_as_it_ended_and_is_never_the_best() -> None:
    curves = [RecordedRun((1.0, 0.5), (1, 2), 0.5, feasible=False), *whole_curves([[3.0, 2.0], [4.0, 3.0]])]
    asked = Recorder()
    assert replay(curves, asked).best == 2.0
    assert asked.ends[0] == (TrialState.COMPLETE, [0.5])
    pruned = replay(curves, Recorder((0, 1)))
    assert (pruned.regret, pruned.wrongly_pruned, pruned.top_pruned, pruned.median) == (0.0, 0, 0, 2.5)


def test_the_top_is_a_share_of_what_is_known_to_its_end() -> None:
    whole = whole_curves([[float(value)] for value in range(20)])
    short = RecordedRun((0.5,), (1,), 0.5, end=TrialState.PRUNED)
    done = replay([short, *whole, short], Recorder((1, 1), (2, 1)))
    assert (done.top, done.top_pruned, done.median) == (1, 1, 9.5)
    assert replay([*whole, *whole[:1]], pruners.NopPruner()).top == 2


def test_a_trial_that_would_only_have_ended_as_well_is_not_wrongly_pruned() -> None:
    done = replay(whole_curves([[3.0, 1.0], [2.0, 1.0], [2.0, 2.0]]), Recorder((0, 1)))
    assert (done.found, done.regret, done.wrongly_pruned, done.top_pruned) == (1.0, 0.0, 0, 1)


def test_two_workers_report_in_turn_and_take_what_is_next() -> None:
    curves = whole_curves([[3.0] * 3, [2.0] * 2, [2.0] * 2, [1.0] * 1, [1.0] * 2])
    asked = Recorder((2, 1))
    done = replay(curves, asked, Setting(workers=2))
    assert asked.asked == [
        *[(0, 1), (1, 1)],
        *[(0, 2), (1, 2)],  # the second worker is free, and takes trial 2
        *[(0, 3), (2, 1)],  # both are free: trial 2 is pruned
        *[(3, 1), (4, 1)],  # the first one finds nothing more
        (4, 2),
    ]
    assert [each.epochs for each in done.trials] == [3, 2, 1, 1, 2]


def test_more_workers_than_trials_run_them_all_at_once() -> None:
    asked = Recorder()
    replay(CURVES[:2], asked, Setting(workers=5))
    assert asked.asked == [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]


def test_configurations_of_different_speed_drift_apart_the_same_way_each_time() -> None:
    def asked(seed: int | None) -> list[tuple[int, int]]:
        recorder = Recorder()
        replay(whole_curves(np.ones((6, 8))), recorder, Setting(workers=3, speed_seed=seed))
        return recorder.asked

    assert asked(1) == asked(1)
    assert len({tuple(asked(seed)) for seed in (None, 1, 2)}) == 3
    for trial in range(6):
        assert [step for number, step in asked(1) if number == trial] == list(range(1, 9))


def plain_loop(rows: NDArray[np.float64], pruner: pruners.BasePruner) -> list[tuple[int, bool]]:
    """The epochs of each trial and whether it was pruned, as written by hand."""
    study, ended = optuna.create_study(study_name="replay", pruner=pruner), []
    for row in rows:
        trial = study.ask()
        for step, value in enumerate(row, start=1):
            trial.report(value, step)
            if trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED)
                ended.append((step, True))
                break
        else:
            study.tell(trial, row[-1])
            ended.append((len(row), False))
    return ended


@pytest.mark.parametrize(
    "make",
    [
        lambda: pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1),
        lambda: pruners.SuccessiveHalvingPruner(min_resource=2, reduction_factor=3),
        lambda: pruners.HyperbandPruner(1, 9, 3),
    ],
)
def test_one_worker_is_a_plain_loop(make: Callable[[], pruners.BasePruner]) -> None:
    random = np.random.default_rng(0)
    rows = random.random((40, 1)) + np.cumsum(-0.1 * random.random((40, 9)), axis=1)
    expected = plain_loop(rows, make())
    done = replay(whole_curves(rows), make())
    assert [(each.epochs, each.pruned) for each in done.trials] == expected
    assert 0 < sum(pruned for _, pruned in expected) < 40


def test_the_study_is_told_its_name_and_its_horizon_where_there_is_one() -> None:
    asked = Recorder()
    replay(CURVES, asked, Setting(max_epochs=7, study_name="mine"))
    assert asked.study is not None
    assert (asked.study.study_name, asked.study.user_attrs) == ("mine", {MAX_EPOCHS_ATTR: 7})
    replay(CURVES, asked)
    assert asked.study.user_attrs == {}


def test_what_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        whole_curves([[1.0], []])
    with pytest.raises(ValueError, match="a step for each"):
        RecordedRun((1.0, 2.0), (1,))
    with pytest.raises(ValueError, match="known to its end"):
        replay([RecordedRun((1.0,), (1,), end=TrialState.PRUNED)], pruners.NopPruner())
    with pytest.raises(ValueError, match="known to its end"):
        replay(CURVES, pruners.NopPruner(), order=[])
    with pytest.raises(ValueError, match="at least one worker"):
        replay(CURVES, pruners.NopPruner(), Setting(workers=0))
    with pytest.raises(ValueError, match="no replay"):
        summarize([])


def judged(**figures: float) -> Replay:
    given = {"epochs_used": 5, "epochs_in_all": 10, "found": 1.0, "best": 1.0, "median": 2.0, "regret": 0.0}
    counts = {"wrongly_pruned": 0, "top": 5, "top_pruned": 0, "decision_s": 1e-3, "slowest_decision_s": 2e-3}
    audit = {"audited": 0, "alpha": None}
    return Replay(trials=(), **{**given, **counts, **audit, **figures})  # type: ignore[arg-type]


def test_several_replays_are_summed_up() -> None:
    summary = summarize(
        [
            judged(regret=0.3, epochs_used=1, wrongly_pruned=3, top_pruned=2, decision_s=3e-3),
            judged(slowest_decision_s=9e-3, top=3, audited=3, alpha=0.04),
        ]
    )
    assert summary.epochs_fraction == pytest.approx((0.1 + 0.5) / 2)
    assert (summary.regret, summary.worst_regret) == (0.15, 0.3)
    assert (summary.wrongly_pruned, summary.top_pruned) == (1.5, 0.25)
    assert (summary.decision_ms, summary.slowest_decision_ms) == (2.0, 9.0)
    assert (summary.audited, summary.alpha) == (1.5, 0.04)
    assert summarize([judged()]).alpha is None


def test_audit_runs_and_alpha_are_read_from_the_decisions() -> None:
    curves = whole_curves([[1.0 / epoch + level / 10 for epoch in range(1, 21)] for level in (0, 5, 6, 7, 8, 9)])
    kept = replay(curves, PredictedLossPruner(max_epochs=20, alpha=0.3, audit_fraction=1.0))
    ended = replay(curves, PredictedLossPruner(max_epochs=20, alpha=0.3, audit_fraction=0.0))
    assert kept.audited > 0
    assert kept.trials[kept.audited].audited
    assert kept.alpha != 0.3  # it has followed
    assert (ended.audited, ended.alpha) == (0, 0.3)
