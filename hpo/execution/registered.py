"""This process as an agent of a study: its row in the database, its beats, and requests that it leave."""

from __future__ import annotations

import contextlib
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from hpo.config.code import code_identity
from hpo.execution.messages import REQUESTS
from hpo.signals import handled
from hpo.storage import agents
from hpo.storage.agents import Agent, Joining
from hpo.storage.ledger import Executor, Owner
from hpo.storage.outage import DatabaseError
from hpo.study.folders import unwritable
from hpo.study.open_study import OpenStudy
from hpo.study.shared import mark_file, refuse_unshared, write_mark
from hpo.trial.resources import Slot

#: How an agent has ended whose run ended with an error.
FAILED: Final = "failed"


class Registered:
    """This process as an agent of a study.

    Args:
        opened: The study.
        slots: A device and threads for each worker.
        stop_seen: The latest request that all agents leave, as of when this agent was placed: it may have waited
            for its machine since. None: the latest request now.
        placement: Its id at the engine that placed it; empty if none did.
    """

    def __init__(
        self, opened: OpenStudy, slots: Sequence[Slot], stop_seen: str | None = None, placement: str = ""
    ) -> None:
        self._opened = opened
        joining = Joining(
            placement=placement,
            devices=", ".join(dict.fromkeys(slot.label for slot in slots)),
            workers=len(slots),
            code=code_identity(opened.spec).hash,
            config=opened.spec.config_hash(),
            mark=secrets.token_hex(8),
            lost_after=opened.spec.run.lost_after,
        )
        with opened.storage.transaction() as session:
            self._agent = agents.register(session, opened.study_id, Owner.current(), joining)
            self._latest = agents.stop_request(session, opened.study_id)
        self._request = self._latest if stop_seen is None else stop_seen

    @property
    def agent(self) -> Agent:
        """The row as it was written."""
        return self._agent

    @property
    def is_to_leave(self) -> bool:
        """Whether a person has asked all agents to leave (`hpo stop`), as of the latest look."""
        return self._latest != self._request

    def join(self, say: Callable[[str], None]) -> None:
        """Make this agent known in the output folder, and compare it with the agents that are at work.

        Args:
            say: Called with what a person should know if this takes long.

        Raises:
            InputError: As `hpo.study.shared.refuse_unshared` raises it.
            StudyError: The output folder can't be written to, or does not answer.
        """
        try:
            write_mark(self._opened.spec, self._agent)
        except OSError as error:
            raise unwritable(self._opened.spec, error) from error
        refuse_unshared(self._opened, self._agent, say)

    def look(self, conn: Executor) -> None:
        """Beat, and read whether agents are asked to leave; in the caller's transaction."""
        agents.beat(conn, self._agent.agent_id)
        self._latest = agents.stop_request(conn, self._opened.study_id)

    def keep_mark(self) -> None:
        """Write the file in the output folder again if it is gone: others may have taken this agent for dead."""
        with contextlib.suppress(OSError):  # trials that write to the folder report what is wrong with it
            if not mark_file(self._opened.spec, self._agent).exists():
                write_mark(self._opened.spec, self._agent)

    def end(self, ending: str) -> None:
        """Store that this agent has ended, and how; does nothing if that has been stored already."""
        with contextlib.suppress(OSError):
            mark_file(self._opened.spec, self._agent).unlink(missing_ok=True)
        with self._opened.storage.one_transaction() as conn:
            agents.end(conn, self._agent.agent_id, ending)


@contextlib.contextmanager
def registered(
    opened: OpenStudy,
    slots: Sequence[Slot],
    say: Callable[[str], None],
    stop_seen: str | None = None,
    placement: str = "",
) -> Iterator[Registered]:
    """Register this process as an agent of a study during the block; if the block raises, the agent has failed.

    A signal that asks it to leave before the block begins is raised as a KeyboardInterrupt.

    Args:
        opened: The study.
        slots: A device and threads for each worker.
        say: See `Registered.join`, which also lists what is raised.
        stop_seen: See `Registered`.
        placement: See there.
    """
    this = Registered(opened, slots, stop_seen, placement)
    try:
        with handled(REQUESTS, signal.default_int_handler):
            this.join(say)
        yield this
    finally:
        # If the database is away, others see that this process is gone. An ending stored before stays as it is.
        with contextlib.suppress(DatabaseError), opened.storage.patience.whole():
            this.end(FAILED)
