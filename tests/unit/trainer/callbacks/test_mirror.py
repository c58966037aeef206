"""What the callbacks share that copy a run to a service."""

from __future__ import annotations

import multiprocessing

from trainer.callbacks.mirror import Service

FORK = multiprocessing.get_context("fork")


def test_a_service_that_a_trial_found_away_is_left_alone_by_the_next_trials_of_its_worker() -> None:
    service = Service("W&B")
    trial = FORK.Process(target=service.failed, args=("this run is not shown", "no answer"), kwargs={"away": True})
    trial.start()
    trial.join()
    assert service.is_away
    service.forget()
    assert not service.is_away
