"""The engine `local`: what every engine does, and scripts that a shell takes."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hpo.execution.engines.by_name import address_of, engine_of
from hpo.execution.engines.engine import AgentOrder, Ended, Engine
from hpo.execution.messages import REQUESTS
from tests.support.commands import wait_until
from tests.support.engine_contract import EngineContract, ended, until


class TestLocal(EngineContract):
    kind = "local"

    def make(self) -> Engine:
        return engine_of(address_of("local"))

    @pytest.fixture(autouse=True)
    def nothing_is_left(self, order: AgentOrder) -> Iterator[None]:
        yield
        engine = self.make()
        engine.kill(engine.find(order))

    def test_an_agent_is_placed_once_others_can_find_it(
        self, order: AgentOrder, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The environment of a process is empty while its program is still being loaded."""
        looks: Counter[int] = Counter()
        environ = psutil.Process.environ

        def early(process: psutil.Process) -> dict[str, str]:
            looks[process.pid] += 1
            return environ(process) if looks[process.pid] > 2 else {}

        monkeypatch.setattr(psutil.Process, "environ", early)
        (placement,) = self.make().place(order, 1)
        assert self.make().find(order) == [placement]

    def test_an_agent_ends_also_where_its_exit_code_is_lost(self, order: AgentOrder) -> None:
        engine = self.make()
        kept = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            (placement,) = engine.place(order, 1)
            order.study.with_name("done").touch()
            changes = until(engine, lambda found: ended(found) == {placement})
        finally:
            signal.signal(signal.SIGCHLD, kept)
        assert changes[-1] == Ended(placement, "its process is gone", in_order=False)

    def test_an_agent_hears_requests_to_leave_also_where_its_driver_ignores_them(
        self, order: AgentOrder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shown = ["/bin/sh", "-c", f"grep SigIgn /proc/self/status > {tmp_path}/ignored"]
        kept = {number: signal.signal(number, signal.SIG_IGN) for number in REQUESTS}
        try:
            monkeypatch.setattr(AgentOrder, "command", lambda _: shown)
            engine = self.make()
            (placement,) = engine.place(order, 1)
            until(engine, lambda found: ended(found) == {placement})
        finally:
            for number, before in kept.items():
                signal.signal(number, before)
        mask = int((tmp_path / "ignored").read_text().split()[1], 16)
        assert not [number for number in REQUESTS if mask >> (number - 1) & 1]

    @pytest.mark.parametrize("driver", [False, True])
    def test_a_shell_runs_the_script(
        self, order: AgentOrder, driver: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("HPO_DASHBOARD_TOKEN")  # the shell's own environment is a person's business
        engine = self.make()
        order.study.with_name("done").touch()
        script = engine.driver_script(["run", "a b"], order) if driver else engine.script(order, 2)
        subprocess.run(["sh"], input=script, text=True, check=True)
        names = ["driver.log"] if driver else ["agent-1.log", "agent-2.log"]
        said = "run a b" if driver else f"worker {order.study} model.name=a b"
        for name in names:
            wait_until(lambda file=order.logs / name: file.exists() and "heard" in file.read_text())
            assert f"none word {said}\n" in (order.logs / name).read_text()

    def test_the_driver_is_submitted_as_a_process_of_its_own(self, order: AgentOrder) -> None:
        order.study.with_name("done").touch()
        engine = self.make()
        pid = engine.submit(["run", "a b"], order)
        wait_until(lambda: Path(order.logs / "driver.log").exists())
        wait_until(lambda: "heard" in (order.logs / "driver.log").read_text())
        assert f"pid {pid} none word run a b\n" in (order.logs / "driver.log").read_text()
