"""Grants: epochs are spent exactly, each grant knows all earlier ones, and its end pauses the trial."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from hpo.errors import InputError, StudyError
from hpo.execution.upkeep import Upkeep
from hpo.search.schedulers.granting import GrantScheduler
from hpo.search.schedulers.hyperband import Hyperband
from hpo.search.schedulers.pruner import PrunerScheduler
from hpo.search.schedulers.scheduler import New, Next, Resume, Standing, Wait, Why
from hpo.storage.attributes import SCHEDULER_ATTR
from hpo.storage.grants import Grant, OldGrantError, grants_of
from hpo.storage.ledger import Lease
from hpo.storage.outage import DatabaseAwayError
from hpo.storage.study_end import prune_paused
from hpo.storage.study_storage import StudyStorage
from hpo.study import standing
from hpo.study.open_study import OpenStudy, start_study
from hpo.study.outcome import Outcome
from hpo.study.ranking import best_of
from hpo.study.standing import standing_of
from hpo.study.status import best_in_words, refuse_without_result, study_best, study_status
from hpo.study.taking import Taker, claimable
from hpo.trial import reports
from hpo.trial.report import TrialReport
from hpo.trial.session import Session
from hpo.trial.training_code import FunctionCode, TrainingCode
from tests.support.attempts import run
from tests.support.commands import PATIENCE, STUDY
from tests.support.studies import Studies, ask, at_once, take


@dataclass(frozen=True)
class TwoByTwo(PrunerScheduler):
    """Two epochs at a time: new trials first, then the paused ones in turn."""

    def first(self, standing: Standing) -> int:
        return 2

    def next(self, standing: Standing) -> Next:
        if standing.new_left:
            return New(until=2, why=Why("breadth"), state={"decision": standing.decision})
        if not standing.paused:
            return Wait()
        trial = min(standing.paused, key=lambda each: (each.epochs, each.number))
        return Resume(trial.number, trial.epochs + 2, Why("promotion", predicted=1.5, low=1.0, high=math.inf))


def two_by_two(view: OpenStudy) -> OpenStudy:
    return replace(view, scheduler=TwoByTwo())


def train(view: OpenStudy, trial: optuna.Trial, code: TrainingCode | None = None) -> TrialReport:
    return run(view, code, trial, extend=partial(Taker(view).extended, trial._trial_id))


def run_all(view: OpenStudy) -> list[tuple[int, int]]:
    """Train until nothing is left; of each attempt the trial and its epochs."""
    done = []
    while isinstance(taken := take(view), optuna.Trial):
        report = train(view, taken)
        done.append((report.number, report.epochs))
    assert taken is None
    return done


def epochs_of(view: OpenStudy) -> list[int]:
    return [trial.last_step or 0 for trial in view.study.get_trials()]


def test_a_trial_trains_to_the_end_of_its_grant_and_pauses(studies: Studies) -> None:
    with studies.open("study.n_trials=2", "trainer.max_epochs=5") as (view,):
        assert run_all(two_by_two(view)) == [(0, 2), (1, 2), (0, 4), (1, 4), (0, 5), (1, 5)]
        trials = view.study.get_trials()
        assert [trial.state for trial in trials] == [TrialState.COMPLETE] * 2
        assert [[(each["number"], each["until"]) for each in grants_of(trial)] for trial in trials] == [
            [(0, 2), (2, 4), (4, 6)],
            [(1, 2), (3, 4), (5, 6)],
        ]
        incumbent = min(trial.intermediate_values[step] for trial in trials for step in (1, 2))
        why = {"kind": "promotion", "predicted": 1.5, "low": 1.0, "high": None, "incumbent": incumbent}
        assert grants_of(trials[0])[1]["why"] == why
        assert standing_of(view).state == {"decision": 1}


@pytest.mark.parametrize(("epochs", "expected"), [(7, [3, 2, 2]), (3, [2, 1]), (1, [1]), (100, [5, 5, 5])])
def test_epochs_are_spent_exactly(epochs: int, expected: list[int], studies: Studies) -> None:
    with studies.open("study.n_trials=3", f"study.epochs={epochs}", "trainer.max_epochs=5") as (view,):
        run_all(two_by_two(view))
        assert epochs_of(view) == expected
        assert claimable(two_by_two(view)) == 0


@pytest.mark.parametrize(("epochs", "expected"), [(12, [5, 5, 2]), (4, [4]), (15, [5, 5, 5])])
def test_they_limit_a_study_with_a_pruner_too(epochs: int, expected: list[int], studies: Studies) -> None:
    overrides = ("study.n_trials=3", f"study.epochs={epochs}", "trainer.max_epochs=5", "study.pruner=none")
    with studies.open(*overrides) as (view,):
        run_all(view)
        assert epochs_of(view) == expected


@pytest.mark.parametrize("searched", ["trainer.max_epochs", "model.hidden"])
def test_trials_of_searched_length_run_side_by_side(studies: Studies, searched: str) -> None:
    """The first one was granted all epochs that were left, as its end was not known, and the others waited."""
    length = "3" if searched == "trainer.max_epochs" else '"${model.hidden}"'
    text = STUDY.replace("max_epochs: 3", f"max_epochs: {length}").replace(
        "model.hidden: {type: int, low: 2, high: 8}", f"{searched}: {{type: int, low: 2, high: 4}}"
    )
    with studies.open("study.n_trials=9", "study.epochs=9", text=text, views=4) as views:
        taken = [take(view) for view in views]
        assert [isinstance(each, optuna.Trial) for each in taken] == [True, True, True, False]
        assert taken[3] == Wait()
        for view, trial in zip(views, taken[:3], strict=False):
            assert isinstance(trial, optuna.Trial)
            train(view, trial)
        run_all(views[3])
        assert sum(epochs_of(views[3])) == 9


def test_epochs_that_a_trial_did_not_use_are_left_for_others(studies: Studies) -> None:
    early = ("callbacks.early_stopping.patience=1", "callbacks.early_stopping.min_delta=0.99")
    with studies.open("study.n_trials=9", "study.epochs=7", "trainer.max_epochs=5", *early) as (view,):
        run_all(view)
        assert epochs_of(view) == [2, 2, 2, 1]


def test_a_trial_that_would_resume_first_trains_on_without_a_pause(studies: Studies) -> None:
    with studies.open("study.n_trials=1", "trainer.max_epochs=5") as (view,):
        assert run_all(two_by_two(view)) == [(0, 5)]
        (trial,) = view.study.get_trials()
        assert [each["until"] for each in grants_of(trial)] == [2, 4, 6]
        assert [each.outcome for each in view.storage.attempts_of_trial(trial._trial_id)] == ["complete"]
        assert len(trial.intermediate_values) == 5


@dataclass(frozen=True)
class OneByOne(PrunerScheduler):
    """One trial, an epoch at a time, which would always train on."""

    def first(self, standing: Standing) -> int:
        return 1

    def next(self, standing: Standing) -> Next:
        if standing.new_left:
            return New(until=1, why=Why("breadth"))
        return Resume(0, int(standing.columns.epochs[0]) + 1, Why("promotion"))


def diverge(session: Session) -> None:
    """With a metric that does not show it."""
    session.diverge()
    session.report(1, val_loss=0.5)


@pytest.mark.parametrize("function", [lambda _: 0.5, diverge], ids=["returned", "diverged"])
def test_a_trial_that_has_ended_where_its_grant_ends_is_granted_nothing_more(
    studies: Studies, function: Callable[[Session], object]
) -> None:
    with studies.open("study.n_trials=1", "trainer.max_epochs=5") as (view,):
        view = replace(view, scheduler=OneByOne())
        trial = take(view)
        assert isinstance(trial, optuna.Trial)
        assert train(view, trial, FunctionCode(function)).outcome is not None
        (stored,) = view.study.get_trials()
        assert [each["until"] for each in grants_of(stored)] == [1]
        assert stored.intermediate_values == {1: 0.5}


@pytest.mark.parametrize(("ends", "asked"), [(TrialState.RUNNING, [0]), (TrialState.FAIL, [0, None])])
def test_a_decision_where_a_grant_ends_stands_if_the_trial_then_pauses(
    ends: TrialState, asked: list[int | None], studies: Studies
) -> None:
    heard = []

    @dataclass(frozen=True)
    class Hears(TwoByTwo):
        def next(self, standing: Standing) -> Next:
            heard.append(standing.here)
            return super().next(standing)

    with studies.open("study.n_trials=2", "trainer.max_epochs=5") as (view,):
        taker = Taker(replace(view, scheduler=Hears()))
        lease = taker.take()
        assert isinstance(lease, Lease)
        view.storage.set_trial_intermediate_value(lease.trial_id, 2, 1.0)
        heard.clear()
        assert taker.extended(lease.trial_id, {}) is None
        if ends is TrialState.RUNNING:
            view.storage.pause(lease.trial_id, 2)
        else:
            view.storage.set_trial_state_values(lease.trial_id, ends)
        assert isinstance(taker.take(), Lease)
        assert heard == asked


def test_what_is_shown_where_a_grant_ends_has_all_of_the_trials_values(studies: Studies) -> None:
    shown = []

    @dataclass(frozen=True)
    class Looks(TwoByTwo):
        def next(self, standing: Standing) -> Next:
            if standing.here is not None:
                (trial,) = standing.paused
                shown.append((standing.here, trial.number, list(trial.values), standing.running))
            return super().next(standing)

    with studies.open("study.n_trials=1", "trainer.max_epochs=5") as (view,):
        run_all(replace(view, scheduler=Looks()))
    assert shown == [(0, 0, [1, 2], []), (0, 0, [1, 2, 3, 4], [])]


@dataclass(frozen=True)
class Gathering(TwoByTwo):
    """It watches no epoch, and keeps what it is shown where a grant ends."""

    shown: list[dict[int, float]]

    def watches(self, study: optuna.Study) -> bool:
        return False

    def next(self, standing: Standing) -> Next:
        self.shown.extend(dict(trial.values) for trial in standing.paused if trial.number == standing.here)
        return super().next(standing)


@pytest.mark.parametrize(("n_trials", "alone"), [(1, [[5]]), (2, [[1, 2], [1, 2], [3, 4], [3, 4], [5], [5]])])
def test_what_was_gathered_is_shown_where_a_grant_ends_and_stored_with_the_next(
    n_trials: int, alone: list[list[int]], studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, store = [], StudyStorage.set_trial_intermediate_values

    def note(self: StudyStorage, trial_id: int, values: dict[int, float]) -> None:
        stored.append(list(values))
        store(self, trial_id, values)

    monkeypatch.setattr(StudyStorage, "set_trial_intermediate_values", note)
    monkeypatch.setattr(reports, "_LATEST", 600.0)
    with studies.open(f"study.n_trials={n_trials}", "trainer.max_epochs=5") as (view,):
        shown: list[dict[int, float]] = []
        run_all(replace(view, scheduler=Gathering(shown)))
        assert stored == alone
        trials = view.study.get_trials()
        assert [list(trial.intermediate_values) for trial in trials] == [[1, 2, 3, 4, 5]] * n_trials
        upto = [
            {step: trial.intermediate_values[step] for step in range(1, at + 1)}
            for at in (2, 4)
            for trial in trials
        ]
        assert shown == upto


def test_a_trial_that_waits_resumes_with_the_grant_that_it_has(studies: Studies) -> None:
    with studies.open("study.n_trials=2", "study.epochs=2", views=2) as (view, other):
        taken = take(two_by_two(view))
        assert isinstance(taken, optuna.Trial)
        view.storage.requeue(taken._trial_id)
        again = take(two_by_two(other))
        assert isinstance(again, optuna.Trial)
        assert again.number == 0
        assert len(grants_of(other.storage.get_trial(again._trial_id))) == 1
        assert train(other, again).epochs == 2
        assert take(two_by_two(other)) is None


def test_an_enqueued_trial_is_granted_its_first_epochs(studies: Studies) -> None:
    with studies.open("study.n_trials=2", "study.epochs=3") as (view,):
        point = view.study.ask().params | {"optimizer.lr": 0.05}
        view.study.tell(0, state=TrialState.FAIL)
        view.study.enqueue_trial(point)
        taken = take(two_by_two(view))
        assert isinstance(taken, optuna.Trial)
        assert grants_of(view.storage.get_trial(taken._trial_id))[0]["why"]["kind"] == "enqueued"
        assert train(replace(view, scheduler=Counting()), taken).epochs == 2
        assert view.space.suggest(taken)["optimizer.lr"] == 0.05


def test_a_trial_that_waits_is_left_where_no_epoch_is(studies: Studies) -> None:
    with studies.open("study.n_trials=3", "study.epochs=2") as (view,):
        assert run_all(two_by_two(view)) == [(0, 2)]
        view.study.enqueue_trial({"optimizer.lr": 0.05})
        assert take(two_by_two(view)) is None
        assert claimable(two_by_two(view)) == 0


def test_a_waiting_trial_that_another_tool_ends_meanwhile_is_passed_over(studies: Studies) -> None:
    with studies.open("study.n_trials=3", views=2) as (view, other):
        for _ in range(2):
            view.study.enqueue_trial({"optimizer.lr": 0.05})
        waiting = view.study.get_trials(deepcopy=False)
        other.storage.owner = None
        other.storage.set_trial_state_values(waiting[0]._trial_id, TrialState.FAIL)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(view.study, "get_trials", lambda **_: waiting)  # as it was a moment ago
            taken = take(view)
        assert isinstance(taken, optuna.Trial)
        assert taken.number == 1


def test_the_parameters_of_a_grant_are_the_trials(studies: Studies) -> None:
    @dataclass(frozen=True)
    class Proposes(TwoByTwo):
        def next(self, standing: Standing) -> Next:
            return New(params={"optimizer.lr": 0.01 + 0.001 * standing.decision}, until=1)

    with studies.open("study.n_trials=3") as (view,):
        proposing = replace(view, scheduler=Proposes())
        taken = [take(proposing) for _ in range(3)]
        assert take(proposing) == Wait()
        drawn = [view.space.suggest(each)["optimizer.lr"] for each in taken if isinstance(each, optuna.Trial)]
        assert drawn == pytest.approx([0.01, 0.011, 0.012])
        assert [each.params["optimizer.lr"] for each in standing_of(view).trials] == pytest.approx(drawn)


# ---- several workers


def grant(view: OpenStudy, number: int) -> Grant:
    return Grant(view.study_id, {"number": number, "until": 2, "why": {}})


def test_a_grant_that_is_not_the_next_one_takes_nothing(studies: Studies) -> None:
    with studies.open("study.n_trials=3", views=2) as (view, other):
        for number in (1, -1):
            with view.storage.granting(grant(view, number)), pytest.raises(OldGrantError):
                view.study.ask()
        assert view.study.get_trials() == []
        with view.storage.granting(grant(view, 0)):
            trial, _ = ask(view)
        trial.report(1.0, 1)
        view.storage.pause(trial._trial_id, 1)
        with other.storage.granting(grant(view, 0)), pytest.raises(OldGrantError):
            other.storage.resume(trial._trial_id)
        with other.storage.granting(grant(view, 1)):
            assert other.storage.resume(trial._trial_id)


def test_workers_that_decide_at_once_spend_no_epoch_twice(studies: Studies) -> None:
    """Every worker reads, then all of them decide, then all store: one grant of a number is kept."""
    workers = 4
    meet = threading.Barrier(workers)

    @dataclass(frozen=True)
    class Together(TwoByTwo):
        def next(self, standing: Standing) -> Next:
            step = super().next(standing)
            if standing.decision == 0:
                meet.wait(PATIENCE)
            return step

    taken: list[Any] = []
    with studies.open("study.n_trials=9", "study.epochs=7", views=workers) as views:

        def work(view: OpenStudy) -> None:
            taken.append(take(replace(view, scheduler=Together())))
            view.storage.close()

        at_once(work, views)
        assert sorted(each.until or 0 for each in standing_of(views[0]).trials) == [1, 2, 2, 2]
        assert sorted(trial.number for trial in taken) == [0, 1, 2, 3]
        numbers = [entry["number"] for trial in views[0].study.get_trials() for entry in grants_of(trial)]
        assert sorted(numbers) == [0, 1, 2, 3]


@dataclass(frozen=True)
class Counting(GrantScheduler):
    """Counts its grants in what it stores."""

    def first(self, standing: Standing) -> int:
        return 1

    def next(self, standing: Standing) -> Next:
        return New(until=1, state={"count": standing.state.get("count", 0) + 1})


def test_what_a_scheduler_stores_is_decided_with_all_that_it_had_stored(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker's grant is stored between the look at the state and the one at the trials."""
    with studies.open("study.n_trials=4", "study.pruner=none", views=2) as views:
        first, second = (Taker(replace(view, scheduler=Counting())) for view in views)
        read, others = standing._seen, [second.take]

        def late(opened: OpenStudy, *more: Any) -> Any:
            if opened is first.opened and others:
                others.pop()()
            return read(opened, *more)

        monkeypatch.setattr(standing, "_seen", late)
        assert isinstance(first.take(), Lease)
        assert views[0].study.user_attrs[SCHEDULER_ATTR] == {"count": 2}


