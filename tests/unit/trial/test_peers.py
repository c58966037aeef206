"""Peers that are lost while a group comes together: the others wait for them no longer."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hpo.trial import peers as module
from hpo.trial.builder import Builder
from hpo.trial.peer import Seat
from hpo.trial.peers import Peers
from tests.support.studies import Studies
from trainer.distributed.processes import Processes
from trainer.distributed.rank_error import RankError
from trainer.distributed.ranks import is_described, is_distributed


@dataclass(frozen=True)
class Lost:
    """Loses the peer before it has built its trainer, or after."""

    by: signal.Signals
    is_ready: bool

    def __call__(self, builder: Builder, seat: Seat) -> None:
        if self.is_ready:
            seat.ready()
        os.kill(os.getpid(), self.by)


def join(peers: Peers, work: Lost, folder: Path) -> None:
    with peers.at_work(work, folder):
        peers.meet()
        assert work.is_ready
        with Processes().session(torch.device("cpu")):
            raise AssertionError("the peer has joined")


@pytest.mark.parametrize("is_ready", [False, True])
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_is_lost_while_it_joins_ends_the_group(
    studies: Studies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: signal.Signals, is_ready: bool
) -> None:
    for name, value in {"_LOOK": 0.01, "_STOPPED_LOOKS": 3, "_LINGER": 1.0}.items():
        monkeypatch.setattr(module, name, value)
    fate = "died without a word" if by == signal.SIGKILL else "was stopped for 0.03 s, and has been ended"
    with contextlib.closing(Peers(Builder(studies.spec()), ["cpu", "cpu"])) as peers:
        peers.fork()
        (process,) = [each.process for each in peers._peers]
        number = process.pid
        with pytest.raises(RankError, match=f"^rank 1 {fate}$") as raised:
            join(peers, Lost(by, is_ready), tmp_path)
    assert raised.value.rank == 1
    assert not is_described()
    assert not is_distributed()
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)
