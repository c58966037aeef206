"""A study's columns, kept from look to look, are those of all its trials read anew, and decide the same."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.study import StudyDirection
from optuna.trial import TrialState

from hpo.search.axes import Floats
from hpo.search.schedulers.asha import Asha
from hpo.search.schedulers.columns import Columns, columns_of
from hpo.search.schedulers.curves import affordable, curves_of, horizon_of, until
from hpo.search.schedulers.hyperband import Hyperband
from hpo.search.schedulers.rungs import climbers_of, ladder
from hpo.search.schedulers.scheduler import New, Next, Resume, Standing, Wait, Why
from hpo.search.schedulers.seen import Curve, Seen
from hpo.storage import id_lists
from hpo.storage import progress as storage_progress
from hpo.storage.attributes import CONSTRAINT_ATTR, GRANTED_ATTR, NEARER_ATTR, OUTCOME_ATTR, SAME_AS_ATTR
from hpo.storage.grants import Grant
from hpo.storage.ledger import Owner
from hpo.storage.opening import open_storage
from hpo.storage.study_end import prune_paused
from hpo.storage.study_storage import StudyStorage
from hpo.study.progress import StudyProgress
from hpo.study.standing import mended, seen
from tests.support.standings import standings
from tests.unit.trainer.support import quick

pytestmark = pytest.mark.full

VALUES = (0.1, 0.2, 0.2, 0.7, -1.0, math.inf, math.nan, 3.0)
EPOCHS = (1, 2, 3, 9)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["create", "report", "report", "measure", "pause", "pause", "resume", "finish", "requeue", "look"]
        ),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    min_size=4,
    max_size=40,
)


class World:
    """A worker whose trials pause and resume, and one that looks at them from time to time."""

    def __init__(self, worker: StudyStorage, looker: StudyStorage) -> None:
        self.worker, self.looker = worker, looker
        self.study = worker.create_new_study([StudyDirection.MINIMIZE], "study")
        worker.begin_grants(self.study)
        self.progress = StudyProgress(looker, self.study, minimize=True)
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.paused: list[int] = []

    def granting(self, until: int) -> Any:
        number = self.worker.get_study_user_attrs(self.study)[GRANTED_ATTR]
        granted = {"number": number, "until": until or None, "why": {"kind": "breadth"}}
        return self.worker.granting(Grant(self.study, granted))  # type: ignore[arg-type]

    def create(self, which: int, _: int) -> None:
        with self.granting(which):
            self.running.append(self.worker.create_new_trial(self.study))

    def report(self, which: int, value: int) -> None:
        if self.running:
            trial = self.running[value % len(self.running)]
            self.worker.set_trial_intermediate_value(trial, which + 1, VALUES[value % len(VALUES)])

    def measure(self, which: int, value: int) -> None:
        """Two bounds, of which a trial has come nearer to none or some since its first epoch."""
        if self.running:
            trial = self.running[which % len(self.running)]
            for name, limit in (("acc", 3), ("parameters", 6)):
                self.worker.set_trial_system_attr(trial, f"{CONSTRAINT_ATTR}{name}", value - limit)
            if value % 3:
                nearer = {"acc": which % 2 == 0, "parameters": which == 9}
                self.worker.set_trial_system_attr(trial, NEARER_ATTR, nearer)

    def pause(self, which: int, epoch: int) -> None:
        if self.running:
            self.paused.append(self.running.pop(which % len(self.running)))
            self.worker.pause(self.paused[-1], epoch)

    def resume(self, which: int, epoch: int) -> None:
        if self.paused:
            self.running.append(self.paused.pop(which % len(self.paused)))
            with self.granting(epoch):
                assert self.worker.resume(self.running[-1])

    def finish(self, which: int, value: int) -> None:
        if self.running:
            state = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)[which % 3]
            trial = self.running.pop(which % len(self.running))
            if value % 2:
                self.worker.set_trial_user_attr(trial, OUTCOME_ATTR, ("diverged", "error", "complete")[value % 3])
            if value % 5 == 1:
                self.worker.set_trial_user_attr(trial, SAME_AS_ATTR, 0)
            values = [VALUES[(which // 3 + value) % 6]] if state == TrialState.COMPLETE else None
            self.worker.set_trial_state_values(trial, state, values)

    def requeue(self, which: int, take: int) -> None:
        if self.running and take % 2:
            self.waiting.append(self.running.pop(which % len(self.running)))
            self.worker.requeue(self.waiting[-1])
        elif self.waiting:
            self.running.append(self.waiting.pop(which % len(self.waiting)))
            assert self.worker.set_trial_state_values(self.running[-1], TrialState.RUNNING)

    def look(self, which: int = 0, value: int = 0) -> None:
        stored = self.worker.get_all_trials(self.study)
        trials = mended([seen(trial) for trial in stored], stored)
        found = self.progress.look()
        same(found, columns_of(trials, minimize=True))
        running = [trial for trial in trials if trial.state == "running"]
        if running:
            self.look_where_a_grant_ends(found, trials, running[which % len(running)], value)

    def look_where_a_grant_ends(self, found: Columns, trials: list[Seen], here: Seen, value: int) -> None:
        """With values that are not stored yet: as those that are, after them, or after epochs without one."""
        first = max(0, here.epochs - value % 2 + value // 2 % 4)
        values = {first + more: VALUES[(value * more) % len(VALUES)] for more in range(1, value % 4 + 1)}
        shown = replace(here, state="paused", values={**here.values, **values})
        expected = columns_of([shown if trial is here else trial for trial in trials], minimize=True)
        ours = found.with_paused(here.number, values, minimize=True)
        if set(values) & set(here.values):  # the best of the values that they take the place of counts with them
            ours = replace(ours, best=expected.best)
        same(ours, expected)
        same(found, columns_of(trials, minimize=True))


def same(ours: Columns, expected: Columns) -> None:
    for each in fields(Columns):
        if each.name != "read_at":
            np.testing.assert_array_equal(getattr(ours, each.name), getattr(expected, each.name), each.name)
    for epoch in EPOCHS:
        come = ours.epochs >= epoch
        np.testing.assert_array_equal(finite(ours.read_at(epoch)[come]), finite(expected.read_at(epoch)[come]))


def finite(values: Floats) -> Floats:
    """With NaN for what is not finite: one loss to a scheduler."""
    return np.where(np.isfinite(values), values, math.nan)


@contextmanager
def world(url: str) -> Iterator[World]:
    worker, looker = open_storage(url, create=False, owner=Owner.current()), open_storage(url, create=False)
    try:
        yield World(worker, looker)
    finally:
        worker.close()
        looker.close()


@quick(12)
@given(STEPS)
def test_columns_follow_any_interleaving(ready_sqlite_file: Path, steps: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ready_sqlite_file, Path(folder) / "study.db")
        with world(f"sqlite:///{folder}/study.db") as made:
            for name, *arguments in [*steps, ("look", 0, 0)]:
                getattr(made, name)(*arguments)


def test_columns_follow_pauses_on_every_database(ready_url: str) -> None:
    """Also where a trial has paused again between two looks, and where the study's end has pruned it."""
    with world(ready_url) as made:
        pauses(made)