@dataclass(frozen=True)
class OneFaster(Hyperband):
    """Another worker takes a trial between this one's decision and its grant, once."""

    others: list[Callable[[], object]] = field(default_factory=list)

    def next(self, standing: Standing) -> Next:
        step = super().next(standing)
        if self.others:
            self.others.pop()()
        return step


def test_a_trial_has_the_grant_of_its_own_number(studies: Studies) -> None:
    """The first is to train to its end, by its bracket, and the second to the first rung."""
    overrides = ("study.n_trials=4", "study.pruner=none", "study.sampler.seed=10", "trainer.max_epochs=9")
    with studies.open(*overrides, views=2) as (view, other):
        faster = Taker(replace(other, scheduler=Hyperband()))
        assert isinstance(Taker(replace(view, scheduler=OneFaster(others=[faster.take]))).take(), Lease)
        granted = [[each["until"] for each in grants_of(trial)] for trial in view.study.get_trials()]
        assert granted == [[None], [1]]


# ---- the best, the end, and a larger budget


def test_the_best_epoch_of_any_trial_is_the_studys_best(studies: Studies) -> None:
    with studies.open("study.n_trials=3", "study.epochs=6", "trainer.max_epochs=9") as (view,):
        run_all(two_by_two(view))
        values = [min(trial.intermediate_values.values()) for trial in view.study.get_trials()]
        assert study_best(view)["value"] == min(values)  # type: ignore[call-overload]
        assert [each.number for each in prune_paused(view.storage, view.study_id)] == [0, 1, 2]
        view.forget_looks()
        best = study_best(view)
        assert isinstance(best, dict)
        assert (best["trial"], best["value"]) == (values.index(min(values)), min(values))
        assert (view.spec.output_dir / "trials" / str(best["trial"])).is_dir()
        assert best["checkpoint"] is not None
        refuse_without_result(view)
        assert len(best_of(view.study.get_trials(), view.spec.study.goals)) == 1


