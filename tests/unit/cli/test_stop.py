"""`hpo stop`."""

from __future__ import annotations

import pytest

from hpo.cli import stop
from hpo.storage import agents
from hpo.storage.outage import DatabaseAwayError
from tests.support.studies import Studies
from tests.unit.study.test_shared import joined


def test_a_database_that_is_away_is_waited_for(studies: Studies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "_PAUSE", 0.0)
    with studies.open() as (view,):
        agent, looks, open_agents = joined(view, "here"), [], agents.open_agents

        def found(*arguments: object, **more: object) -> object:
            looks.append(len(looks))
            if len(looks) == 2:
                raise DatabaseAwayError("no route")
            if len(looks) == 3:
                with view.storage.one_transaction() as conn:
                    agents.end(conn, agent.agent_id, agents.GONE)
            return open_agents(*arguments, **more)

        monkeypatch.setattr(agents, "open_agents", found)
        stop._wait(view, {agent.agent_id})
    assert len(looks) >= 4
