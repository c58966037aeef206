"""What every engine does, as one suite: a stand-in for the agent shows what an engine does to a process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from hpo.execution.engines import engine as engine_module
from hpo.execution.engines.engine import AgentOrder, Change, Ended, Engine, NodeGone, Placement, Running
from tests.support.commands import wait_until

#: Leaves as an agent does at a signal, and at the end of a pipe that is its standard input, and says what it has
#: heard. Files say that its study is ``done``, or that it is to ``die``.
AGENT: Final = """
import os, signal, stat, sys, threading, time
from pathlib import Path

heard = []
for each in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(each, lambda number, _: heard.append(signal.Signals(number).name))
if stat.S_ISFIFO(os.fstat(0).st_mode):
    threading.Thread(target=lambda: (os.read(0, 1), heard.append("the end of its input")), daemon=True).start()
placement = os.environ.get("HPO_PLACEMENT", "none")
secret = os.environ.get("HPO_DASHBOARD_TOKEN", os.environ.get("A_SECRET"))  # the first one is not to be there
print("pid", os.getpid(), placement, secret, *sys.argv[1:], flush=True)
done = Path(__file__).with_name("done")
while not heard and not done.exists():
    time.sleep(0.02)
    die = done.with_name("die")
    if die.exists():
        die.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0.1)
print("heard", *heard, flush=True)
sys.exit(75 if heard else 0)
"""


class EngineContract:
    """Inherited by the tests of each engine, which say how to make one.

    Attributes:
        kind: The engine's name.
        kill_is_heard: What an agent hears that is killed; None where nothing lets it leave by itself.
    """

    kind = ""
    kill_is_heard: str | None = None

    def make(self) -> Engine:
        """A new object of the engine, as a driver has one."""
        raise NotImplementedError

    @pytest.fixture
    def order(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentOrder:
        """An order whose agents are the stand-in; the folder has characters that shells take amiss."""
        folder = tmp_path / 'it\'s a "test" $HOME'
        folder.mkdir()
        (folder / "agent.py").write_text(AGENT)
        monkeypatch.setenv("A_SECRET", "word")
        monkeypatch.setenv("HPO_DASHBOARD_TOKEN", "not for agents")
        needed = self.put_in_place(folder / "agent.py", monkeypatch)
        return AgentOrder(
            folder / "study.yaml",
            "my study",
            folder / "logs",
            arguments=("model.name=a b",),
            environment=("A_SECRET", *needed),
        )

    def put_in_place(self, agent: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
        """Let the engine start the stand-in in place of hpo; names of variables that agents need for that."""
        monkeypatch.setattr(engine_module, "HPO", (sys.executable, str(agent)))
        return ()

    def test_agents_run_with_their_placement_and_end_in_order(self, order: AgentOrder) -> None:
        engine = self.make()
        assert engine.agents >= 1
        placed = engine.place(order, 2)
        assert len(set(placed)) == 2
        for placement in placed:
            said = line(engine, placement, "pid").split(" ", 2)[2]
            assert said == f"{placement.id} word worker {order.study} model.name=a b"
        order.study.with_name("done").touch()
        changes = until(engine, lambda found: ended(found) == set(placed))
        assert {each.placement for each in changes if isinstance(each, Running) and each.host} == set(placed)
        assert all(each.in_order for each in changes if isinstance(each, Ended))
        assert engine.find(order) == []
        engine.close()

    def test_another_driver_finds_drains_and_kills_them(self, order: AgentOrder) -> None:
        first, second = self.make().place(order, 2)
        engine = self.make()
        assert engine.find(replace(order, name="another")) == []
        assert engine.find(replace(order, logs=order.logs.with_name("other"))) == []
        assert set(engine.find(order)) == {first, second}
        assert set(engine.find(order)) == {first, second}
        for placement in (first, second):
            line(engine, placement, "pid")
        assert hosts_of(until(engine, lambda found: len(hosts_of(found)) == 2)).keys() == {first, second}
        engine.drain([first])
        until(engine, lambda found: ended(found) == {first})
        assert line(engine, first, "heard").startswith("heard SIGTERM")
        engine.drain([first])  # it needs no asking any more
        engine.kill([second])
        changes = until(engine, lambda found: second in ended(found))
        assert not any(each.in_order for each in changes if isinstance(each, Ended))
        if self.kill_is_heard is None:
            assert "heard" not in Path(engine.logs(second)).read_text()
        else:
            assert line(engine, second, "heard").startswith(f"heard {self.kill_is_heard}")
        assert engine.find(order) == []

    def test_an_agent_that_dies_has_not_ended_in_order(self, order: AgentOrder) -> None:
        engine = self.make()
        (placement,) = engine.place(order, 1)
        line(engine, placement, "pid")
        order.study.with_name("die").touch()  # it removes this: an engine may start it again
        changes = until(engine, lambda found: ended(found) == {placement})
        (end,) = (each for each in changes if isinstance(each, Ended))
        assert (end.in_order, end.asked) == (False, False)
        assert end.cause

    def test_scripts_are_complete_and_have_no_secrets(self, order: AgentOrder) -> None:
        engine = self.make()
        driver = ["run", str(order.study), "--on", self.kind]
        for script in (engine.script(order, 3), engine.driver_script(driver, order)):
            assert "word" not in script.replace("password", "")
            assert script.endswith("\n")
        assert "worker" in engine.script(order, 3)
        assert "--on" in engine.driver_script(driver, order)


class MachinesContract(EngineContract):
    """As every engine does, and of one whose machines may be lost.

    Attributes:
        starts_again: Whether the engine itself places the agent of a machine that is lost elsewhere.
    """

    starts_again = False

    def lose(self, placement: Placement, host: str) -> None:
        """Let the machine of an agent be gone, with all that runs there."""
        raise NotImplementedError

    def test_the_loss_of_a_machine_is_said(self, order: AgentOrder) -> None:
        engine = self.make()
        placed = engine.place(order, engine.agents)
        hosts = hosts_of(until(engine, lambda found: len(hosts_of(found)) == len(placed)))
        for placement in placed:
            line(engine, placement, "pid")
        lost = max(placed, key=lambda placement: hosts[placement])  # no test loses its cluster's first machine
        self.lose(lost, hosts[lost])
        changes = until(engine, lambda found: any(isinstance(each, NodeGone) for each in found))
        assert changes == [NodeGone(lost, hosts[lost])]
        assert list(engine.changes()) == []
        assert set(engine.find(order)) == {*placed} - ({lost} if not self.starts_again else set())


def until(engine: Engine, done: Callable[[list[Change]], bool]) -> list[Change]:
    """What an engine reports until there is enough of it."""
    changes: list[Change] = []

    def enough() -> bool:
        changes.extend(engine.changes())
        return done(changes)

    wait_until(enough)
    return changes


def hosts_of(changes: list[Change]) -> dict[Placement, str]:
    """The machines of agents that are reported to run."""
    return {each.placement: each.host for each in changes if isinstance(each, Running)}


def ended(changes: list[Change]) -> set[Placement]:
    return {each.placement for each in changes if isinstance(each, Ended)}


def line(engine: Engine, placement: Placement, word: str) -> str:
    """The first line that an agent has printed that begins with a word."""
    log = Path(engine.logs(placement))

    def found() -> str:
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        return next((each for each in lines if each.startswith(word) and each.endswith("\n")), "")

    return str(wait_until(found)).rstrip("\n")