def test_a_study_whose_paused_trials_violate_a_bound_says_so(studies: Studies) -> None:
    bound = "study.constraints={val_loss: <= -1}"
    with studies.open("study.n_trials=2", "study.epochs=4", "trainer.max_epochs=9", bound) as (view,):
        run_all(two_by_two(view))
        with pytest.raises(StudyError, match="none of the 2 trials of tiny meets its constraints: val_loss <= -1"):
            study_best(view)
        ((_, said),) = best_in_words(view.spec, study_status(view))
        assert said == "none of the 2 trials of tiny meets its constraints: val_loss <= -1"
        assert len(list(prune_paused(view.storage, view.study_id))) == 2
        view.forget_looks()
        with pytest.raises(StudyError, match="none of the 2 trials of tiny meets its constraints: val_loss <= -1"):
            refuse_without_result(view)
        one = {"best": None, "outcomes": {Outcome.COMPLETE: 1}, "outside": 0}
        ((_, said),) = best_in_words(view.spec, one)
        assert said == "the only complete trial of tiny does not meet its constraints: val_loss <= -1"


def test_a_larger_budget_resumes_what_the_end_has_pruned(studies: Studies) -> None:
    overrides = ("study.n_trials=2", "trainer.max_epochs=6")
    with studies.open(*overrides, "study.epochs=4") as (view,):
        run_all(two_by_two(view))
        assert len(list(prune_paused(view.storage, view.study_id))) == 2
    with studies.open(*overrides, "study.epochs=4") as (view,):  # the same budget changes nothing
        assert [trial.state for trial in view.study.get_trials()] == [TrialState.PRUNED] * 2
    with studies.open(*overrides, "study.epochs=10") as (view,):
        assert [trial.state for trial in standing_of(view).trials] == ["paused"] * 2  # type: ignore[comparison-overlap]
        assert [trial.values for trial in view.study.get_trials()] == [None, None]
        run_all(two_by_two(view))
        assert epochs_of(view) == [6, 4]
        assert len(list(prune_paused(view.storage, view.study_id))) == 1
        assert [trial.state.name for trial in view.study.get_trials()] == ["COMPLETE", "PRUNED"]


