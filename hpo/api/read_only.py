"""A read-only storage: it answers every read, and refuses every write."""

from __future__ import annotations

from typing import Any, NoReturn

from hpo.errors import StudyError
from hpo.storage.cache import StudyCache


def _refused(*_: Any, **__: Any) -> NoReturn:
    """Refuse to write; see `ReadOnlyCache`."""
    raise StudyError(
        "this view of the study is for reading only\n"
        "  fix: run it with `hpo.run`; to try things, copy it: `optuna.create_study().add_trials(study.trials)`"
    )


class ReadOnlyCache(StudyCache):
    """The read-only storage of `hpo.load_study`.

    A trial that is created, ended or changed here would have no worker: no lease, no checkpoint, no place in the
    budget. So nothing can be changed, and reading a running study is safe.
    """

    create_new_study = delete_study = _refused
    set_study_user_attr = set_study_system_attr = _refused
    create_new_trial = set_trial_param = _refused
    set_trial_state_values = set_trial_intermediate_value = _refused
    set_trial_user_attr = set_trial_system_attr = _refused
