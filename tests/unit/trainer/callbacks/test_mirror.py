"""What the callbacks share that copy a run to a service."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from tests.unit.trainer.support import At, make_trainer, regression
from trainer.callbacks.mirror import Service, outcome_of

FORK = multiprocessing.get_context("fork")


def test_a_service_that_a_trial_found_away_is_left_alone_by_the_next_trials_of_its_worker() -> None:
    service = Service("W&B")
    trial = FORK.Process(target=service.failed, args=("this run is not shown", "no answer"), kwargs={"away": True})
    trial.start()
    trial.join()
    assert service.is_away
    service.forget()
    assert not service.is_away


@pytest.mark.parametrize("event", ["on_train_batch_end", "on_validation_start", "on_epoch_end"])
def test_ctrl_c_is_interrupted_also_in_the_last_epoch(event: str) -> None:
    def interrupt(trainer: Any) -> None:
        raise KeyboardInterrupt

    trainer = make_trainer([At(event, interrupt)], max_epochs=1)
    with pytest.raises(KeyboardInterrupt) as caught:
        trainer.fit(regression(), regression())
    assert outcome_of(trainer, caught.value) == "interrupted"


@pytest.mark.parametrize(("error", "outcome"), [(OSError(), "error"), (KeyboardInterrupt(), "interrupted")])
def test_a_run_whose_end_failed_is_not_complete_until_another_fit_ends_it(error: Any, outcome: str) -> None:
    def fail(trainer: Any) -> None:
        raise errors.pop()

    errors, seen = [error], []
    fails = At("on_fit_end", fail, lambda trainer: bool(errors))
    trainer = make_trainer([fails, At("teardown", lambda trainer: seen.append(outcome_of(trainer, None)))])
    with pytest.raises(type(error)):
        trainer.fit(regression(), regression())
    trainer.fit(regression(), regression())
    assert seen == [outcome, "complete"]


@pytest.mark.parametrize(("now", "outcome"), [(True, "interrupted"), (False, "complete")])
def test_a_run_is_complete_once_its_last_epoch_is_validated(now: bool, outcome: str) -> None:
    stop = At("on_train_batch_end", lambda t: t.state.stop("interrupted", now=now), lambda t: t.state.step == 3)
    trainer = make_trainer([stop], max_epochs=None, max_steps=3)
    trainer.fit(regression(), regression())
    assert outcome_of(trainer, None) == outcome
