"""Several processes of one run: kept for many tests, each of which has them call a function."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from tests.support.commands import PATIENCE
from tests.support.owners import forked


@dataclass
class Outcome:
    """What a function returned in one process, or the error that it raised there."""

    value: Any = None
    error: str = ""
    text: str = ""


class Ranks:
    """Processes of one group, which know of each other as those that torchrun starts do.

    Args:
        size: How many.
        apart: Whether they share no memory, as those of several machines.
    """

    def __init__(self, size: int, *, apart: bool = False) -> None:
        self.size = size
        self.apart = apart
        # As torchrun keeps it: outside of the processes, so that it outlives each of them.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._ends: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            ours, theirs = forked.Pipe()
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
            }
            process = forked.Process(target=_serve, args=(theirs, environment, apart), daemon=True)
            process.start()
            theirs.close()
            self._ends.append(ours)
            self.processes.append(process)

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Outcome]:
        """Have all call a function; one that is killed by it has the error ``"killed"``."""
        for end in self._ends:
            end.send((function, arguments))
        found = []
        for end in self._ends:
            try:
                assert end.poll(PATIENCE), "a process hangs"
                found.append(pickle.loads(end.recv_bytes()))
            except (EOFError, ConnectionResetError):
                found.append(Outcome(error="killed"))
        return found

    def values(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What a function returns in each; an error is one."""
        found = self.call(function, *arguments)
        assert not any(each.error for each in found), "\n".join(each.text for each in found)
        return [each.value for each in found]

    def close(self) -> None:
        """End them."""
        for end in self._ends:
            end.close()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()


def _serve(end: Connection, environment: dict[str, str], apart: bool) -> None:
    os.environ.update(environment)
    import torch

    if apart:
        from trainer.distributed import board

        board._made = lambda size: None

    torch.set_num_threads(1)
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            return
        try:
            outcome = Outcome(function(*arguments))
        except Exception as error:  # noqa: BLE001 - the test says whether it is right
            outcome = Outcome(error=f"{type(error).__name__}: {error}", text=traceback.format_exc())
        end.send_bytes(pickle.dumps(outcome))
