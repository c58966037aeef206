"""Reading finished trials without reading the running ones again."""

import copy
from collections.abc import Collection, Container
from typing import cast

import sqlalchemy as sa
from optuna.storages._cached_storage import _CachedStorage, _StudyInfo
from optuna.storages._rdb.models import TrialModel
from optuna.trial import FrozenTrial, TrialState

from hpo.storage import StudyStorage

_TRIALS = cast("sa.Table", TrialModel.__table__)
_FINISHED = tuple(state for state in TrialState if state.is_finished())


class StudyCache(_CachedStorage):
    """Optuna's cache in front of a storage, with a cheaper answer to "which trials are complete?".

    Optuna's reads every unfinished trial with its whole curve each time it is asked for any. Pruners that
    compare with finished trials only (median, percentile) ask after every epoch; here that is one small query,
    and finished trials are read once.
    """

    def __init__(self, backend: StudyStorage) -> None:
        super().__init__(backend)
        self._engine = backend.engine

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        """The trials in these states, by number; see `optuna.storages.BaseStorage`."""
        if states is None or any(state in states for state in TrialState if not state.is_finished()):
            return super().get_all_trials(study_id, deepcopy, states)
        with self._lock:
            study = self._studies.setdefault(study_id, _StudyInfo())
            self._read_finished(study_id, study)
            found = sorted(number for number, trial in study.trials.items() if trial.state in states)
            trials = [study.trials[number] for number in found]
        return copy.deepcopy(trials) if deepcopy else trials

    def _read_finished(self, study_id: int, study: _StudyInfo) -> None:
        """Bring the trials that have finished since the last look into the cache."""
        known = {
            trial._trial_id  # noqa: SLF001 - Optuna has no public name for it
            for trial in study.trials.values()
            if trial.state.is_finished()
        }
        new = self._finished_ids(study_id, study) - known
        if not new:
            return
        # The mark up to which all trials are known stays: running ones in between have not been looked at.
        trials = self._backend._get_trials(  # noqa: SLF001
            study_id, states=None, included_trial_ids=new, trial_id_greater_than=_MAX_ID
        )
        self._add_trials_to_cache(study_id, trials)
        study.unfinished_trial_ids -= new

    def _finished_ids(self, study_id: int, study: _StudyInfo) -> set[int]:
        query = sa.select(_TRIALS.c.trial_id).where(
            _TRIALS.c.study_id == study_id,
            _TRIALS.c.state.in_(_FINISHED),
            _later_or_among(study.last_finished_trial_id, study.unfinished_trial_ids),
        )
        with self._engine.connect() as connection:
            return set(connection.execute(query).scalars())


_MAX_ID = 2**31 - 1


def _later_or_among(last: int, ids: Collection[int]) -> sa.ColumnElement[bool]:
    return sa.or_(_TRIALS.c.trial_id > last, _TRIALS.c.trial_id.in_(ids))
