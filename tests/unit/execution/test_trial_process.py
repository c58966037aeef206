"""What the worker and the supervisor send a process that trains."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from multiprocessing import Pipe

import pytest

from hpo.execution.trial_process import Orders
from hpo.trial.stopping import StopRequest


@pytest.fixture
def _signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_signals")
def test_without_a_worker_there_is_no_trial_and_no_grant_however_often_it_is_asked() -> None:
    ours, theirs = Pipe()
    request = StopRequest()
    with theirs:
        orders = Orders(theirs, request)
        ours.close()
        assert orders.assignment() is None
        assert request.leaving
        assert [orders.extend({1: 0.5}) for _ in range(3)] == [None] * 3
