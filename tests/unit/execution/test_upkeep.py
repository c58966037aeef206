"""What a supervisor settles beside its workers."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

import pytest
import sqlalchemy as sa
from optuna.trial import TrialState

from hpo.execution.messages import Notice
from hpo.execution.upkeep import Upkeep
from hpo.storage import settling
from hpo.storage.ledger import Lease, RunningTrial
from hpo.storage.outage import DatabaseAwayError
from hpo.storage.settling import Settled, Verdict
from hpo.storage.study_storage import StudyStorage
from hpo.study.outcome import Outcome
from hpo.study.taking import Taker
from tests.support.owners import dead_owner
from tests.support.studies import Studies


def test_the_verdict_over_a_trial_whose_process_was_killed_and_lives_on_waits(studies: Studies) -> None:
    """For its end: it sleeps in the kernel."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    heard: list[Settled | Notice] = []
    with studies.open(views=2) as (view, other):
        assert process.pid is not None
        assert other.storage.owner is not None
        other.storage.owner = other.storage.owner.in_process(process.pid)
        assert isinstance(Taker(other).take(), Lease)
        upkeep = Upkeep(view, lambda _, said: heard.append(said))
        now, verdict = time.monotonic(), Verdict(Outcome.TIMED_OUT, "it took too long", final=True)
        upkeep.settle("worker-1", process.pid, verdict)
        upkeep.look(now)
        assert (heard, upkeep.running()) == ([], 1)
        process.kill()
        process.join()
        upkeep.look(now + upkeep.interval)
    assert heard == [Settled(0, 1, TrialState.FAIL, Outcome.TIMED_OUT, "it took too long")]
    assert (upkeep.settled(), upkeep.settled()) == (heard, [])


@pytest.mark.parametrize("how", ["looks", "settles"])
def test_what_was_settled_before_the_database_went_away_is_heard(
    how: str, studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three trials whose workers are dead, the second can't be stored at first."""
    heard: list[Settled | Notice] = []
    stored: list[int] = []

    def store(storage: StudyStorage, running: RunningTrial, *given: Any, **options: Any) -> Settled | None:
        stored.append(running.number)
        if len(stored) == 2:
            raise DatabaseAwayError("no route")
        return settle(storage, running, *given, **options)

    settle = settling._settle
    monkeypatch.setattr(settling, "_settle", store)
    with studies.open(views=2) as (view, other):
        assert other.storage.owner is not None
        other.storage.owner = dead = dead_owner(code=other.storage.owner.code)
        assert all(isinstance(Taker(other).take(), Lease) for _ in range(3))
        upkeep, now = Upkeep(view, lambda _, said: heard.append(said)), time.monotonic()
        if how == "settles":
            upkeep.settle("worker-1", dead.pid, settling.GONE)
        upkeep.look(now)
        upkeep.look(now + upkeep.interval)
        upkeep.look(now + 2 * upkeep.interval)
    assert [said.number for said in heard if isinstance(said, Settled)] == [0, 1, 2]
    assert [said.number for said in upkeep.settled()] == ([0, 1, 2] if how == "settles" else [])


@pytest.mark.parametrize("quota", ["null", "1GiB"])
def test_the_database_is_away_until_it_answers(
    quota: str, studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an agent does without it, such as keeping to a quota, says nothing of it."""
    heard: list[str] = []
    with studies.open(f"run.disk_quota={quota}") as (view,):
        upkeep, now = Upkeep(view, lambda _, said: heard.append(str(said))), time.monotonic()
        with monkeypatch.context() as patch:

            def fail(_: object) -> None:
                raise DatabaseAwayError("no route")

            patch.setattr(sa.Engine, "connect", fail)
            for turn in range(3):
                upkeep.look(now + turn * upkeep.interval)
                assert upkeep.away
        upkeep.look(now + 3 * upkeep.interval)
        assert not upkeep.away
    unreachable, reachable = heard
    assert "the database is unreachable; waiting for it: no route" in unreachable
    assert "the database is reachable again" in reachable
