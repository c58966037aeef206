"""`TrialRun`: runs one attempt at a trial, from its parameters to its stored outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import optuna
import torch
from optuna.exceptions import StorageInternalError
from optuna.trial import FrozenTrial

from hpo.errors import LeaseLostError
from hpo.search.distinct import twin
from hpo.storage.attributes import (
    GRANTS_ATTR,
    PARTS_ATTR,
    RUN_ATTR,
    SAME_AS_ATTR,
    STARTED_AGAIN_ATTR,
    TIMING_ATTR,
)
from hpo.storage.grants import Extend, Granted
from hpo.storage.ledger import Lease
from hpo.storage.lineage import forked_from, inherited_epochs
from hpo.storage.optuna_private import id_of_trial, known_of
from hpo.storage.outage import first_line
from hpo.study.code_record import trial_codes
from hpo.study.folders import (
    attempt_folder,
    attempt_folders,
    note_stop,
    print_error,
    print_notice,
    redirect_output,
    set_aside,
)
from hpo.study.open_study import OpenStudy
from hpo.study.outcome import Outcome, outcome_of, unclaimed
from hpo.study.own_trials import trial_value
from hpo.study.timing import timing_of
from hpo.trial.artifacts import keep_artifacts
from hpo.trial.checkpoints import Checkpoints, Source, checkpoint_of_epoch
from hpo.trial.end import Failure, TrialEnd
from hpo.trial.failure import failure_outcome, is_device_memory
from hpo.trial.process_forks import only_in
from hpo.trial.report import TrialReport
from hpo.trial.reports import GatheredReports, LateReports, Reports
from hpo.trial.session import Session
from hpo.trial.stopping import StopRequest
from hpo.trial.training_code import TrainingCode
from hpo.wording import ENDED_OUTSIDE, never_asked, same_as
from trainer.error_text import error_text, traceback_text
from trainer.state import DIVERGED, INTERRUPTED, PAUSED, PRUNED

_OUTCOMES: Final[Mapping[str | None, Outcome]] = {DIVERGED: Outcome.DIVERGED, PRUNED: Outcome.PRUNED}


@dataclass
class TrialRun:
    """One attempt at one trial, in this process.

    Attributes:
        opened: The study; its storage holds the trial's lease.
        trial: Optuna's trial, RUNNING.
        code: The code that trains it: the Trainer or a function.
        device: The device to train on.
        request: Requests to stop this worker or its trial.
        pulse: Called repeatedly with the session, as long as training advances.
        extend: Called where the trial's grant ends. Without it the trial pauses there.
        before_s: Seconds that it took to take the trial and to start this process for it.
    """

    opened: OpenStudy
    trial: optuna.Trial
    code: TrainingCode
    device: torch.device
    request: StopRequest
    pulse: Callable[[Session], None]
    extend: Extend | None = None
    before_s: float = 0.0
    _failure: Failure | None = None
    _paused: bool = False
    _outside: bool = False
    _unclaimed: str = ""
    _running: Session | None = None
    _same: FrozenTrial | None = None

    def run(self) -> TrialReport:
        """Train, and store the result.

        Returns:
            The report. An error of the trial's own code is in it, and not raised.

        Raises:
            StorageInternalError: The storage failed, which is not the trial's fault; the trial stays RUNNING.
        """
        started = time.monotonic()
        number, storage = self.trial.number, self.opened.storage
        outcome: Outcome | None
        value: float | None
        attempt = 0
        try:
            attempt = self._lease.attempt
            foreign = set_aside(self.opened.spec, number, attempt, self._attempts)
            folder = attempt_folder(self.opened.spec, number, attempt)
            with redirect_output(folder / "log.txt"):
                for name in foreign:
                    print_notice(f"a folder was here that this study's database does not know; it is now {name}")
                outcome = self._train(folder)
                self._say_unclaimed(outcome)
                with storage.together(self._id):
                    if outcome is not None or self._paused:
                        keep_artifacts(self.opened, self._id, number, folder)
                    value = self._store(outcome)
        except StorageInternalError as error:
            note_stop(self.opened.spec, number, attempt, f"the database failed: {first_line(error)}")
            raise
        except LeaseLostError:
            # Another attempt has the trial, or it was ended from outside: this attempt counts no more.
            storage.forget(self._id)
            self._failure, self._paused = None, False
            outcome, value = self._ended_outside(attempt)
        return TrialReport(
            number,
            outcome,
            value,
            epochs=len(self.code.history),
            duration_s=time.monotonic() - started,
            reason=self._reason,
            params=dict(self.trial.params),
            paused=self._paused,
            outside=self._outside,
            bounded=bool(known_of(self.trial).constraints),
        )

    def _ended_outside(self, attempt: int) -> tuple[Outcome | None, float | None]:
        """The outcome and value of a trial that was ended from outside during this attempt; else None twice."""
        storage = self.opened.storage
        try:
            trial, last = storage.get_trial(self._id), storage.attempts_of_trial(self._id)[-1]
        except (KeyError, IndexError):  # the study was deleted
            return None, None
        # If not ours, another attempt has ended it, or a process that took this one for dead.
        ours = last.attempt == attempt and last.outcome in (None, trial.state.name.lower())
        if not ours or not trial.state.is_finished():
            return None, None
        self._outside = True
        return Outcome(outcome_of(trial)), trial_value(self.opened, trial)

    @property
    def _reason(self) -> str:
        """The reason of the trial's end, for people; empty if the outcome says it all."""
        if self._outside:
            return ENDED_OUTSIDE
        if self._failure is not None:
            return self._failure.reason
        same = self._attrs.get(SAME_AS_ATTR)
        return self._unclaimed if same is None else same_as(same)

    def _say_unclaimed(self, outcome: Outcome | None) -> None:
        """Report which queued values had no effect, for a trial that ran to its end."""
        if outcome == Outcome.COMPLETE and (names := unclaimed(known_of(self.trial))):
            self._unclaimed = never_asked(names)
            print_notice(self._unclaimed)

    @property
    def _id(self) -> int:
        return id_of_trial(self.trial)

    @cached_property
    def _lease(self) -> Lease:
        return Lease(self._id, self.opened.storage.attempt_of(self._id))

    @property
    def _attrs(self) -> Mapping[str, Any]:
        return known_of(self.trial).user_attrs

    def _suggested(self) -> dict[str, Any]:
        """The trial's parameters: the stored ones, and the others drawn now."""
        with self.opened.storage.together(self._id):
            return self.opened.space.suggest(self.trial)

    def _attempts(self) -> set[int]:
        return {each.attempt for each in self.opened.storage.attempts_of_trial(self._id)}

    @property
    def _end(self) -> TrialEnd:
        return TrialEnd(self.opened, self.trial, self.code)

    def _known(self) -> FrozenTrial | None:
        """A trial with the same parameters whose result this trial takes over; None where there is none."""
        if self.opened.spec.study.duplicates != "reuse":
            return None
        # A trial that has started to train resumes. A fork's result does not depend on its parameters alone.
        if RUN_ATTR in self._attrs or forked_from(self.trial) is not None:
            return None
        params, space = self._suggested(), self.opened.space.distributions
        known = twin(self.opened.study, self.trial.number, params, space)
        owner = self.opened.storage.owner
        # A result of other code is not a result of this worker's code.
        same = known is None or owner is None or trial_codes(self.opened.storage, known) == [owner.code]
        return known if same else None

    def _train(self, folder: Path) -> Outcome | None:
        """Train, unless the trial takes over the result of a trial with the same parameters.

        Returns:
            The outcome; None for a trial that is requeued or paused.
        """
        try:
            self._same = self._known()
            if self._same is not None:
                return Outcome(outcome_of(self._same))
            with only_in(self.opened.storage.process):
                self._running = self._session(folder)
                reason = self.code.train(self._running)
        except (LeaseLostError, StorageInternalError):
            raise
        except optuna.TrialPruned:
            return Outcome.PRUNED
        except BaseException as error:  # noqa: BLE001 - a study's code may raise anything; a worker ignores SIGINT
            self._failure = self._failure_of(error)
            print_error(self._failure.traceback)
            if self._failure.parts:
                return None
            if self._is_asked_to_leave:
                # An engine's signal may have ended the code's own processes too. A real error will occur again.
                self._failure = None
                return None
            return self._failure.outcome
        return self._outcome_of(reason)

    def _outcome_of(self, reason: str | None) -> Outcome | None:
        """The outcome of a training that raised no error; None: the trial is requeued or paused.

        Args:
            reason: Why it ended early, if it did.
        """
        if reason in _OUTCOMES:
            return _OUTCOMES[reason]
        if reason == PAUSED:
            return self._pause()
        if reason == INTERRUPTED:
            if self._is_asked_to_leave:
                return None
            verdict = self.request.verdict(self._lease)
            if verdict is not None:
                return self._failed(Outcome(verdict.outcome), verdict.reason)
        without = self._end.without_value(reason)
        return Outcome.COMPLETE if without is None else self._failed(Outcome.ERROR, without)

    @property
    def _is_asked_to_leave(self) -> bool:
        """Whether the worker was asked to leave, without a verdict that ends the trial."""
        return self.request.leaving and self.request.verdict(self._lease) is None

    def _pause(self) -> Outcome | None:
        """Mark the trial as paused if it can resume from its last epoch; else it ends with an error."""
        epoch = len(self.code.history)
        if checkpoint_of_epoch(attempt_folders(self.opened.spec, self.trial.number), epoch) is None:
            return self._failed(
                Outcome.ERROR,
                f"it can't be paused: there is no checkpoint of epoch {epoch}, which it reported last\n"
                "  fix: see its log for why none was written; a function saves one after each report",
            )
        self._paused = True
        return None

    def _failed(self, outcome: Outcome, reason: str) -> Outcome:
        self._failure = Failure(outcome, reason)
        return outcome

    def _failure_of(self, error: BaseException) -> Failure:
        outcome = failure_outcome(error)
        reason, text = error_text(error), traceback_text(error)
        again = self.opened.spec.run.on_oom == "retry_with_accumulation"
        if outcome != Outcome.OUT_OF_MEMORY or not again or not is_device_memory(error):
            return Failure(outcome, reason, text)
        parts = self.code.smaller()
        if isinstance(parts, str):
            return Failure(outcome, f"{reason} ({parts})" if parts else reason, text)
        return Failure(outcome, f"{reason}; it resumes with each batch in {parts} parts", text, parts)

    def _store(self, outcome: Outcome | None) -> float | None:
        """Store the outcome, or take over that of a trial with the same parameters; returns the value."""
        if self._same is not None:
            return self._end.take_over(self._same)
        if self._running is not None and self._running.started_again:
            self.trial.set_user_attr(STARTED_AGAIN_ATTR, self._running.lease.attempt)
        if outcome is not None or self._paused:
            self._keep_timing()
        if self._paused:
            self._end.pause()
        else:
            self._end.store(outcome, self._failure)
        return self._end.value

    def _keep_timing(self) -> None:
        """Store how long the trial's attempts took, for schedulers that consider the cost of a switch."""
        epochs, seconds = (0, 0.0) if self._running is None else self._running.trained
        if not epochs or GRANTS_ATTR not in self._attrs:
            return
        around = self.before_s + self.opened.storage.held_for(self._id) - seconds
        self.trial.set_user_attr(TIMING_ATTR, asdict(timing_of(self.trial).with_attempt(epochs, seconds, around)))

    def _session(self, folder: Path) -> Session:
        """The session of this attempt, before training begins."""
        opened, spec, trial = self.opened, self.opened.spec, self.trial
        with opened.storage.together(self._id):
            params = self._suggested()
            seed = opened.trial_seed(trial.number, params)
            self._run_as_before(seed)
        reports: type[Reports] = GatheredReports
        if opened.scheduler.watches(opened.study):
            reports = LateReports if spec.run.background_reports else Reports
        session = Session(
            number=trial.number,
            params=params,
            config=spec.resolve(params),
            folder=folder,
            device=self.device,
            seed=seed,
            mode=spec.study.mode,
            reports=reports(trial, spec.study.metric, opened.scheduler, self.extend and self._extended),
            checkpoints=Checkpoints(attempt_folders(spec, trial.number), self.device, self._source()),
            inherited=inherited_epochs(trial),
            request=self.request,
            lease=self._lease,
            process=opened.storage.process,
            pulse=self.pulse,
            parts=int(self._attrs.get(PARTS_ATTR, 1)),
            max_epochs=spec.trainer.known_epochs or 0,
        )
        session.keep_config(session.config)
        return session

    def _source(self) -> Source | None:
        """The parent's checkpoint with which the trial begins, if it is a fork."""
        fork = forked_from(self.trial)
        if fork is None:
            return None
        return Source(fork["parent"], fork["epoch"], attempt_folders(self.opened.spec, fork["parent"]))

    def _extended(self, values: Mapping[int, float]) -> Granted | None:
        """As `extend`, after storing how far the trial violates bounds, which the scheduler needs to know."""
        assert self.extend is not None
        self._end.keep_constraints()
        return self.extend(values)

    def _run_as_before(self, seed: int) -> None:
        """Store how the trial is run; a trial that resumes keeps its number of threads, for equal bits."""
        attrs = self._attrs
        if RUN_ATTR in attrs:
            torch.set_num_threads(attrs[RUN_ATTR]["threads"])
            return
        owner = self.opened.storage.owner
        worker = owner.worker if owner else ""
        run = {"seed": seed, "threads": torch.get_num_threads(), "worker": worker, "device": str(self.device)}
        self.trial.set_user_attr(RUN_ATTR, run)
