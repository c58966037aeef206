"""A cache of a study's trials: finished and paused trials are read once, others only when they are asked for."""

import bisect
import copy
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Final

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.storage.optuna_private import CachedStorage, CachedStudy, id_of_trial
from hpo.storage.rung_values import AtRungs, RungValues
from hpo.storage.sample import stride, thinned
from hpo.storage.study_storage import StudyStorage
from hpo.storage.trial_rows import TrialRow

_ALL: Final = frozenset(TrialState)
#: Seconds per unfinished trial for which an answer may be reused: with 1,000 of them, 20 s.
_AGE_A_TRIAL: Final = 0.02
_FINISHED: Final = frozenset(state for state in TrialState if state.is_finished())


class StudyCache(CachedStorage):
    """Optuna's cache in front of a storage, with cheaper answers to "which trials are there?".

    Optuna's cache reads every unfinished trial with its whole curve each time it is asked for any trials, and
    sorts all that it knows. Here one small statement shows what has changed, and only trials that have finished or
    were asked for are read: a pruner that compares with finished trials, or a look for waiting ones, reads no
    curves. A paused trial, too, is read once, until it is resumed or pruned; an attribute that a person gives it
    in between is seen only then. A pruned trial is read again if a larger budget pauses it again, and a failed one
    if it waits again. All these events are noted in the table of changes (`hpo.storage.changes`).

    Args:
        backend: The storage.
        max_age: Seconds for which an answer about finished trials may be reused, unless this process itself has
            finished one since: a pruner that is asked many times a second needs no newer one. If many trials run,
            the time is longer: see `look_age`.
        most: The most finished and paused trials to hold, beside the best; None for all of them. A study with more
            trials, and a single objective, is shown as a sample (`hpo.storage.sample`).
    """

    def __init__(self, backend: StudyStorage, *, max_age: float = 0.0, most: int | None = None) -> None:
        super().__init__(backend)
        self._storage = backend
        self._max_age = max_age
        self._most = most
        self._seen: dict[int, _Seen] = {}
        self._rungs: dict[int, RungValues] = {}
        self._shown: dict[str, BaseDistribution] = {}

    def expect(self, study_id: int, distributions: Mapping[str, BaseDistribution]) -> None:
        """Give the cache a study's distributions by parameter, which its config fixes.

        Otherwise each process would look up another trial's distribution when it first sets a parameter.
        """
        with self._lock:
            self._studies.setdefault(study_id, CachedStudy()).param_distribution.update(distributions)

    def show_as(self, distributions: Mapping[str, BaseDistribution]) -> None:
        """Show trials that are read from now on with these distributions, if they contain the trial's values.

        The trials of a study whose search space was widened have the ranges that they were drawn from. Samplers
        model together only parameters that have the same range in all trials.
        """
        self._shown = dict(distributions)

    def _as_shown(self, trial: FrozenTrial) -> FrozenTrial:
        changed = {
            name: wide
            for name, each in trial.distributions.items()
            if (wide := self._shown.get(name)) is not None and wide != each and _holds(wide, trial.params[name])
        }
        if changed:
            trial.distributions = {**trial.distributions, **changed}
        return trial

    def delete_study(self, study_id: int) -> None:
        """Delete a study; see `optuna.storages.BaseStorage`."""
        self._seen.pop(study_id, None)
        super().delete_study(study_id)

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """Add a trial; see `optuna.storages.BaseStorage`."""
        try:
            return super().create_new_trial(study_id, template_trial)
        finally:
            self.forget_looks()

    def set_trial_state_values(
        self, trial_id: int, state: TrialState, values: Sequence[float] | None = None
    ) -> bool:
        """Change a trial's state; see `optuna.storages.BaseStorage`."""
        try:
            return super().set_trial_state_values(trial_id, state, values)
        finally:
            self.forget_looks()

    def meet(self, study_id: int, trial_id: int) -> None:
        """Read a trial that another process has taken for this one, so that its parameters can be set.

        The next read of it returns this copy, unless this process has written to it in between.
        """
        trial = self._storage.get_trial(trial_id)
        self._add_trials_to_cache(study_id, [trial])
        self._storage.keep_untouched(trial)

    def get_trial_number_from_id(self, trial_id: int) -> int:
        """A trial's number; see `optuna.storages.BaseStorage`."""
        with self._lock:
            known = self._trial_id_to_study_id_and_number.get(trial_id)
        return self._storage.get_trial_number_from_id(trial_id) if known is None else known[1]

    def set_trial_intermediate_values(self, trial_id: int, values: Mapping[int, float]) -> None:
        """Store reported values; see `StudyStorage`."""
        self._storage.set_trial_intermediate_values(trial_id, values)

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """The trials in these states, by number; see `optuna.storages.BaseStorage`."""
        wanted = _ALL if states is None else frozenset(state for state in TrialState if state in states)
        if study_id not in self._studies:
            self.get_study_name_from_id(study_id)  # KeyError if there is no such study
        with self._lock:
            seen = self._seen.setdefault(study_id, _Seen())
            now = time.monotonic()
            unfinished: list[FrozenTrial] = []
            if not wanted <= _FINISHED or now >= seen.fresh_until:
                unfinished = self._look(study_id, seen, wanted)
                seen.fresh_until = now + look_age(self._max_age, len(seen.unfinished))
            trials = seen.finished_in(wanted)
            if TrialState.RUNNING in wanted:
                unfinished += seen.paused.values()
        trials += unfinished
        if unfinished:
            trials.sort(key=_number)  # of sorted runs: nearly as cheap as a merge
        return copy.deepcopy(trials) if deepcopy else trials

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        """The best complete trial, the earliest of equals; see `optuna.storages.BaseStorage`.

        A sample contains the best trial, so a worker that holds one need not have the server sort all values.
        """
        if self._most is None:
            return super().get_best_trial(study_id)
        return BaseStorage.get_best_trial(self, study_id)

    @property
    def behind(self) -> StudyStorage:
        """The storage."""
        return self._storage

    def at_rungs(self, study_id: int) -> list[AtRungs]:
        """The trials' values at the rungs of a successive-halving pruner."""
        with self._lock:
            if study_id not in self._rungs:
                self._rungs[study_id] = RungValues(self._storage, study_id)
            return list(self._rungs[study_id].look())

    def read_again(self, study_id: int, trial_id: int) -> None:
        """Make the next look read a trial again that is known as paused but was changed without a note."""
        with self._lock:
            if study_id in self._seen:
                self._seen[study_id].see_again([trial_id])
        self.forget_looks()

    def forget_looks(self) -> None:
        """Make the next look at a study's trials query the storage, however recent the last one is."""
        with self._lock:
            for seen in self._seen.values():
                seen.fresh_until = 0.0

    def _look(self, study_id: int, seen: "_Seen", wanted: frozenset[TrialState]) -> list[FrozenTrial]:
        """Take in what has finished since the last look; returns the unfinished trials in the wanted states."""
        rows, trials = self._read(study_id, seen, wanted | _FINISHED)
        if self._shown:
            trials = [self._as_shown(trial) for trial in trials]
        seen.take_in(rows, trials, self._most)
        unfinished = [trial for trial in trials if id_of_trial(trial) in seen.unfinished]
        if self._most is None:
            self._add_trials_to_cache(study_id, trials)
        else:  # Optuna's cache never drops a trial, so it gets no finished ones
            self._add_trials_to_cache(study_id, unfinished)
            seen.thin(self._most, maximize=self._maximizes(study_id))
        return unfinished

    def _read(
        self, study_id: int, seen: "_Seen", states: frozenset[TrialState]
    ) -> tuple[list[TrialRow], list[FrozenTrial]]:
        if seen.change is None:
            seen.change = self._storage.latest_change(study_id)
            if self._most is not None:
                maximize = self._maximizes(study_id)
                seen.last_id, rows, trials = self._storage.read_sample(
                    study_id, most=self._most, maximize=maximize, states=states
                )
                return rows, trials
            return self._storage.read_changes(study_id, after=-1, among=(), states=states)
        seen.change, changed, rows, trials = self._storage.read_changes_since(
            study_id, seen.change, after=seen.last_id, among=seen.unfinished, states=states
        )
        self._forget_ended(study_id, seen.see_again(changed))
        return rows, trials

    def _forget_ended(self, study_id: int, trial_ids: Iterable[int]) -> None:
        """Remove these trials from Optuna's cache if they are there as finished; running ones stay."""
        held = self._studies[study_id].trials
        for trial_id in trial_ids:
            _, number = self._trial_id_to_study_id_and_number.get(trial_id, (study_id, -1))
            if number in held and held[number].state.is_finished():
                del self._trial_id_to_study_id_and_number[trial_id]

    def _maximizes(self, study_id: int) -> bool:
        known = self._studies[study_id]
        if known.directions is None:  # not by `get_study_directions`, which takes the lock that is held here
            known.directions = self._storage.get_study_directions(study_id)
        return known.directions == [StudyDirection.MAXIMIZE]


