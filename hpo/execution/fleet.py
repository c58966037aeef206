"""The agents that a driver has placed or found: keeps their number, and reports what becomes of them."""

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

#: This many deaths per allowed agent, with nothing done in the study in between, stop the study.
_DEATHS: Final = 3
#: Seconds to wait after an agent has died before the next one is placed. The pause doubles with each death, up to
#: the longest, and starts again at the first after `_CALM` seconds without one. Other agents may work meanwhile:
#: perhaps one machine of several is broken.
_LONGEST_PAUSE: Final = 60.0
_FIRST_PAUSE: Final = 1.0
_CALM: Final = 120.0
#: Lines of a dead agent's output that are shown.
_LINES: Final = 12
_PREEMPTED: Final = "the engine took its machine"


class Fleet:
    """The agents of a study on one engine.

    Args:
        engine: Places the agents.
        order: What each agent does.
        most: How many agents there may be.
        report: Called with what a person should know.
        retries: How many deaths of its worker a trial survives.
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
        """How many agents there are, including those that wait for a machine."""
        return len(self._hosts)

    @property
    def placements(self) -> set[str]:
        """The agents' ids at the engine."""
        return {placement.id for placement in self._hosts}

    @property
    def _deaths_allowed(self) -> int:
        # A trial that kills its agents must fail, and the driver see that, before the study is stopped.
        return self._most * (max(_DEATHS, self._retries + 2) if self._has_started else _DEATHS)

    def started(self) -> None:
        """Note that a trial has started since the last progress."""
        self._has_started = True

    def progressed(self) -> None:
        """Note progress in the study: earlier deaths no longer count."""
        self._deaths, self._has_started = 0, False

    def adopt(self) -> None:
        """Take over agents that other drivers of this study have placed."""
        for placement in self._asked(lambda: self._engine.find(self._order)) or ():
            if placement not in self._hosts:
                self._take_in(placement, "found")

    def grow(self, wanted: int) -> None:
        """Place agents until there are ``wanted`` of them, or as many as there may be."""
        if self.count >= wanted or time.monotonic() < self._died_at + self._pause:
            return
        self.adopt()
        missing = min(wanted, self._most) - self.count
        if missing > 0 and not self._away:
            for placement in self._asked(lambda: self._engine.place(self._order, missing)) or ():
                self._take_in(placement, "placed")

    def drain(self) -> None:
        """Ask all agents to leave, including those that the engine starts again in the meantime."""
        self._draining = set()
        self._drain_rest()

    def resume(self) -> None:
        """Stop asking agents to leave: those that start from now on stay."""
        self._draining = None

    def kill(self) -> list[Placement]:
        """Kill all agents; returns those that were killed, which are none if the engine does not answer."""
        left = list(self._hosts)
        self._asked(lambda: self._engine.kill(left))
        return [] if self._away else left

    def take_changes(self) -> list[NodeGone]:
        """Note what has become of agents; returns the changes about agents whose machine is gone.

        Raises:
            StudyError: Agents die again and again, with nothing done in the study in between.
        """
        self._drain_rest()
        gone: list[NodeGone] = []

        def take_all() -> None:
            for change in self._engine.changes():  # one by one: if the engine goes away, earlier changes are noted
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
            if not in_order:  # even if `asked`: otherwise a person who stops each agent gets new ones for ever
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
        """Ask the agents to leave that have not been asked yet; if the engine is away, try again later."""
        if self._draining is None:
            return
        rest = [placement for placement in self._hosts if placement not in self._draining]
        if rest:
            self._asked(lambda: self._engine.drain(rest))
            if not self._away:
                self._draining.update(rest)

    def _asked(self, question: Callable[[], T]) -> T | None:
        """The engine's answer; None if it does not answer for now."""
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
    """The last lines of a log that is a file on this machine, indented; empty for any other log."""
    try:
        lines = Path(log).read_text(errors="replace").splitlines()[-_LINES:]
    except OSError:
        return ""
    return "".join(f"    {line}\n" for line in lines)
