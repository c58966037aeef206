"""Beats in the ledger: one statement for many leases, and a thread that beats regularly.

An agent beats for all its trial processes (`hpo.execution.beating`); a process without an agent that beats for it
beats for itself. Both use this module. An attempt that is no longer its trial's lease gets no beat.
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Self, cast

import sqlalchemy as sa

from hpo.errors import StudyError
from hpo.storage.id_lists import in_chunks
from hpo.storage.ledger import ATTEMPTS, Executor, Lease
from hpo.storage.outage import DatabaseGoneError, first_line

logger = logging.getLogger(__name__)

#: The most leases in one statement: databases limit the depth of an expression and the number of parameters.
_TOGETHER: Final = 100


class Beat(NamedTuple):
    """A lease whose owner lives, and the seconds that the attempt has taken so far."""

    lease: Lease
    seconds: float


def give(conn: Executor, beats: Sequence[Beat]) -> list[Lease]:
    """Record that the owners of leases live, up to 100 leases per statement; returns the leases that are lost."""
    return [lease for chunk in in_chunks(beats, _TOGETHER) for lease in _give(conn, chunk)]


def _give(conn: Executor, beats: Sequence[Beat]) -> list[Lease]:
    update, still_held = _statements(len(beats))
    which: dict[str, Any] = {}
    for at, beat in enumerate(beats):
        which |= {f"trial_{at}": beat.lease.trial_id, f"attempt_{at}": beat.lease.attempt}
    seconds = {f"seconds_{at}": beat.seconds for at, beat in enumerate(beats)}
    done = cast("sa.CursorResult[Any]", conn.execute(update, which | seconds | {"now": time.time()}))
    if done.rowcount == len(beats):
        return []
    held = {Lease(*cast("tuple[int, int]", tuple(row))) for row in conn.execute(still_held, which)}
    return [beat.lease for beat in beats if beat.lease not in held]


@functools.cache
def _statements(count: int) -> tuple[sa.Update, sa.Select[tuple[int, int]]]:
    """The statements that beat for ``count`` leases, and that ask which of them are held; built once per count."""
    leases = [
        sa.and_(
            ATTEMPTS.c.trial_id == sa.bindparam(f"trial_{at}", type_=sa.Integer),
            ATTEMPTS.c.attempt == sa.bindparam(f"attempt_{at}", type_=sa.Integer),
        )
        for at in range(count)
    ]
    are_held = sa.and_(sa.or_(*leases), ATTEMPTS.c.ended_at.is_(None))
    took = [(lease, sa.bindparam(f"seconds_{at}", type_=sa.Double)) for at, lease in enumerate(leases)]
    update = sa.update(ATTEMPTS).where(are_held).values(beat_at=sa.bindparam("now"), seconds=sa.case(*took))
    return update, sa.select(ATTEMPTS.c.trial_id, ATTEMPTS.c.attempt).where(are_held)


class Heartbeat:
    """A thread that beats for the leases that a worker holds, and reports those that have been lost.

    A beat that fails, for any reason, is tried again at the next interval: without beats a living worker
    would be taken for dead.

    Args:
        beat: Beats once for every held trial; returns the leases that are lost.
        interval: Seconds between beats.
        is_due: Called at each interval; whether to beat now. None: always.
        on_lost: Called from the thread, once for each lease that is lost.
        on_gone: Called from the thread when the database is gone permanently.
    """

    def __init__(
        self,
        beat: Callable[[], Iterable[Lease]],
        *,
        interval: float = 10.0,
        is_due: Callable[[], bool] | None = None,
        on_lost: Callable[[Lease], None] | None = None,
        on_gone: Callable[[], None] | None = None,
    ) -> None:
        self._beat = beat
        self._interval = interval
        self._is_due = is_due
        self._on_lost = on_lost
        self._on_gone = on_gone
        self._reported: set[Lease] = set()
        self._failing = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpo-heartbeat", daemon=True)

    def start(self) -> Self:
        """Start to beat."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop beating, and wait for a beat that is under way."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._give()

    def _give(self) -> None:
        try:
            if self._is_due is not None and not self._is_due():
                return
            lost = set(self._beat())
            for lease in lost - self._reported:
                if self._on_lost is not None:
                    self._on_lost(lease)
        except Exception as error:
            if not self._failing:
                text = "a sign of life could not be given, tried again: %s"
                expected = isinstance(error, StudyError | sa.exc.SQLAlchemyError | OSError)
                logger.warning(text, first_line(error), exc_info=not expected)
            self._failing = True
            if isinstance(error, DatabaseGoneError) and self._on_gone is not None:
                self._on_gone()
        else:
            self._failing, self._reported = False, lost
