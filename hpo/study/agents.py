"""The agents of a study: lists those at work, asks all of them to leave, and ends the dead ones."""

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
#: Outcomes of attempts that count as trials ended by their agent; the agent of a lost trial did not end it.
_ENDS: Final = tuple(str(each) for each in Outcome if each is not Outcome.LOST)


def agents_at_work(opened: OpenStudy) -> list[dict[str, Any]]:
    """One entry for each agent that has not ended, as far as is known on this machine, by number.

    ``running`` is how many of its workers have a trial. ``ended_per_hour`` is how many trials it has brought to an
    end in the last hour by its own clock, scaled up to an hour where it is younger. ``last_beat_s`` is how many
    seconds ago it last gave a sign of life.
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
    """How many agents are at work, judged by the time of their last signs of life."""
    now, own = time.time(), opened.spec.run.lost_after
    with opened.storage.engine.connect() as conn:
        found = not_dead(conn, opened.study_id)
    return sum(now - each.beat_at < each.allowed_silence(own) for each in found)


def not_dead(conn: sa.Connection, study_id: int) -> list[Agent]:
    """The agents of a study that have not ended and are not known to be dead."""
    return [each for each in agents.open_agents(conn, study_id) if each.is_alive() is not False]


def _work_of(conn: sa.Connection, of: Sequence[int]) -> dict[int, tuple[int, int, float]]:
    """For each agent: its running attempts, those that ended a trial in the last hour, and when one last ended."""
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
    """Ask every agent of a study to requeue its trials and leave; agents that join later are not affected.

    Returns:
        The agents that are to leave, without those known to be dead.
    """
    opened.storage.set_study_system_attr(opened.study_id, STOP_ATTR, agents.new_stop_request())
    with opened.storage.engine.connect() as conn:
        return not_dead(conn, opened.study_id)


@patient
def end_dead_agents(storage: StudyStorage, study_id: int, *, grace: float, sightings: Sightings) -> list[Agent]:
    """Store the end of agents that are dead, or that stayed silent while this process watched them.

    Args:
        storage: The study's storage.
        study_id: Optuna's id of the study.
        grace: Seconds of silence after which an agent on another machine counts as gone; an agent's own allowed
            silence counts where it is longer.
        sightings: What this process saw when it looked before.

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