def test_a_trial_that_the_epochs_have_cut_resumes_before_a_new_one(studies: Studies) -> None:
    overrides = ("study.n_trials=2", "trainer.max_epochs=5", "study.pruner=none")
    for budget, expected in (("7", [5, 2]), ("9", [5, 4]), ("null", [5, 5])):
        with studies.open(*overrides, f"study.epochs={budget}") as (view,):
            run_all(view)
            assert epochs_of(view) == expected
            assert claimable(view) == 0
            list(prune_paused(view.storage, view.study_id))


def test_epochs_that_another_trial_leaves_go_to_the_one_that_they_have_cut(studies: Studies) -> None:
    overrides = ("study.n_trials=2", "study.epochs=7", "trainer.max_epochs=5", "study.pruner=none")
    with studies.open(*overrides, views=2) as (view, other):
        first, second = take(view), take(other)
        assert isinstance(first, optuna.Trial)
        assert isinstance(second, optuna.Trial)
        assert train(other, second).epochs == 2
        view.study.tell(first, state=TrialState.FAIL)
        assert run_all(other) == [(1, 5)]
        assert claimable(other) == 0


def test_who_ends_a_study_prunes_nothing_that_a_larger_budget_has_paused_again(studies: Studies) -> None:
    overrides = ("study.n_trials=3", "trainer.max_epochs=6")
    with studies.open(*overrides, "study.epochs=6") as (view,):
        run_all(two_by_two(view))
        said: list[str] = []
        upkeep = Upkeep(view, lambda _, message: said.append(str(message)))
        budgets = upkeep.budgets()
        assert not upkeep.is_more_to_come()
        ended = prune_paused(view.storage, view.study_id, budgets)
        assert next(ended).number == 0
        start_study(studies.spec(*overrides, "study.epochs=10")).storage.close()
        assert list(ended) == []
        assert not upkeep.end_study(budgets)
        view.forget_looks()
        assert [trial.state for trial in standing_of(view).trials] == ["paused"] * 3
        assert upkeep.is_more_to_come()
        assert not said


