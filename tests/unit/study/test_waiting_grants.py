"""Trials that wait with grants beyond the budget of epochs: it was lowered, or failed ones wait again."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

import optuna
import pytest
from optuna.trial import TrialState

from hpo.search.schedulers.scheduler import New, Next, Standing, Wait, Why
from hpo.storage.grants import granted_after, grants_of
from hpo.storage.ledger import Lease
from hpo.storage.outage import DatabaseError
from hpo.study import retry
from hpo.study.open_study import OpenStudy
from hpo.study.retry import reopen
from hpo.study.standing import standing_of
from hpo.study.taking import Taker, claimable
from tests.support.commands import PATIENCE, hpo
from tests.support.standings import seen
from tests.support.standings import standing as standing_with
from tests.support.studies import Studies, at_once, take
from tests.unit.study.test_granting import TwoByTwo, epochs_of, run_all, train

pytestmark = pytest.mark.full


@dataclass(frozen=True)
class Fours(TwoByTwo):
    """New trials of four epochs, and no more."""

    meet: threading.Barrier | None = None

    def first(self, standing: Standing) -> int:
        if self.meet is not None:
            self.meet.wait(PATIENCE)
        return 4

    def next(self, standing: Standing) -> Next:
        return New(until=4, why=Why("breadth")) if standing.new_left and standing.epochs_left else Wait()


def fours(view: OpenStudy) -> OpenStudy:
    return replace(view, scheduler=Fours())


def fail_one_epoch_each(view: OpenStudy, count: int) -> None:
    """Trials that fail after the first of their four epochs."""
    for taken in [take(fours(view)) for _ in range(count)]:
        assert isinstance(taken, optuna.Trial)
        taken.report(1.0, 1)
        view.study.tell(taken, state=TrialState.FAIL)


def ends_of(view: OpenStudy) -> list[list[int | None]]:
    return [[each["until"] for each in grants_of(trial)] for trial in view.study.get_trials()]


def test_failed_trials_that_wait_again_share_what_is_left(studies: Studies) -> None:
    """Three epochs each are due to trials 0 and 1, of 1 + 1 + 4 trained; 10 leave four of them."""
    overrides = ("study.n_trials=3", "study.epochs=12", "trainer.max_epochs=5")
    with studies.open(*overrides) as (view,):
        fail_one_epoch_each(view, 2)
        assert run_all(fours(view)) == [(2, 4)]
        reopen(view, [0, 1])
    with studies.open(*overrides[:1], "study.epochs=10", *overrides[2:], views=3) as (view, other, third):
        assert claimable(fours(view)) == 2
        first, second = take(fours(view)), take(fours(other))
        assert take(fours(third)) == Wait()
        assert isinstance(first, optuna.Trial)
        assert isinstance(second, optuna.Trial)
        assert ends_of(view) == [[4], [4, 2], [4]]
        cut = grants_of(view.study.get_trials()[1])
        assert ([each["number"] for each in cut], cut[1]["why"], granted_after(cut)) == ([1, 3], cut[0]["why"], 0)
        assert train(fours(view), first).epochs + train(fours(other), second).epochs == 4 + 2
        assert take(fours(third)) is None
        assert epochs_of(third) == [4, 2, 4]


def test_one_for_which_no_epoch_is_left_waits_for_a_larger_budget(studies: Studies) -> None:
    overrides = ("study.n_trials=3", "trainer.max_epochs=5")
    with studies.open(*overrides, "study.epochs=12") as (view,):
        fail_one_epoch_each(view, 2)
        assert run_all(fours(view)) == [(2, 4)]
        reopen(view, [0, 1])
    for epochs, trained in ((6, [1, 1, 4]), (9, [4, 1, 4]), (11, [4, 3, 4]), (12, [4, 3, 4])):
        with studies.open(*overrides, f"study.epochs={epochs}") as (view,):
            run_all(fours(view))
            assert (epochs_of(view), claimable(fours(view))) == (trained, 0)
    assert [trial.state for trial in standing_of(view).paused] == ["paused"] * 3


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("study.epochs=6",), "resumes none of them: `study.epochs` leaves no epochs"),
        (("study.epochs=9",), "resumes the others; trial 1 waits for larger `study.epochs`\n"),
        (("study.epochs=11",), "resumes them; trial 1 trains up to epoch 3, for `study.epochs` has no more\n"),
        (("study.epochs=12",), "resumes them\n"),
        (
            ("study.epochs=12", "study.target_value=9"),
            "resumes none of them: trial 2 has reached target_value: 1 ",
        ),
    ],
)
def test_a_retry_says_what_the_budget_leaves_for_them(
    overrides: tuple[str, ...], said: str, studies: Studies
) -> None:
    """Three epochs each are due to trials 0 and 1, and six are trained."""
    with studies.open("study.n_trials=3", "study.epochs=12", "trainer.max_epochs=5") as (view,):
        fail_one_epoch_each(view, 2)
        taken = take(fours(view))
        assert isinstance(taken, optuna.Trial)
        for epoch in range(1, 5):
            taken.report(1.0, epoch)
        view.study.tell(taken, 1.0)
    done = hpo("retry", view.spec.path, "study.n_trials=3", "trainer.max_epochs=5", *overrides, "--failed")
    assert f"`hpo run` {said}" in done.stdout


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("study.epochs=3",), "trial 1 waits for larger `study.epochs`, of which none are left\n"),
        (("study.epochs=4",), "trial 1 waits for the next free worker\n"),
        (
            ("study.epochs=4", "study.target_value=9"),
            "trial 1 waits, and `hpo run` does not take it: trial 0 has reached target_value: 1 ",
        ),
    ],
)
def test_what_is_enqueued_says_what_it_waits_for(overrides: tuple[str, ...], said: str, studies: Studies) -> None:
    with studies.open("study.n_trials=3", *overrides) as (view,):
        taken = take(view)
        assert isinstance(taken, optuna.Trial)
        for epoch in (1, 2, 3):
            taken.report(1.0, epoch)
        view.study.tell(taken, 1.0)
    file = studies.folder / "study.yaml"
    assert hpo("enqueue", file, "optimizer.lr=0.01", "study.n_trials=3", *overrides).stdout.startswith(said)


@pytest.mark.parametrize("command", [("enqueue", "model.hidden=5"), ("retry", "--failed")])
def test_what_was_done_is_said_where_the_prospect_can_t_be_read(
    command: tuple[str, ...], studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: OpenStudy) -> None:
        raise DatabaseError("the database is gone")

    overrides = ("study.n_trials=3", "study.epochs=12")
    with studies.open(*overrides) as (view,):
        fail_one_epoch_each(view, 1)
    monkeypatch.setattr(retry, "standing_of", away)
    done = hpo(command[0], view.spec.path, *overrides, *command[1:])
    assert done.stdout.startswith(
        ("trial 1 waits for the next free worker\n", "trial 0 is requeued after 1 attempt")
    )
    assert done.stderr == "warning: what `hpo run` will do is not known: the database is gone\n"


def test_workers_that_take_them_at_once_keep_to_the_budget(studies: Studies) -> None:
    """Twelve epochs are due, and seven are left: of trials 0 and 1 all, of trial 2 one, of trial 3 none."""
    workers = 4
    overrides = ("study.n_trials=4", "trainer.max_epochs=5")
    with studies.open(*overrides, "study.epochs=16") as (view,):
        fail_one_epoch_each(view, 4)
        reopen(view, range(4))
    taken: list[int | None] = []
    with studies.open(*overrides, "study.epochs=11", views=workers) as views:
        meet = threading.Barrier(workers)

        def work(view: OpenStudy) -> None:
            trial = take(replace(view, scheduler=Fours(meet)))
            taken.append(trial.number if isinstance(trial, optuna.Trial) else None)
            meet.abort()  # who asks again has no one to meet
            view.storage.close()

        at_once(work, views)
        assert sorted(ends_of(views[0])) == [[4], [4], [4], [4, 2]]


def test_a_worker_that_decides_while_a_failed_trial_is_retried_counts_its_epochs(studies: Studies) -> None:
    """Three epochs are due to trial 0, and taken, after a worker has decided who trains the last four of five."""
    with studies.open("study.n_trials=2", "study.epochs=5", "trainer.max_epochs=5", views=2) as (view, other):
        fail_one_epoch_each(view, 1)

        @dataclass(frozen=True)
        class Slow(Fours):
            def next(self, standing: Standing) -> Next:
                step = super().next(standing)
                if standing.count("running") == 0:
                    reopen(other, [0])
                    assert isinstance(take(fours(other)), optuna.Trial)
                return step

        assert isinstance(take(replace(view, scheduler=Slow())), optuna.Trial)
        assert ends_of(view) == [[4], [1]]


def test_what_was_decided_before_a_trial_is_retried_does_not_stand(studies: Studies) -> None:
    """Where trial 1 pauses four of nine epochs are left; three of them go to trial 0 before its worker asks."""
    with studies.open("study.n_trials=3", "study.epochs=9", "trainer.max_epochs=5", views=2) as (view, other):
        fail_one_epoch_each(view, 1)
        taker = Taker(fours(view))
        lease = taker.take()
        assert isinstance(lease, Lease)
        assert taker.extended(lease.trial_id, {4: 1.0}) is None
        view.storage.set_trial_intermediate_value(lease.trial_id, 4, 1.0)
        view.storage.pause(lease.trial_id, 4)
        reopen(other, [0])
        assert isinstance(take(fours(other)), optuna.Trial)
        assert isinstance(taker.take(), Lease)
        assert ends_of(view) == [[4], [4], [1]]


def test_without_a_scheduler_a_smaller_budget_cuts_the_trial_that_waits(studies: Studies) -> None:
    overrides = ("study.n_trials=2", "trainer.max_epochs=5", "study.pruner=none")
    with studies.open(*overrides, "study.epochs=20") as (view,):
        first, second = take(view), take(view)
        assert isinstance(first, optuna.Trial)
        assert isinstance(second, optuna.Trial)
        assert train(view, first).epochs == 5
        second.report(1.0, 1)
        second.report(1.0, 2)
        view.storage.requeue(second._trial_id)
    for epochs, trained in ((7, 2), (8, 3), (20, 5)):
        with studies.open(*overrides, f"study.epochs={epochs}") as (view,):
            run_all(view)
            assert (epochs_of(view), claimable(view)) == ([5, trained], 0)


@pytest.mark.parametrize(
    ("n_epochs", "takeable", "cut"),
    [
        (None, [0, 1, 2, 3, 4], None),
        (26, [0, 1, 2, 3, 4], None),
        (25, [0, 1, 2, 3], None),
        (24, [0, 1, 2, 3], (3, 8)),
        (17, [0, 1, 2, 3], (3, 1)),
        (16, [0, 1, 2], None),
        (15, [0, 1, 2], (2, 6)),
        (14, [0, 1], None),
        (13, [0, 1], (1, 2)),
        (12, [0], None),
        (5, [0], None),
    ],
)
def test_the_earlier_trials_come_first(
    n_epochs: int | None, takeable: list[int], cut: tuple[int, int] | None
) -> None:
    """3 + 1 + 1 + 3 are trained, and 4 claimed by the running one; none, 2, 2 of the fork and 9 are due."""
    trials = [
        seen(0, [1.0, 1.0, 1.0], "waiting", until=3),
        seen(1, [1.0], "waiting", until=3),
        seen(2, {5: 1.0}, "waiting", until=7, inherited=4),
        seen(3, [], "waiting", kinds=("promotion",)),
        seen(4, [], "waiting", kinds=()),
        seen(5, [1.0], "running", until=4),
        seen(6, [1.0, 1.0, 1.0], "ended", until=9),
    ]
    now = standing_with(trials, horizon=9, n_epochs=n_epochs)
    assert (now.takeable.tolist(), now.cut) == (takeable, cut)