def test_who_asks_after_epochs_without_a_value_stands_at_them_with_the_last_one_before(
    ready_sqlite_file: Path, tmp_path: Path
) -> None:
    shutil.copy(ready_sqlite_file, tmp_path / "study.db")
    with world(f"sqlite:///{tmp_path}/study.db") as made:
        made.create(3, 0)
        made.report(1, 0)  # after its second epoch
        found = made.progress.look()
        for unstored in ({}, {4: 7.0}):
            assert found.with_paused(0, unstored, minimize=True).read_at(3).tolist() == [VALUES[0]]
        assert found.with_paused(0, {3: 5.0}, minimize=True).read_at(3).tolist() == [5.0]


def test_one_that_has_ended_outside_of_a_bound_stands_at_its_rungs_as_it_was(
    ready_sqlite_file: Path, tmp_path: Path
) -> None:
    shutil.copy(ready_sqlite_file, tmp_path / "study.db")
    with world(f"sqlite:///{tmp_path}/study.db") as made:
        made.create(1, 0)
        made.report(0, 0)
        made.measure(0, 4)  # it violates a bound, and has come nearer to it
        made.finish(0, 0)
        made.look()
        climbers = climbers_of(Standing(read=list, read_columns=made.progress.look))
        assert climbers.at(1).tolist() == [VALUES[0]]
        assert climbers.violating.all()
        assert not climbers.resumable.any()


