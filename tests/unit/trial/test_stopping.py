"""What a request to stop means, and to whom."""

import pytest

from hpo.errors import LeaseLostError
from hpo.storage.ledger import Lease
from hpo.storage.recovery import Verdict
from hpo.trial.stopping import StopRequest

VERDICT = Verdict("timed_out", "too long", final=True)


def test_nothing_stops_a_trial_without_a_request() -> None:
    request = StopRequest()
    assert not request.stops(1, Lease(1, 1))
    assert not request.leaving
    assert request.verdict(1) is None


def test_leaving_stops_every_trial() -> None:
    request = StopRequest()
    request.leave()
    assert request.leaving
    assert request.stops(1, Lease(1, 1))
    assert request.stops(2, Lease(2, 1))
    assert request.verdict(1) is None


def test_a_verdict_stops_its_trial_only() -> None:
    request = StopRequest()
    request.end(3, VERDICT)
    assert not request.stops(4, Lease(4, 1))
    assert request.stops(3, Lease(3, 1))
    assert request.verdict(3) == VERDICT
    assert not request.leaving


def test_a_lost_lease_is_one_attempts_and_not_the_trials() -> None:
    request = StopRequest()
    request.lose(Lease(5, 1))
    with pytest.raises(LeaseLostError):
        request.stops(0, Lease(5, 1))
    assert not request.stops(0, Lease(5, 2)), "the same trial, taken again by the same worker"
