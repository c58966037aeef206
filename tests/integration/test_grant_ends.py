"""What goes wrong while a worker decides what a process trains, in real processes."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpo.execution.launchers.forkserver import start_fork_server
from hpo.execution.launchers.local import LocalLauncher
from hpo.execution.messages import Failed
from hpo.execution.supervisor import Ending, Supervisor
from hpo.search.schedulers.granting import GrantScheduler
from hpo.search.schedulers.scheduler import New, Next, Resume, Standing, Wait
from hpo.storage.outage import DatabaseError
from hpo.study.folders import worker_logs
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import outcome_of
from hpo.trial.resources import deal
from tests.support.commands import MODEL
from tests.support.studies import Studies

pytestmark = pytest.mark.full

#: A process with a thread can't be forked.
THREAD = "\nimport threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"


@dataclass(frozen=True)
class Granting(GrantScheduler):
    """Grants each trial two epochs, then the rest; something goes wrong where the first grant ends.

    Attributes:
        database: The study's file.
    """

    database: Path

    def first(self, standing: Standing) -> int | None:
        """Two epochs."""
        return 2

    def next(self, standing: Standing) -> Next:
        """The rest for who asks or is paused, then new trials."""
        mark = self.database.with_name("gone wrong")
        if standing.here is not None and not mark.exists():
            mark.touch()
            self.go_wrong()
        if standing.here is not None:
            return Resume(standing.here)
        if standing.paused:
            return Resume(standing.paused[0].number)
        return Wait() if standing.new_left == 0 else New(until=2)

    def go_wrong(self) -> None:
        raise NotImplementedError


class Failing(Granting):
    """The database fails."""

    def go_wrong(self) -> None:
        raise DatabaseError("the disk is full")


class Losing(Granting):
    """Another process takes the trial for lost, and requeues it."""

    def go_wrong(self) -> None:
        with closing(sqlite3.connect(self.database)) as database, database:
            database.execute("UPDATE hpo_attempts SET ended_at = 1.0, outcome = 'lost' WHERE ended_at IS NULL")
            database.execute("UPDATE trials SET state = 'WAITING' WHERE state = 'RUNNING'")


class Slow(Granting):
    """The decision takes longer than a trial may go without a batch."""

    def go_wrong(self) -> None:
        time.sleep(8)


@dataclass(frozen=True)
class Terminating(Granting):
    """A worker gets a SIGTERM while it takes its first trial.

    Attributes:
        supervisor: Id of the process that has started it.
    """

    supervisor: int

    def next(self, standing: Standing) -> Next:
        """As of `Granting`."""
        mark = self.database.with_name("terminated")
        if os.getpid() != self.supervisor and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGTERM)
        return super().next(standing)

    def go_wrong(self) -> None:
        """Nothing more does."""


def run(view: OpenStudy, scheduler: Granting) -> tuple[Ending, list[str]]:
    """Run a study with one worker; how it ended, and why workers could not continue."""
    heard: list[object] = []
    start_fork_server(view.spec)
    launcher = LocalLauncher(deal(["cpu"], 1), worker_logs(view.spec))
    opened = OpenStudy(**{**vars(view), "scheduler": scheduler})
    ending = Supervisor(opened, launcher, lambda _, message: heard.append(message)).run()
    return ending, [message.message for message in heard if isinstance(message, Failed)]


@pytest.mark.parametrize(("kind", "outcome"), [(Failing, "requeued"), (Losing, "lost")])
def test_it_is_the_trials_trouble_and_not_the_workers(
    kind: type[Granting], outcome: str, studies: Studies
) -> None:
    with studies.open("study.n_trials=2", "trainer.max_epochs=4") as (view,):
        assert run(view, kind(view.spec.output_dir / "study.db")) == (Ending.DONE, [])
        for trial in view.study.get_trials():
            assert (outcome_of(trial), sorted(trial.intermediate_values)) == ("complete", [1, 2, 3, 4])
        first = view.storage.attempts_of_trial(view.study.get_trials()[0]._trial_id)
        assert [each.outcome for each in first] == [outcome, "complete"]


def test_the_time_of_a_decision_is_not_one_without_progress(studies: Studies) -> None:
    with studies.open("study.n_trials=1", "trainer.max_epochs=4", "run.no_progress_timeout=4") as (view,):
        assert run(view, Slow(view.spec.output_dir / "study.db")) == (Ending.DONE, [])
        (trial,) = view.study.get_trials()
        assert (outcome_of(trial), sorted(trial.intermediate_values)) == ("complete", [1, 2, 3, 4])


def test_a_worker_that_trains_itself_hears_a_sigterm_that_came_while_it_took_the_trial(studies: Studies) -> None:
    with studies.open("study.n_trials=1", "trainer.max_epochs=4", code=MODEL + THREAD) as (view,):
        scheduler = Terminating(view.spec.output_dir / "study.db", os.getpid())
        assert run(view, scheduler) == (Ending.DONE, [])
        (trial,) = view.study.get_trials()
        attempts = view.storage.attempts_of_trial(trial._trial_id)
        assert [each.outcome for each in attempts] == ["requeued", "complete"]
        assert attempts[0].pid != attempts[1].pid
