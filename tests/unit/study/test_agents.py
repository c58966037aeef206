"""What `hpo status` says of agents at work."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import sqlalchemy as sa

from hpo.storage.agents import AGENTS
from hpo.storage.ledger import ATTEMPTS, Owner
from hpo.study.agents import agents_at_work
from tests.support.studies import Studies, ask
from tests.unit.study.test_shared import joined

HOUR = 3600.0


@pytest.mark.parametrize("ahead", [-5 * HOUR, 0.0, 5 * HOUR])
def test_an_agents_rate_is_by_its_own_clock(studies: Studies, ahead: float) -> None:
    with studies.open() as (view,):
        agent = joined(view, "here", host="elsewhere")
        view.storage.owner = replace(Owner.current(), agent=agent.agent_id)
        for value in (1.0, 2.0):
            view.study.tell(ask(view)[0], value)
        ask(view)
        now = time.time() + ahead
        with view.storage.one_transaction() as conn:
            conn.execute(sa.update(AGENTS).values(started_at=now - HOUR / 2, beat_at=now))
            conn.execute(sa.update(ATTEMPTS).where(ATTEMPTS.c.ended_at.is_not(None)).values(ended_at=now - 60))
        (shown,) = agents_at_work(view)
        assert (shown["running"], shown["ended_per_hour"]) == (1, pytest.approx(4.0))
