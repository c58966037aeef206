"""Attempts at a study's trials, made in this process, and what they have stored."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace

import optuna
import torch
from optuna.trial import FrozenTrial

from hpo.storage.grants import Extend
from hpo.storage.ledger import Lease, Owner
from hpo.study.open_study import OpenStudy, load_study
from hpo.trial.builder import Builder
from hpo.trial.report import TrialReport
from hpo.trial.run import TrialRun
from hpo.trial.session import Session
from hpo.trial.stopping import StopRequest
from hpo.trial.trainer_code import TrainerCode
from hpo.trial.training_code import FunctionCode, TrainingCode


def run(
    view: OpenStudy,
    code: TrainingCode | None = None,
    trial: optuna.Trial | None = None,
    *,
    request: StopRequest | None = None,
    pulse: Callable[[Session], None] = lambda _: None,
    extend: Extend | None = None,
) -> TrialReport:
    """One attempt at a trial, the next one if none is given; the Trainer trains it, if nothing else does."""
    trial = view.study.ask() if trial is None else trial
    code = trainer_code(view) if code is None else code
    return TrialRun(view, trial, code, torch.device("cpu"), request or StopRequest(), pulse, extend).run()


def run_function(
    view: OpenStudy, function: Callable[[Session], object], request: StopRequest | None = None
) -> TrialReport:
    """One attempt at the next trial, by a function that trains by itself."""
    return run(view, FunctionCode(function), request=request)


def trainer_code(view: OpenStudy) -> TrainingCode:
    """The Trainer, as the study file has it."""
    return TrainerCode(Builder(view.spec))


def stored(view: OpenStudy, number: int = 0) -> FrozenTrial:
    """The trial as another process reads it."""
    with load_study(view.spec) as other:
        return other.study.get_trials()[number]


def dying(view: OpenStudy) -> OpenStudy:
    """The study as a worker sees it whose process is gone, to all others."""
    return load_study(view.spec, replace(Owner.current(), start_time=1.0))


def killing(pulse: int) -> Callable[[Session], None]:
    """Ends this process by a SIGKILL at the n-th pulse of a run."""
    seen: list[int] = []

    def count(session: Session) -> None:
        seen.append(session.epoch)
        if len(seen) == pulse:
            os.kill(os.getpid(), signal.SIGKILL)

    return count


class InThirdEpoch:
    """A pulse that does something once: after the second epoch's report, at the third one's first batch."""

    def __init__(self, action: Callable[[], object]) -> None:
        self.epochs: list[int] = []
        self.action = action

    def __call__(self, session: Session) -> None:
        self.epochs.append(session.epoch)
        if self.epochs.count(2) == 2:
            self.action()


class From(StopRequest):
    """A request to leave that comes at the n-th look, or whatever else is to happen then."""

    def __init__(self, look: int, action: Callable[[], object] | None = None) -> None:
        super().__init__()
        self.looks, self.look = 0, look
        self.action = self.leave if action is None else action

    def stops(self, number: int, lease: Lease) -> bool:
        self.looks += 1
        if self.looks == self.look:
            self.action()
        return super().stops(number, lease)


class AskedAt(optuna.pruners.BasePruner):
    """Prunes at one step and remembers each step that it was asked about."""

    def __init__(self, prune_at: int | None = None) -> None:
        self.prune_at = prune_at
        self.steps: list[int] = []

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        assert trial.last_step is not None
        self.steps.append(trial.last_step)
        return trial.last_step == self.prune_at
