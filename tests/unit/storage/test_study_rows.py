"""What is read of a study without Optuna's mapper is what Optuna itself reads."""

from typing import Any

import optuna
import pytest
from optuna.storages import RDBStorage
from optuna.study import StudyDirection

from hpo.storage.study_storage import StudyStorage
from tests.support.owners import opened

_READS = (
    "get_study_name_from_id",
    "get_study_directions",
    "get_study_user_attrs",
    "get_study_system_attrs",
)


def test_a_study_is_read_as_optuna_reads_it(ready_url: str) -> None:
    directions = [StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE, StudyDirection.MAXIMIZE]
    with opened(ready_url) as storage:
        other = storage.create_new_study([StudyDirection.MINIMIZE], "bare")
        study = storage.create_new_study(directions, "full")
        for key, value in (("a", 1.5), ("b", {"deep": [None, "ü"]}), ("c", None)):
            storage.set_study_user_attr(study, key, value)
            storage.set_study_system_attr(study, f"system {key}", value)
        for each in (study, other):
            for name in _READS:
                expected = getattr(RDBStorage, name)(storage, each)
                assert getattr(storage, name)(each) == expected, name
        assert storage.get_study_directions(study) == directions
        assert [storage.get_study_id_from_name(name) for name in ("full", "bare")] == [study, other]


def test_a_missing_study_is_a_key_error(ready_url: str) -> None:
    with opened(ready_url) as storage:
        for name in _READS:
            with pytest.raises(KeyError, match="Record does not exist"):
                getattr(storage, name)(-1)
        with pytest.raises(KeyError, match="Record does not exist"):
            storage.get_study_id_from_name("missing")


def state_of(storage: RDBStorage) -> dict[str, Any]:
    return {name: value for name, value in vars(storage).items() if not name.startswith("_")}


def test_our_storage_starts_with_all_that_optunas_does(sqlite_url: str) -> None:
    plain = RDBStorage(sqlite_url, skip_compatibility_check=True)
    optuna.create_study(storage=plain, study_name="s")
    with opened(sqlite_url, create=True) as storage:
        ours, theirs = state_of(storage), state_of(plain)
        assert ours.keys() >= theirs.keys()
        different = {name for name in theirs if ours[name] != theirs[name]}
        assert different == {"engine", "scoped_session", "engine_kwargs"}
        assert isinstance(storage, StudyStorage)
        assert storage.get_current_version() == plain.get_current_version()
        assert storage.get_head_version() == plain.get_head_version()
    plain.engine.dispose()
