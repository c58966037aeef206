"""Connections of which a server has few: a process keeps one, and closes it while it does not use it for long."""

import math
import time

import sqlalchemy as sa
from sqlalchemy.util import queue


class IdlePool(sa.QueuePool):
    """A pool that can close what it has not lent for a while; the next statement opens a connection anew."""

    _used_at = math.inf

    def _do_return_conn(self, record: sa.pool.ConnectionPoolEntry) -> None:
        self._used_at = time.monotonic()
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
