"""What the worker and the supervisor send a process that trains."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from multiprocessing import Pipe

import pytest

from hpo.execution.messages import End
from hpo.execution.trial_process import Assignment, Extension, Orders
from hpo.storage.ledger import Lease
from hpo.storage.settling import Verdict
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


@pytest.mark.usefixtures("_signals")
def test_a_verdict_that_comes_once_the_trial_has_paused_does_not_end_it_when_it_resumes() -> None:
    ours, theirs = Pipe()
    request = StopRequest()
    paused, resumed = Lease(4, 1), Lease(4, 2)
    late, inside = (Verdict("timed_out", reason, final=True) for reason in ("late", "inside"))
    with ours, theirs:
        orders = Orders(theirs, request)
        # One is on its way when the trial resumes, the other arrives when it has resumed.
        for told in (End(paused, late), Assignment(resumed, 0.0), End(paused, late), Extension(None)):
            ours.send(told)
        assert orders.assignment() is not None
        orders.extend({})
        assert request.verdict(resumed) is None
        assert not request.stops(3, resumed)
        for told in (End(resumed, inside), Extension(None)):
            ours.send(told)
        orders.extend({})
        assert request.stops(3, resumed)
        assert request.verdict(resumed) == inside
