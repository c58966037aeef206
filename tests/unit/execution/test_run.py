"""What the listener of a run hears of its workers."""

from __future__ import annotations

from collections.abc import Mapping

import optuna
import pytest

from hpo.console.lines import Reporter
from hpo.errors import StudyError
from hpo.execution.messages import Heard, Placed
from hpo.execution.run import _supervised, listened_to
from hpo.execution.supervisor import Ending
from hpo.storage import agents
from hpo.storage.agents import Joining
from hpo.storage.ledger import Owner
from hpo.study.shared import write_mark
from hpo.study.taking import claimable
from hpo.trial.resources import Slot
from tests.support.attempts import run
from tests.support.studies import Studies


class Begun:
    """Takes note of the workers that begin."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    def begin(self, workers: Mapping[str, Slot], placed: Placed | None = None) -> None:
        assert placed is None
        self.labels += workers

    def heard(self, label: str, message: Heard) -> None:
        pass

    def end(self, ending: str, reason: str | None = None) -> None:
        pass

    def close(self) -> None:
        pass


def test_workers_beside_another_agents_are_known_by_their_own_numbers(studies: Studies) -> None:
    """A view that counted them from 1 would show workers that there are not."""
    with studies.open("study.n_trials=1") as (view,):
        run(view)
        with view.storage.transaction() as session:
            joining = Joining("", "cpu", 3, "code", "config", "mark", 60.0)
            write_mark(view.spec, agents.register(session, view.study_id, Owner.current(), joining))
        begun = Begun()
        _supervised(view, begun, [Slot("cpu", "cpu", None, 1)] * 2, None, None, "")
        assert begun.labels == ["worker-4", "worker-5"]


def test_a_study_that_another_tool_deletes_while_it_runs_is_said_to_be(studies: Studies) -> None:
    """And an error that has another cause stays what it is."""
    with studies.open() as (view,):
        url = view.storage.engine.url.render_as_string(hide_password=False)

        def fail() -> Ending:
            raise KeyError("mistaken")

        def delete() -> Ending:
            optuna.delete_study(study_name=view.spec.study.name, storage=url)
            claimable(view)
            return Ending.DONE

        with pytest.raises(KeyError, match="mistaken"):
            listened_to(view, Reporter(view), lambda: None, fail)
        with pytest.raises(StudyError, match="has been deleted"):
            listened_to(view, Reporter(view), lambda: None, delete)
