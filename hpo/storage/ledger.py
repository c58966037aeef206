"""The ledger: who works on which trial, as leases and attempts in a table beside Optuna's.

Every time a trial becomes RUNNING under an owner, one row is added to ``hpo_attempts``, in the transaction that
changes the trial's state. The row is the trial's *lease* as long as ``ended_at`` is null; at most one row of a
trial is open, and it has the highest attempt number (`claim` closes what an older owner left open).

All functions take a SQLAlchemy connection or session and leave the commit to the caller. Times are seconds since
the epoch by the caller's clock, so they mean the same in every database. The duration of an attempt is measured on
its owner's machine, by a monotonic clock, and stored with each beat (`hpo.storage.beats`): time limits use that.
"""

import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, NamedTuple, Protocol, Self, cast

import sqlalchemy as sa
from optuna.trial import TrialState

from hpo.storage import machine
from hpo.storage.id_lists import in_chunks
from hpo.storage.optuna_private import REPORTS, TRIALS
from hpo.storage.pausing import IS_PAUSED

_NAME_LENGTH = 255

metadata = sa.MetaData()

ATTEMPTS = sa.Table(
    "hpo_attempts",
    metadata,
    # No foreign key: Optuna's own tools delete trials, and know nothing of this table.
    sa.Column("trial_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("host", sa.String(_NAME_LENGTH), nullable=False),
    sa.Column("boot_id", sa.String(64), nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("start_time", sa.Double, nullable=False),
    sa.Column("worker", sa.String(_NAME_LENGTH), nullable=False),
    sa.Column("device", sa.String(_NAME_LENGTH), nullable=False),
    sa.Column("code", sa.String(64), nullable=False),
    sa.Column("agent", sa.Integer, nullable=False),
    sa.Column("started_at", sa.Double, nullable=False),
    sa.Column("beat_at", sa.Double, nullable=False),
    sa.Column("seconds", sa.Double, nullable=False),
    sa.Column("ended_at", sa.Double),
    sa.Column("outcome", sa.String(64)),
    sa.Column("reason", sa.Text),
)


class Executor(Protocol):
    """What the functions here need of a `sqlalchemy.Connection` or a `sqlalchemy.orm.Session`."""

    def execute(
        self,
        statement: sa.Executable,
        parameters: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        /,
    ) -> sa.Result[tuple[object, ...]]:
        """Run one statement in the caller's transaction."""


@dataclass(frozen=True)
class Owner:
    """The process that runs trials, described so that others can see whether it still lives.

    Attributes:
        host: Name of the machine. If the process has a PID namespace of its own, the name contains it, because
            processes outside can't look into the namespace.
        boot_id: Identifies the machine's boot; empty if the system has no such id.
        pid: Process id.
        start_time: When the process started, in the system's own unit (see `process_start`).
        worker: Label of the worker, for people.
        device: Device that the worker trains on, for people.
        code: Hash of the study's code that it runs (`hpo.config.code`); empty if it runs none.
        agent: Id of the worker's agent (`hpo.storage.agents`); 0 if it has none.
    """

    host: str
    boot_id: str
    pid: int
    start_time: float
    worker: str = ""
    device: str = ""
    code: str = ""
    agent: int = 0

    @classmethod
    def current(cls, *, worker: str = "", device: str = "", agent: int = 0) -> Self:
        """The calling process as an owner."""
        names = {"worker": worker[:_NAME_LENGTH], "device": device[:_NAME_LENGTH]}
        owner = cls(machine.host_name(), machine.boot_id(), 0, machine.HIDDEN, **names, agent=agent)
        return owner.in_process(os.getpid())

    def in_process(self, pid: int) -> Self:
        """The same worker and code in another process of this machine: the current one, or a fork of it."""
        start = machine.process_start(pid)
        return replace(self, pid=pid, start_time=machine.HIDDEN if start is None else start)


class Attempt(NamedTuple):
    """One row of the ledger; see `Owner` for the meaning of the owner's fields.

    ``seconds`` is how long the attempt took, or, if it runs or was lost, how long it had taken at its last beat.
    Time in which it could not advance (its agent was stopped, the database away) is left out.
    """

    trial_id: int
    attempt: int
    host: str
    boot_id: str
    pid: int
    start_time: float
    worker: str
    device: str
    code: str
    agent: int
    started_at: float
    beat_at: float
    seconds: float
    ended_at: float | None
    outcome: str | None
    reason: str | None

    def owner_is_alive(self) -> bool | None:
        """`hpo.storage.machine.is_alive` of the attempt's owner."""
        return machine.is_alive(self.host, self.boot_id, self.pid, self.start_time)


class Lease(NamedTuple):
    """An attempt at a trial, as its owner knows it."""

    trial_id: int
    attempt: int


class RunningTrial(NamedTuple):
    """A RUNNING trial and its lease, if it has one."""

    trial_id: int
    number: int
    lease: Attempt | None


# Statements of the hot path are built once, because building one costs more than executing it.
_LAST = sa.select(sa.func.max(ATTEMPTS.c.attempt), sa.func.count() - sa.func.count(ATTEMPTS.c.ended_at)).where(
    ATTEMPTS.c.trial_id == sa.bindparam("trial", type_=sa.Integer)
)
_CLAIM = sa.insert(ATTEMPTS)


def claim(conn: Executor, trial_id: int, owner: Owner) -> int:
    """Give ``owner`` the trial's next attempt.

    The caller's transaction must hold the trial (row lock, or SQLite's write lock).

    Returns:
        The number of the new attempt, counted from 1.
    """
    last = conn.execute(_LAST, {"trial": trial_id}).one()
    previous, still_open = cast("tuple[int | None, int]", tuple(last))
    if still_open:  # a tool without leases took the trial from its owner
        stale = sa.update(ATTEMPTS).where(ATTEMPTS.c.trial_id == trial_id, ATTEMPTS.c.ended_at.is_(None))
        conn.execute(stale.values(ended_at=time.time(), outcome="lost", reason="the trial was taken over"))
    attempt = (previous or 0) + 1
    now = time.time()
    begun = {"trial_id": trial_id, "attempt": attempt, "started_at": now, "beat_at": now, "seconds": 0.0}
    conn.execute(_CLAIM, asdict(owner) | begun)
    return attempt


_IS_LEASE = sa.and_(
    ATTEMPTS.c.trial_id == sa.bindparam("trial", type_=sa.Integer),
    ATTEMPTS.c.attempt == sa.bindparam("number", type_=sa.Integer),
    ATTEMPTS.c.ended_at.is_(None),
)
_END = (
    sa.update(ATTEMPTS)
    .where(_IS_LEASE)
    .values(
        ended_at=sa.bindparam("now"),
        outcome=sa.bindparam("how"),
        reason=sa.bindparam("why"),
        seconds=sa.func.coalesce(sa.bindparam("took", type_=sa.Double), ATTEMPTS.c.seconds),
    )
)
_LOCK = sa.select(ATTEMPTS.c.attempt).where(_IS_LEASE).with_for_update()


def holds(conn: Executor, trial_id: int, attempt: int) -> bool:
    """Whether ``attempt`` is the trial's lease; the row stays locked until the transaction ends.

    The lock is what keeps a requeue by another process out until the caller's writes are committed.
    """
    return conn.execute(_LOCK, {"trial": trial_id, "number": attempt}).first() is not None


def is_held_by(conn: Executor, trial_id: int, attempt: int, owner: Owner) -> bool:
    """Whether ``attempt`` is the trial's lease, and the process of ``owner`` holds it."""
    query = sa.select(ATTEMPTS.c.attempt).where(
        _IS_LEASE,
        ATTEMPTS.c.host == owner.host,
        ATTEMPTS.c.boot_id == owner.boot_id,
        ATTEMPTS.c.pid == owner.pid,
        ATTEMPTS.c.start_time == owner.start_time,
    )
    return conn.execute(query, {"trial": trial_id, "number": attempt}).first() is not None


def hand_over(conn: Executor, trial_id: int, attempt: int, owner: Owner) -> bool:
    """Give a lease to another process of its owner; False if the attempt is not the trial's lease."""
    process = {"pid": owner.pid, "start_time": owner.start_time}
    return (
        changed_rows(
            conn, sa.update(ATTEMPTS).where(_IS_LEASE).values(process), {"trial": trial_id, "number": attempt}
        )
        == 1
    )


def has_ended_as(conn: Executor, trial_id: int, attempt: int, outcome: str) -> bool:
    """Whether an attempt has ended with this outcome."""
    query = sa.select(ATTEMPTS.c.attempt).where(
        ATTEMPTS.c.trial_id == trial_id, ATTEMPTS.c.attempt == attempt, ATTEMPTS.c.ended_at.is_not(None)
    )
    return conn.execute(query.where(ATTEMPTS.c.outcome == outcome)).first() is not None


def end(
    conn: Executor,
    trial_id: int,
    attempt: int,
    outcome: str,
    reason: str | None = None,
    *,
    seconds: float | None = None,
) -> bool:
    """End an attempt that took ``seconds`` (None: as of its last beat); False if it had ended already."""
    how = {"now": time.time(), "how": outcome, "why": reason, "took": seconds}
    return changed_rows(conn, _END, {"trial": trial_id, "number": attempt} | how) == 1


def end_open(conn: Executor, trial_id: int, outcome: str) -> None:
    """End the open attempt of a trial, if there is one, whoever the owner is."""
    conn.execute(
        sa.update(ATTEMPTS)
        .where(ATTEMPTS.c.trial_id == trial_id, ATTEMPTS.c.ended_at.is_(None))
        .values(ended_at=time.time(), outcome=outcome)
    )


def changed_rows(conn: Executor, statement: sa.Update, parameters: Mapping[str, Any]) -> int:
    """Execute an update; returns how many rows it has changed."""
    return cast("sa.CursorResult[tuple[object, ...]]", conn.execute(statement, parameters)).rowcount


def lock_unchanged(conn: Executor, lease: Attempt) -> bool:
    """Lock an attempt that was read before; False if its owner has beaten since, or it has ended."""
    unchanged = _LOCK.where(ATTEMPTS.c.beat_at == lease.beat_at)
    return conn.execute(unchanged, {"trial": lease.trial_id, "number": lease.attempt}).first() is not None


def attempts(conn: Executor, study_id: int, *, after: int = -1) -> list[Attempt]:
    """Every attempt of a study's trials with an id above ``after``, by trial and attempt."""
    query = sa.select(ATTEMPTS).join(TRIALS, TRIALS.c.trial_id == ATTEMPTS.c.trial_id)
    query = query.where(TRIALS.c.study_id == study_id, TRIALS.c.trial_id > after)
    return _read(conn, query)


def attempts_by_trial(conn: Executor, study_id: int, *, after: int = -1) -> defaultdict[int, list[Attempt]]:
    """As `attempts`, by trial; an empty list for a trial that has had none."""
    found: defaultdict[int, list[Attempt]] = defaultdict(list)
    for attempt in attempts(conn, study_id, after=after):
        found[attempt.trial_id].append(attempt)
    return found


def attempts_of_trial(conn: Executor, trial_id: int) -> list[Attempt]:
    """Every attempt of one trial, oldest first."""
    return _read(conn, sa.select(ATTEMPTS).where(ATTEMPTS.c.trial_id == trial_id))


#: For more trials than this, all trials of their study are queried.
_MANY: Final = 2_000


def lasted(conn: Executor, trial_ids: Sequence[int]) -> dict[int, dict[int, tuple[float, float]]]:
    """By trial and attempt: the seconds that the attempt had taken at its last beat, and the time of that beat."""
    columns = (ATTEMPTS.c.trial_id, ATTEMPTS.c.attempt, ATTEMPTS.c.seconds, ATTEMPTS.c.beat_at)
    found: dict[int, dict[int, tuple[float, float]]] = {}
    for chunk in in_chunks(trial_ids):
        rows: Sequence[Any] = conn.execute(sa.select(*columns).where(ATTEMPTS.c.trial_id.in_(chunk))).all()
        for trial_id, attempt, seconds, beat_at in rows:
            found.setdefault(trial_id, {})[attempt] = (seconds, beat_at)
    return found


def seconds_of(conn: Executor, study_id: int, trial_ids: Sequence[int]) -> dict[int, float]:
    """By trial, the seconds that all its attempts took together; trials without an attempt may be missing."""
    query = sa.select(ATTEMPTS.c.trial_id, sa.func.sum(ATTEMPTS.c.seconds)).group_by(ATTEMPTS.c.trial_id)
    if len(trial_ids) <= _MANY:
        queries = [query.where(ATTEMPTS.c.trial_id.in_(chunk)) for chunk in in_chunks(trial_ids)]
    else:
        of_study = sa.select(TRIALS.c.trial_id).where(TRIALS.c.study_id == study_id)
        queries = [query.where(ATTEMPTS.c.trial_id.in_(of_study))]
    rows: list[Any] = [row for each in queries for row in conn.execute(each).all()]
    return {trial_id: float(seconds or 0.0) for trial_id, seconds in rows}


def _read(conn: Executor, query: sa.Select[tuple[object, ...]]) -> list[Attempt]:
    rows = conn.execute(query.order_by(ATTEMPTS.c.trial_id, ATTEMPTS.c.attempt))
    return [Attempt._make(row) for row in rows]


def running_trials(conn: Executor, study_id: int) -> list[RunningTrial]:
    """The study's RUNNING trials with their leases, by number; without the paused ones."""
    join = sa.and_(ATTEMPTS.c.trial_id == TRIALS.c.trial_id, ATTEMPTS.c.ended_at.is_(None))
    query = (
        sa.select(TRIALS.c.trial_id, TRIALS.c.number, ATTEMPTS)
        .outerjoin_from(TRIALS, ATTEMPTS, join)
        .where(TRIALS.c.study_id == study_id, TRIALS.c.state == TrialState.RUNNING, ~IS_PAUSED)
        .order_by(TRIALS.c.number)
    )
    rows = cast("list[tuple[Any, ...]]", conn.execute(query).all())
    return [RunningTrial(row[0], row[1], None if row[2] is None else Attempt._make(row[2:])) for row in rows]


def unfinished_with_values(conn: Executor, study_id: int) -> list[int]:
    """Numbers of a study's trials that have reported values and have not ended, ascending."""
    unfinished = TRIALS.c.state.in_([TrialState.RUNNING, TrialState.WAITING])
    query = sa.select(TRIALS.c.number).where(TRIALS.c.study_id == study_id, unfinished)
    reported = sa.exists().where(REPORTS.c.trial_id == TRIALS.c.trial_id)
    return [cast("int", row[0]) for row in conn.execute(query.where(reported).order_by(TRIALS.c.number))]


def has_begun(conn: Executor, study_id: int) -> bool:
    """Whether a worker has ever taken a trial of a study."""
    one = sa.select(ATTEMPTS.c.trial_id).join(TRIALS, TRIALS.c.trial_id == ATTEMPTS.c.trial_id)
    return conn.execute(one.where(TRIALS.c.study_id == study_id).limit(1)).first() is not None


def has_paused(conn: Executor, study_id: int) -> bool:
    """Whether a trial of a study is paused."""
    one = sa.select(TRIALS.c.trial_id).where(TRIALS.c.study_id == study_id, TRIALS.c.state == TrialState.RUNNING)
    return conn.execute(one.where(IS_PAUSED).limit(1)).first() is not None


def is_paused(conn: Executor, trial_id: int) -> bool:
    """Whether a trial is paused."""
    one = sa.select(TRIALS.c.trial_id).where(TRIALS.c.trial_id == trial_id, TRIALS.c.state == TrialState.RUNNING)
    return conn.execute(one.where(IS_PAUSED)).first() is not None


def forget_trials(conn: Executor, trial_ids: Sequence[int]) -> None:
    """Delete the attempts of trials that are about to be deleted."""
    conn.execute(sa.delete(ATTEMPTS).where(ATTEMPTS.c.trial_id.in_(trial_ids)))


_FORGET = sa.delete(ATTEMPTS).where(ATTEMPTS.c.trial_id == sa.bindparam("trial", type_=sa.Integer))


def forget_trial(conn: Executor, trial_id: int) -> None:
    """Delete the attempts of a deleted trial whose id a new trial has got."""
    conn.execute(_FORGET, {"trial": trial_id})
