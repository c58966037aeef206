"""A connection pool for servers that allow few connections: it keeps one, and can close it while it is idle."""

import math
import time
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.util import queue

#: Seconds for which a connection that worked is assumed to still work; the statements of a decision follow each
#: other faster. If it has broken in between, the statement fails as if it had broken a moment later, and is tried
#: again (`hpo.storage.outage`).
_FRESH: Final = 0.1


class IdlePool(sa.QueuePool):
    """A pool that can close connections that have not been used for a while; the next statement opens a new one.

    With ``pool_pre_ping``, it pings a connection before use only if none was returned just before, because a ping
    takes as long as many a statement.
    """

    _used_at = math.inf
    _pings = False

    @property
    def _pre_ping(self) -> bool:  # SQLAlchemy reads it at each checkout of a connection
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
        record.fresh = False  # as SQLAlchemy itself does for a connection that it has pinged
        super()._do_return_conn(record)

    def close_idle(self, seconds: float) -> None:
        """Close connections that are not in use, if none has been returned for this many seconds.

        Any thread may call this: a connection is taken out of the pool as for use, and then closed like one for
        which the pool has no room.
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