def test_a_study_is_not_ended_while_nobody_knows_what_is_left(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: OpenStudy, **_limit: int) -> int:
        raise DatabaseAwayError("the connection broke")

    with studies.open("study.n_trials=3", "trainer.max_epochs=6", "study.epochs=6") as (view,):
        upkeep = Upkeep(view, lambda *_: None)
        budgets = upkeep.budgets()
        with monkeypatch.context() as patch:
            patch.setattr("hpo.execution.upkeep.prune_paused", lambda storage, *_: away(view))
            assert not upkeep.end_study(budgets), "trials may still be paused"
        assert upkeep.end_study(budgets)
        monkeypatch.setattr("hpo.execution.upkeep.claimable", away)
        assert upkeep.waits()


def test_a_grid_with_a_larger_budget_resumes_too(studies: Studies) -> None:
    space = "search_space={model.hidden: {type: categorical, choices: [2, 3, 4]}}"
    overrides = ("study.n_trials=9", "study.sampler=grid", "trainer.max_epochs=6", space)
    with studies.open(*overrides, "study.epochs=6") as (view,):
        run_all(two_by_two(view))
        assert len(list(prune_paused(view.storage, view.study_id))) == 3
    opened = start_study(studies.spec(*overrides, "study.epochs=10"))
    assert [trial.state for trial in standing_of(opened).trials] == ["paused"] * 3
    opened.storage.close()


