"""Agents on several machines: equal names, and a network that is cut."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from hpo.errors import StudyError
from hpo.storage.ledger import Attempt
from tests.support.commands import (
    HELD,
    PATIENCE,
    STUDY,
    epochs_trained,
    hpo,
    kill_all,
    ledger_of,
    make_study,
    values,
    wait_until,
)
from tests.support.machines import Machine, needs_namespaces, network

pytestmark = [pytest.mark.full, needs_namespaces]


def running(study: Path) -> list[Attempt]:
    """The attempts that hold a trial."""
    with contextlib.suppress(StudyError):  # there is none yet
        return [each for each in ledger_of(study) if each.ended_at is None]
    return []


@pytest.mark.parametrize("boots", [("boot-a", "boot-b"), ("", "")], ids=["machines", "containers"])
def test_lost_after_decides_where_a_network_is_cut_between_two_of_one_name(
    tmp_path: Path, postgres_url: str, boots: tuple[str, str]
) -> None:
    """Both are called localhost: what one sees of its own processes says nothing about those of the other."""
    text = STUDY.replace("n_trials: 6", "n_trials: 4")
    text += f"run: {{lost_after: 6s, max_retries: 1, storage: '{postgres_url}'}}\n"
    study = make_study(tmp_path / "study", text, HELD)
    first, second = (Machine(tmp_path, "localhost", boot) for boot in boots)
    with network(postgres_url) as way, contextlib.ExitStack() as stack:
        agents = [first.start("run", study, "--workers", 1, "--storage", way.url)]
        stack.callback(lambda: [kill_all(agent) for agent in agents if agent.poll() is None])
        [held] = wait_until(lambda: running(study))
        agents.append(second.start("worker", study, "--workers", 1))
        wait_until(lambda: epochs_trained(study) == [1, 1])
        assert len(running(study)) == 2
        way.cut()
        [lost] = wait_until(lambda: [each for each in ledger_of(study) if each.outcome == "lost"])
        assert (lost.host, lost.boot_id) == (held.host, held.boot_id)
        way.mend()
        study.with_name("go").touch()
        said = [agent.communicate(timeout=PATIENCE)[0] for agent in agents]
        assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    ends = [(each.trial_id, each.attempt, each.outcome) for each in ledger_of(study)]
    assert [end for end in ends if end[2] != "complete"] == [(lost.trial_id, 1, "lost")]
    assert (lost.trial_id, 2, "complete") in ends
    alone = ("--storage", f"sqlite:///{tmp_path}/alone.db", "--output-dir", tmp_path / "alone")
    hpo("run", study, *alone)
    assert len(values(study, *alone)) == 4
    assert values(study) == values(study, *alone)
