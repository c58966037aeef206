"""Text on a MariaDB: what differs in one letter's case or a space at the end is not the same."""

import optuna
import pytest
import sqlalchemy as sa
from optuna.distributions import IntDistribution

from hpo.storage.ledger import Owner
from hpo.storage.study_storage import StudyStorage
from tests.support.owners import NAME, load, make_study, opened
from tests.support.servers import DatabaseServer

ALIKE = {"model.k": 1, "model.K": 2, "model.k ": 3}
TABLES = (
    *("studies", "study_user_attributes", "study_system_attributes", "trial_params", "trial_user_attributes"),
    *("trial_system_attributes", "hpo_attempts", "hpo_agents"),
)


def make_older(server: DatabaseServer, url: str) -> None:
    """As an earlier version made the tables, in a database of the server's usual collation."""
    older = (f"ALTER TABLE {each} CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci" for each in TABLES)
    server.administer(*older, database=str(sa.make_url(url).database))


def tells_names_apart(storage: StudyStorage) -> None:
    """Studies, parameters and attributes of names that are alike are stored each for itself."""
    names = ["digits", "DIGITS", "digits "]
    ids = {name: storage.create_new_study([optuna.study.StudyDirection.MINIMIZE], name) for name in names}
    assert {name: storage.get_study_id_from_name(name) for name in names} == ids
    storage.delete_study(ids["DIGITS"])
    assert {each.study_name for each in storage.get_all_studies()} >= {"digits", "digits "}
    for key, value in ALIKE.items():
        storage.set_study_user_attr(ids["digits"], key, value)
    assert storage.get_study_user_attrs(ids["digits"]) == ALIKE
    study = load(storage)
    trials = [study.ask() for _ in range(2)]
    fill(trials[0])
    with storage.together(trials[1]._trial_id):
        fill(trials[1])
    for trial in trials:
        stored = storage.get_trial(trial._trial_id)
        assert (set(stored.params), stored.user_attrs) == (set(ALIKE), ALIKE)


def fill(trial: optuna.Trial) -> None:
    for name, value in ALIKE.items():
        trial._suggest(name, IntDistribution(1, 9))
        trial.set_user_attr(name, value)


def test_names_that_are_alike_are_told_apart(mariadb_server: DatabaseServer) -> None:
    url = mariadb_server.new_database()
    make_study(url, 10)
    with opened(url, owner=Owner.current(worker="a")) as storage:
        tells_names_apart(storage)


def test_tables_of_an_earlier_version_tell_names_apart_from_now_on(mariadb_server: DatabaseServer) -> None:
    url = mariadb_server.new_database(ready=True)
    make_study(url, 10)
    with opened(url, owner=Owner.current(worker="a")) as storage:
        trial = load(storage).ask()
        trial.suggest_int("model.k", 1, 9)
        before = storage.get_trial(trial._trial_id)
    make_older(mariadb_server, url)
    with opened(url, owner=Owner.current(worker="b")) as storage:
        assert storage.get_all_trials(storage.get_study_id_from_name(NAME)) == [before]
        with pytest.raises(KeyError):
            storage.get_study_id_from_name(NAME.upper())
        tells_names_apart(storage)
