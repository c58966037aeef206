"""Who is alive, and what the ledger says after any order of claims, ends and takeovers."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy as sa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from optuna.storages._rdb import models
from sqlalchemy import orm

from hpo.errors import BudgetExhaustedError
from hpo.storage import beats, ledger, machine
from hpo.storage.attributes import BUDGET_ATTR, EPOCHS_ATTR, IMPORTED_ATTR, PAUSED_ATTR
from hpo.storage.beats import Beat, Heartbeat
from hpo.storage.budget import Room, budgets_of, claimable, make_room, refuse_beyond_budget, store_budgets
from hpo.storage.ledger import ATTEMPTS, Lease, Owner
from hpo.storage.machine import host_name, is_alive
from hpo.storage.optuna_private import REPORTS, TRIAL_SYSTEM_ATTRS, TRIAL_USER_ATTRS
from tests.support.commands import wait_until


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def alive(owner: Owner, **changes: Any) -> bool | None:
    seen = vars(owner) | changes
    return is_alive(seen["host"], seen["boot_id"], seen["pid"], seen["start_time"])


def test_the_current_process_is_alive() -> None:
    me = Owner.current(worker="w0", device="cuda:1")
    assert (me.pid, me.worker, me.device) == (os.getpid(), "w0", "cuda:1")
    assert me == Owner.current(worker="w0", device="cuda:1")
    assert alive(me) is True


def test_death_is_told_from_what_only_looks_like_it() -> None:
    me = Owner.current()
    assert alive(me, start_time=me.start_time + 1) is False, "the id belongs to another process by now"
    assert alive(me, boot_id="another boot") is None, "an earlier one of this machine, or another machine"
    assert alive(me, host="elsewhere") is None
    assert alive(me, host="elsewhere", boot_id="another boot", pid=1) is None
    assert alive(me, start_time=0.0) is None, "it could not see itself, and others may not see it either"


def test_where_the_clock_tells_a_start_the_clock_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_HAS_PROC", False)  # as on macOS
    me = Owner.current()
    assert alive(me, start_time=me.start_time + 2) is True
    assert alive(me, start_time=me.start_time + 60) is False


def test_a_stopped_process_lives_and_a_zombie_does_not(child: "subprocess.Popen[bytes]") -> None:
    start = machine.process_start(child.pid)
    assert start is not None
    owner = Owner(host_name(), machine.boot_id(), child.pid, start)
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)
    assert alive(owner) is True
    child.kill()
    wait_until(lambda: not alive(owner))
    assert child.returncode is None, "not waited for: a zombie"
    assert Path(f"/proc/{child.pid}").exists()
    assert alive(owner) is False
    child.wait()
    assert alive(owner) is False


def test_long_labels_are_cut_to_what_every_database_takes() -> None:
    assert len(Owner.current(worker="w" * 1000).worker) == 255


# ---------------------------------------------------------------------- heartbeat


LEASE = Lease(7, 1)


def test_the_heartbeat_survives_whatever_goes_wrong(caplog: pytest.LogCaptureFixture) -> None:
    answers: Iterator[Exception | list[Lease]] = iter(
        [sa.exc.OperationalError("update", {}, Exception("gone")), KeyError(1), [], [LEASE], [LEASE], [], [LEASE]]
    )
    beats: list[int] = []
    lost_leases: list[Lease] = []

    def beat() -> list[Lease]:
        beats.append(1)
        answer = next(answers, [])
        if isinstance(answer, Exception):
            raise answer
        return answer

    heart = Heartbeat(beat, interval=0.005, on_lost=lost_leases.append).start()
    wait_until(lambda: len(beats) >= 9)
    heart.stop()
    assert lost_leases == [LEASE, LEASE], "once for each loss, not for each beat"
    (said,) = caplog.messages  # once for each time of trouble
    assert said.startswith("a sign of life could not be given")
    count = len(beats)
    time.sleep(0.03)
    assert len(beats) == count
    heart.stop()


# ---------------------------------------------------------------------- any order of events

_TRIALS = st.integers(1, 3)
_OWNER = Owner("host", "boot", 1, 1.0)


def with_three_trials() -> sa.Engine:
    engine = sa.create_engine("sqlite://", poolclass=sa.StaticPool)
    models.BaseModel.metadata.create_all(engine)
    ledger.metadata.create_all(engine)
    with engine.begin() as conn:
        conn.execute(sa.text("INSERT INTO studies VALUES (1, 'a')"))
        for trial in (1, 2, 3):
            conn.execute(sa.text(f"INSERT INTO trials VALUES ({trial}, {trial}, 1, 'RUNNING', NULL, NULL)"))
    return engine


class LedgerMachine(RuleBasedStateMachine):
    """Compares the table with a model: for each trial the outcomes of its attempts, None while open."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = with_three_trials()
        self.conn = self.engine.connect()
        self.outcomes: dict[int, list[str | None]] = {1: [], 2: [], 3: []}

    def teardown(self) -> None:
        self.conn.close()
        self.engine.dispose()

    def is_lease(self, trial: int, attempt: int) -> bool:
        outcomes = self.outcomes[trial]
        return attempt == len(outcomes) > 0 and outcomes[-1] is None

    @rule(trial=_TRIALS)
    def claim(self, trial: int) -> None:
        outcomes = self.outcomes[trial]
        if outcomes and outcomes[-1] is None:
            outcomes[-1] = "lost"
        outcomes.append(None)
        assert ledger.claim(self.conn, trial, _OWNER) == len(outcomes)

    @rule(trial=_TRIALS, attempt=st.integers(1, 4), outcome=st.sampled_from(["complete", "requeued", "lost"]))
    def end(self, trial: int, attempt: int, outcome: str) -> None:
        expected = self.is_lease(trial, attempt)
        if expected:
            self.outcomes[trial][-1] = outcome
        assert ledger.end(self.conn, trial, attempt, outcome) is expected

    @rule(trial=_TRIALS)
    def end_whatever_is_open(self, trial: int) -> None:
        ledger.end_open(self.conn, trial, "fail")
        self.outcomes[trial] = [outcome or "fail" for outcome in self.outcomes[trial]]

    @rule(trial=_TRIALS, attempt=st.integers(1, 4))
    def beat(self, trial: int, attempt: int) -> None:
        lease = Lease(trial, attempt)
        assert beats.give(self.conn, [Beat(lease, 1.0)]) == ([] if self.is_lease(*lease) else [lease])

    @rule(leases=st.sets(st.tuples(_TRIALS, st.integers(1, 4))))
    def beat_for_many(self, leases: set[Lease]) -> None:
        before = {(a.trial_id, a.attempt): a for a in ledger.attempts(self.conn, 1)}
        given = [Beat(Lease(*lease), 10.0 * lease[0] + lease[1]) for lease in leases]
        held = {lease for lease in leases if self.is_lease(*lease)}
        assert set(beats.give(self.conn, given)) == leases - held
        for after in ledger.attempts(self.conn, 1):
            lease = Lease(after.trial_id, after.attempt)
            if lease in held:
                assert after.seconds == 10.0 * lease.trial_id + lease.attempt
                assert after.beat_at >= before[lease].beat_at
            else:
                assert after == before[lease]

    @precondition(lambda self: any(self.outcomes.values()))
    @rule(trial=_TRIALS)
    def forget(self, trial: int) -> None:
        ledger.forget_trials(self.conn, sa.select(sa.literal(trial)))
        self.outcomes[trial] = []

    @invariant()
    def table_equals_model(self) -> None:
        rows = ledger.attempts(self.conn, 1)
        found = {trial: [a.outcome for a in rows if a.trial_id == trial] for trial in self.outcomes}
        assert found == self.outcomes
        for trial in self.outcomes:
            last = len(self.outcomes[trial])
            assert ledger.holds(self.conn, trial, last) is self.is_lease(trial, last)
            assert not ledger.holds(self.conn, trial, last - 1)
        assert all(a.started_at <= (a.ended_at or a.beat_at) for a in rows)


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=12, stateful_step_count=15, deadline=None, database=None)


