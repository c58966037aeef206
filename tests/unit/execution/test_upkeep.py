"""What a supervisor settles beside its workers."""

from __future__ import annotations

import multiprocessing
import time

from optuna.trial import TrialState

from hpo.execution.messages import Notice
from hpo.execution.upkeep import Upkeep
from hpo.storage.ledger import Lease
from hpo.storage.recovery import Settled, Verdict
from hpo.study.outcome import Outcome
from hpo.study.taking import Taker
from tests.support.studies import Studies


def test_the_verdict_over_a_trial_whose_process_was_killed_and_lives_on_waits(studies: Studies) -> None:
    """For its end: it sleeps in the kernel."""
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    heard: list[Settled | Notice] = []
    with studies.open(views=2) as (view, other):
        assert process.pid is not None
        assert other.storage.owner is not None
        other.storage.owner = other.storage.owner.in_process(process.pid)
        assert isinstance(Taker(other).take(), Lease)
        upkeep = Upkeep(view, lambda _, said: heard.append(said))
        now, verdict = time.monotonic(), Verdict(Outcome.TIMED_OUT, "it took too long", final=True)
        assert upkeep.settle("worker-1", process.pid, verdict) == []
        upkeep.look(now)
        assert (heard, upkeep.running()) == ([], 1)
        process.kill()
        process.join()
        upkeep.look(now + upkeep.interval)
    assert heard == [Settled(0, 1, TrialState.FAIL, Outcome.TIMED_OUT, "it took too long")]
