"""What agents must share, and how one that does not is found; other machines are rows that say so."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from hpo.errors import InputError
from hpo.storage import agents
from hpo.storage.agents import Agent, Joining
from hpo.storage.ledger import Owner
from hpo.study.open_study import OpenStudy
from hpo.study.shared import mark_file, refuse_unshared, write_mark
from tests.support.studies import Studies


@pytest.fixture
def opened(studies: Studies) -> Iterator[OpenStudy]:
    with studies.open("run.lost_after=3") as (view,):
        yield view


def joined(opened: OpenStudy, mark: str, **owner: Any) -> Agent:
    joining = Joining("", "cpu", 1, "code", "config", mark, 60.0)
    with opened.storage.transaction() as session:
        return agents.register(session, opened.study_id, replace(Owner.current(), **owner), joining)


def open_numbers(opened: OpenStudy) -> list[int]:
    with opened.storage.engine.connect() as conn:
        return [each.number for each in agents.open_agents(conn, opened.study_id)]


def beating(opened: OpenStudy, agent: Agent, done: threading.Event) -> None:
    while not done.wait(0.1):
        with opened.storage.one_transaction() as conn:
            agents.beat(conn, agent.agent_id)


@pytest.mark.parametrize("elsewhere", [{}, {"host": "elsewhere"}], ids=["here", "another machine"])
def test_an_agent_with_another_output_folder_is_refused(opened: OpenStudy, elsewhere: dict[str, Any]) -> None:
    other, me = joined(opened, "other", **elsewhere), joined(opened, "me")
    done, said = threading.Event(), list[str]()
    beats = threading.Thread(target=beating, args=(opened, other, done))
    beats.start()
    try:
        with pytest.raises(InputError) as refused:
            refuse_unshared(opened, me, said.append)
        assert f"the output folder is not that of agent 1 on {other.host}" in str(refused.value)
        assert refused.value.path == "run.output_dir"
        assert len(said) == len(elsewhere), "where it is known that it lives, it is not waited for"
        refuse_unshared(opened, other, said.append)  # of two the one that joined later is refused
        write_mark(opened.spec, other)
        refuse_unshared(opened, me, said.append)
        assert str(other.pid) in mark_file(opened.spec, other).read_text()
    finally:
        done.set()
        beats.join()


@pytest.mark.parametrize("how", ["dead here", "silent elsewhere"])
def test_an_agent_that_does_not_live_is_in_no_ones_way(opened: OpenStudy, how: str) -> None:
    gone: dict[str, Any] = {"start_time": 1.0} if how == "dead here" else {"host": "elsewhere"}
    joined(opened, "other", **gone)
    me = joined(opened, "me")
    refuse_unshared(opened, me, lambda _: None)
    assert open_numbers(opened) == [2]


def test_a_file_that_another_machine_shows_late_is_waited_for(opened: OpenStudy) -> None:
    other, me = joined(opened, "other", host="elsewhere"), joined(opened, "me")
    refuse_unshared(opened, me, lambda _: write_mark(opened.spec, other))
    assert open_numbers(opened) == [1, 2]


def test_a_sqlite_file_is_used_by_one_machine_alone(opened: OpenStudy, monkeypatch: pytest.MonkeyPatch) -> None:
    other, me = joined(opened, "other", boot_id="another"), joined(opened, "me")
    write_mark(opened.spec, other)

    def beat(_: float) -> None:
        with opened.storage.one_transaction() as conn:
            agents.beat(conn, other.agent_id)

    monkeypatch.setattr(time, "sleep", beat)
    with pytest.raises(InputError, match=r"lies in a SQLite file, and agent 1 on .*, another machine"):
        refuse_unshared(opened, me, lambda _: None)
