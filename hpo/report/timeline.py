"""Sorts the ledger's attempts by worker, and computes the share of time in which each worker was busy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from hpo.storage.ledger import Attempt

#: A time without work that is longer than this share of the work is a pause, which is not drawn.
_PAUSE: Final = 0.1


@dataclass(frozen=True)
class Work:
    """One attempt at a trial.

    Attributes:
        trial: The trial's number.
        attempt: The attempt's number, from 1.
        worker: The worker.
        host: Its machine.
        device: Its device.
        start: When the attempt began, in seconds since the epoch.
        end: When it ended, or last beat.
        outcome: How it ended; ``running`` until then.
        reason: Why it ended, if that is stored.
    """

    trial: int
    attempt: int
    worker: str
    host: str
    device: str
    start: float
    end: float
    outcome: str
    reason: str | None = None

    @classmethod
    def of(cls, attempt: Attempt, trial: int) -> Self:
        """The work of an attempt of the ledger, at the trial with this number."""
        return cls(
            trial,
            attempt.attempt,
            attempt.worker or "unnamed",
            attempt.host,
            attempt.device or "unknown device",
            attempt.started_at,
            attempt.started_at + attempt.seconds,
            "running" if attempt.ended_at is None else attempt.outcome or "unknown",
            attempt.reason,
        )


@dataclass(frozen=True)
class Lane:
    """The work of one worker on one device.

    Attributes:
        name: Its name for people, with the machine only if there are several.
        work: Its attempts, sorted by start.
        busy: The seconds in which it was busy.
    """

    name: str
    work: Sequence[Work]
    busy: float


@dataclass(frozen=True)
class Timeline:
    """The work of a study.

    Attributes:
        lanes: The lanes, sorted by name.
        spans: The times when the study ran, as (start, end) in seconds since the epoch; between them are pauses.
    """

    lanes: Sequence[Lane]
    spans: Sequence[tuple[float, float]]

    @classmethod
    def of(cls, work: Iterable[Work]) -> Self:
        """Sort the attempts into lanes."""
        work = sorted(work, key=lambda each: each.start)
        hosts = len({each.host for each in work}) > 1
        lanes: dict[str, list[Work]] = {}
        for each in work:
            name = f"{each.worker} ({each.device})" + (f" on {each.host}" if hosts else "")
            lanes.setdefault(name, []).append(each)
        busy = {name: _length(_united(each)) for name, each in lanes.items()}
        order = sorted(lanes, key=lambda name: (len(name), name))  # worker-10 after worker-9
        return cls([Lane(name, lanes[name], busy[name]) for name in order], _joined(_united(work)))

    def latest(self, most: int) -> Self:
        """A copy with only the `most` attempts that began last; lanes without any of them stay."""
        starts = sorted(each.start for lane in self.lanes for each in lane.work)
        if len(starts) <= most:
            return self
        lanes = [
            replace(lane, work=[each for each in lane.work if each.start >= starts[-most]]) for lane in self.lanes
        ]
        return replace(self, lanes=lanes)

    @property
    def seconds(self) -> float:
        """How long the study ran, without pauses."""
        return _length(self.spans)

    @property
    def worked(self) -> float:
        """The busy seconds of all workers together."""
        return sum(lane.busy for lane in self.lanes)

    @property
    def busy_share(self) -> float | None:
        """The share of the workers' time in which they were busy; None without any work."""
        return self.worked / (self.seconds * len(self.lanes)) if self.seconds else None

    @property
    def pauses(self) -> float:
        """Seconds between the first attempt and the last in which the study did not run."""
        return self.spans[-1][1] - self.spans[0][0] - self.seconds if self.spans else 0.0

    def at(self, instant: float) -> float:
        """The seconds that the study had run at an instant, without pauses."""
        return sum(max(0.0, min(end, instant) - start) for start, end in self.spans)

    def totals(self) -> dict[str, Any]:
        """The totals as plain data; times in seconds."""
        by_outcome: dict[str, float] = {}
        for lane in self.lanes:
            for each in lane.work:
                by_outcome[each.outcome] = by_outcome.get(each.outcome, 0.0) + each.end - each.start
        return {
            "seconds": self.seconds,
            "worker_seconds": self.worked,
            "busy_share": self.busy_share,
            "pauses_s": self.pauses,
            "attempts": sum(len(lane.work) for lane in self.lanes),
            "seconds_by_outcome": by_outcome,
            "workers": [
                {
                    "worker": lane.name,
                    "attempts": len(lane.work),
                    "seconds": lane.busy,
                    "busy_share": lane.busy / self.seconds if self.seconds else None,
                }
                for lane in self.lanes
            ],
        }


def _united(work: Iterable[Work]) -> list[tuple[float, float]]:
    """The times in which at least one attempt was running."""
    spans: list[tuple[float, float]] = []
    for each in work:  # sorted by start
        if spans and each.start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], each.end))
        else:
            spans.append((each.start, each.end))
    return spans


def _joined(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The spans with short gaps closed: between two trials a worker is idle, but the study runs."""
    longest = _PAUSE * _length(spans)
    joined: list[tuple[float, float]] = []
    for start, end in spans:
        if joined and start - joined[-1][1] <= longest:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)