def look_age(least: float, unfinished: int) -> float:
    """Seconds for which an answer about finished trials may be reused, given the number of unfinished trials.

    One look's cost to the server is proportional to that number, and so is the number of processes that look. With
    an age proportional to it as well, the total cost grows linearly with it, not with its square.
    """
    return least and max(least, unfinished * _AGE_A_TRIAL)


class _Seen:
    """What is known of a study's trials.

    Attributes:
        last_id: All trials up to this id have been looked at. A process that adds a trial holds the row lock
            until the commit, so ids become visible in their order.
        unfinished: Those of them that had not finished then, except paused ones that have been read.
        change: Changes (`hpo.storage.changes`) up to this one are known; None before the first look.
        trials: How many trials there are, according to the highest number.
        fresh_until: The monotonic clock until which no new look is needed for finished trials.
        paused: Paused trials by id, as they were read.
    """

    def __init__(self) -> None:
        self.last_id = -1
        self.trials = 0
        self.fresh_until = 0.0
        self.unfinished: set[int] = set()
        self.change: int | None = None
        self.paused: dict[int, FrozenTrial] = {}
        self._ended: set[int] = set()
        self._finished: dict[frozenset[TrialState], list[FrozenTrial]] = {_FINISHED: []}
        self._thinned = -1

    def take_in(self, rows: Iterable[TrialRow], read: Iterable[FrozenTrial], most: int | None) -> None:
        """Note the rows and the whole trials that a look has read; see `thin` for ``most``."""
        whole = {id_of_trial(trial): trial for trial in read}
        for row in rows:
            self.last_id = max(self.last_id, row.trial_id)
            self.trials = max(self.trials, row.number + 1)
            self.unfinished.add(row.trial_id)
            if row.state.is_finished():
                self.unfinished.discard(row.trial_id)
                self._ended.add(row.trial_id)
            elif row.pause is not None and (row.trial_id in whole or self._is_left_out(row.number, most)):
                self.unfinished.discard(row.trial_id)
                if row.trial_id in whole:
                    self.paused[row.trial_id] = whole[row.trial_id]
        for trial in whole.values():
            for states, trials in self._finished.items():
                if trial.state not in states:
                    continue
                if not trials or trials[-1].number < trial.number:  # all of them, when a study is opened
                    trials.append(trial)
                else:
                    bisect.insort(trials, trial, key=_number)

    def _is_left_out(self, number: int, most: int | None) -> bool:
        return most is not None and number % stride(self.trials, most) != 0

    def see_again(self, changed: Iterable[int]) -> set[int]:
        """Make the current look take in these trials again; returns those that were known as ended.

        Such a trial was pruned and is paused again after a larger budget, or failed and waits again. Or it was
        resumed and ended before the look that found it ended; then it is read once more in vain.
        """
        known = {trial_id for trial_id in changed if trial_id <= self.last_id}
        for trial_id in known:
            self.paused.pop(trial_id, None)
        self.unfinished |= known
        ended = known & self._ended
        if ended:
            self._ended -= ended
            for states, trials in self._finished.items():
                self._finished[states] = [trial for trial in trials if id_of_trial(trial) not in ended]
        return ended

    def thin(self, most: int, *, maximize: bool) -> None:
        """Forget finished and paused trials that are not in the sample, if the study has more than ``most``."""
        every = stride(self.trials, most)
        if every > 1:
            self.paused = {at: trial for at, trial in self.paused.items() if trial.number % every == 0}
        if every > 1 and len(self._finished[_FINISHED]) != self._thinned:
            kept = thinned(self._finished[_FINISHED], every, maximize=maximize)
            self._finished, self._thinned = {_FINISHED: kept}, len(kept)

    def finished_in(self, states: frozenset[TrialState]) -> list[FrozenTrial]:
        """The finished trials in these states, by number; the list is the caller's."""
        states &= _FINISHED
        if states not in self._finished:  # kept from now on: the caller will ask again
            every = self._finished[_FINISHED]
            self._finished[states] = [trial for trial in every if trial.state in states]
        return self._finished[states].copy()


def _holds(distribution: BaseDistribution, value: Any) -> bool:
    if isinstance(distribution, CategoricalDistribution):
        return value in distribution.choices
    return distribution._contains(distribution.to_internal_repr(value))  # noqa: SLF001 - Optuna has no other way


def _number(trial: FrozenTrial) -> int:
    return trial.number