def test_one_that_diverged_within_an_epoch_stands_at_its_end(ready_sqlite_file: Path, tmp_path: Path) -> None:
    """Without any report, after its first one, and by its first one; two more trials are sound."""
    shutil.copy(ready_sqlite_file, tmp_path / "study.db")
    with world(f"sqlite:///{tmp_path}/study.db") as made:
        for reports in ([], [0.1], [math.nan], [0.2], [0.3]):
            made.create(1, 0)
            trial = made.running[-1]
            for epoch, value in enumerate(reports, start=1):
                made.worker.set_trial_intermediate_value(trial, epoch, value)
        for trial in made.running[:3]:
            made.worker.set_trial_user_attr(trial, OUTCOME_ATTR, "diverged")
            made.worker.set_trial_state_values(trial, TrialState.COMPLETE, [math.inf])
        del made.running[:3]
        made.look()
        now = Standing(read=list, read_columns=made.progress.look)
        climbers = climbers_of(now)
        assert climbers.done.tolist() == [1, 2, 1, 1, 1]
        assert climbers.at(1).tolist() == [math.inf, 0.1, math.inf, 0.2, 0.3]
        assert climbers.at(2).tolist()[1] == math.inf
        assert now.columns.epochs.tolist() == [0, 1, 1, 1, 1], "no more than it has finished"
        assert now.incumbent == 0.2


