"""`hpo run` with a scheduler that pauses and resumes trials: a storm starts it in the command's place."""

from __future__ import annotations

from dataclasses import dataclass

import optuna

from hpo.cli.app import main
from hpo.search.schedulers.pruner import PrunerScheduler
from hpo.search.schedulers.scheduler import Decision, New, Next, Resume, Standing, Wait
from hpo.study import open_study


@dataclass(frozen=True)
class PauseOften(PrunerScheduler):
    """Pauses every trial after every third epoch, and resumes three of four of them, the latest first.

    The study's pruner stops trials as ever. The fourth ones stay paused up to the study's end.
    """

    every: int = 3
    share: int = 4
    few: int = 2

    def watches(self, study: optuna.Study) -> bool:
        """Always."""
        return True

    def decide(self, trial: optuna.Trial, step: int) -> Decision:
        """STOP where the pruner does, else PAUSE after every third epoch."""
        decision = super().decide(trial, step)
        return Decision.PAUSE if decision is Decision.CONTINUE and step % self.every == 0 else decision

    def next(self, standing: Standing) -> Next:
        """A few paused trials gather before one of them is resumed, as long as there are new ones to start."""
        waiting = [trial.number for trial in standing.paused if trial.number % self.share]
        if waiting and (standing.new_left == 0 or len(waiting) > self.few):
            return Resume(waiting[-1])
        return Wait() if standing.new_left == 0 else New()


if __name__ == "__main__":
    from tests.acceptance.chaos.pausing import PauseOften as Scheduler  # by the name under which workers find it

    open_study.make_scheduler = lambda _: Scheduler()
    main()