def test_a_lease_is_that_of_one_process_until_it_is_handed_over_or_ends() -> None:
    """Where a connection breaks at a commit, the next try asks whether the last one got it, or another process."""
    engine = with_three_trials()
    changes: list[dict[str, Any]] = [{"host": "b"}, {"boot_id": "b"}, {"pid": 2}, {"start_time": 2.0}]
    others = [replace(_OWNER, **each) for each in changes]
    with engine.connect() as conn:
        attempt = ledger.claim(conn, 1, _OWNER)
        ledger.claim(conn, 2, others[0])
        assert ledger.is_held_by(conn, 1, attempt, _OWNER)
        assert not any(ledger.is_held_by(conn, 1, attempt, other) for other in others)
        assert not ledger.is_held_by(conn, 2, attempt, _OWNER)
        taker = replace(_OWNER, pid=2, start_time=2.0)
        assert ledger.hand_over(conn, 1, attempt, taker)
        assert ledger.is_held_by(conn, 1, attempt, taker)
        assert ledger.is_held_by(conn, 2, attempt, others[0])
        ledger.end(conn, 1, attempt, "requeued")
        assert not ledger.is_held_by(conn, 1, attempt, taker)
        assert not ledger.hand_over(conn, 1, attempt, _OWNER)
        assert ledger.has_ended_as(conn, 1, attempt, "requeued")
        assert not ledger.has_ended_as(conn, 1, attempt, "complete")
        assert not ledger.has_ended_as(conn, 1, attempt + 1, "requeued")
        assert not ledger.has_ended_as(conn, 2, attempt, "requeued")
    engine.dispose()


