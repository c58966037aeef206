"""Failed trials that wait again, on real databases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import pytest
from optuna.trial import FrozenTrial, TrialState

from hpo.errors import LeaseLostError, StudyError
from hpo.search.halving_pruners import at_rungs
from hpo.storage import ledger
from hpo.storage.attributes import RETRIED_ATTR
from hpo.storage.grants import Grant
from hpo.storage.ledger import Lease, Owner
from hpo.storage.recovery import requeue_dead
from hpo.storage.rung_values import RUNG_ATTR, AtRungs
from hpo.study import retry
from hpo.study.open_study import OpenStudy, load_study
from hpo.study.retry import Reopened, failed_trials, reopen
from hpo.study.standing import standing_of
from hpo.study.status import study_status
from hpo.study.taking import Taker
from hpo.study.trial_entries import study_trials
from tests.support.owners import dead_owner
from tests.support.studies import Studies, ask

pytestmark = pytest.mark.full

FAILURE = {
    "hpo:outcome": "error",
    "hpo:reason": "ValueError: no\nreally",
    "hpo:traceback": "Traceback …",
    "hpo:worker": "w",
}


def fail(view: OpenStudy) -> FrozenTrial:
    """A trial that has reported two epochs and failed."""
    trial, _ = ask(view)
    for step in (1, 2):
        view.storage.set_trial_intermediate_value(trial._trial_id, step, 3.0 - step)
    trial.set_user_attr("hpo:run", {"threads": 1})
    for key, value in FAILURE.items():
        trial.set_user_attr(key, value)
    view.study.tell(trial, state=TrialState.FAIL)
    return view.storage.get_trial(trial._trial_id)


@pytest.fixture
def view(studies: Studies, ready_url: str) -> Iterator[OpenStudy]:
    """A worker's view of a study of four trials, on each kind of database."""
    with studies.open("study.n_trials=4", f"run.storage={ready_url}") as (opened,):
        yield opened


def test_a_failed_trial_waits_with_all_that_it_was_but_its_failure(view: OpenStudy) -> None:
    failed = fail(view)
    plain = load_study(view.spec)
    assert reopen(plain, failed_trials(plain)) == [Reopened(0, 1, "error", "ValueError: no\nreally")]
    waiting = plain.storage.get_trial(failed._trial_id)
    assert (waiting.state, waiting.datetime_complete, waiting.values) == (TrialState.WAITING, None, None)
    assert waiting.user_attrs == {"hpo:run": {"threads": 1}, RETRIED_ATTR: 1}
    assert (waiting.number, waiting.params) == (failed.number, failed.params)
    assert waiting.intermediate_values == failed.intermediate_values
    assert waiting.system_attrs == failed.system_attrs
    plain.storage.close()


def test_the_next_worker_goes_on_with_it_as_itself(view: OpenStudy) -> None:
    failed = fail(view)
    reopen(view, [0])
    later = load_study(view.spec, Owner.current(worker="later"))
    trial, params = ask(later)
    assert (trial.number, params) == (0, failed.params)
    trial.report(0.5, 3)
    later.study.tell(trial, 0.5)
    (entry,) = study_trials(later)
    assert (entry["outcome"], entry["epochs"], entry["reason"]) == ("complete", 3, None)
    assert [each["outcome"] for each in entry["internals"]["attempts"]] == ["error", "complete"]
    later.storage.close()


def test_a_study_counts_a_trial_once_however_often_it_is_retried(view: OpenStudy) -> None:
    fail(view)
    fail(view)
    for _ in range(2):
        plain = load_study(view.spec)
        reopen(plain, failed_trials(plain))
        plain.storage.close()
        worker = load_study(view.spec, Owner.current(worker="again"))
        status = study_status(worker)
        assert (status["finished"], status["waiting"], status["n_trials"]) == (0, 2, 4)
        assert sorted(fail(worker).number for _ in range(2)) == [0, 1]
        worker.storage.close()
    assert [ask(view)[0].number for _ in range(2)] == [2, 3]


def test_deaths_before_a_retry_are_forgiven(view: OpenStudy) -> None:
    dead = load_study(view.spec, dead_owner())
    ends = []
    for _ in range(2):
        for _ in range(2):
            dead.study.ask()
            ends += requeue_dead(dead.storage, dead.study_id, max_retries=1)
        plain = load_study(view.spec)
        assert [each.attempts for each in reopen(plain, [0])] == [len(ends)]
        plain.storage.close()
        dead.storage.close()
        dead = load_study(view.spec, dead_owner())
    dead.storage.close()
    assert [(end.attempt, end.state.name) for end in ends] == [
        (1, "WAITING"),
        (2, "FAIL"),
        (3, "WAITING"),
        (4, "FAIL"),
    ]
    assert "died 2 times" in ends[-1].reason


def test_a_dry_run_changes_nothing_and_says_the_same(view: OpenStudy) -> None:
    failed = fail(view)
    foreseen = reopen(view, [0], dry_run=True)
    assert view.storage.get_trial(failed._trial_id) == failed
    assert reopen(view, [0]) == foreseen


