"""Which agents work on which study: a table beside the ledger, and requests that all agents of a study leave.

An agent is a supervisor with its local workers. It has a row from the moment that it joins a study; the row is
open as long as ``ended_at`` is null, and gets beats as the ledger's leases do. The rows only decide which agents
are shown, which numbers are free, and what a joining agent is compared with: a trial belongs to the holder of its
lease.

All functions take a SQLAlchemy connection or session and leave the commit to the caller. Times are seconds since
the epoch by the agent's own clock, which may be wrong on another machine.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self, cast

import sqlalchemy as sa
from sqlalchemy import orm

from hpo.storage import ledger, machine
from hpo.storage.attributes import STOP_ATTR
from hpo.storage.budget import lock_study
from hpo.storage.ledger import Executor, Owner
from hpo.storage.optuna_private import STUDY_SYSTEM_ATTRS

AGENTS = sa.Table(
    "hpo_agents",
    ledger.metadata,
    sa.Column("agent_id", sa.Integer, primary_key=True),
    # No foreign key: Optuna's own tools delete studies, and know nothing of this table.
    sa.Column("study_id", sa.Integer, nullable=False, index=True),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("placement", sa.String(255), nullable=False),
    sa.Column("host", sa.String(255), nullable=False),
    sa.Column("boot_id", sa.String(64), nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("start_time", sa.Double, nullable=False),
    sa.Column("devices", sa.Text, nullable=False),
    sa.Column("workers", sa.Integer, nullable=False),
    sa.Column("first_worker", sa.Integer, nullable=False),
    sa.Column("code", sa.String(64), nullable=False),
    sa.Column("config", sa.String(64), nullable=False),
    sa.Column("mark", sa.String(64), nullable=False),
    sa.Column("started_at", sa.Double, nullable=False),
    sa.Column("beat_at", sa.Double, nullable=False),
    sa.Column("ended_at", sa.Double),
    sa.Column("ending", sa.String(64)),
    sa.Column("lost_after", sa.Double),
    sqlite_autoincrement=True,  # no id is used twice: an agent of a deleted study may still beat
)

#: A time in seconds in which a living agent beats several times.
_LATELY: Final = 60.0
#: The ending of an agent that has found nothing left to do in its study.
DONE = "done"
#: The ending of an agent that has not beaten for too long; it may still live, on another machine.
SILENT = "silent"
#: The ending of an agent whose process others have found to be gone.
GONE = "gone"


@dataclass(frozen=True)
class Joining:
    """What an agent says about itself when it joins a study.

    Attributes:
        placement: Its id at the engine that placed it; empty if a person started it.
        devices: What its workers train on, for people.
        workers: How many workers it has room for.
        code: Hash of the study's code that it runs.
        config: Hash of its study file's config.
        mark: Name of its file in the output folder, by which other agents see that they share the folder.
        lost_after: Seconds of silence after which a worker counts as dead, according to its study file. It and its
            workers beat often enough for that.
    """

    placement: str
    devices: str
    workers: int
    code: str
    config: str
    mark: str
    lost_after: float


class Agent(NamedTuple):
    """A row of the table; see `hpo.storage.ledger.Owner` and `Joining` for fields of the same names.

    ``number`` counts the study's agents from 1 and is never reused. ``first_worker`` is the number of its first
    worker; workers of living agents never share a number. ``lost_after`` is None in a row of an earlier version.
    """

    agent_id: int
    study_id: int
    number: int
    placement: str
    host: str
    boot_id: str
    pid: int
    start_time: float
    devices: str
    workers: int
    first_worker: int
    code: str
    config: str
    mark: str
    started_at: float
    beat_at: float
    ended_at: float | None
    ending: str | None
    lost_after: float | None

    def allowed_silence(self, own: float) -> float:
        """Seconds of silence after which it counts as gone, to a process whose own limit is ``own`` seconds."""
        return max(own, self.lost_after or 0.0)

    def is_alive(self) -> bool | None:
        """Whether its process lives; None if that can't be known here, such as for another machine."""
        return machine.is_alive(self.host, self.boot_id, self.pid, self.start_time)


def register(session: orm.Session, study_id: int, me: Owner, joining: Joining) -> Agent:
    """Add the calling process as an agent of a study; KeyError if there is no such study.

    Agents that are known to be dead are ended first, so their worker numbers are free.
    """
    lock_study(session, study_id)  # no other agent gets these numbers
    for other in open_agents(session, study_id):
        if _is_over(session, other):
            end_unchanged(session, other, GONE)
    of_study = AGENTS.c.study_id == study_id
    number = cast("int | None", session.execute(sa.select(sa.func.max(AGENTS.c.number)).where(of_study)).scalar())
    # An agent that was ended as silent may live: its worker numbers are not given out again.
    in_use = sa.or_(AGENTS.c.ended_at.is_(None), AGENTS.c.ending == SILENT)
    blocks = session.execute(sa.select(AGENTS.c.first_worker, AGENTS.c.workers).where(of_study, in_use)).all()
    now = time.time()
    row: dict[str, Any] = vars(joining) | {
        "study_id": study_id,
        "number": (number or 0) + 1,
        "first_worker": _first_free(((int(first), int(count)) for first, count in blocks), joining.workers),
        "started_at": now,
        "beat_at": now,
    }
    row |= {"host": me.host, "boot_id": me.boot_id, "pid": me.pid, "start_time": me.start_time}
    result = cast("sa.CursorResult[Any]", session.execute(sa.insert(AGENTS).values(row)))
    key = result.inserted_primary_key
    assert key is not None
    return Agent(agent_id=key[0], ended_at=None, ending=None, **row)


