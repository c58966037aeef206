"""StudyCache answers as Optuna's own cache does, whatever others do to the storage in between."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.storages._cached_storage import _CachedStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.storage import reader
from hpo.storage.attributes import BUDGET_ATTR, EPOCHS_ATTR
from hpo.storage.cache import StudyCache
from hpo.storage.grants import Grant
from hpo.storage.ledger import Owner
from hpo.storage.lineage import Forked
from hpo.storage.opening import open_storage
from hpo.storage.pausing import paused_at
from hpo.storage.study_end import prune_paused, set_budgets
from hpo.storage.trial_rows import TrialRow
from tests.unit.trainer.support import quick

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
ASKED: tuple[Any, ...] = (
    None,
    (TrialState.COMPLETE,),
    FINISHED,
    (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING),
    (TrialState.WAITING,),
    (TrialState.RUNNING,),
    (),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("create"), st.integers(0, 1)),
        st.tuples(st.just("report"), st.integers(0, 9)),
        st.tuples(st.just("finish"), st.integers(0, 9)),
        st.tuples(st.just("requeue"), st.integers(0, 9)),
        st.tuples(st.just("take"), st.integers(0, 9)),
        st.tuples(st.just("pause"), st.integers(0, 9)),
        st.tuples(st.just("resume"), st.integers(0, 9)),
        st.tuples(st.just("end"), st.just(0)),
        st.tuples(st.just("enlarge"), st.just(0)),
        st.tuples(st.just("look"), st.integers(0, len(ASKED) - 1)),
    ),
    min_size=1,
    max_size=18,
)


class World:
    """A worker that changes trials, and two others that only look."""

    def __init__(self, url: str) -> None:
        self.worker = open_storage(url, create=False, owner=Owner.current())
        self.study = self.worker.create_new_study([StudyDirection.MINIMIZE], "study")
        self.backends = [open_storage(url, create=False) for _ in range(2)]
        self.ours, self.optunas = StudyCache(self.backends[0]), _CachedStorage(self.backends[1])
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.paused: list[int] = []
        self.pruned: list[int] = []
        self.epoch = 0
        self.budget = 1
        set_budgets(self.worker, self.study, {BUDGET_ATTR: None, EPOCHS_ATTR: self.budget})

    def close(self) -> None:
        for storage in (self.worker, *self.backends):
            storage.close()

    def create(self, through: int) -> None:
        """By the worker, or by the one who looks, whose cache then knows the trial."""
        if through:
            trial = self.ours.create_new_trial(self.study)
            self.backends[0].set_trial_state_values(trial, TrialState.WAITING)
            self.waiting.append(trial)
        else:
            self.running.append(self.worker.create_new_trial(self.study))

    def report(self, which: int) -> None:
        if self.running:
            self.worker.set_trial_intermediate_value(self.running[which % len(self.running)], which, float(which))

    def finish(self, which: int) -> None:
        if self.running:
            state = FINISHED[which % 3]
            trial = self.running.pop(which % len(self.running))
            self.worker.set_trial_state_values(trial, state, [float(which)] if state.name == "COMPLETE" else None)

    def requeue(self, which: int) -> None:
        if self.running:
            self.waiting.append(self.running.pop(which % len(self.running)))
            self.worker.requeue(self.waiting[-1])

    def take(self, which: int) -> None:
        if self.waiting:
            self.running.append(self.waiting.pop(which % len(self.waiting)))
            assert self.worker.set_trial_state_values(self.running[-1], TrialState.RUNNING)

    def pause(self, which: int) -> None:
        """After another epoch, as any trial is."""
        if self.running:
            self.epoch += 1
            self.paused.append(self.running.pop(which % len(self.running)))
            self.worker.pause(self.paused[-1], self.epoch)

    def resume(self, which: int) -> None:
        if self.paused:
            self.running.append(self.paused.pop(which % len(self.paused)))
            assert self.worker.resume(self.running[-1])

    def end(self, _: int) -> None:
        """The study's end, as its driver stores it."""
        assert len(list(prune_paused(self.worker, self.study))) == len(self.paused)
        self.pruned += self.paused
        self.paused = []

    def enlarge(self, _: int) -> None:
        """A larger budget; Optuna's cache takes a finished trial for finished for ever, so it begins anew."""
        self.budget += 1
        set_budgets(self.worker, self.study, {BUDGET_ATTR: None, EPOCHS_ATTR: self.budget})
        self.paused += self.pruned
        self.pruned = []
        self.optunas = _CachedStorage(self.backends[1])

    def fork(self) -> None:
        """A new trial takes the place of a paused one, which the same transaction prunes."""
        fork: Forked = {"parent": 0, "epoch": 1, "replaces": 0}
        with self.worker.granting(Grant(self.study, {"number": 0, "until": None, "why": {}}, fork=fork)):
            self.running.append(self.worker.create_new_trial(self.study))

    def look(self, which: int) -> None:
        states = ASKED[which]
        ours = self.ours.get_all_trials(self.study, states=states)
        assert ours == self.optunas.get_all_trials(self.study, states=states)
        assert ours == self.worker.get_all_trials(self.study, states=states)
        for trial in self.worker.get_all_trials(self.study):
            assert self.ours.get_trial(trial._trial_id) == trial


@contextmanager
def world(ready: Path) -> Iterator[World]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ready, Path(folder) / "study.db")
        made = World(f"sqlite:///{folder}/study.db")
        try:
            yield made
        finally:
            made.close()


@quick(8)
@given(STEPS)
def test_any_interleaving_is_seen_as_optunas_cache_sees_it(
    ready_sqlite_file: Path, steps: list[tuple[str, int]]
) -> None:
    with world(ready_sqlite_file) as made:
        for name, argument in steps:
            getattr(made, name)(argument)
        for which in (*range(len(ASKED)), *reversed(range(len(ASKED)))):
            made.look(which)