def test_only_what_has_failed_is_retried_and_all_or_nothing(view: OpenStudy) -> None:
    fail(view)
    complete, _ = ask(view)
    view.study.tell(complete, 1.0)
    pruned, _ = ask(view)
    pruned.report(1.0, 1)
    view.study.tell(pruned, state=TrialState.PRUNED)
    ask(view)
    reasons = {1: "it is complete", 2: "it was pruned", 3: "it is running", 4: "has no trial 4"}
    for number, reason in reasons.items():
        with pytest.raises(StudyError, match=reason):
            reopen(view, [0, number])
    assert failed_trials(view) == [0]


def test_an_imported_failure_is_not_ours_to_retry(view: OpenStudy) -> None:
    failed = fail(view)
    view.study.add_trial(failed)
    assert failed_trials(view) == [0]
    with pytest.raises(StudyError, match="was imported"):
        reopen(view, [1])


def test_of_two_who_retry_at_once_one_does(view: OpenStudy) -> None:
    fail(view)
    other = load_study(view.spec)
    (seen,) = other.study.get_trials()  # as failed
    assert len(reopen(view, [0])) == 1
    assert retry._reopen(other.storage, seen) is None
    with pytest.raises(StudyError, match="trial 0 has not failed: it waits already"):
        reopen(other, [0])
    other.storage.close()


def test_the_owner_of_a_trial_that_another_tool_has_failed_cannot_write_to_it(view: OpenStudy) -> None:
    trial, _ = ask(view)
    # Past the lease, as plain Optuna does.
    plain = load_study(view.spec)
    super(type(plain.storage), plain.storage).set_trial_state_values(trial._trial_id, TrialState.FAIL, [1.0])
    assert len(reopen(plain, [0])) == 1
    with pytest.raises(LeaseLostError):
        trial.report(1.0, 1)
    with plain.storage.engine.connect() as conn:
        assert [each.outcome for each in ledger.attempts(conn, plain.study_id)] == ["fail"]
    assert plain.storage.get_trial(trial._trial_id).values is None
    plain.storage.close()


@pytest.mark.parametrize("scheduler", [None, "asha", "freeze_thaw", "{name: pbt, population: 4, every: 1}"])
def test_a_worker_that_has_seen_the_failure_takes_the_trial_that_waits(
    studies: Studies, scheduler: str | None
) -> None:
    overrides = ("study.n_trials=4", "study.pruner=none", f"study.scheduler={scheduler or 'null'}")
    with studies.open(*overrides, views=2) as (worker, other):
        taker = Taker(worker)
        failed = taker.take()
        assert isinstance(failed, Lease)
        worker.storage.set_trial_state_values(failed.trial_id, TrialState.FAIL)
        assert isinstance(taker.take(), Lease)
        assert [trial.number for trial in worker.study.get_trials(states=(TrialState.FAIL,))] == [0]
        assert [each.trial for each in reopen(other, [0])] == [0]
        again = taker.take()
        assert again == Lease(failed.trial_id, 2)


def test_a_worker_that_has_seen_the_failure_counts_what_the_trial_is_granted_after_it(studies: Studies) -> None:
    """It asked for ever what comes next: each grant that it wanted to store was not the study's next one."""
    with studies.open("study.n_trials=4", "study.pruner=none", "study.scheduler=asha", views=2) as (worker, other):
        taker = Taker(worker)
        failed = taker.take()
        assert isinstance(failed, Lease)
        worker.storage.set_trial_state_values(failed.trial_id, TrialState.FAIL)
        assert isinstance(taker.take(), Lease)
        reopen(other, [0])
        assert Taker(other).take() == Lease(failed.trial_id, 2)
        decision = standing_of(other).decision
        grant = Grant(other.study_id, {"number": decision, "until": 3, "why": {"kind": "promotion"}})
        other.storage.extend(failed.trial_id, grant, {})
        assert standing_of(worker).decision == decision + 1
        assert isinstance(taker.take(), Lease)


def test_a_pruner_that_halves_and_has_seen_the_failure_sees_the_trials_later_rungs(view: OpenStudy) -> None:
    def rungs() -> dict[int, dict[str, float]]:
        return {
            each.number: each.system_attrs for each in cast("list[AtRungs]", at_rungs(other.study).get_trials())
        }

    first, second = f"{RUNG_ATTR}0", f"{RUNG_ATTR}1"
    trial, _ = ask(view)
    view.storage.set_trial_system_attr(trial._trial_id, first, 3.0)
    view.study.tell(trial, state=TrialState.FAIL)
    ask(view)  # a later one, which runs all the time
    other = load_study(view.spec)
    assert rungs() == {0: {first: 3.0}}
    reopen(view, [0])
    again, _ = ask(view)
    view.storage.set_trial_system_attr(again._trial_id, second, 2.0)
    assert rungs() == {0: {first: 3.0, second: 2.0}}
    view.study.tell(again, 1.0)
    assert rungs() == {0: {first: 3.0, second: 2.0}}
    other.storage.close()