def test_what_is_asked_about_one_study_leaves_out_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_three_trials()
    with engine.connect() as conn:
        conn.execute(sa.text("INSERT INTO studies VALUES (2, 'b'), (3, 'c')"))
        conn.execute(sa.text("INSERT INTO trials VALUES (4, 0, 2, 'RUNNING', NULL, NULL)"))
        conn.execute(sa.text("INSERT INTO trials VALUES (5, 0, 3, 'COMPLETE', NULL, NULL)"))
        conn.execute(sa.text("UPDATE trials SET state = 'COMPLETE' WHERE trial_id = 3"))
        reports = [{"trial_id": trial, "step": 1, "intermediate_value": 1.0} for trial in (1, 3, 4)]
        conn.execute(sa.insert(REPORTS), [each | {"intermediate_value_type": "FINITE"} for each in reports])
        marks = [
            {"trial_id": trial, "key": key, "value_json": "1"} for trial, key in ((1, PAUSED_ATTR), (2, "other"))
        ]
        conn.execute(sa.insert(TRIAL_USER_ATTRS), marks)
        for trial in (1, 1, 2, 4):
            attempt = ledger.claim(conn, trial, _OWNER)
            if trial == 1:
                ledger.end(conn, trial, attempt, "paused", seconds=2.0 + attempt)

        assert [ledger.has_begun(conn, study) for study in (1, 2, 3)] == [True, True, False]
        assert [ledger.has_paused(conn, study) for study in (1, 2, 3)] == [True, False, False]
        assert [ledger.is_paused(conn, trial) for trial in (1, 2, 4)] == [True, False, False]
        running = [(each.trial_id, each.lease and each.lease[:2]) for each in ledger.running_trials(conn, 1)]
        assert running == [(2, (2, 1))]
        assert [ledger.unfinished_with_values(conn, study) for study in (1, 2, 3)] == [[1], [0], []]
        for most in (2, 1):  # all of the study's are asked for where there are more
            monkeypatch.setattr(ledger, "_MANY", most)
            assert ledger.seconds_of(conn, 1, [1, 2]) == {1: 7.0, 2: 0.0}
        assert {trial: list(each) for trial, each in ledger.lasted(conn, [1, 4]).items()} == {1: [1, 2], 4: [1]}
        conn.execute(sa.text("UPDATE trials SET state = 'COMPLETE' WHERE trial_id = 1"))
        assert not ledger.has_paused(conn, 1)
        assert not ledger.is_paused(conn, 1)
    engine.dispose()


@pytest.mark.parametrize(
    ("budget", "most", "beside", "becomes"),
    [
        (5, 9, False, 5),  # it has room
        (5, 9, True, 6),
        (5, 5, True, 5),
        (3, 4, False, 4),
        (3, 4, True, 4),
        (3, 3, False, 3),
        (2, 4, False, 4),  # it was lowered
        (2, 3, False, 2),
        (None, 9, True, None),
    ],
)
def test_a_budget_is_raised_for_one_more_trial_as_far_as_it_may(
    budget: int | None, most: int, beside: bool, becomes: int | None
) -> None:
    engine = with_three_trials()
    with orm.Session(engine) as session:
        session.execute(sa.text("INSERT INTO studies VALUES (2, 'b')"))
        for trial, state in ((4, "COMPLETE"), (5, "RUNNING"), (6, "WAITING"), (7, "FAIL")):
            session.execute(sa.text(f"INSERT INTO trials VALUES ({trial}, {trial}, 2, '{state}', NULL, NULL)"))
        marks = [(1, IMPORTED_ATTR), (2, IMPORTED_ATTR), (4, IMPORTED_ATTR), (5, "other"), (6, "other")]
        rows = [{"trial_id": trial, "key": key, "value_json": "true"} for trial, key in marks]
        session.execute(sa.insert(TRIAL_SYSTEM_ATTRS), rows)
        store_budgets(session, 1, {BUDGET_ATTR: 8, EPOCHS_ATTR: 7})
        for now in (1, budget):
            store_budgets(session, 2, {BUDGET_ATTR: now, EPOCHS_ATTR: 7})
        make_room(session, 2, Room(most, beside))
        assert budgets_of(session, 2) == {BUDGET_ATTR: becomes, EPOCHS_ATTR: 7}
        assert budgets_of(session, 1) == {BUDGET_ATTR: 8, EPOCHS_ATTR: 7}
        assert claimable(session, 2) == 1 + max(0, (becomes or 0) - 3)
        with pytest.raises(BudgetExhaustedError) if becomes in {2, 3} else contextlib.nullcontext():
            assert refuse_beyond_budget(session, 2) == 4
    engine.dispose()


def test_the_table_is_named_and_keyed_as_documented() -> None:
    assert ATTEMPTS.name == "hpo_attempts"
    assert [column.name for column in ATTEMPTS.primary_key] == ["trial_id", "attempt"]