def test_columns_are_the_same_read_in_parts(
    ready_sqlite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(id_lists, "AT_ONCE", 2)
    monkeypatch.setattr(storage_progress, "_BLOCK", 3)
    shutil.copy(ready_sqlite_file, tmp_path / "study.db")
    with world(f"sqlite:///{tmp_path}/study.db") as made:
        pauses(made)
        for _ in range(2):  # five that are known, and new ones with them
            for _ in range(5):
                made.create(1, 0)
                made.report(0, len(made.running) - 1)
            made.look()
        made.progress.forget()
        made.look()


def pauses(made: World) -> None:
    for _ in range(5):
        made.create(1, 0)
        made.report(0, len(made.running) - 1)
    for which in range(4):
        made.pause(0, 1)
        made.look(which)
    made.resume(2, 3)
    made.report(2, 1)
    made.pause(1, 3)
    made.look()
    made.resume(0, 0)
    made.look()
    assert len(list(prune_paused(made.worker, made.study))) == 3
    made.look()


def test_what_is_paused_or_finished_is_not_read_again(
    ready_sqlite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(ready_sqlite_file, tmp_path / "study.db")
    with world(f"sqlite:///{tmp_path}/study.db") as made:
        for _ in range(6):
            made.create(1, 0)
        for _ in range(3):
            made.pause(0, 1)
        made.finish(0, 0)
        made.look()
        asked: list[list[int]] = []
        take_in = made.progress._take_in

        def noted(read: Mapping[str, Any], reports: Sequence[Any]) -> None:
            asked.append(read["number"].tolist())
            take_in(read, reports)

        monkeypatch.setattr(made.progress, "_take_in", noted)
        made.look()
        made.resume(0, 3)
        made.create(1, 0)
        made.look()
        assert asked == [[4, 5], [0, 4, 5, 6]]


# ---------------------------------------------------------------------------- decisions, with curves in Python


def promoted(curves: Sequence[Curve], rungs: Sequence[int], factor: int) -> tuple[Curve, int] | None:
    """As the algorithm reads: sort those who came to a rung, and take the first of the best that waits."""
    for rung, after in reversed(list(pairwise(rungs))):
        there = [curve for curve in curves if curve.done >= rung]
        ranked = sorted(there, key=lambda each: (not each.seen.feasible, each.at(rung), each.number))
        for curve in ranked[: len(there) // factor]:
            if curve.done < after and curve.resumable:
                return curve, after
    return None


def expected(scheduler: Asha | Hyperband, now: Standing) -> Next:
    """What the scheduler answers, worked out trial by trial."""
    # One that failed before its first report has come to no rung; a model is shown it as if it had diverged.
    curves = [curve for curve in curves_of(now) if curve.seen.values or not curve.steps]
    rungs = ladder(horizon_of(now, curves), scheduler.factor, scheduler.first_rung)
    upcoming = max((trial.number for trial in now.trials), default=-1) + 1

    def bracket(number: int) -> int:
        return scheduler.bracket(now, number, len(rungs)) if isinstance(scheduler, Hyperband) else 0

    if now.epochs_left == 0:
        return Wait()
    for curve in sorted(curves, key=lambda each: each.number):
        if curve.resumable and curve.done < (rung := rungs[bracket(curve.number)]):
            return Resume(curve.number, until(now, curves, affordable(now, curve.done, rung)), Why("breadth"))
    for first in range(len(rungs)):
        if found := promoted(
            [curve for curve in curves if bracket(curve.number) == first], rungs[first:], scheduler.factor
        ):
            curve, rung = found
            return Resume(curve.number, until(now, curves, affordable(now, curve.done, rung)), Why("promotion"))
    if now.new_left == 0:
        return Wait()
    return New(None, until(now, curves, affordable(now, 0, rungs[bracket(upcoming)])), Why("breadth"))


@quick(150)
@given(standings(), st.sampled_from([Asha(), Asha(2, 2), Hyperband(), Hyperband(2)]), st.booleans())
def test_decisions_are_those_by_whole_curves(now: Standing, scheduler: Asha | Hyperband, bounded: bool) -> None:
    if bounded:
        trials = [
            replace(each, feasible=each.number % 3 != 0, mends=each.number % 6 == 0 and each.state != "ended")
            for each in now.trials
        ]
        now = replace(now, read=lambda: trials)
    assert scheduler.next(now) == expected(scheduler, now)
    sound = [
        each for each in now.own if each.feasible and each.values and math.isfinite(each.values[max(each.values)])
    ]
    incumbents = [best for each in sound if (best := each.best(min if now.minimize else max)) is not None]
    assert now.incumbent == ((min if now.minimize else max)(incumbents) if incumbents else None)
    assert now.decision == sum(len(each.kinds) for each in now.own)
    if now.n_epochs is not None:
        assert now.epochs_left == max(0, now.n_epochs - sum(claimed(now, each) for each in now.own))
    for each in now.own:
        assert now.epochs_of(each.number) == each.epochs
        assert now.is_paused(each.number) == (each.state == "paused")


def claimed(now: Standing, trial: Any) -> int:
    """Epochs of a trial that count against the budget: those it has trained, and those it may still train."""
    if trial.taken_over:
        return 0
    if trial.state in ("paused", "ended") or not (trial.kinds or trial.state == "running"):
        return int(trial.epochs - trial.inherited)
    granted = now.horizon if trial.until is None else trial.until
    return int(max(trial.epochs, granted or 0) - trial.inherited)


def test_values_whose_reading_breaks_off_are_read_at_the_next_look(
    ready_sqlite_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(*_: Any) -> Any:
        raise ConnectionError

    shutil.copy(ready_sqlite_file, tmp_path / "study.db")
    storage = open_storage(f"sqlite:///{tmp_path / 'study.db'}", create=False, owner=Owner.current())
    with closing(storage):
        world = World(storage, storage)
        world.create(0, 0)
        world.report(0, 0)
        columns = world.progress.look()
        with monkeypatch.context() as patch:
            patch.setattr("hpo.study.progress.reports_at", break_off)
            with pytest.raises(ConnectionError):
                columns.read_at(1)
        assert columns.read_at(1).tolist() == [VALUES[0]]
