"""A scheduler on curves that are known: workers in virtual time, and nothing is trained."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hpo.search.schedulers.scheduler import Fork, New, Next, Resume, Scheduler, Standing, Wait, within_epochs
from hpo.search.schedulers.seen import Seen


@dataclass(frozen=True)
class Known:
    """A configuration and what is known of its training.

    Attributes:
        params: Dotted path → value.
        values: Epochs → the metric as it was reported after them.
        whole: It ended after the last of them by itself; False: what came after is not known.
        feasible: As of `Seen`, at its end: how far it violated a bound before is not kept.
        counts: Its values may be the best of a study; those of a trial that diverged or failed are no result.
        pace: Virtual time that an epoch takes.
    """

    params: Mapping[str, Any]
    values: Mapping[int, float]
    whole: bool = True
    feasible: bool = True
    counts: bool = True
    pace: float = 1.0

    @property
    def epochs(self) -> int:
        """How many epochs are known."""
        return max(self.values, default=0)

    @property
    def diverged(self) -> bool:
        """Whether it ended by itself, and not with a result."""
        return self.whole and not self.counts


@dataclass
class SimulatedTrial:
    """A trial of a simulated study.

    Attributes:
        number: Its number.
        known: What it trains.
        done: Epochs that it has trained.
        values: What it has reported.
        state: As of `Seen`.
        until: As of `Seen`.
        kinds: As of `Seen`.
        at_edge: It was granted epochs that are not known.
    """

    number: int
    known: Known
    done: int = 0
    values: dict[int, float] = field(default_factory=dict)
    state: Literal["running", "paused", "ended"] = "running"
    until: int | None = None
    kinds: list[str] = field(default_factory=list)
    at_edge: bool = False

    def train(self) -> None:
        """Another epoch has been trained."""
        self.done += 1
        if self.done in self.known.values:
            self.values[self.done] = self.known.values[self.done]

    def end(self) -> None:
        """All that is known of it has been trained."""
        self.state, self.at_edge = "ended", not self.known.whole

    def seen(self) -> Seen:
        """As a scheduler sees it."""
        return Seen(
            self.number,
            self.known.params,
            self.values,
            self.state,
            self.until,
            tuple(self.kinds),
            whole=self.state == "ended" and self.known.whole and self.known.counts,
            diverged=self.state == "ended" and self.known.diverged,
            feasible=self.known.feasible or self.state != "ended",
        )


#: Returns what a new trial trains, of parameters that the scheduler proposes, or None where a sampler would draw.
Draw = Callable[[Mapping[str, Any] | None], Known]


class Simulation:
    """A study of workers in virtual time.

    Args:
        scheduler: Decides.
        standing: The study without its trials: space, budgets, seed. Its ``n_trials`` bounds how often ``draw`` is
            called. `Standing.trials` has those that were imported.
        draw: See `Draw`.
        workers: How many trials run at a time.

    Attributes:
        trials: All trials, by number.
        seconds: What each decision took, in seconds.

    Raises:
        TypeError: By `run`: the scheduler forks a trial.
    """

    def __init__(self, scheduler: Scheduler, standing: Standing, draw: Draw, workers: int) -> None:
        self._scheduler, self._standing, self._draw, self._workers = scheduler, standing, draw, workers
        self._imported = list(standing.trials)
        self._events: list[tuple[float, int, int]] = []
        self.trials: list[SimulatedTrial] = []
        self.seconds: list[float] = []

    def run(self) -> None:
        """Train until nothing is left to do; of events at one time the lower worker's comes first."""
        idle = self._occupied(0.0, list(range(self._workers)), self._asked(None))
        while self._events:
            now, worker, place = heapq.heappop(self._events)
            trial = self.trials[place]
            trial.train()
            answer = self._after(trial)
            if answer is None:
                self._train(now, worker, trial)
            else:
                idle = self._occupied(now, sorted([*idle, worker]), answer)

    def _after(self, trial: SimulatedTrial) -> Next | None:
        """What a worker does after an epoch of its trial; None: it trains on."""
        if trial.done >= trial.known.epochs and (trial.known.whole or trial.until != trial.done):
            trial.end()
            return self._asked(None)
        if trial.until is None or trial.done < trial.until or not trial.values:
            return None  # as a trial of a study, it does not pause before its first value
        trial.state = "paused"
        return self._asked(trial.number)

    def _occupied(self, now: float, idle: list[int], answer: Next) -> list[int]:
        """Give the idle workers trials, the first one by this answer; returns those that wait."""
        while (trial := self._taken(answer)) is not None:
            if trial.done < trial.known.epochs:
                self._train(now, idle.pop(0), trial)
            else:  # it would resume where nothing is known any more
                trial.end()
            if not idle:
                break
            answer = self._asked(None)
        return idle

    def _taken(self, answer: Next) -> SimulatedTrial | None:
        if isinstance(answer, Wait):
            return None
        if isinstance(answer, Fork):
            raise TypeError("what a fork with other parameters would report is not known")
        if isinstance(answer, Resume):
            trial = self.trials[answer.number - len(self._imported)]
        else:
            trial = SimulatedTrial(len(self._imported) + len(self.trials), self._draw(answer.params))
            self.trials.append(trial)
        trial.state, trial.until = "running", answer.until
        trial.kinds.append(answer.why.kind)
        if answer.state is not None:
            self._standing = replace(self._standing, state=answer.state)
        return trial

    def _train(self, now: float, worker: int, trial: SimulatedTrial) -> None:
        place = trial.number - len(self._imported)
        heapq.heappush(self._events, (now + trial.known.pace, worker, place))

    def _asked(self, here: int | None) -> Next:
        trials = [*self._imported, *(trial.seen() for trial in self.trials)]
        standing = replace(self._standing, read=lambda: trials, here=here)
        began = time.perf_counter()
        answer = within_epochs(standing, self._scheduler.next(standing))
        self.seconds.append(time.perf_counter() - began)
        if isinstance(answer, New) and standing.new_left == 0:
            return Wait()
        return answer
