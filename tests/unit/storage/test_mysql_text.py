"""Text on a MariaDB: what differs in one letter's case or a space at the end is not the same; it may be long."""

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
SHORT = (
    *((table, "value_json") for table in TABLES if table.endswith("attributes")),
    *(("trial_params", "distribution_json"), ("hpo_attempts", "reason")),
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


def holds_long_texts(storage: StudyStorage) -> None:
    """A config, the grants of a trial and all else that is text may be of any length."""
    text = "ä" * 70_000
    study = storage.get_study_id_from_name(NAME)
    storage.set_study_user_attr(study, "long", text)
    storage.set_study_system_attr(study, "long", text)
    trial = load(storage).ask()
    trial.set_user_attr("long", text)
    trial.suggest_categorical("long", [text, "short"])
    storage.requeue(trial._trial_id, text)
    assert storage.get_study_user_attrs(study)["long"] == storage.get_study_system_attrs(study)["long"] == text
    stored = storage.get_trial(trial._trial_id)
    assert stored.user_attrs["long"] == text
    assert stored.distributions["long"].to_internal_repr(text) == 0
    assert storage.attempts_of_trial(trial._trial_id)[0].reason == text


def with_short_text(server: DatabaseServer) -> str:
    """A database in which no conversion to another character set makes a TEXT longer."""
    name = str(sa.make_url(url := server.new_database()).database)
    server.administer(f"ALTER DATABASE {name} CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin", database=name)
    return url


def test_texts_may_be_long(mariadb_server: DatabaseServer) -> None:
    url = with_short_text(mariadb_server)
    make_study(url, 10)
    with opened(url, owner=Owner.current()) as storage:
        holds_long_texts(storage)
        with storage.engine.connect() as conn:
            needed = sa.inspect(conn).get_columns("hpo_agents")
            assert not next(each for each in needed if each["name"] == "devices")["nullable"]


def test_texts_in_tables_of_an_earlier_version_may_be_long_from_now_on(mariadb_server: DatabaseServer) -> None:
    url = with_short_text(mariadb_server)
    make_study(url, 10)
    shorter = (f"ALTER TABLE {table} MODIFY {column} TEXT" for table, column in SHORT)
    mariadb_server.administer(*shorter, database=str(sa.make_url(url).database))
    with opened(url, owner=Owner.current()) as storage:
        holds_long_texts(storage)


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
