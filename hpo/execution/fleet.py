"""The agents that a driver has placed, or found: how many there are to be, and what becomes of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from hpo.errors import StudyError
from hpo.execution.engines.engine import (
    AgentOrder,
    Change,
    Ended,
    Engine,
    EngineAwayError,
    NodeGone,
    Placement,
    Preempted,
    Running,
    Waits,
)
from hpo.execution.messages import AgentNews, Notice

T = TypeVar("T")

#: For each agent that there may be, so many may die with nothing done in the study meanwhile.
_DEATHS: Final = 3
#: Seconds before the next agent is placed where one has died; doubled each time, up to the longest, until none has
#: died for so long. Others may well work meanwhile: one machine of several may be broken.
_LONGEST_PAUSE: Final = 60.0
_FIRST_PAUSE: Final = 1.0
_CALM: Final = 120.0
#: Lines of a dead agent's output that are shown.
_LINES: Final = 12
_PREEMPTED: Final = "the engine took its machine"


class Fleet:
    """The agents of a study on one engine.

    Args:
        engine: Places them.
        order: What each of them is to do.
        most: How many there may be.
        report: Called with what a person should know.
        retries: How many deaths a trial survives.
    """

    def __init__(
        self,
        engine: Engine,
        order: AgentOrder,
        most: int,
        report: Callable[[AgentNews | Notice], None],
        retries: int = 0,
    ) -> None:
        self._engine = engine
        self._order = order
        self._most = most
        self._report = report
        self._retries = retries
        self._hosts: dict[Placement, str] = {}
        self._away = False
        self._draining: set[Placement] | None = None
        self._deaths = 0
        self._has_started = False
        self._died_at = -math.inf
        self._pause = 0.0

    @property
    def count(self) -> int:
        """How many agents there are, the queued ones too."""
        return len(self._hosts)

    @property
    def placements(self) -> set[str]:
        """Their ids at the engine."""
        return {placement.id for placement in self._hosts}

    @property
    def _deaths_allowed(self) -> int:
        # A trial that kills its agents is to come to its own end, and that to be seen, before the study does.
        return self._most * (max(_DEATHS, self._retries + 2) if self._has_started else _DEATHS)

    def started(self) -> None:
        """Note that a trial has started since something was done."""
        self._has_started = True

    def progressed(self) -> None:
        """Note that something was done in the study: earlier deaths count no more."""
        self._deaths, self._has_started = 0, False

    def adopt(self) -> None:
        """Take over agents that other drivers of this study have placed."""
        for placement in self._asked(lambda: self._engine.find(self._order)) or ():
            if placement not in self._hosts:
                self._take_in(placement, "found")

    def grow(self, wanted: int) -> None:
        """Place agents until there are so many, as far as there may be."""
        if self.count >= wanted or time.monotonic() < self._died_at + self._pause:
            return
        self.adopt()
        missing = min(wanted, self._most) - self.count
        if missing > 0 and not self._away:
            for placement in self._asked(lambda: self._engine.place(self._order, missing)) or ():
                self._take_in(placement, "placed")

    def drain(self) -> None:
        """Ask all agents to leave, and those that the engine starts again meanwhile."""
        self._draining = set()
        self._drain_rest()

    def resume(self) -> None:
        """Let agents that come from now on stay."""
        self._draining = None

    def kill(self) -> list[Placement]:
        """End all agents at once; those that are ended so: none where the engine does not answer."""
        left = list(self._hosts)
        self._asked(lambda: self._engine.kill(left))
        return [] if self._away else left

    def take_changes(self) -> list[NodeGone]:
        """Take note of what has become of agents; those whose machine is gone.

        Raises:
            StudyError: Agents die again and again, with nothing done in the study meanwhile.
        """
        self._drain_rest()
        gone: list[NodeGone] = []

        def take_all() -> None:
            for change in self._engine.changes():  # one by one: an engine that goes away has said what came before
                if change.placement in self._hosts:
                    self._take(change)
                    gone.extend([change] if isinstance(change, NodeGone) else [])

        self._asked(take_all)
        return gone

    def _take_in(self, placement: Placement, how: str) -> None:
        self._hosts[placement] = ""
        self._report(AgentNews(placement.id, how, logs=self._engine.logs(placement)))

    def _take(self, change: Change) -> None:
        placement = change.placement
        if isinstance(change, Running):
            self._hosts[placement] = change.host
            self._report(AgentNews(placement.id, "running", change.host))
            return
        if isinstance(change, Waits):
            self._report(AgentNews(placement.id, "waiting", cause=change.cause))
            return
        if isinstance(change, Preempted) and change.requeued:
            if self._draining is not None:
                self._draining.discard(placement)
            self._report(AgentNews(placement.id, "requeued", self._hosts[placement], _PREEMPTED))
            return
        host = self._hosts.pop(placement)
        if isinstance(change, Ended):
            in_order = change.in_order or self._draining is not None
            what = "ended" if in_order or change.asked else "died"
            self._report(AgentNews(placement.id, what, host, change.cause))
            if not in_order:  # whoever asks each one to leave would have another one placed for ever
                self._died(change)
        elif isinstance(change, NodeGone):
            self._report(AgentNews(placement.id, "lost", change.host, "its machine is gone"))
        else:
            self._report(AgentNews(placement.id, "ended", host, _PREEMPTED))

    def _died(self, ended: Ended) -> None:
        self._deaths += 1
        now, before = time.monotonic(), self._died_at
        self._died_at = now
        self._pause = _FIRST_PAUSE if now - before > _CALM else min(_LONGEST_PAUSE, 2 * self._pause)
        if self._deaths >= self._deaths_allowed:
            where = self._engine.logs(ended.placement)
            raise StudyError(
                f"{self._deaths} agents died with nothing done in the study meanwhile\n"
                f"  the last one: {ended.cause}\n{_last_lines(where)}  fix: see {where}"
            )

    def _drain_rest(self) -> None:
        """Ask those to leave that have not been asked; an engine that is away is asked later."""
        if self._draining is None:
            return
        rest = [placement for placement in self._hosts if placement not in self._draining]
        if rest:
            self._asked(lambda: self._engine.drain(rest))
            if not self._away:
                self._draining.update(rest)

    def _asked(self, question: Callable[[], T]) -> T | None:
        """An engine's answer; None where it does not answer for now."""
        try:
            answer = question()
        except EngineAwayError as error:
            if not self._away:
                self._report(Notice(f"the engine does not answer, and is asked again: {error}"))
            self._away = True
            return None
        if self._away:
            self._report(Notice("the engine answers again"))
        self._away = False
        return answer


def _last_lines(log: str) -> str:
    """The end of a log that is a file here, indented; empty for any other."""
    try:
        lines = Path(log).read_text(errors="replace").splitlines()[-_LINES:]
    except OSError:
        return ""
    return "".join(f"    {line}\n" for line in lines)
