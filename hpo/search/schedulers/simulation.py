"""Runs a scheduler on recorded curves, with workers in virtual time and without any training."""

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
    """A configuration and its recorded curve.

    Attributes:
        params: Dotted path → value.
        values: Epoch → the metric reported after it.
        whole: Whether the training ended by itself after the last of these epochs; False: the rest is not known.
        feasible: As of `Seen`, at the trial's end: earlier violations are not recorded.
        counts: Whether its values may be the study's best; False for a trial that diverged or failed.
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
        """The last recorded epoch; 0 without one."""
        return max(self.values, default=0)

    @property
    def diverged(self) -> bool:
        """Whether the training ended by itself without a result."""
        return self.whole and not self.counts


@dataclass
class SimulatedTrial:
    """A trial of a simulated study.

    Attributes:
        number: The trial's number.
        known: Its configuration and recorded curve.
        done: Epochs that it has trained.
        values: The values that it has reported, by epoch.
        state: As of `Seen`.
        until: As of `Seen`.
        kinds: As of `Seen`.
        at_edge: Whether it ended because its recorded curve ends, not by itself.
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
        """Train one more epoch."""
        self.done += 1
        if self.done in self.known.values:
            self.values[self.done] = self.known.values[self.done]

    def end(self) -> None:
        """End the trial at the end of its recorded curve."""
        self.state, self.at_edge = "ended", not self.known.whole

    def seen(self) -> Seen:
        """The trial as a scheduler sees it."""
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


#: Returns the recorded configuration of a new trial, for the parameters that the scheduler proposes; for None, as
#: a sampler would draw it.
Draw = Callable[[Mapping[str, Any] | None], Known]


class Simulation:
    """A simulated study whose workers run in virtual time.

    Args:
        scheduler: The scheduler to run.
        standing: The study before its first trial: space, budgets, seed, and in `Standing.trials` the imported
            trials. ``n_trials`` limits how often ``draw`` is called.
        draw: See `Draw`.
        workers: How many trials run at a time.

    Attributes:
        trials: All trials but imported ones, by number.
        seconds: How long each decision took, in seconds.

    Raises:
        TypeError: By `run`, if the scheduler forks a trial.
    """

    def __init__(self, scheduler: Scheduler, standing: Standing, draw: Draw, workers: int) -> None:
        self._scheduler, self._standing, self._draw, self._workers = scheduler, standing, draw, workers
        self._imported = list(standing.trials)
        self._events: list[tuple[float, int, int]] = []
        self.trials: list[SimulatedTrial] = []
        self.seconds: list[float] = []

    def run(self) -> None:
        """Train until nothing is left to do; at equal times the lower worker's event comes first."""
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
        """The scheduler's answer if an epoch has ended a trial or its grant; None: the trial continues."""
        if trial.done >= trial.known.epochs and (trial.known.whole or trial.until != trial.done):
            trial.end()
            return self._asked(None)
        if trial.until is None or trial.done < trial.until or not trial.values:
            return None  # as in a real study, a trial does not pause before its first value
        trial.state = "paused"
        return self._asked(trial.number)

    def _occupied(self, now: float, idle: list[int], answer: Next) -> list[int]:
        """Give the idle workers trials, the first by this answer; returns the workers that stay idle."""
        while (trial := self._taken(answer)) is not None:
            if trial.done < trial.known.epochs:
                self._train(now, idle.pop(0), trial)
            else:  # it would resume where its recorded curve has ended
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
