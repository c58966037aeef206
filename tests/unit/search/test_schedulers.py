"""The contract of schedulers, held by each of them."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest

from hpo.search.schedulers.by_name import SCHEDULERS
from hpo.search.schedulers.pruner import PrunerScheduler
from hpo.search.schedulers.scheduler import Decision, New, Next, Resume, Scheduler, Wait
from hpo.storage.attributes import BUDGET_ATTR
from hpo.study import open_study
from hpo.study.standing import standing_of
from tests.support.pausing import PauseAll
from tests.support.studies import Studies, ask

PRUNERS = [
    "none",
    "median",
    "percentile",
    "successive_halving",
    "hyperband",
    "threshold",
    "patient",
    "wilcoxon",
    "predicted_loss",
]
_ARGUMENTS = {
    "median": ["study.pruner.n_startup_trials=1"],
    "percentile": ["study.pruner.percentile=25", "study.pruner.n_startup_trials=1"],
    "threshold": ["study.pruner.upper=2"],
    "patient": ["study.pruner.wrapped_pruner=median", "study.pruner.patience=1"],
}
#: Each trial's values; the later trials are worse.
_CURVES = [[1.0 + number - 0.1 * step for step in range(4)] for number in range(6)]


@pytest.fixture(autouse=True)
def _no_old_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's cache answers for a moment as it did before; here every answer is new."""
    monkeypatch.setattr(open_study, "MAX_AGE", 0.0)


class SchedulerContract(ABC):
    """What holds for every scheduler."""

    overrides: tuple[str, ...] = ("study.n_trials=6", "trainer.max_epochs=4")

    @abstractmethod
    def scheduler(self) -> Scheduler:
        """A new one."""

    def decisions(self, studies: Studies, at: str, of: Callable[[], Scheduler]) -> list[Decision]:
        """What is decided at each epoch of trials that run in turn, by who ``of`` gives each time."""
        decided = []
        with studies.open(*self.overrides, at=at) as (view,):
            for curve in _CURVES:
                trial, _ = ask(view)
                for step, value in enumerate(curve, start=1):
                    trial.report(value, step)
                    decided.append(of().decide(trial, step))
                view.study.tell(trial, curve[-1])
        return decided

    def test_it_keeps_nothing_but_what_the_study_stores(self, studies: Studies) -> None:
        """A worker that has just started decides as one that has been there all the time."""
        one, sent = self.scheduler(), pickle.dumps(self.scheduler())
        always_the_same = self.decisions(studies, "one", lambda: one)
        assert self.decisions(studies, "many", lambda: pickle.loads(sent)) == always_the_same
        assert len(always_the_same) == sum(map(len, _CURVES))

    def test_a_free_worker_of_a_new_study_starts_a_trial(self, studies: Studies) -> None:
        with studies.open(*self.overrides) as (view,):
            assert isinstance(self.scheduler().next(standing_of(view)), New)

    def test_only_a_paused_trial_is_resumed(self, studies: Studies) -> None:
        with studies.open(*self.overrides) as (view,):
            for _ in range(6):
                answer: Next = self.scheduler().next(standing_of(view))
                assert isinstance(answer, New | Wait)
                if isinstance(answer, New):
                    ask(view)
            assert not isinstance(self.scheduler().next(standing_of(view)), Resume)


class TestPauseAll(SchedulerContract):
    """A scheduler that pauses and resumes."""

    def scheduler(self) -> Scheduler:
        return PauseAll()

    def test_it_resumes_the_latest_when_all_have_paused(self, studies: Studies) -> None:
        with studies.open("study.n_trials=3") as (view,):
            for expected in (New(), New(), New(), Wait()):
                assert self.scheduler().next(standing_of(view)) == expected
                if expected == New():
                    ask(view)[0].report(1.0, 1)
            for trial in view.study.get_trials():
                view.storage.set_trial_intermediate_value(trial._trial_id, 2, 1.0)
                view.storage.pause(trial._trial_id, 2)
            assert [each.number for each in standing_of(view).paused] == [0, 1, 2]
            assert self.scheduler().next(standing_of(view)) == Resume(2)


@pytest.mark.parametrize("name", SCHEDULERS)
class TestByName(SchedulerContract):
    """The schedulers of the study file."""

    @pytest.fixture(autouse=True)
    def _name(self, name: str) -> None:
        self.overrides = (*type(self).overrides, f"study.scheduler={name}")

    def scheduler(self) -> Scheduler:
        return SCHEDULERS[self.overrides[-1].partition("=")[2]]()

    def test_it_grants_a_first_rung(self, name: str, studies: Studies) -> None:
        with studies.open(*self.overrides) as (view,):
            assert type(view.scheduler) is SCHEDULERS[name]
            assert view.scheduler.first(standing_of(view)) in (1, 2, 3, None)


@pytest.mark.parametrize("pruner", PRUNERS)
class TestPrunerScheduler(SchedulerContract):
    """Every pruner of the study file is a scheduler that only stops."""

    @pytest.fixture(autouse=True)
    def _pruner(self, pruner: str) -> None:
        self.overrides = (*type(self).overrides, f"study.pruner.name={pruner}", *_ARGUMENTS.get(pruner, []))

    def scheduler(self) -> Scheduler:
        return PrunerScheduler()

    def test_it_stops_where_the_pruner_prunes(self, pruner: str, studies: Studies) -> None:
        decided = self.decisions(studies, "ours", PrunerScheduler)
        expected = []
        with studies.open(*self.overrides, at="optuna") as (view,):
            for curve in _CURVES:
                trial, _ = ask(view)
                for step, value in enumerate(curve, start=1):
                    trial.report(value, step)
                    expected.append(Decision.STOP if trial.should_prune() else Decision.CONTINUE)
                view.study.tell(trial, curve[-1])
        assert decided == expected
        assert (Decision.STOP in decided) == (pruner not in {"none", "patient"})


def test_standing_tells_what_the_budget_allows(studies: Studies) -> None:
    with studies.open("study.n_trials=2") as (view,):
        assert standing_of(view).new_left == 2
        ask(view)
        now = standing_of(view)
        assert (now.new_left, [each.number for each in now.running], now.paused) == (1, [0], [])
        view.study.set_user_attr(BUDGET_ATTR, None)
        assert standing_of(view).new_left is None
