"""Which trial a free worker takes, by what the scheduler says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import optuna
import pytest
import sqlalchemy as sa
from optuna.trial import TrialState

from hpo.search.schedulers.asha import Asha
from hpo.search.schedulers.pruner import PrunerScheduler
from hpo.search.schedulers.scheduler import New, Next, Resume, Standing, Wait
from hpo.storage.ledger import Lease
from hpo.storage.pausing import paused_at
from hpo.study.open_study import OpenStudy
from hpo.study.taking import Taker, begin, claimable
from tests.support.pausing import PauseAll
from tests.support.studies import Studies, ask, take

pytestmark = pytest.mark.full


@dataclass(frozen=True)
class Says(PrunerScheduler):
    """Says the same always."""

    answer: Next

    def next(self, standing: Standing) -> Next:
        return self.answer


class PausesAll(PauseAll):
    """Decides by whole trials."""

    reads_trials: ClassVar[bool] = True


def saying(view: OpenStudy, answer: Next) -> OpenStudy:
    return replace(view, scheduler=Says(answer))


def paused(view: OpenStudy) -> int:
    trial, _ = ask(view)
    trial.report(1.0, 1)
    view.storage.pause(trial._trial_id, 1)
    return trial.number


def number_of(taken: optuna.Trial | Wait | None) -> int:
    assert isinstance(taken, optuna.Trial)
    return taken.number


@pytest.mark.parametrize("answer", [New(), Wait(), Resume(0)])
def test_what_waits_is_taken_first(answer: Next, studies: Studies) -> None:
    with studies.open("study.n_trials=3", views=2) as (view, other):
        assert paused(view) == 0
        trial, _ = ask(view)
        view.storage.requeue(trial._trial_id)
        assert claimable(saying(other, answer)) >= 1
        taken = take(saying(other, answer))
        assert number_of(taken) == 1
        assert isinstance(taken, optuna.Trial)
        assert taken.params == trial.params


def test_a_paused_trial_is_resumed_as_itself(studies: Studies) -> None:
    with studies.open("study.n_trials=3", views=2) as (view, other):
        paused(view)
        params = view.study.get_trials()[0].params
        assert claimable(saying(other, Resume(0))) == 1
        taken = take(saying(other, Resume(0)))
        assert number_of(taken) == 0
        assert isinstance(taken, optuna.Trial)
        assert other.space.suggest(taken) == params
        assert paused_at(other.storage.get_trial(taken._trial_id)) is None


@pytest.mark.parametrize(("n_trials", "new"), [(9, 0), (12, 3)])
def test_of_the_paused_trials_those_count_that_the_scheduler_would_resume(
    n_trials: int, new: int, studies: Studies
) -> None:
    """Of nine at the first rung the best three are promoted, and then one of them trains."""
    with studies.open(f"study.n_trials={n_trials}", "trainer.max_epochs=9", "study.pruner=none") as (view,):
        asha = replace(view, scheduler=Asha())
        for value in range(9):
            taken = view.study.ask()
            taken.report(float(value), 1)
            view.storage.pause(taken._trial_id, 1)
        assert claimable(asha) == 3 + new
        assert claimable(asha, most=2) == 2
        assert number_of(take(asha)) == 0
        assert claimable(asha) == 2 + new


def test_a_worker_that_was_slower_asks_again(studies: Studies, monkeypatch: pytest.MonkeyPatch) -> None:
    with studies.open("study.n_trials=3") as (view,):
        paused(view)
        monkeypatch.setattr(view.storage, "resume", lambda _: False)
        assert take(saying(view, Resume(0))) == Wait()


def test_it_waits_only_while_a_trial_runs(studies: Studies) -> None:
    with studies.open("study.n_trials=3", views=2) as (view, other):
        paused(view)
        assert take(saying(view, Wait())) is None
        assert claimable(saying(view, Wait())) == 0
        trial, _ = ask(other)
        assert take(saying(view, Wait())) == Wait()
        other.study.tell(trial, 1.0)
        assert take(saying(view, Wait())) is None


def test_nothing_is_taken_beyond_the_budget(studies: Studies) -> None:
    with studies.open("study.n_trials=2") as (view,):
        paused(view)
        assert claimable(saying(view, New())) == 1
        assert number_of(take(saying(view, New()))) == 1
        assert take(saying(view, New())) is None
        assert claimable(saying(view, New())) == 0


def test_a_scheduler_that_resumes_what_is_not_paused_is_refused(studies: Studies) -> None:
    with studies.open("study.n_trials=2") as (view,):
        ask(view)
        for number, lacks in ((0, "paused"), (7, "there")):
            with pytest.raises(ValueError, match=f"resumes trial {number}, which is not {lacks}"):
                take(saying(view, Resume(number)))


def test_a_trial_that_was_handed_to_another_process_is_read_as_that_one_left_it(studies: Studies) -> None:
    with studies.open("study.n_trials=1", views=2) as (worker, process):
        lease = Taker(worker).take()
        assert isinstance(lease, Lease)
        trial = begin(process, lease)
        process.study.tell(trial, 1.0)
        worker.storage.forget(lease.trial_id)
        assert worker.storage.get_trial(lease.trial_id).value == 1.0


def test_a_trial_that_a_process_begins_is_read_once(studies: Studies) -> None:
    with studies.open("study.n_trials=3") as (view,):
        lease = Taker(view).take()
        assert isinstance(lease, Lease)
        view.storage.forget(lease.trial_id)  # another process has taken it
        statements: list[str] = []
        sa.event.listen(view.storage.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
        begun = begin(view, lease)
        assert sum("FROM trial_params" in statement for statement in statements) == 1
        begun.set_user_attr("colour", "red")
        assert view.storage.get_trial(lease.trial_id).user_attrs["colour"] == "red", "anew after a write"


@pytest.mark.parametrize("scheduler", [Asha(), PausesAll(epoch=1)])
def test_paused_trials_that_another_tool_has_failed_are_not_waited_for(
    scheduler: Asha | PausesAll, studies: Studies
) -> None:
    """Plain Optuna leaves no note for looks: who would resume such a trial finds out."""
    with studies.open("study.n_trials=3", "trainer.max_epochs=9", views=2) as views:
        supervisor, worker = (replace(view, scheduler=scheduler) for view in views)
        numbers = [paused(worker) for _ in range(3)]
        assert claimable(supervisor) >= 1
        assert claimable(worker) >= 1
        plain = optuna.storages.RDBStorage(worker.storage.engine.url.render_as_string(hide_password=False))
        for number in numbers:
            study = optuna.load_study(study_name=worker.spec.study.name, storage=plain)
            study.tell(number, state=TrialState.FAIL)
        plain.remove_session()
        plain.engine.dispose()
        assert [take(worker) for _ in range(4)][-1] is None
        assert claimable(supervisor) == 0
