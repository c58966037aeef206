"""Connections of which a server has few: a process keeps one, and closes it while it does not use it for long."""

from __future__ import annotations

import math
import time
from typing import Any, Final, cast

import sqlalchemy as sa
from sqlalchemy.util import queue

#: Seconds after its use for which a connection counts as good: to try it costs as much as a small statement.
_FRESH: Final = 0.1


class IdlePool(sa.QueuePool):
    """A pool that can close what it has not lent for a while; the next statement opens a connection anew.

    With ``pre_ping`` a connection is tried before it is lent, unless it was in use a moment ago. One that breaks
    within that moment is found by the statement itself, as one that breaks after it was tried.
    """

    _used_at = math.inf
    _pings = False

    @property
    def _pre_ping(self) -> bool:
        return self._pings and not time.monotonic() - self._used_at < _FRESH

    @_pre_ping.setter
    def _pre_ping(self, pings: bool) -> None:
        self._pings = pings

    def recreate(self) -> IdlePool:
        """A new pool like this one."""
        pool = cast("IdlePool", super().recreate())
        pool._pings = self._pings  # noqa: SLF001 - one of this class
        return pool

    def _do_return_conn(self, record: sa.pool.ConnectionPoolEntry) -> None:
        self._used_at = time.monotonic()
        cast("Any", record).fresh = False  # lent without a look whether it is
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
