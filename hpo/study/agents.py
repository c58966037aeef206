"""The agents of a study: who works on it now, what each of them does, and the request that all of them leave."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, cast

import sqlalchemy as sa

from hpo.storage import agents
from hpo.storage.agents import AGENTS, Agent
from hpo.storage.attributes import STOP_ATTR
from hpo.storage.ledger import ATTEMPTS
from hpo.storage.outage import patient
from hpo.storage.recovery import Sightings
from hpo.storage.study_storage import StudyStorage
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import Outcome

_HOUR: Final = 3600.0
#: Outcomes of attempts that have ended their trial; a lost trial's own end is no work of its agent's.
_ENDS: Final = tuple(str(each) for each in Outcome if each is not Outcome.LOST)


def agents_at_work(opened: OpenStudy) -> list[dict[str, Any]]:
    """One entry an agent that has not ended, as far as is known here, by number.

    ``running`` is how many of its workers have a trial; ``ended_per_hour`` how many trials it has brought to an
    end in the last hour by its own clock, or scaled up to an hour where it is younger; ``last_beat_s`` when it was
    last heard of.
    """
    with opened.storage.engine.connect() as conn:
        found = not_dead(conn, opened.study_id)
        work = _work_of(conn, [each.agent_id for each in found])
    now = time.time()
    return [
        {
            "agent": each.number,
            "placement": each.placement or None,
            "host": each.host,
            "pid": each.pid,
            "devices": each.devices,
            "workers": each.workers,
            "first_worker": each.first_worker,
            "running": running,
            "ended_per_hour": ended * _HOUR / min(_HOUR, max(1.0, max(last, each.beat_at) - each.started_at)),
            "last_beat_s": max(0.0, now - each.beat_at),
        }
        for each in found
        for running, ended, last in (work.get(each.agent_id, (0, 0, 0.0)),)
    ]


def heard_of_lately(opened: OpenStudy) -> int:
    """How many agents are at work, as far as their last signs of life tell."""
    now, own = time.time(), opened.spec.run.lost_after
    with opened.storage.engine.connect() as conn:
        found = not_dead(conn, opened.study_id)
    return sum(now - each.beat_at < each.allowed_silence(own) for each in found)


def not_dead(conn: sa.Connection, study_id: int) -> list[Agent]:
    """The agents of a study that have not ended, without those that are known to be dead."""
    return [each for each in agents.open_agents(conn, study_id) if each.is_alive() is not False]


def _work_of(conn: sa.Connection, of: Sequence[int]) -> dict[int, tuple[int, int, float]]:
    """How many attempts of each agent run, how many have ended a trial in the last hour, and when one last did."""
    lately = sa.and_(ATTEMPTS.c.ended_at > AGENTS.c.beat_at - _HOUR, ATTEMPTS.c.outcome.in_(_ENDS))
    query = (
        sa.select(
            ATTEMPTS.c.agent,
            sa.func.count() - sa.func.count(ATTEMPTS.c.ended_at),
            sa.func.coalesce(sa.func.sum(sa.case((lately, 1), else_=0)), 0),
            sa.func.coalesce(sa.func.max(ATTEMPTS.c.ended_at), 0.0),
        )
        .join_from(ATTEMPTS, AGENTS, AGENTS.c.agent_id == ATTEMPTS.c.agent)
        .where(ATTEMPTS.c.agent.in_(of))
        .group_by(ATTEMPTS.c.agent)
    )
    rows = cast("list[tuple[int, int, int, float]]", conn.execute(query).all()) if of else []
    return {agent: (running, int(ended), last) for agent, running, ended, last in rows}


def ask_all_to_leave(opened: OpenStudy) -> list[Agent]:
    """Ask every agent of a study to requeue its trials and to leave; those that join later are not meant.

    Returns:
        The agents that are to leave, but for those that are known to be dead.
    """
    opened.storage.set_study_system_attr(opened.study_id, STOP_ATTR, agents.new_stop_request())
    with opened.storage.engine.connect() as conn:
        return not_dead(conn, opened.study_id)


@patient
def end_dead_agents(storage: StudyStorage, study_id: int, *, grace: float, sightings: Sightings) -> list[Agent]:
    """Store that agents have ended which are dead, or which were not heard of while this process watched them.

    Args:
        storage: Where the study is.
        study_id: Optuna's id of the study.
        grace: Seconds of silence after which an agent on another machine counts as gone; its own, where longer.
        sightings: What this process has seen when it looked before.

    Returns:
        The agents that have been ended now.
    """
    with storage.engine.connect() as conn:
        quiet = agents.open_agents(conn, study_id, not_within=grace / 2)
    silent = sightings.look([(each.agent_id, each.beat_at) for each in quiet], grace)
    ended = [
        (each, agents.SILENT if alive is None else agents.GONE)
        for each, seconds in zip(quiet, silent, strict=True)
        for alive in (each.is_alive(),)
        if (seconds > each.allowed_silence(grace) if alive is None else not alive)
    ]
    if ended:
        with storage.one_transaction() as conn:
            for each, how in ended:
                agents.end_unchanged(conn, each, how)
    return [each for each, _ in ended]
