"""Reports a trial's progress to the supervisor: its epochs, its grants, and what trackers fail to show of it."""

from __future__ import annotations

import contextlib
import logging
import select
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Final

from hpo.execution.messages import Command, EpochsEnded, Extended, Message, Warned, send
from hpo.storage.grants import Granted
from hpo.trial.session import Session
from trainer.callbacks import mirror

#: Shortest time between two messages about epochs, in seconds.
_PAUSE: Final = 0.25
#: The most epochs in one message, so that it fits into any channel that has room at all.
_LENGTH: Final = 100
#: The most characters of a tracker's error in one message, for the same reason.
_CHARACTERS: Final = 500


class News:
    """Reports to the supervisor which epochs a trial has finished, and which grants it gets while it trains.

    Training never waits for this. What can't be sent now, because the channel is full or has just been used, is
    sent after a later batch, and the rest when the trial has ended.

    Args:
        channel: To the supervisor.
        number: The trial.
        metric: The metric to report.
        grants: The grants that the trial had when it was taken.
    """

    def __init__(
        self, channel: Connection[Message, Command], number: int, metric: str, grants: Sequence[Granted] = ()
    ) -> None:
        self._channel = channel
        self._number = number
        self._metric = metric
        self._session: Session | None = None
        self._told = 0
        self._next = 0.0
        self._grants = list(grants)
        self._granted_told = len(self._grants)
        self._warnings: list[Warned] = []

    @contextlib.contextmanager
    def of_trackers(self) -> Iterator[None]:
        """Report the warnings that trackers log inside the block."""
        handler = _Handler(self)
        mirror.logger.addHandler(handler)
        try:
            yield
        finally:
            mirror.logger.removeHandler(handler)

    def warn(self, what: str, why: str) -> None:
        """Note what a tracker fails to show, and why; it is reported with the next epochs."""
        self._warnings.append(Warned(self._number, what, why.partition("\n")[0][:_CHARACTERS]))

    def extend(self, granted: Granted) -> None:
        """Note a grant with which the trial trains on; it is reported with the next epochs."""
        self._grants.append(granted)

    def follow(self, session: Session, now: float) -> None:
        """Send what is new, as far as that is possible without waiting; resumed epochs come first."""
        self._session = session
        if self._told < len(session.history) and now >= self._next:
            self._next = now + _PAUSE
            while self._told < len(session.history) and _has_room(self._channel):
                self._say(session)
            if _has_room(self._channel):
                self._say_granted()
            while self._warnings and _has_room(self._channel):
                send(self._channel, self._warnings.pop(0))

    def finish(self) -> None:
        """Report the rest: training is over."""
        while self._session is not None and self._told < len(self._session.history):
            self._say(self._session)
        self._say_granted()
        for warning in self._warnings:
            send(self._channel, warning)

    def _say_granted(self) -> None:
        while self._granted_told < len(self._grants):
            self._granted_told += 1
            send(self._channel, Extended(self._number, tuple(self._grants[: self._granted_told])))

    def _say(self, session: Session) -> None:
        resumed = self._told < session.resumed_at
        end = session.resumed_at if resumed else len(session.history)
        said = session.history[self._told : min(end, self._told + _LENGTH)]
        values = tuple(_number(metrics.get(self._metric)) for metrics in said)
        predicted = _number(said[-1].get("predicted_final_loss"))
        first, self._told = self._told + 1, self._told + len(said)
        send(self._channel, EpochsEnded(self._number, first, values, session.max_epochs, predicted, resumed))


class _Handler(logging.Handler):
    """Passes the warnings of `trainer.callbacks.mirror.Service` on to `News`."""

    def __init__(self, news: News) -> None:
        super().__init__(logging.WARNING)
        self._news = news

    def emit(self, record: logging.LogRecord) -> None:
        what, error = record.args  # type: ignore[misc]
        self._news.warn(str(what), str(error))


def _number(value: float | None) -> float | None:
    return None if value is None else float(value)


def _has_room(channel: Connection[Message, Command]) -> bool:
    """Whether a short message can be sent without waiting for its reader."""
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLOUT)
    return poll.poll(0) == [(channel.fileno(), select.POLLOUT)]