def _is_over(session: orm.Session, other: Agent) -> bool:
    """Whether an agent is known to be dead.

    A SQLite file belongs to one machine. So an agent with this machine's name, another boot id and no recent beat
    ran before the machine restarted.
    """
    if session.get_bind().dialect.name != "sqlite" or (other.host, other.boot_id) == machine.here():
        return other.is_alive() is False
    return other.host == machine.host_name() and abs(time.time() - other.beat_at) > _LATELY


def _first_free(blocks: Iterable[tuple[int, int]], count: int) -> int:
    """The first of ``count`` consecutive free numbers from 1; ``blocks``: the taken ones, as (first, count)."""
    free = 1
    for first, taken in sorted(blocks):
        if first - free >= count:
            break
        free = max(free, first + taken)
    return free


_BEAT = (
    sa.update(AGENTS)
    .where(AGENTS.c.agent_id == sa.bindparam("agent"))
    .values(beat_at=sa.bindparam("now"), ended_at=None, ending=None)
)
_STOP = sa.select(STUDY_SYSTEM_ATTRS.c.value_json).where(
    STUDY_SYSTEM_ATTRS.c.study_id == sa.bindparam("study", type_=sa.Integer), STUDY_SYSTEM_ATTRS.c.key == STOP_ATTR
)


def beat(conn: Executor, agent_id: int) -> None:
    """Record that an agent lives; this opens a row again that was ended as silent."""
    conn.execute(_BEAT, {"agent": agent_id, "now": time.time()})


def end(conn: Executor, agent_id: int, ending: str) -> None:
    """Record that an agent has ended; does nothing if it has already."""
    ended = sa.update(AGENTS).where(AGENTS.c.agent_id == agent_id, AGENTS.c.ended_at.is_(None))
    conn.execute(ended.values(ended_at=time.time(), ending=ending))


def end_unchanged(conn: Executor, seen: Agent, ending: str) -> None:
    """As `end`, but only if the agent has not beaten since it was read."""
    ended = sa.update(AGENTS).where(AGENTS.c.agent_id == seen.agent_id, AGENTS.c.ended_at.is_(None))
    conn.execute(ended.where(AGENTS.c.beat_at == seen.beat_at).values(ended_at=time.time(), ending=ending))


def end_placement(conn: Executor, study_id: int, placement: str) -> set[int]:
    """End the agents with this placement as silent; returns their ids.

    There are several if the engine has restarted the agent.
    """
    of_it = sa.and_(AGENTS.c.study_id == study_id, AGENTS.c.placement == placement)
    ids = set(conn.execute(sa.select(AGENTS.c.agent_id).where(of_it)).scalars())
    for agent_id in ids:
        end(conn, cast("int", agent_id), SILENT)
    return cast("set[int]", ids)


def open_agents(conn: Executor, study_id: int, *, not_within: float | None = None) -> list[Agent]:
    """The agents of a study that have not ended, as far as is known, by number.

    Args:
        conn: The connection.
        study_id: The study.
        not_within: Only agents whose latest beat (by their clocks) differs from now (by this clock) by more than
            this many seconds, in either direction.
    """
    query = sa.select(AGENTS).where(AGENTS.c.study_id == study_id, AGENTS.c.ended_at.is_(None))
    if not_within is not None:
        now = time.time()
        query = query.where(~AGENTS.c.beat_at.between(now - not_within, now + not_within))
    return [Agent._make(cast("Any", row)) for row in conn.execute(query.order_by(AGENTS.c.number))]


@dataclass(frozen=True)
class AllowedSilence:
    """How long a worker may be silent before it counts as dead.

    Attributes:
        own: Seconds, according to the process that judges.
        of_agents: Seconds by agent id, according to each agent, whose workers beat often enough for that. Agents
            that stored none are left out.
    """

    own: float
    of_agents: Mapping[int, float]

    @classmethod
    def of(cls, conn: Executor, study_id: int, own: float) -> Self:
        """Read the seconds of all agents that a study has had."""
        query = sa.select(AGENTS.c.agent_id, AGENTS.c.lost_after).where(AGENTS.c.study_id == study_id)
        rows = conn.execute(query.where(AGENTS.c.lost_after.is_not(None))).all()
        return cls(own, dict(cast("list[tuple[int, float]]", rows)))

    def of_owner(self, lease: ledger.Attempt) -> float:
        """Seconds that the owner of a lease may be silent."""
        return max(self.own, self.of_agents.get(lease.agent, 0.0))


def last_ending(conn: Executor, study_id: int) -> str | None:
    """The ending of the agent that ended last in a study; None if none has."""
    query = sa.select(AGENTS.c.ending).where(AGENTS.c.study_id == study_id, AGENTS.c.ended_at.is_not(None))
    return cast("str | None", conn.execute(query.order_by(AGENTS.c.ended_at.desc()).limit(1)).scalar())


def forget_study(conn: Executor, study_id: int) -> None:
    """Delete the agents of a study that is about to be deleted."""
    conn.execute(sa.delete(AGENTS).where(AGENTS.c.study_id == study_id))


def stop_request(conn: Executor, study_id: int) -> str:
    """The latest request that all agents of a study leave; empty if there was none.

    It concerns only agents that had joined by then: each compares it with the one that it found when it joined.
    """
    found = conn.execute(_STOP, {"study": study_id}).scalar()
    return "" if found is None else str(json.loads(cast("str", found)))


def new_stop_request() -> str:
    """A value for `STOP_ATTR` that differs from all earlier ones, so that no clocks need to be compared."""
    return secrets.token_hex(8)
