"""Pausing and resuming on real databases: one state for each trial, one worker for each resume."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import optuna
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from optuna.trial import TrialState

from hpo.errors import BudgetExhaustedError, LeaseLostError
from hpo.storage import ledger, machine
from hpo.storage.attributes import BUDGET_ATTR, EPOCHS_ATTR, PAUSE_AT_ATTR, PAUSED_ATTR
from hpo.storage.cache import StudyCache
from hpo.storage.ledger import Owner
from hpo.storage.opening import open_storage
from hpo.storage.outlines import KeptOutlines
from hpo.storage.pausing import PAUSED, paused_at
from hpo.storage.recovery import requeue_dead, settle_process
from hpo.storage.settling import GONE
from hpo.storage.study_end import prune_paused, set_budgets
from hpo.storage.study_storage import StudyStorage
from tests.support.commands import PATIENCE
from tests.support.owners import attempts, load, make_study, opened, running, study_id, trials

Owners = tuple[StudyStorage, StudyStorage]


def url_of(storage: StudyStorage) -> str:
    return storage.engine.url.render_as_string(hide_password=False)


def paused_trial(storage: StudyStorage, step: int = 2, value: float = 0.5) -> int:
    """A trial that has reported up to a step, and is paused there; its database id."""
    trial = load(storage).ask()
    trial.suggest_float("x", 0, 1)
    for at in range(1, step + 1):
        trial.report(value, at)
    trial.set_user_attr(PAUSE_AT_ATTR, step)
    storage.pause(trial._trial_id, step)
    return trial._trial_id


def test_a_paused_trial_is_taken_only_by_who_resumes_it(two_owners: Owners) -> None:
    first, second = two_owners
    trial_id = paused_trial(first)
    (trial,) = first.get_all_trials(study_id(first))
    assert (trial.state, paused_at(trial)) == (TrialState.RUNNING, 2)
    (attempt,) = first.attempts_of_trial(trial_id)
    assert (attempt.outcome, attempt.reason) == (PAUSED, "after epoch 2")
    assert running(first) == [], "it does not run"
    assert requeue_dead(first, study_id(first), grace=0) == []
    assert load(second).ask().number == 1
    assert optuna.load_study(study_name="study", storage=StudyCache(first)).ask().number == 2
    # Optuna's own storage, which knows nothing of leases
    optunas = optuna.storages.RDBStorage(url_of(first))
    assert optuna.load_study(study_name="study", storage=optunas).ask().number == 3
    optunas.remove_session()
    optunas.engine.dispose()
    assert not second.set_trial_state_values(trial_id, TrialState.RUNNING), "it waits for no worker"
    assert second.resume(trial_id)
    assert not first.resume(trial_id)
    again = second.get_trial(trial_id)
    assert (again.state, paused_at(again), again.intermediate_values) == (
        TrialState.RUNNING,
        None,
        {1: 0.5, 2: 0.5},
    )
    assert PAUSE_AT_ATTR not in again.user_attrs
    assert [each.number for each in running(first) if each.lease is not None] == [0, 1, 2]
    load(second).tell(0, 0.5)
    assert second.get_trial(trial_id).state == TrialState.COMPLETE


def test_who_has_paused_a_trial_can_write_to_it_no_more(two_owners: Owners) -> None:
    first, _ = two_owners
    trial_id = paused_trial(first)
    for write in (
        partial(first.set_trial_intermediate_value, trial_id, 3, 0.1),
        partial(first.set_trial_user_attr, trial_id, "key", 1),
        partial(first.set_trial_state_values, trial_id, TrialState.COMPLETE, [0.1]),
        partial(first.pause, trial_id, 3),
        partial(first.requeue, trial_id),
    ):
        with pytest.raises(LeaseLostError):
            write()
    (trial,) = first.get_all_trials(study_id(first))
    assert (paused_at(trial), trial.intermediate_values, first.beat()) == (2, {1: 0.5, 2: 0.5}, [])


def test_only_who_holds_a_trial_pauses_it(two_owners: Owners) -> None:
    first, second = two_owners
    trial = load(first).ask()
    with pytest.raises(LeaseLostError):
        second.pause(trial._trial_id, 1)
    assert paused_at(first.get_trial(trial._trial_id)) is None
    load(first).tell(trial, 1.0)
    with pytest.raises(LeaseLostError):
        first.pause(trial._trial_id, 1)


def test_of_many_workers_one_resumes(ready_url: str) -> None:
    make_study(ready_url, 3)
    with opened(ready_url, owner=Owner.current(worker="first")) as storage:
        ids = [paused_trial(storage) for _ in range(3)]
    count, start = 4, Barrier(4)

    def resume(worker: int) -> list[bool]:
        with opened(ready_url, owner=Owner.current(worker=str(worker))) as storage:
            won = []
            for trial_id in ids:
                start.wait(PATIENCE)
                won.append(storage.resume(trial_id))
            return won

    with ThreadPoolExecutor(count) as pool:
        won = list(pool.map(resume, range(count)))
    assert [sum(each) for each in zip(*won, strict=True)] == [1, 1, 1]
    assert [(each.attempt, each.outcome) for each in attempts(ready_url)] == [(1, PAUSED), (2, None)] * 3


def test_a_resumed_trial_whose_worker_dies_waits_and_is_not_paused(two_owners: Owners, ready_url: str) -> None:
    first, second = two_owners
    trial_id = paused_trial(first)
    dead = Owner(machine.host_name(), machine.boot_id(), 2**22 + 1, 1.0, "dead")
    with opened(ready_url, owner=dead) as third:
        assert third.resume(trial_id)
    (settled,) = requeue_dead(second, study_id(second), grace=0)
    assert (settled.number, settled.attempt, settled.state) == (0, 2, TrialState.WAITING)
    assert load(second).ask().number == 0


def test_one_that_waits_is_taken_in_the_name_of_its_kept_process(two_owners: Owners) -> None:
    first, second = two_owners
    trial_id = paused_trial(first)
    assert second.resume(trial_id)
    second.requeue(trial_id)
    assert first.owner is not None
    first.owners = {trial_id: replace(first.owner, pid=2**22 + 7)}
    assert load(first).ask().number == 0
    assert first.attempts_of_trial(trial_id)[-1].pid == 2**22 + 7


def test_a_trial_that_dies_before_it_pauses_keeps_the_decision(two_owners: Owners) -> None:
    first, second = two_owners
    trial = load(first).ask()
    trial.set_user_attr(PAUSE_AT_ATTR, 2)
    first.requeue(trial._trial_id)
    again = load(second).ask()
    assert (again.number, again.user_attrs[PAUSE_AT_ATTR]) == (0, 2)


def test_one_that_another_tool_lets_wait_is_not_paused_when_it_runs_again(two_owners: Owners) -> None:
    first, second = two_owners
    trial_id = paused_trial(first)
    with opened(url_of(first)) as ignorant:
        ignorant.set_trial_state_values(trial_id, TrialState.WAITING)
    assert load(second).ask().number == 0
    assert paused_at(second.get_trial(trial_id)) is None


@pytest.mark.parametrize("state", [TrialState.FAIL, TrialState.COMPLETE, TrialState.WAITING])
def test_one_that_another_program_ends_is_paused_no_more_and_looks_see_that(
    two_owners: Owners, state: TrialState
) -> None:
    """As the button "Fail Trial" of the dashboard does, which stands beside each trial that is RUNNING."""
    first, _ = two_owners
    study, trial_id = study_id(first), paused_trial(first)
    cache, outlines = StudyCache(first), KeptOutlines(first, study)
    assert [paused_at(*look) for look in (cache.get_all_trials(study), outlines.look())] == [2, 2]
    with opened(url_of(first)) as ignorant:
        ignorant.set_trial_state_values(trial_id, state, [1.0] if state == TrialState.COMPLETE else None)
    for trial in (*cache.get_all_trials(study), *outlines.look()):
        assert (trial.state, PAUSED_ATTR in trial.user_attrs) == (state, False)


@pytest.mark.parametrize(("last", "value"), [(0.25, 0.25), (math.inf, math.inf), (math.nan, None)])
def test_the_end_of_a_study_prunes_paused_trials(two_owners: Owners, last: float, value: float | None) -> None:
    first, _ = two_owners
    trial_id, resumed = paused_trial(first, 3, last), paused_trial(first)
    assert first.resume(resumed)
    with opened(url_of(first)) as supervisor:
        (settled,) = prune_paused(supervisor, study_id(first))
        assert (settled.number, settled.state, settled.outcome) == (0, TrialState.PRUNED, "pruned")
        assert settled.reason == "pruned at epoch 3: paused there when the study ended"
        assert list(prune_paused(supervisor, study_id(first))) == []
    trial = first.get_trial(trial_id)
    assert (trial.state, trial.value, paused_at(trial)) == (TrialState.PRUNED, value, None)
    assert trial.datetime_complete is not None
    assert not first.resume(trial_id)
    # What Optuna's own tell makes of the same trial
    by_optuna = optuna.create_study().ask()
    by_optuna.report(last, 1)
    assert by_optuna.study.tell(by_optuna, state=TrialState.PRUNED).values == trial.values


def test_with_several_objectives_a_pruned_trial_has_no_value(ready_url: str) -> None:
    with opened(ready_url) as storage:
        study = optuna.create_study(study_name="study", storage=storage, directions=["minimize", "maximize"])
        storage.set_budget(study._study_id, 1)
    with opened(ready_url, owner=Owner.current()) as storage:
        trial = load(storage).ask()
        storage.set_trial_intermediate_value(trial._trial_id, 1, 0.5)
        storage.pause(trial._trial_id, 1)
    with opened(ready_url) as storage:
        assert len(list(prune_paused(storage, study_id(storage)))) == 1
    (found,) = trials(ready_url)
    assert (found.state, found.values) == (TrialState.PRUNED, None)


def test_a_larger_budget_pauses_again_what_the_end_has_pruned_and_notes_it(two_owners: Owners) -> None:
    first, _ = two_owners
    study, ids = study_id(first), [paused_trial(first, 2), paused_trial(first)]
    set_budgets(first, study, {BUDGET_ATTR: 10, EPOCHS_ATTR: 5})
    assert len(list(prune_paused(first, study))) == 2
    before = first.latest_change(study)
    set_budgets(first, study, {BUDGET_ATTR: 10, EPOCHS_ATTR: 5})  # no larger one
    assert [first.get_trial(each).state for each in ids] == [TrialState.PRUNED] * 2
    set_budgets(first, study, {BUDGET_ATTR: 10, EPOCHS_ATTR: None})
    found = [first.get_trial(each) for each in ids]
    assert [(paused_at(each), each.values, each.datetime_complete) for each in found] == [(2, None, None)] * 2
    assert first.changes_since(study, before)[1] == set(ids)
    assert first.resume(ids[0])


# ---------------------------------------------------------------------- any order of events

_WORKERS = st.integers(0, 2)
_TRIALS = st.integers(0, 5)
_BUDGET = 4


class PausingMachine(RuleBasedStateMachine):
    """Compares the storage with a model: what each trial is, and which worker has it."""

    url = ""

    @initialize()
    def begin(self) -> None:
        file = Path(self.url.removeprefix("sqlite:///"))
        file.unlink(missing_ok=True)
        make_study(self.url, _BUDGET)
        self.looking = open_storage(self.url, create=False)
        self.generation = 0
        self.workers = [self.new_worker() for _ in range(3)]
        self.states: dict[int, str] = {}  # waiting, running, paused, or a finished state
        self.having: dict[int, int] = {}  # trial by worker
        self.ids: dict[int, int] = {}

    def new_worker(self) -> StudyStorage:
        """A worker whose process, by its number, is not there: it is dead whenever it is checked."""
        self.generation += 1
        owner = Owner(machine.host_name(), machine.boot_id(), 2**22 + self.generation, 1.0, str(self.generation))
        return open_storage(self.url, create=False, owner=owner)

    def teardown(self) -> None:
        for storage in (*getattr(self, "workers", ()), *([self.looking] if hasattr(self, "looking") else ())):
            storage.close()

    def held(self, worker: int) -> int | None:
        return self.having.get(worker)

    @rule(worker=_WORKERS)
    def ask(self, worker: int) -> None:
        if worker in self.having:
            return
        waiting = [number for number, state in sorted(self.states.items()) if state == "waiting"]
        study = load(self.workers[worker])
        if not waiting and len(self.states) == _BUDGET:
            with pytest.raises(BudgetExhaustedError):
                study.ask()
            return
        trial = study.ask()
        assert trial.number == (waiting[0] if waiting else len(self.states))
        self.states[trial.number], self.having[worker] = "running", trial.number
        self.ids[trial.number] = trial._trial_id

    def release(self, worker: int, state: str) -> int | None:
        number = self.having.pop(worker, None)
        if number is None:
            return None
        self.states[number] = state
        return self.ids[number]

    @rule(worker=_WORKERS, step=st.integers(1, 9))
    def pause(self, worker: int, step: int) -> None:
        if (trial_id := self.release(worker, "paused")) is not None:
            self.workers[worker].pause(trial_id, step)

    @rule(worker=_WORKERS, number=_TRIALS)
    def resume(self, worker: int, number: int) -> None:
        if worker in self.having or number not in self.ids:
            return
        paused = self.states[number] == "paused"
        assert self.workers[worker].resume(self.ids[number]) is paused
        if paused:
            self.states[number], self.having[worker] = "running", number

    @rule(worker=_WORKERS)
    def requeue(self, worker: int) -> None:
        if (trial_id := self.release(worker, "waiting")) is not None:
            self.workers[worker].requeue(trial_id)

    @rule(worker=_WORKERS, state=st.sampled_from([TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL]))
    def tell(self, worker: int, state: TrialState) -> None:
        if (trial_id := self.release(worker, state.name.lower())) is not None:
            values = [1.0] if state == TrialState.COMPLETE else None
            self.workers[worker].set_trial_state_values(trial_id, state, values)

    @rule(worker=_WORKERS, zombie=st.booleans())
    def kill(self, worker: int, zombie: bool) -> None:
        """Its trial waits; where it was only taken for dead, what it still writes changes nothing."""
        storage = self.workers[worker]
        assert storage.owner is not None
        settled = settle_process(self.looking, study_id(self.looking), storage.owner.pid, GONE, max_retries=99)
        number = self.having.get(worker)
        trial_id = self.release(worker, "waiting")
        assert [each.number for each in settled] == ([] if number is None else [number])
        if zombie and trial_id is not None:
            with pytest.raises(LeaseLostError):
                storage.pause(trial_id, 1)
        storage.close()
        self.workers[worker] = self.new_worker()

    @rule()
    def repair(self) -> None:
        """All that runs is lost, as no owner is there; paused trials are not lost."""
        for settled in requeue_dead(self.looking, study_id(self.looking), grace=0, max_retries=99):
            assert self.states[settled.number] == "running"
            self.states[settled.number] = "waiting"
        for storage in self.workers:
            for trial_id in list(storage._held):
                storage.forget(trial_id)
        self.having.clear()

    @rule()
    def end_of_study(self) -> None:
        done = [each.number for each in prune_paused(self.looking, study_id(self.looking))]
        assert done == [number for number, state in sorted(self.states.items()) if state == "paused"]
        self.states.update(dict.fromkeys(done, "pruned"))

    @invariant()
    def each_trial_is_in_one_state(self) -> None:
        found = self.looking.get_all_trials(study_id(self.looking))
        shown: dict[int, Any] = {
            each.number: "paused" if paused_at(each) is not None else each.state.name.lower() for each in found
        }
        assert shown == self.states
        assert len(found) <= _BUDGET
        leases = {each.number: each.lease for each in running(self.looking)}
        assert sorted(leases) == sorted(self.having.values())
        for worker, number in self.having.items():
            lease, owner = leases[number], self.workers[worker].owner
            assert lease is not None
            assert owner is not None
            assert lease.pid == owner.pid
        with self.looking.engine.connect() as conn:
            every = ledger.attempts(conn, study_id(self.looking))
        open_ones = [each.trial_id for each in every if each.ended_at is None]
        assert len(open_ones) == len(set(open_ones)) == len(self.having)


def test_any_order_of_events_leaves_each_trial_in_one_state(sqlite_url: str) -> None:
    machine = type("Machine", (PausingMachine,), {"url": sqlite_url}).TestCase
    machine.settings = settings(max_examples=10, stateful_step_count=16, deadline=None, database=None)
    machine().runTest()
