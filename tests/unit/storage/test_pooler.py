"""Many workers share few connections of PostgreSQL's through a pooler that pools transactions."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import optuna
import pytest
from optuna.trial import TrialState

from hpo.storage.ledger import Owner
from hpo.storage.optuna_private import id_of_study
from hpo.storage.study_storage import open_storage
from tests.support.servers import PostgresServer, ServerMissingError, pooled

WORKERS, REPORTS, CONNECTIONS = 6, 8, 2


def test_a_study_through_a_pooler_of_transactions(postgres_server: PostgresServer) -> None:
    """Each worker makes its trial, reports more often than a statement is prepared after, beats and ends it."""
    url, together = postgres_server.new_database(), threading.Barrier(WORKERS)
    try:
        with pooled(postgres_server, url, CONNECTIONS) as through:
            main = open_storage(through, create=True)  # with the lock of who makes the tables
            study = optuna.create_study(storage=main, study_name="study")
            main.set_budget(id_of_study(study), WORKERS)

            def work(_: int) -> None:
                storage = open_storage(through, create=False, owner=Owner.current())
                storage.rehearse(id_of_study(study))
                together.wait(60)
                trial_id = storage.create_new_trial(id_of_study(study))
                for step in range(1, REPORTS + 1):
                    storage.set_trial_intermediate_value(trial_id, step, 1 / step)
                    assert storage.beat() == []
                assert storage.engine.pool.checkedin() == 1  # kept by a worker between two reports
                storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [1 / REPORTS])
                storage.close()

            with ThreadPoolExecutor(WORKERS) as pool:
                list(pool.map(work, range(WORKERS)))
            trials = main.get_all_trials(id_of_study(study))
            main.close()
            database = url.rsplit("/", 1)[1].split("?")[0]
            assert len(postgres_server.connections(database)) <= CONNECTIONS
    except ServerMissingError as missing:
        pytest.skip(str(missing))
    assert [trial.state for trial in trials] == [TrialState.COMPLETE] * WORKERS
    assert all(len(trial.intermediate_values) == REPORTS for trial in trials)