def test_more_workers_than_planned_are_counted(studies: Studies) -> None:
    with studies.open("study.n_trials=3") as (view,):
        assert standing_of(view).workers == 1
        ask(view)
        ask(view)
        assert standing_of(view).workers == 3


def test_a_study_that_is_given_epochs_later_counts_those_it_has_trained(studies: Studies) -> None:
    overrides = ("study.n_trials=9", "trainer.max_epochs=3", "study.pruner=none")
    with studies.open(*overrides) as (view,):
        trial = view.study.ask()
        train(view, trial)
    with studies.open(*overrides, "study.epochs=5") as (view,):
        run_all(view)
        assert epochs_of(view) == [3, 2]


# ---- the study file


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (("study.scheduler=assha",), "no scheduler has this name"),
        (("study.scheduler=asha", "study.pruner=median"), "can't stand beside `scheduler`"),
        (("study.epochs=0",), "must be at least 1"),
    ],
)
def test_a_scheduler_that_can_not_be_is_refused(
    overrides: tuple[str, ...], problem: str, studies: Studies
) -> None:
    with pytest.raises(InputError) as caught:
        start_study(studies.spec(*overrides))
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("written", "overrides", "expected"),
    [
        ("epochs: 7", (), (7, "median")),
        ("epochs: 7\n  n_trials: 6", (), (6, "median")),
        ("scheduler: asha", (), (100, "none")),
        ("baseline: false", ("study.scheduler=asha", "study.epochs=9"), (9, "none")),
        ("n_trials: 6", ("study.epochs=9",), (6, "median")),
        ("epochs: 7", ("study.n_trials=5", "study.pruner=hyperband"), (5, "hyperband")),
    ],
)
def test_what_takes_the_place_of_a_default(
    written: str, overrides: tuple[str, ...], expected: tuple[int, str], studies: Studies
) -> None:
    text = STUDY.replace("n_trials: 6", written).replace("  pruner: none\n", "")
    study = studies.spec(*overrides, text=text).study
    assert (study.n_trials, study.pruner.name) == expected
