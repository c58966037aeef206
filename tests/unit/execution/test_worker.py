"""What a worker answers the process of its trial."""

from __future__ import annotations

from multiprocessing import Pipe
from typing import Any

from hpo.errors import LeaseLostError
from hpo.execution.trial_process import Extension
from hpo.execution.worker import _Worker
from hpo.storage.ledger import Lease
from hpo.study.taking import Taker
from tests.support.studies import Studies
from tests.unit.study.test_granting import two_by_two


def test_a_trial_that_was_taken_away_meanwhile_is_granted_nothing_and_ends_no_worker(studies: Studies) -> None:
    with studies.open("study.n_trials=1", "trainer.max_epochs=4", views=2) as (view, other):
        view = two_by_two(view)
        taker = Taker(view)
        lease = taker.take()
        assert isinstance(lease, Lease)
        trial = view.storage.get_trial(lease.trial_id)
        other.storage.hold(lease)
        other.storage.set_trial_intermediate_value(lease.trial_id, 2, 1.0)
        other.storage.requeue(lease.trial_id)
        assert other.storage.set_trial_state_values(lease.trial_id, trial.state)
        ours, theirs = Pipe()
        worker: Any = _Worker.__new__(_Worker)
        worker._taker, worker._opened = taker, view
        worker._extend(ours, lease)
        extension = theirs.recv()
        assert isinstance(extension, Extension)
        assert extension.granted is None
        assert isinstance(extension.error, LeaseLostError)
