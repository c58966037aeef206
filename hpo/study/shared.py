"""Whether agents share what they must: the output folder, and on one machine alone a SQLite file.

A folder of one name is not one folder. So each agent writes a file there whose name is in its row of the database,
and one that joins looks for the files of those that are at work. Of two that join together the later one looks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from hpo.config.spec import StudySpec
from hpo.errors import InputError
from hpo.storage import agents, machine
from hpo.storage.agents import SILENT, Agent
from hpo.study.folders import unwritable
from hpo.study.open_study import OpenStudy

#: Of the time after which a silent agent counts as dead, the part for which one that joins watches it.
_WATCHED_SHARE: Final = 2
#: Seconds between two looks while watching.
_PAUSE: Final = 0.5


def mark_file(spec: StudySpec, agent: Agent) -> Path:
    """The file of an agent in the output folder."""
    return spec.output_dir / "agents" / agent.mark


def write_mark(spec: StudySpec, agent: Agent) -> None:
    """Write an agent's file; OSError where that is not possible."""
    file = mark_file(spec, agent)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"agent {agent.number} of {spec.study.name}, process {agent.pid} on {agent.host}\n")


def refuse_unshared(opened: OpenStudy, me: Agent, say: Callable[[str], None]) -> None:
    """Refuse an agent that does not share with the others what they must share.

    It is compared with those that have joined before it. One of which it is not known whether it lives is watched
    for signs of life; it is ended where it gives none.

    Args:
        opened: The study.
        me: The agent that has joined, and has written its file.
        say: Called with what a person should know while this takes long.

    Raises:
        InputError: The output folder is another one than that of an agent at work, or the study lies in a SQLite
            file and an agent works on it on another machine.
        StudyError: The output folder does not answer.
    """
    with opened.storage.engine.connect() as conn:
        others = agents.open_agents(conn, opened.study_id)
    for other in others:
        if other.number < me.number and (refusal := _refusal(opened, other)) and _lives(opened, other, say):
            raise refusal


def _refusal(opened: OpenStudy, other: Agent) -> InputError | None:
    """Why this process can't work beside another agent, if that lives."""
    spec, who = opened.spec, f"agent {other.number} on {other.host}"
    if other.boot_id != machine.boot_id() and opened.storage.engine.dialect.name == "sqlite":
        return spec.error(
            f"the study lies in a SQLite file, and {who}, another machine, works on it",
            path="run.storage",
            value=spec.storage_url,
            fix="several machines need PostgreSQL or MariaDB: give a URL with `--storage`",
        )
    try:
        is_shared = mark_file(spec, other).exists()
    except OSError as error:
        raise unwritable(spec, error) from error
    if not is_shared:
        return spec.error(
            f"the output folder is not that of {who}: the file {mark_file(spec, other)}, which it has written, is "
            "not here",
            path="run.output_dir",
            value=str(spec.output_dir),
            fix="give all agents one folder, on a disk that their machines share, with `--output-dir`",
        )
    return None


def _lives(opened: OpenStudy, other: Agent, say: Callable[[str], None]) -> bool:
    """Whether an agent that is in the way gives a sign of life, or has gone out of the way meanwhile."""
    alive = other.is_alive()
    if alive is not None:
        return alive
    patience = other.allowed_silence(opened.spec.run.lost_after) / _WATCHED_SHARE
    say(f"waiting up to {patience:.0f} s to see whether agent {other.number} on {other.host} is at work")
    until = time.monotonic() + patience
    while time.monotonic() < until:
        time.sleep(_PAUSE)
        with opened.storage.engine.connect() as conn:
            latest = {each.agent_id: each for each in agents.open_agents(conn, opened.study_id)}
        if other.agent_id not in latest or _refusal(opened, other) is None:
            return False
        if latest[other.agent_id].beat_at != other.beat_at:
            return True
    with opened.storage.one_transaction() as conn:
        agents.end_unchanged(conn, other, SILENT)
    return False
