"""Reading what has changed: finished and paused trials once, other ones only when they are asked for."""

import bisect
import copy
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Final

from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from hpo.storage.optuna_private import CachedStorage, CachedStudy, id_of_trial
from hpo.storage.reader import TrialRow
from hpo.storage.sample import stride, thinned
from hpo.storage.study_storage import StudyStorage

_ALL: Final = frozenset(TrialState)
#: Seconds that an answer holds for each trial that has not finished: with 1,000 of them, 20 s.
_AGE_A_TRIAL: Final = 0.02
_FINISHED: Final = frozenset(state for state in TrialState if state.is_finished())


class StudyCache(CachedStorage):
    """Optuna's cache in front of a storage, with cheaper answers to "which trials are there?".

    Optuna's reads every unfinished trial with its whole curve each time it is asked for any trials, and sorts
    all that it knows. Here one small statement shows what has changed, and only what has finished or was asked
    for is read: a pruner that compares with finished trials and a look for waiting ones read no curves.
    A paused trial is read once, too, since only its next attempt changes it; an attribute that a person gives it
    meanwhile is seen after that.

    Args:
        backend: The storage.
        max_age: Seconds for which an answer about finished trials holds, what this process itself has finished
            aside. A pruner that is asked many times a second needs no newer one. Where many trials run, it holds
            longer: see `look_age`.
        most: Finished trials to hold at most, beside the best; None for all of them. A study that has more, and
            one objective, is shown as a sample (`hpo.storage.sample`).
    """

    def __init__(self, backend: StudyStorage, *, max_age: float = 0.0, most: int | None = None) -> None:
        super().__init__(backend)
        self._storage = backend
        self._max_age = max_age
        self._most = most
        self._seen: dict[int, _Seen] = {}
        self._shown: dict[str, BaseDistribution] = {}

    def expect(self, study_id: int, distributions: Mapping[str, BaseDistribution]) -> None:
        """Take a study's distributions as known, by parameter: its config fixes them.

        Otherwise each process looks in the storage, the first time it sets a parameter, what another trial had.
        """
        with self._lock:
            self._studies.setdefault(study_id, CachedStudy()).param_distribution.update(distributions)

    def show_as(self, distributions: Mapping[str, BaseDistribution]) -> None:
        """Show trials that are read from now on with these distributions, wherever they hold the trial's value.

        The trials of a study whose search space was widened have the ranges that they were drawn from. Samplers
        look for parameters that have one range in all trials, and would draw any other by itself.
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
        """Know a trial that another process has taken for this one; its parameters can be set then.

        Who reads it next gets it as it was read here, if this process has not written to it until then.
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
        for trial in unfinished:
            bisect.insort(trials, trial, key=_number)
        return copy.deepcopy(trials) if deepcopy else trials

    def forget_looks(self) -> None:
        """Let the next look at a study's trials find all that has been stored until then."""
        with self._lock:
            for seen in self._seen.values():
                seen.fresh_until = 0.0

    def _look(self, study_id: int, seen: "_Seen", wanted: frozenset[TrialState]) -> list[FrozenTrial]:
        """Take in what has finished since the last look; the unfinished trials in the wanted states."""
        rows, trials = self._read(study_id, seen, wanted | _FINISHED)
        if self._shown:
            trials = [self._as_shown(trial) for trial in trials]
        seen.take_in(rows, [trial for trial in trials if trial.state.is_finished()])
        if self._most is None:
            self._add_trials_to_cache(study_id, trials)
        else:  # which holds each trial that it is given for good
            self._add_trials_to_cache(study_id, [trial for trial in trials if not trial.state.is_finished()])
            seen.thin(self._most, maximize=self._maximizes(study_id))
        unfinished = {id_of_trial(trial): trial for trial in trials if not trial.state.is_finished()}
        paused = seen.paused_among(rows, unfinished)
        return [*unfinished.values(), *(paused if TrialState.RUNNING in wanted else ())]

    def _read(
        self, study_id: int, seen: "_Seen", states: frozenset[TrialState]
    ) -> tuple[list[TrialRow], list[FrozenTrial]]:
        if seen.last_id < 0 and self._most is not None:
            maximize = self._maximizes(study_id)
            seen.last_id, rows, trials = self._storage.read_sample(
                study_id, most=self._most, maximize=maximize, states=states
            )
            return rows, trials
        known = {trial_id: mark for trial_id, (mark, _) in seen.paused.items()}
        return self._storage.read_changes(
            study_id, after=seen.last_id, among=seen.unfinished, states=states, known=known
        )

    def _maximizes(self, study_id: int) -> bool:
        known = self._studies[study_id]
        if known.directions is None:  # not by `get_study_directions`, which takes the lock that is held here
            known.directions = self._storage.get_study_directions(study_id)
        return known.directions == [StudyDirection.MAXIMIZE]


def look_age(least: float, unfinished: int) -> float:
    """Seconds for which an answer about finished trials holds where so many trials have not finished.

    A look costs the server in proportion to that number, and all who run them look: with an age in proportion,
    too, their looks cost in proportion to it, and not to its square.
    """
    return least and max(least, unfinished * _AGE_A_TRIAL)


class _Seen:
    """What is known of a study's trials.

    Attributes:
        last_id: All trials up to this id have been looked at. A process that adds a trial holds the row lock
            until the commit, so ids become visible in their order.
        unfinished: Those among them that had not finished then.
        trials: How many there are, by their numbers.
        fresh_until: The monotonic clock until which that holds well enough.
        paused: Paused trials by id, each with its mark, as they were when they were last read.
    """

    def __init__(self) -> None:
        self.last_id = -1
        self.trials = 0
        self.fresh_until = 0.0
        self.unfinished: set[int] = set()
        self.paused: dict[int, tuple[str, FrozenTrial]] = {}
        self._finished: dict[frozenset[TrialState], list[FrozenTrial]] = {_FINISHED: []}
        self._thinned = -1

    def take_in(self, rows: Iterable[TrialRow], finished: Iterable[FrozenTrial]) -> None:
        """Note a look at these rows, and the trials that were found finished."""
        for row in rows:
            self.last_id = max(self.last_id, row.trial_id)
            self.trials = max(self.trials, row.number + 1)
            if row.state.is_finished():
                self.unfinished.discard(row.trial_id)
            else:
                self.unfinished.add(row.trial_id)
        for trial in finished:
            for states, trials in self._finished.items():
                if trial.state not in states:
                    continue
                if not trials or trials[-1].number < trial.number:  # all of them, when a study is opened
                    trials.append(trial)
                else:
                    bisect.insort(trials, trial, key=_number)

    def thin(self, most: int, *, maximize: bool) -> None:
        """Forget the finished trials that are not in the sample, where there are more than ``most``."""
        every = stride(self.trials, most)
        if every > 1 and len(self._finished[_FINISHED]) != self._thinned:
            kept = thinned(self._finished[_FINISHED], every, maximize=maximize)
            self._finished, self._thinned = {_FINISHED: kept}, len(kept)

    def paused_among(self, rows: Iterable[TrialRow], read: Mapping[int, FrozenTrial]) -> list[FrozenTrial]:
        """The paused trials of a look that it has not read, as they are known; those it has read become known."""
        found = []
        for row in rows:
            if row.pause is None:
                self.paused.pop(row.trial_id, None)
            elif row.trial_id in read:
                self.paused[row.trial_id] = (row.pause, read[row.trial_id])
            elif row.trial_id in self.paused:
                mark, trial = self.paused[row.trial_id]
                if mark == row.pause:
                    found.append(trial)
        return found

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
