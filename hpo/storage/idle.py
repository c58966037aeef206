"""Connections of which a server has few: a process keeps one, and closes it while it does not use it for long."""

import math
import time
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.util import queue

#: Seconds for which a connection that worked is taken to work still; statements of a decision follow each other
#: faster. Where it has broken meanwhile, what it was lent for fails as if it broke a moment later, and is tried
#: again (`hpo.storage.outage`).
_FRESH: Final = 0.1


class IdlePool(sa.QueuePool):
    """A pool that can close what it has not lent for a while; the next statement opens a connection anew.

    Told to ask a connection whether it still works before it lends it, it does so only if none was given back
    just before: a question takes as long as many a statement.
    """

    _used_at = math.inf
    _pings = False

    @property
    def _pre_ping(self) -> bool:  # SQLAlchemy reads it each time that it lends a connection
        return self._pings and time.monotonic() - self._used_at >= _FRESH

    @_pre_ping.setter
    def _pre_ping(self, pings: bool) -> None:
        self._pings = pings

    def recreate(self) -> "IdlePool":
        """A new pool like this one, which SQLAlchemy makes when all connections are closed."""
        pool = super().recreate()
        assert isinstance(pool, IdlePool)
        pool._pings = self._pings  # noqa: SLF001 - another one of this class
        return pool

    def _do_return_conn(self, record: Any) -> None:
        self._used_at = time.monotonic()
        record.fresh = False  # as SQLAlchemy marks one that it has lent with a question
        super()._do_return_conn(record)

    def close_idle(self, seconds: float) -> None:
        """Close connections that are not in use, if none has been given back for so many seconds.

        Any thread may do so: a connection is taken out of the pool as by who uses it, and closed as one for which
        a pool has no room.
        """
        while time.monotonic() - self._used_at >= seconds:
            try:
                record = self._pool.get(block=False)
            except queue.Empty:
                return
            try:
                record.close()
            finally:
                self._dec_overflow()
