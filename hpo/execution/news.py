"""What a worker reports to its supervisor about a trial: its epochs and grants, and trackers that lack it."""

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

#: Seconds between two messages about epochs at least.
_PAUSE: Final = 0.25
#: Epochs in one of them at most: with few it fits into any channel that has room at all.
_LENGTH: Final = 100
#: Of what a tracker says of its failure at most, for the same reason.
_CHARACTERS: Final = 500


class News:
    """Reports to the supervisor which epochs a trial has finished, and what it is granted as it trains.

    Training never waits for that. What can't be sent now, because the channel is full or has just been used,
    is said with a later batch, and the rest when the trial has ended.

    Args:
        channel: To the supervisor.
        number: The trial.
        metric: The metric to report.
        grants: What a scheduler had granted the trial when it was taken.
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
        """Report what trackers warn of inside."""
        handler = _Handler(self)
        mirror.logger.addHandler(handler)
        try:
            yield
        finally:
            mirror.logger.removeHandler(handler)

    def warn(self, what: str, why: str) -> None:
        """Take note of what a tracker lacks, and why; it is reported with the next epochs."""
        self._warnings.append(Warned(self._number, what, why.partition("\n")[0][:_CHARACTERS]))

    def extend(self, granted: Granted) -> None:
        """Take note of a grant by which the trial trains on; it is reported with the next epochs."""
        self._grants.append(granted)

    def follow(self, session: Session, now: float) -> None:
        """Send what is new, if that is possible without waiting, what was resumed first."""
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
    """Hands the warnings of `trainer.callbacks.mirror.Service` on."""

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
