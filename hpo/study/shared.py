"""Checks that a study's agents share one output folder, and that only one machine uses a SQLite file.

Folders with the same path on two machines may be different folders. So each agent writes a file into the output
folder, named in its row of the database, and an agent that joins looks for the files of the agents at work. Of two
agents that join at the same time, the later one checks.
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

#: A joining agent watches a silent one for 1 / this of the time after which it counts as dead.
_WATCHED_SHARE: Final = 2
#: Seconds between two looks while watching.
_PAUSE: Final = 0.5


def mark_file(spec: StudySpec, agent: Agent) -> Path:
    """An agent's file in the output folder."""
    return spec.output_dir / "agents" / agent.mark


def write_mark(spec: StudySpec, agent: Agent) -> None:
    """Write an agent's file; raises OSError where that is not possible."""
    file = mark_file(spec, agent)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"agent {agent.number} of {spec.study.name}, process {agent.pid} on {agent.host}\n")


def refuse_unshared(opened: OpenStudy, me: Agent, say: Callable[[str], None]) -> None:
    """Refuse an agent that does not share with the others what they must share.

    It is compared with the agents that joined before it. If it is not known whether one of them lives, that agent
    is watched for signs of life, and its end is stored if it gives none.

    Args:
        opened: The study.
        me: The agent that has joined and has written its file.
        say: Called with a message for the user if this takes long.

    Raises:
        InputError: An agent at work has another output folder, or works on another machine while the study is in a
            SQLite file.
        StudyError: The output folder can't be read.
    """
    with opened.storage.engine.connect() as conn:
        others = agents.open_agents(conn, opened.study_id)
    for other in others:
        if other.number < me.number and (refusal := _refusal(opened, other)) and _lives(opened, other, say):
            raise refusal


def _refusal(opened: OpenStudy, other: Agent) -> InputError | None:
    """The error for working beside another agent if that lives; None where the two share what they must."""
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
    """Whether another agent lives and is still in the way; if unknown, it is watched, and ended if silent."""
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
