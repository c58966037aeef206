"""The audit of a study that has come to its end: database, files and training must tell the same story."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from optuna.trial import FrozenTrial, TrialState

from hpo.config.spec import StudySpec
from hpo.storage import ledger
from hpo.storage.attributes import (
    BEST_ATTR,
    GRANTED_ATTR,
    IMPORTED_ATTR,
    OUTCOME_ATTR,
    PAUSE_AT_ATTR,
    PAUSED_ATTR,
    PRUNED_ATTR,
    REASON_ATTR,
    RETRIED_ATTR,
    RUN_ATTR,
)
from hpo.storage.grants import granted_until, grants_of
from hpo.storage.ledger import Attempt
from hpo.storage.lineage import epochs_reached, forked_from, inherited_epochs
from hpo.storage.pausing import PAUSED
from hpo.storage.settling import LOST
from hpo.study.folders import attempt_folders, trial_folder
from hpo.study.lineage import Stage, lineage_of
from hpo.study.open_study import OpenStudy, load_study
from hpo.study.outcome import Outcome, finite, outcome_of
from hpo.trial.builder import Builder
from tests.acceptance.chaos.alone import Alone, train_alone
from tests.acceptance.chaos.forks import epochs_left, forks
from trainer.checkpoint.files import CheckpointError, CheckpointFile, list_checkpoints
from trainer.checkpoint.manager import load_checkpoint
from trainer.recorded import Metrics
from trainer.state import best_epoch

#: Ends that a trial comes to by itself: trained alone it comes to the same end at the same epoch.
_OF_ITSELF = {Outcome.COMPLETE, Outcome.DIVERGED, Outcome.ERROR}
#: An attempt that ended so was the trial's last.
_FINAL = {*map(str, Outcome), "fail"} - {Outcome.LOST}


def audit(spec: StudySpec, *, retrain: bool = True) -> list[str]:
    """What is wrong with a study that has come to its end, in words; nothing, if it is sound.

    Args:
        spec: The study file. With callbacks that measure time or memory no two trainings are equal, so such a
            study can't be retrained.
        retrain: Train each trial once more, alone, and compare; otherwise its newest checkpoint is the measure.
    """
    with load_study(spec) as opened:
        trials = opened.storage.get_all_trials(opened.study_id)
        with opened.storage.engine.connect() as conn:
            attempts = ledger.attempts(conn, opened.study_id)
        problems = [
            *_count(trials, opened),
            *_grants(trials, opened),
            *forks(trials, opened),
            *_workers(attempts),
            *_strangers(spec, trials),
        ]
        builder = Builder(spec) if retrain else None
        for trial in sorted(trials, key=lambda trial: trial.number):
            if trial.state.is_finished() and IMPORTED_ATTR not in trial.system_attrs:
                own = [attempt for attempt in attempts if attempt.trial_id == trial._trial_id]
                case = _Case(opened, trials, trial, own, builder)
                problems += [f"trial {trial.number}: {problem}" for problem in case.problems()]
    return problems


# ---- the study


def _count(trials: Sequence[FrozenTrial], opened: OpenStudy) -> Iterator[str]:
    seen = Counter(trial.number for trial in trials)
    if missing := [number for number in range(max(seen, default=-1)) if number not in seen]:
        yield f"there is no trial {_listed(missing)}"
    if twice := [number for number, count in sorted(seen.items()) if count > 1]:
        yield f"there are several trials {_listed(twice)}"
    for trial in trials:
        if not trial.state.is_finished():
            yield f"trial {trial.number} is {trial.state.name}"
    counted, budget = sum(IMPORTED_ATTR not in trial.system_attrs for trial in trials), opened.budget()
    is_spent = epochs_left(trials, opened) == 0 or opened.scheduler.forks  # that ends with its population
    if counted > budget or (counted < budget and not is_spent):
        yield f"{counted} trials count, the budget is {budget}"


def _grants(trials: Sequence[FrozenTrial], opened: OpenStudy) -> Iterator[str]:
    numbers = sorted(grant["number"] for trial in trials for grant in grants_of(trial))
    count = opened.study.user_attrs[GRANTED_ATTR]
    if numbers != list(range(count)):
        yield f"there were {count} grants, and the trials have those of the numbers {_listed(numbers)}"
    if (left := epochs_left(trials, opened)) is not None and left < 0:
        yield f"the trials have trained {-left} epochs more than the study may"


def _workers(attempts: Iterable[Attempt]) -> Iterator[str]:
    """A process works on one trial at a time."""
    by_owner: dict[tuple[str, int, float], list[Attempt]] = {}
    for attempt in attempts:
        by_owner.setdefault((attempt.host, attempt.pid, attempt.start_time), []).append(attempt)
    for (host, pid, _), own in by_owner.items():
        for first, second in pairwise(sorted(own, key=lambda attempt: attempt.started_at)):
            if first.ended_at is not None and second.started_at < first.ended_at:
                yield f"process {pid} on {host} had two trials at a time"


def _strangers(spec: StudySpec, trials: Iterable[FrozenTrial]) -> Iterator[str]:
    known = {str(trial.number) for trial in trials}
    folder = spec.output_dir / "trials"
    for each in sorted(folder.iterdir()) if folder.is_dir() else ():
        if each.name not in known:
            yield f"{each} is of a trial that is not there"


# ---- one trial


@dataclass
class _Case:
    """One finished trial with all that is known about it."""

    opened: OpenStudy
    trials: Sequence[FrozenTrial]
    trial: FrozenTrial
    attempts: list[Attempt]
    builder: Builder | None
    unreadable: list[str] = field(default_factory=list)

    def problems(self) -> Iterator[str]:
        yield from self._ledger()
        yield from self._sequence()
        yield from self._parameters()
        yield from self._outcome()
        yield from self._granted()
        yield from self._curve()
        yield from self._beginning()
        yield from self._tables()
        yield from self._checkpoint_files()
        if self.outcome == Outcome.COMPLETE or self.ended_paused:
            yield from self._best()
        if self.alone is not None:
            yield from self._end(self.alone)

    # ---- what there is

    @cached_property
    def outcome(self) -> str:
        return outcome_of(self.trial)

    @cached_property
    def ended_paused(self) -> bool:
        """Whether it was pruned because the study ended while it was paused."""
        return self.outcome == Outcome.PRUNED and [each.outcome for each in self.attempts[-1:]] == [PAUSED]

    @cached_property
    def epochs(self) -> int:
        """Epochs that were reported, behind those of its parent."""
        return epochs_reached(self.trial)

    @cached_property
    def inherited(self) -> int:
        """Epochs of its parent."""
        return inherited_epochs(self.trial)

    @cached_property
    def lineage(self) -> Sequence[Stage]:
        """The trials that it was forked from, and itself; empty where one is missing, which `forks` says."""
        try:
            return lineage_of(self.trials, self.trial, self.opened.trial_seed)
        except ValueError:
            return []

    @cached_property
    def replaced(self) -> bool:
        """Whether a fork stands in its place."""
        forks = (forked_from(trial) for trial in self.trials)
        return any(fork is not None and fork["replaces"] == self.trial.number for fork in forks)

    @cached_property
    def folders(self) -> dict[int, Path]:
        """Folder of each attempt that made one."""
        found = attempt_folders(self.opened.spec, self.trial.number)
        return {int(folder.name.rpartition("-")[2]): folder for folder in found}

    @cached_property
    def tables(self) -> dict[int, list[Metrics]]:
        """metrics.csv of each attempt that came to write one."""
        files = {attempt: folder / "metrics.csv" for attempt, folder in self.folders.items()}
        return {attempt: _read_table(file) for attempt, file in files.items() if file.exists()}

    @cached_property
    def checkpoints(self) -> list[tuple[CheckpointFile, dict[str, Any]]]:
        """Every readable checkpoint of every attempt, the newest last; even one killed leaves no other."""
        found = []
        for file in list_checkpoints(folder / "checkpoints" for folder in self.folders.values()):
            try:
                found.append((file, load_checkpoint(file.path)))
            except CheckpointError as error:
                self.unreadable.append(str(error))
        return found

    @cached_property
    def histories(self) -> dict[str, list[Metrics]]:
        """What each file records of the epochs, by its name in the trial's folder."""
        own = trial_folder(self.opened.spec, self.trial.number)
        records = {f"attempt-{attempt}/metrics.csv": rows for attempt, rows in self.tables.items()}
        return records | {str(f.path.relative_to(own)): held["state"]["history"] for f, held in self.checkpoints}

    @cached_property
    def alone(self) -> Alone | None:
        """The trial trained alone, as far as its files record it."""
        run = self.trial.user_attrs.get(RUN_ATTR)
        if self.builder is None or run is None or not self.lineage or self.outcome == Outcome.OUT_OF_MEMORY:
            return None
        epochs = None
        if self.outcome not in _OF_ITSELF:
            epochs = max([self.epochs, *map(len, self.histories.values())])
        return train_alone(self.builder, self.lineage, threads=run["threads"], epochs=epochs)

    @cached_property
    def truth(self) -> list[Metrics]:
        """The epochs as they must be, as far as they are known."""
        if self.alone is not None:
            return self.alone.history
        return self.checkpoints[-1][1]["state"]["history"] if self.checkpoints else []

    # ---- what must hold

    def _ledger(self) -> Iterator[str]:
        numbers = [attempt.attempt for attempt in self.attempts]
        if numbers != list(range(1, len(numbers) + 1)) or not numbers:
            yield f"its attempts are {_listed(numbers)}, not 1 to {max(len(numbers), 1)}"
        for attempt in self.attempts:
            if attempt.ended_at is None:
                yield f"attempt {attempt.attempt} is open"
        last = self.attempts[-1] if self.attempts else None
        ended = last is not None and last.ended_at is not None and not self.ended_paused
        if last is not None and ended and last.outcome != self.outcome:
            yield f"it is {self.outcome}, its last attempt {last.outcome}"
        for number in self.folders:
            if number not in numbers:
                yield f"there are files of an attempt {number} that the ledger does not know"

    def _sequence(self) -> Iterator[str]:
        """One attempt after another, and no more of them than there may be."""
        retried = self.trial.user_attrs.get(RETRIED_ATTR, 0)  # `hpo retry` has given it another go after that one
        for earlier, later in pairwise(self.attempts):
            if earlier.outcome in _FINAL and earlier.attempt > retried:
                yield f"attempt {earlier.attempt} ended it as {earlier.outcome}, and another followed"
            if earlier.ended_at is not None and later.started_at < earlier.ended_at:
                yield f"attempt {later.attempt} began before attempt {earlier.attempt} had ended"
        deaths = sum(each.outcome == LOST for each in self.attempts if each.attempt > retried)
        allowed = self.opened.spec.run.max_retries + (self.outcome == Outcome.LOST)
        if deaths > allowed:
            yield f"its worker died {deaths} times, which is {deaths - allowed} too many"

    def _parameters(self) -> Iterator[str]:
        trial, seed = self.trial, self.opened.trial_seed(self.trial.number, self.trial.params)
        run = trial.user_attrs.get(RUN_ATTR)
        if run is None and self.outcome == Outcome.LOST and self.epochs == self.inherited:
            return  # no attempt came so far
        if run is None:
            yield "nothing tells how it was run"
        elif run["seed"] != seed:
            yield f"it was run with seed {run['seed']}, its own is {seed}"
        if not self.opened.space.contains(trial.params):
            yield f"its parameters {trial.params} do not lie in the search space"
            return
        due = {**self.opened.spec.resolve(trial.params), "seed": seed}
        for attempt, folder in self.folders.items():
            file = folder / "config.yaml"
            if file.exists() and OmegaConf.to_container(OmegaConf.load(file)) != due:
                yield f"attempt {attempt} trained with another config than its parameters give"

    def _outcome(self) -> Iterator[str]:
        marked = self.trial.user_attrs.get(PAUSED_ATTR)
        if marked != (self.epochs if self.ended_paused and not self.replaced else None):
            yield f"it has ended, and is marked as paused at {marked}"
        trial, values = self.trial, [metrics.get(self._metric, math.nan) for metrics in self.truth]
        if trial.state == TrialState.FAIL:
            for name in (OUTCOME_ATTR, REASON_ATTR):
                if name not in trial.user_attrs:
                    yield f"it failed without {name}"
        elif self.outcome == Outcome.PRUNED:
            late, paused = self.opened.spec.run.background_reports, self.ended_paused
            decided = trial.user_attrs.get(PAUSE_AT_ATTR if paused else PRUNED_ATTR, granted_until(trial))
            if decided not in {self.epochs, self.epochs - late}:
                yield f"it was to be {'paused' if paused else 'pruned'} at {decided}, and was at {self.epochs}"
            if values[self.epochs - 1 : self.epochs] != [trial.value]:
                yield f"its value {trial.value!r} is not that of its last epoch"
        elif self.outcome == Outcome.COMPLETE:
            best = best_epoch(self.truth, self._metric, self._mode, after=self.inherited)
            if best is None or trial.value != values[best - 1]:
                yield f"its value {trial.value!r} is not its curve's best"

    def _granted(self) -> Iterator[str]:
        """A trial trains no further than it was granted, and each grant goes further, or to its end."""
        ends = [math.inf if each["until"] is None else each["until"] for each in grants_of(self.trial)]
        if any(later < earlier or later == earlier < math.inf for earlier, later in pairwise(ends)):
            yield f"its grants end at {ends}"
        if ends and self.epochs > ends[-1]:
            yield f"it has trained {self.epochs} epochs, and was granted {ends[-1]}"

    def _curve(self) -> Iterator[str]:
        reported = self.trial.intermediate_values
        if sorted(reported) != list(range(self.inherited + 1, self.epochs + 1)):
            yield f"the reported steps are {_listed(sorted(reported))}, not {self.inherited + 1} to {self.epochs}"
        for step, value in sorted(reported.items()):
            if 0 < step <= len(self.truth) and not _same(value, self.truth[step - 1].get(self._metric)):
                yield f"step {step} is reported as {value!r}, and is {self.truth[step - 1].get(self._metric)!r}"

    def _beginning(self) -> Iterator[str]:
        """The epochs of a fork that are its parent's are what that has reported of its own."""
        for stage in self.lineage[:-1]:
            reported = next(each for each in self.trials if each.number == stage.trial).intermediate_values
            for step, value in sorted(reported.items()):
                if step > (stage.until or 0):
                    break
                for name, history in self.histories.items():
                    if step <= len(history) and not _same(value, history[step - 1].get(self._metric)):
                        yield f"{name} differs at epoch {step} from trial {stage.trial}, of which it is a fork"

    def _tables(self) -> Iterator[str]:
        for attempt, rows in self.tables.items():
            epochs = [row.get("epoch") for row in rows]
            if epochs != list(range(1, len(rows) + 1)):
                yield f"metrics.csv of attempt {attempt} has the epochs {_listed(epochs)}"
                return
            for row, metrics in zip(rows, self.truth, strict=False):
                if not _equal({**row, "epoch": 0.0}, {**metrics, "epoch": 0.0}):
                    yield f"metrics.csv of attempt {attempt} differs at epoch {row.get('epoch')}"
        last = max(self.folders, default=0)
        if self.outcome in (Outcome.LOST, Outcome.TIMED_OUT):
            return  # its last process wrote what it came to
        if (rows := self.tables.get(last)) is None:
            if self.epochs > self.inherited:
                yield f"attempt {last} left no metrics.csv"
        elif len(rows) != self.epochs:
            yield f"metrics.csv of attempt {last} has {len(rows)} epochs, {self.epochs} are reported"

    def _checkpoint_files(self) -> Iterator[str]:
        own = trial_folder(self.opened.spec, self.trial.number)
        for file, held in self.checkpoints:
            name, state = file.path.relative_to(own), held["state"]
            if (state["epoch"], state["batch_index"]) != file.progress or len(state["history"]) != file.epoch:
                yield f"{name} holds epoch {state['epoch']}, batch {state['batch_index']}"
            elif file.epoch > self.epochs:
                yield f"{name} is beyond the {self.epochs} reported epochs"
            for at, (kept, metrics) in enumerate(zip(state["history"], self.truth, strict=False), start=1):
                if not _equal(kept, metrics):
                    yield f"{name} differs at epoch {at}"
            if state["inherited"] != self.inherited:
                yield f"{name} has {state['inherited']} epochs of its parent, not {self.inherited}"
            if held["seed"] != self.opened.trial_seed(self.trial.number, self.trial.params):
                yield f"{name} was made with another seed"
        yield from self.unreadable
        newest = self.checkpoints[-1][0] if self.checkpoints else None
        whole = self.outcome in (Outcome.COMPLETE, Outcome.PRUNED)
        if whole and (newest is None or newest.epoch != self.epochs):
            yield f"its newest checkpoint is of epoch {newest and newest.epoch}, {self.epochs} are reported"

    def _best(self) -> Iterator[str]:
        best = self.trial.user_attrs.get(BEST_ATTR)
        # A killed attempt may have trained on where the one after it paused.
        known = self.truth[: self.epochs]
        epoch = best_epoch(known, self._metric, self._mode, after=self.inherited)
        if best is None or epoch is None:
            yield "it has no best epoch"
            return
        if best["epoch"] != epoch or best["metrics"] != finite(known[epoch - 1]):
            yield f"its best epoch is stored as {best['epoch']}, with metrics that are not those of epoch {epoch}"
        path = self.opened.spec.output_dir / str(best["checkpoint"])
        held = [file for file, _ in self.checkpoints if file.path == path]
        if not held or held[0].progress != (best["epoch"], 0):
            yield f"its best checkpoint {best['checkpoint']} is not one of its readable ones of that epoch"

    def _end(self, alone: Alone) -> Iterator[str]:
        """Trained alone it comes to the same end, with the same weights."""
        if self.outcome in _OF_ITSELF and len(alone.history) != self.epochs:
            yield f"alone it trains {len(alone.history)} epochs, {self.epochs} are reported"
        if alone.diverged != (self.outcome == Outcome.DIVERGED):
            yield f"alone it {'diverges' if alone.diverged else 'does not diverge'}"
        if (alone.error is not None) != (self.outcome == Outcome.ERROR):
            yield f"alone it {'raises ' + repr(alone.error) if alone.error else 'raises nothing'}"
        for file, held in self.checkpoints:
            if alone.model is not None and file.progress == (len(alone.history), 0):
                model = held["model"]
                if any(not torch.equal(model[name], tensor) for name, tensor in alone.model.items()):
                    yield f"{file.path.name} has other weights than it has alone"

    @property
    def _metric(self) -> str:
        return self.opened.spec.study.metric

    @property
    def _mode(self) -> Any:
        return "min" if self.opened.spec.study.direction == "minimize" else "max"


def _read_table(file: Path) -> list[Metrics]:
    with file.open(newline="") as lines:
        return [{name: float(text) for name, text in row.items() if text} for row in csv.DictReader(lines)]


def _same(left: float | None, right: float | None) -> bool:
    if left is None or right is None:
        return left is right
    return left == right or (math.isnan(left) and math.isnan(right))


def _equal(left: Mapping[str, float], right: Mapping[str, float]) -> bool:
    return left.keys() == right.keys() and all(_same(left[name], right[name]) for name in left)


def _listed(items: Iterable[object]) -> str:
    return ", ".join(str(int(item) if isinstance(item, float) else item) for item in items) or "none"
