"""What the report concludes: edges of ranges, causes of failures, the time at work, importances."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import optuna
import pytest
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from hpo.report.causes import causes
from hpo.report.edges import edges
from hpo.report.importances import importances
from hpo.report.looks import thinned
from hpo.report.search_sections import importance_section
from hpo.report.sections import edge_section, overview
from hpo.report.timeline import Timeline
from hpo.storage.attributes import FORK_ATTR
from tests.support.reports import report_of, trial_of, work_of

LOSS: dict[str, Any] = {"val_loss": "minimize"}
LR = FloatDistribution(1e-4, 1e-1, log=True)


def searched(distribution: BaseDistribution, values: Sequence[Any]) -> list[FrozenTrial]:
    """A trial for each value, the best first; None: its condition did not hold."""
    return [
        trial_of(
            number, {} if value is None else {"p": value}, {} if value is None else {"p": distribution}, number
        )
        for number, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("distribution", "values", "end", "trials"),
    [
        (LR, [0.09, 0.08, 0.095, 0.1, 0.001], "upper", [0, 1, 2, 3]),
        (LR, [1.2e-4, 1e-4, 0.01, 0.01, 0.01], "lower", [0, 1]),
        (LR, [1e-4, 0.01, 0.01, 0.01, 0.01], None, []),  # one may lie there by chance
        (FloatDistribution(0, 1), [0.96, 0.97, 0.5, 0.5, 0.5], "upper", [0, 1]),
        (FloatDistribution(0, 1), [0.94, 0.94, 0.5, 0.5, 0.5], None, []),
        (FloatDistribution(0, 0.5, step=0.1), [0.5, 0.5, 0.5, 0.5, 0.1], "upper", [0, 1, 2, 3]),
        (IntDistribution(1, 2), [2, 2, 2, 2, 2], "upper", [0, 1, 2, 3, 4]),
        (IntDistribution(1, 2), [2, 2, 2, 2, 1], None, []),  # of two values each is an end
        (IntDistribution(2, 8), [2, 2, 2, 5, 4], "lower", [0, 1, 2]),
        (IntDistribution(16, 1024, log=True), [1000, 1024, 900, 20, 30], "upper", [0, 1, 2]),
        (IntDistribution(1, 16, log=True), [1, 1, 1, 8, 4], None, []),  # 1 is drawn in a third of the cases
        (IntDistribution(1, 16, log=True), [1, 1, 1, 1, 1], "lower", [0, 1, 2, 3, 4]),
        (IntDistribution(1, 16, log=True), [16, 16, 2, 3, 4], "upper", [0, 1]),  # and 16 in a fiftieth
        (FloatDistribution(0.1, 0.7, step=0.1), [0.7 - 1e-16, 0.7, 0.7, 0.7, 0.2], "upper", [0, 1, 2, 3]),
        (CategoricalDistribution((64, 16, 128, 32)), [128, 128, 128, 128, 64], "upper", [0, 1, 2, 3]),
        (CategoricalDistribution(("a", "b", "c")), ["c"] * 5, None, []),  # no order, so no end
        (CategoricalDistribution((True, False)), [True] * 5, None, []),
        (FloatDistribution(0.1, 0.1), [0.1] * 5, None, []),
        (LR, [0.1, None, 0.1, None, None], "upper", [0, 2]),
        (LR, [None] * 3, None, []),
    ],
)
def test_an_edge_is_where_the_best_values_gather(
    distribution: BaseDistribution, values: Sequence[Any], end: str | None, trials: list[int]
) -> None:
    found = edges(searched(distribution, values))
    assert [(edge.end, edge.trials) for edge in found] == ([] if end is None else [(end, trials)])


@pytest.mark.parametrize(
    "distribution",
    [
        LR,
        IntDistribution(1, 8, log=True),
        IntDistribution(1, 256, log=True),
        IntDistribution(1, 30),
        FloatDistribution(0, 1, step=0.04),
        CategoricalDistribution((8, 16, 32)),
    ],
    ids=str,
)
def test_an_edge_is_rarely_one_of_random_values(distribution: BaseDistribution) -> None:
    study, sampler = optuna.create_study(), optuna.samplers.RandomSampler(seed=0)
    draw = partial(sampler.sample_independent, study, study.ask(), "p", distribution)
    found = [edge.end for _ in range(1500) for edge in edges(searched(distribution, [draw() for _ in range(5)]))]
    for end in ("lower", "upper"):
        assert found.count(end) < 0.065 * 1500  # 5 %, and some for chance


def test_a_front_of_thousands_of_trials_has_edges() -> None:
    """The number of ways to choose from so many is beyond what a float holds."""
    values = [(0.99 if number % 3 else 0.5) for number in range(3000)]
    assert [edge.end for edge in edges(searched(FloatDistribution(0, 1), values))] == ["upper"]
    few = [0.99 if number < 150 else 0.5 for number in range(3000)]  # as many as chance puts there
    assert edges(searched(FloatDistribution(0, 1), few)) == []


def test_forks_of_one_trial_are_no_trials_that_were_drawn_there() -> None:
    trials = searched(LR, [0.1, 0.1, 0.1, 0.1, 0.01, 0.1, 0.1])
    for fork, parent in ((1, 0), (2, 1), (3, 0)):
        trials[fork].set_user_attr(FORK_ATTR, {"parent": parent, "epoch": 1, "replaces": None})
    assert report_of(trials[:5]).edges == []
    report = report_of(trials)
    assert [edge.trials for edge in report.edges] == [[0, 5, 6]]
    assert "Of a trial and its forks the best one counts" in str(edge_section(report).content)


def test_an_edge_says_what_to_do() -> None:
    (upper,) = edges(searched(LR, [0.1, 0.1, 0.1, 0.1, 0.01]))
    assert upper.said == (
        "`p` of 4 of the best 5 trials lies at the upper end of its range (0.1): widen it, if a larger value "
        "makes sense (raise it to a larger value in `high`)"
    )
    (choice,) = edges(searched(CategoricalDistribution((8, 16, 32)), [8] * 4))
    assert "lower end of its list of choices (8)" in choice.said
    assert "add a smaller value in `choices`" in choice.said


def failed(number: int, reason: str | None, traceback: str = "") -> FrozenTrial:
    attrs = {"hpo:outcome": "error", "hpo:reason": reason, "hpo:traceback": traceback}
    return trial_of(number, {}, {}, 0.0, state=TrialState.FAIL, attrs=attrs)


def test_equal_causes_are_counted_together() -> None:
    trials = [
        failed(0, "OSError: disk\nmore"),
        failed(1, "ValueError: 3 of 7 wrong", "Trace 1"),
        failed(2, "ValueError: 5 of 9 wrong", "Trace 2"),
        failed(3, None),
        trial_of(4, {}, {}, float("inf"), attrs={"hpo:outcome": "diverged"}),
        trial_of(5, {}, {}, 1.0),
        trial_of(7, {}, {}, 0.0, state=TrialState.FAIL, attrs={"hpo:outcome": "lost", "hpo:reason": "its end"}),
        trial_of(8, {}, {}, 0.0, state=TrialState.WAITING),
    ]
    work = [
        work_of(5, outcome="lost", reason="the process died"),
        work_of(5, outcome="complete", attempt=2),
        work_of(6, outcome="requeued", reason="interrupted"),
        work_of(7, outcome="lost", reason="the end of trial 7"),
        work_of(8, outcome="lost", reason="the machine is gone"),
    ]
    found = [(each.outcome, each.reason, each.trials, each.traceback) for each in causes(trials, work)]
    assert found == [
        ("error", "ValueError: 3 of 7 wrong", [1, 2], "Trace 1"),
        ("error", "OSError: disk", [0], ""),
        ("error", "no reason is stored", [3], ""),
        ("diverged", "a metric was no finite number any more", [4], ""),
        ("lost attempt", "the process died", [5], ""),
        ("requeued attempt", "interrupted", [6], ""),
        ("lost", "its end", [7], ""),
        ("lost attempt", "the machine is gone", [8], ""),
    ]


def test_a_trial_that_was_interrupted_and_ended_well_is_no_failure_at_the_top() -> None:
    again = {"hpo:started_again": 1}
    trials = [failed(0, "OSError: disk"), trial_of(1, {}, {}, 1.0, attrs=again), trial_of(2, {}, {}, 2.0)]
    trials.append(trial_of(3, {}, {}, float("inf"), attrs={"hpo:outcome": "diverged"}))
    work = [
        work_of(1, outcome="requeued", reason="interrupted"),
        work_of(1, attempt=2),
        work_of(2, outcome="lost", reason="the process died"),
        work_of(2, attempt=2),
    ]
    assert ">2 failures<" in overview(report_of(trials, work=work))
    assert "failure" not in overview(report_of(trials[1:3], work=work))


def test_the_time_at_work_leaves_pauses_out() -> None:
    work = [
        work_of(0, "worker-1", start=100, end=140),
        work_of(1, "worker-2", start=101, end=120),
        work_of(2, "worker-2", start=122, end=140),
        work_of(3, "worker-1", start=9000, end=9060, outcome="pruned"),  # the next evening
    ]
    timeline = Timeline.of(work)
    assert [lane.name for lane in timeline.lanes] == ["worker-1 (cpu)", "worker-2 (cpu)"]
    assert timeline.spans == [(100, 140), (9000, 9060)]
    assert (timeline.seconds, timeline.pauses, timeline.worked) == (100, 8860, 137)
    assert timeline.busy_share == pytest.approx(0.685)
    assert [timeline.at(instant) for instant in (50, 110, 5000, 9030, 9999)] == [0, 10, 40, 70, 100]
    totals = timeline.totals()
    assert totals["seconds_by_outcome"] == {"complete": 77, "pruned": 60}
    assert [lane["busy_share"] for lane in totals["workers"]] == [pytest.approx(1.0), pytest.approx(0.37)]


def test_machines_are_named_where_there_are_several_and_no_worker_is_busy_twice() -> None:
    work = [
        work_of(0, start=0, end=10),
        work_of(1, start=5, end=20),  # taken over before it was known to be lost
        work_of(2, start=0, end=20, host="there"),
    ]
    timeline = Timeline.of(work)
    assert [(lane.name, lane.busy) for lane in timeline.lanes] == [
        ("worker-1 (cpu) on here", 20),
        ("worker-1 (cpu) on there", 20),
    ]
    assert timeline.busy_share == 1


def test_a_study_without_work_has_no_share() -> None:
    timeline = Timeline.of([])
    assert (timeline.busy_share, timeline.pauses, timeline.totals()["workers"]) == (None, 0, [])


SPACE = {"a": FloatDistribution(0, 1), "b": FloatDistribution(0, 1)}


def points(count: int, *, only: str = "", alike: bool = False, rare: bool = False) -> list[FrozenTrial]:
    made = []
    for number in range(count):
        params = {"a": number / count, "b": (number * 7 % count) / count}
        if only:
            params = {only: params[only]}
        space: dict[str, BaseDistribution] = {name: SPACE[name] for name in params}
        if rare and number == 0:
            params["c"], space["c"] = 0.5, SPACE["a"]
        made.append(trial_of(number, params, space, 1.0 if alike else abs(params.get("a", 0.0) - 0.5)))
    return made


def test_the_parameter_that_matters_is_the_most_important() -> None:
    found = importances(points(60), LOSS)
    assert list(found.shares) == ["a", "b"]
    assert found.shares["a"] > 0.8
    assert sum(found.shares.values()) == pytest.approx(1)
    assert (found.missing, found.remarks) == (None, ())


def test_of_a_trial_and_its_forks_the_best_one_counts_for_importances() -> None:
    trials = points(60)
    drawn = importances(trials, LOSS)
    for number in range(60, 90):  # a lineage that walks along b, below the best of all
        trials.append(trial_of(number, {"a": 0.5, "b": number / 90}, SPACE, number / 1e4))
        trials[-1].set_user_attr(FORK_ATTR, {"parent": 30, "epoch": 1, "replaces": None})
    report = report_of(trials)
    assert report.importances == drawn
    assert "Of a trial and its forks the best one counts." in str(importance_section(report).content)
    related = report_of([trials[30], *trials[60:]])
    assert related.importances.missing == "it takes 2 complete trials; there is 1"
    assert "there is 1. Of a trial and its forks" in str(importance_section(related).content)


def test_importances_say_which_ranges_differ_from_trial_to_trial() -> None:
    trials = points(60)
    wider = {**SPACE, "b": FloatDistribution(0, 2)}
    trials += [trial_of(60 + number, {"a": number / 60, "b": 1.5}, wider, 1.0) for number in range(60)]
    found = importances(trials, LOSS)
    assert found.shares.keys() == {"a", "b"}
    assert found.remarks == ("The range of b differs from trial to trial: trials are compared within each range.",)


def test_importances_of_few_trials_are_doubted() -> None:
    found = importances(points(20, rare=True), LOSS)
    assert found.remarks == (
        "They are rough: 20 complete trials are few, 50 make them dependable.",
        "Few trials have (or lack) c: more doubtful than the others.",
    )


@pytest.mark.parametrize(
    ("trials", "missing"),
    [
        ([], "it takes 2 complete trials; there are 0"),
        (points(1), "it takes 2 complete trials; there is 1"),
        (points(9, only="a"), "it takes several parameters with more than one value"),
        (points(9, alike=True), "the values of the complete trials are all alike"),
    ],
)
def test_where_there_are_no_importances_the_reason_is_said(trials: list[FrozenTrial], missing: str) -> None:
    assert importances(trials, LOSS).missing == missing


def test_of_many_trials_the_best_and_an_even_sample_are_drawn() -> None:
    trials = points(100)
    best_first = [*trials[50:], *trials[:50]]
    kept = [trial.number for trial in thinned(best_first, 20)]
    assert kept == sorted(kept)
    assert len(set(kept)) == 20
    assert {*range(50, 60)} <= set(kept)
    assert sum(number < 50 for number in kept) >= 5
    assert thinned(trials[:3], 20) == trials[:3]
