"""Everything that hpo uses of Optuna's private API: its tables, ids and base classes, under names of ours.

Optuna may change these at any time. So its version is pinned closely, its own suite of storage tests is run, and a
test makes sure that no other module uses them. `StudyStorage` also overrides private methods: see ``OVERRIDDEN``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Container, Sequence
from typing import Any, Final, cast

import sqlalchemy as sa
from optuna import Study, Trial
from optuna.artifacts._upload import ARTIFACTS_ATTR_PREFIX
from optuna.storages import BaseStorage, RDBStorage
from optuna.storages._cached_storage import _CachedStorage as CachedStorage
from optuna.storages._cached_storage import _StudyInfo as CachedStudy
from optuna.storages._rdb import models
from optuna.storages._rdb.storage import _create_scoped_session as scoped_transaction
from optuna.storages._rdb.storage import _VersionManager
from optuna.study import StudyDirection
from optuna.study._multi_objective import _get_pareto_front_trials_by_trials
from optuna.study.study import _SYSTEM_ATTR_METRIC_NAMES as METRIC_NAMES_ATTR
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import orm

__all__ = [
    "ARTIFACTS_ATTR_PREFIX",
    "METRIC_NAMES_ATTR",
    "CachedStorage",
    "CachedStudy",
    "models",
    "scoped_transaction",
]


class PreparedStorage(RDBStorage):
    """Optuna's relational storage, for a database that is known to have its tables at the right version.

    Optuna's own constructor checks tables and version, for which it imports Alembic: a tenth of a second in each
    command. The creator of this object has called `hpo.storage.schema.tables_of` instead.

    Args:
        url: The database, with its driver.
        engine_kwargs: Arguments of `sqlalchemy.create_engine`.
    """

    def __init__(self, url: str, engine_kwargs: dict[str, Any]) -> None:
        self.url, self.engine_kwargs, self.skip_compatibility_check = url, engine_kwargs, True
        self.heartbeat_interval = self.grace_period = None
        self.heartbeat_stale_trial_callback = self.failed_trial_callback = None
        self.engine = sa.create_engine(url, **engine_kwargs)
        self.scoped_session = orm.scoped_session(orm.sessionmaker(bind=self.engine))

    @functools.cached_property
    def _version_manager(self) -> Any:  # type: ignore[override]
        """Used by Optuna's methods about versions and upgrades."""
        return _VersionManager(self.url, self.engine, self.scoped_session)


#: Private methods of Optuna's storage that our storage overrides.
OVERRIDDEN: Final = frozenset(
    {"_create_new_trial", "_get_best_trial_id", "_get_prepared_new_trial", "_get_trials", "_set_trial_param"}
)

STUDIES: Final = cast("sa.Table", models.StudyModel.__table__)
TRIALS: Final = cast("sa.Table", models.TrialModel.__table__)
PARAMS: Final = cast("sa.Table", models.TrialParamModel.__table__)
VALUES: Final = cast("sa.Table", models.TrialValueModel.__table__)
REPORTS: Final = cast("sa.Table", models.TrialIntermediateValueModel.__table__)
TRIAL_USER_ATTRS: Final = cast("sa.Table", models.TrialUserAttributeModel.__table__)
TRIAL_SYSTEM_ATTRS: Final = cast("sa.Table", models.TrialSystemAttributeModel.__table__)
STUDY_DIRECTIONS: Final = cast("sa.Table", models.StudyDirectionModel.__table__)
STUDY_USER_ATTRS: Final = cast("sa.Table", models.StudyUserAttributeModel.__table__)
STUDY_SYSTEM_ATTRS: Final = cast("sa.Table", models.StudySystemAttributeModel.__table__)
#: The attribute that holds the parameters with which a trial was queued.
FIXED_PARAMS_ATTR: Final = "fixed_params"


def referring_to(table: sa.Table) -> list[sa.Table]:
    """Optuna's tables that have a foreign key to this one."""
    every = models.BaseModel.metadata.sorted_tables
    return [each for each in every if any(key.references(table) for key in each.foreign_keys)]


def id_of_trial(trial: Trial | FrozenTrial) -> int:
    """A trial's id, which is unique in its database; its number is unique only in its study."""
    return trial._trial_id


def id_of_study(study: Study) -> int:
    """A study's id in its database."""
    return study._study_id


def storage_of(study: Study) -> BaseStorage:
    """A study's storage as its sampler and pruner see it."""
    return study._storage


def all_trials(study: Study) -> list[FrozenTrial]:
    """Every trial of a study; with Hyperband, ``study.get_trials`` shows only those of one bracket."""
    return study._storage.get_all_trials(study._study_id, deepcopy=False)


def showing(study: Study, trials: Sequence[FrozenTrial]) -> Study:
    """A study that shows these trials, by number, instead of its own; writes go to its own storage.

    Hyperband shows a sampler only a part of a study; this one shows all the given trials.
    """
    shown = copy.copy(getattr(study, "_study", study))
    shown._storage = cast("BaseStorage", _Showing(study._storage, study._study_id, trials))
    return shown


class _Showing:
    """A storage that shows the given trials for one study."""

    def __init__(self, storage: BaseStorage, study_id: int, trials: Sequence[FrozenTrial]) -> None:
        self._storage, self._study_id, self._trials = storage, study_id, trials

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        if study_id != self._study_id:
            return self._storage.get_all_trials(study_id, deepcopy, states)
        trials = [trial for trial in self._trials if states is None or trial.state in states]
        return copy.deepcopy(trials) if deepcopy else trials

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)


def user_attrs_of(study: Study) -> dict[str, Any]:
    """A study's user attributes, read now; ``study.user_attrs`` would copy each of them again."""
    return study._storage.get_study_user_attrs(study._study_id)


def known_of(trial: Trial) -> FrozenTrial:
    """The running trial's own copy of itself, which must not be changed; ``trial`` returns copies of its parts."""
    return trial._cached_frozen_trial


def fixed_params(trial: FrozenTrial) -> dict[str, Any]:
    """The parameters with which a trial was queued; empty if it was not queued."""
    return trial.system_attrs.get(FIXED_PARAMS_ATTR) or {}


def forget_cached_trials(study: Study) -> None:
    """Make a study read its trials again for the next trial, as Optuna's ``ask`` does."""
    study._thread_local.cached_all_trials = None


def reports_of(trial: Trial) -> dict[int, float]:
    """The running trial's own copy of the values that it has reported, by step; pruners see these."""
    return known_of(trial).intermediate_values


def set_user_attr(storage: RDBStorage, session: orm.Session, trial_id: int, key: str, value: Any) -> None:
    """Set a trial's user attribute in the caller's transaction."""
    storage._set_trial_attr_without_commit(session, models.TrialUserAttributeModel, trial_id, key, value)


def started_utc(trial: models.TrialModel) -> Any:
    """The value of the database column for a trial's start."""
    return trial._datetime_start_utc


def pareto_front(trials: Sequence[FrozenTrial], directions: Sequence[StudyDirection]) -> list[FrozenTrial]:
    """The trials that no other trial dominates; the same as Optuna's plots show."""
    return _get_pareto_front_trials_by_trials(trials, directions, consider_constraint=False)
