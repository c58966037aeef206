"""An agent's file in an output folder that is on a disk of several machines."""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hpo.errors import StudyError
from hpo.execution.registered import Registered, registered
from hpo.execution.upkeep import Upkeep
from hpo.storage import agents
from hpo.storage.agents import Joining
from hpo.storage.ledger import Owner
from hpo.study.shared import mark_file, write_mark
from tests.support.studies import Studies


def stale(_: Path) -> bool:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def test_a_folder_that_does_not_answer_for_a_moment_ends_no_agent(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    with studies.open() as (view,):
        agent = Registered(view, [])
        with monkeypatch.context() as patch:
            patch.setattr(Path, "exists", stale)
            Upkeep(view, lambda *_: None, agent).look(time.monotonic())
        assert not mark_file(view.spec, agent.agent).exists()
        Upkeep(view, lambda *_: None, agent).look(time.monotonic())
        assert mark_file(view.spec, agent.agent).exists()


def test_an_agent_does_not_join_in_a_folder_that_does_not_answer(
    studies: Studies, monkeypatch: pytest.MonkeyPatch
) -> None:
    with studies.open() as (view,):
        write_mark(view.spec, Registered(view, []).agent)
        second = Registered(view, [])
        with monkeypatch.context() as patch:
            patch.setattr(Path, "exists", stale)
            with pytest.raises(StudyError, match=r"can't make the output folder: Stale file handle\n  fix: give "):
                second.join(lambda _: None)
        second.join(lambda _: None)


def test_an_error_of_who_listens_is_not_one_of_the_folder(studies: Studies) -> None:
    def say(_: str) -> None:
        raise BrokenPipeError(errno.EPIPE, "nothing reads the output")

    with studies.open() as (view,):
        joining = Joining("", "cpu", 1, "code", "config", "theirs", 60.0)
        with view.storage.transaction() as session:
            agents.register(session, view.study_id, replace(Owner.current(), host="elsewhere"), joining)
        second = Registered(view, [])
        with pytest.raises(BrokenPipeError):
            second.join(say)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_an_agent_that_is_asked_to_leave_while_it_watches_others_leaves_nothing(
    studies: Studies, number: signal.Signals
) -> None:
    with studies.open() as (view,):
        joining = Joining("", "cpu", 1, "code", "config", "theirs", 60.0)
        with view.storage.transaction() as session:
            first = agents.register(session, view.study_id, replace(Owner.current(), host="elsewhere"), joining)
        kept = signal.signal(number, lambda *_: pytest.fail("that is for an agent that holds nothing"))
        try:
            with pytest.raises(KeyboardInterrupt), registered(view, [], lambda _: os.kill(os.getpid(), number)):
                pytest.fail("it has joined")
        finally:
            signal.signal(number, kept)
        with view.storage.engine.connect() as conn:
            assert [each.agent_id for each in agents.open_agents(conn, view.study_id)] == [first.agent_id]
        assert list((view.spec.output_dir / "agents").iterdir()) == []