def test_finished_trials_are_read_once_and_running_ones_not_at_all(
    ready_sqlite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(ready_sqlite_file) as made:
        read: list[set[int]] = []
        original = reader.whole_trials

        def counted(conn: sa.Connection, rows: Sequence[TrialRow]) -> list[FrozenTrial]:
            read.append({row.trial_id for row in rows})
            return original(conn, rows)

        monkeypatch.setattr(reader, "whole_trials", counted)
        for _ in range(4):
            made.create(0)
        made.finish(0)
        for _ in range(3):
            made.ours.get_all_trials(made.study, deepcopy=False, states=(TrialState.COMPLETE,))
        made.finish(3)
        made.ours.get_all_trials(made.study, deepcopy=False, states=(TrialState.COMPLETE,))
        assert [len(ids) for ids in read] == [1, 0, 0, 1]
        assert not read[0] & read[3]


def test_a_paused_trial_is_read_once_until_it_has_been_resumed(
    ready_sqlite_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(ready_sqlite_file) as made:
        read: list[int] = []
        original = reader.whole_trials

        def counted(conn: sa.Connection, rows: Sequence[TrialRow]) -> list[FrozenTrial]:
            read.append(len(rows))
            return original(conn, rows)

        monkeypatch.setattr(reader, "whole_trials", counted)
        made.create(0)
        made.create(0)
        made.pause(0)
        looks = [made.ours.get_all_trials(made.study, deepcopy=False) for _ in range(2)]
        assert read == [2, 1], "the running one alone is read again"
        assert looks[0] == looks[1]
        made.resume(0)
        made.report(1)
        made.pause(1)
        assert made.ours.get_all_trials(made.study)[0].intermediate_values == {1: 1.0}
        assert read == [2, 1, 2]


def test_a_trial_that_paused_and_ended_unseen_is_known_once(ready_sqlite_file: Path) -> None:
    with world(ready_sqlite_file) as made:
        made.create(0)
        made.create(0)
        made.ours.get_all_trials(made.study)
        made.pause(0)
        made.resume(0)  # this change of a paused trial is not asked for as long as none has been seen
        made.running.sort(reverse=True)
        made.finish(3)  # the second one
        made.pause(0)
        made.resume(0)
        made.finish(3)
        made.create(0)
        made.pause(0)
        looks = [[trial.number for trial in made.ours.get_all_trials(made.study)] for _ in range(3)]
        assert looks == 3 * [[0, 1, 2]]


@pytest.mark.parametrize("asked", [None, FINISHED])
def test_a_trial_that_a_larger_budget_has_reopened_is_read_again(ready_sqlite_file: Path, asked: Any) -> None:
    with world(ready_sqlite_file) as made:
        made.create(0)
        made.report(1)
        made.pause(0)
        made.end(0)
        (pruned,) = made.ours.get_all_trials(made.study, states=asked)
        assert pruned.state == TrialState.PRUNED
        made.enlarge(0)
        assert not made.ours.get_all_trials(made.study, states=FINISHED)
        assert made.ours.get_trial(pruned._trial_id).state == TrialState.RUNNING
        made.resume(0)
        made.report(2)
        made.finish(3)
        (complete,) = made.ours.get_all_trials(made.study, states=asked)
        assert (complete.state, complete.last_step) == (TrialState.COMPLETE, 2)
        assert made.ours.get_trial(pruned._trial_id) == complete


@pytest.mark.parametrize("statement", range(3))
def test_a_fork_is_never_seen_beside_the_paused_trial_that_it_has_replaced(
    ready_sqlite_file: Path, statement: int
) -> None:
    """Wherever within a look it is stored: who saw both would replace the paused trial a second time."""
    with world(ready_sqlite_file) as made:
        made.worker.begin_grants(made.study)
        made.create(0)
        made.pause(0)
        made.ours.get_all_trials(made.study)
        said = itertools.count()

        def fork_before(*_: object) -> None:
            if next(said) == statement:
                made.fork()

        sa.event.listen(made.backends[0].engine, "before_cursor_execute", fork_before)
        for _ in range(3):
            first, *forks = made.ours.get_all_trials(made.study)
            assert paused_at(first) is None or not forks
        assert forks


def test_a_copy_may_be_changed_without_changing_the_cache(ready_sqlite_file: Path) -> None:
    with world(ready_sqlite_file) as made:
        made.create(0)
        made.finish(0)
        made.ours.get_all_trials(made.study, states=FINISHED)[0].user_attrs["mine"] = 1
        assert made.ours.get_all_trials(made.study, states=FINISHED)[0].user_attrs == {}


def test_a_parameter_of_a_known_distribution_is_stored_without_a_look(ready_url: str) -> None:
    """A trial's process is new, and would look up what the trials before it had, for each parameter."""
    rate = FloatDistribution(1e-3, 1.0, log=True)
    storage = open_storage(ready_url, create=False, owner=Owner.current())
    cache = StudyCache(storage)
    study = cache.create_new_study([StudyDirection.MINIMIZE], "study")
    cache.expect(study, {"lr": rate})
    trial = cache.create_new_trial(study)
    said: list[str] = []
    sa.event.listen(storage.engine, "before_cursor_execute", lambda *arguments: said.append(arguments[2]))
    cache.set_trial_param(trial, "lr", 0.5, rate)
    assert [text.split()[0] for text in said if text != "BEGIN IMMEDIATE"] == ["INSERT"]
    assert storage.get_trial(trial).params == {"lr": 0.5}
    with pytest.raises(ValueError, match="Cannot set different distribution kind"):
        cache.set_trial_param(trial, "lr", 1, IntDistribution(1, 2))
    storage.close()
