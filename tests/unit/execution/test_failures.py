"""When failures of trials end a study, and when they are the trials' own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpo.errors import StudyError
from hpo.execution.failures import Failures
from hpo.execution.messages import Failed
from hpo.study.outcome import Outcome
from hpo.trial.report import TrialReport
from tests.support.studies import Studies, ask

LOG = Path("worker.log")
SCHEDULED = ("study.scheduler=asha", "study.pruner=none", "study.n_trials=9")


def failed(number: int, reason: str = "ValueError: so much dropout is refused") -> TrialReport:
    return TrialReport(number, Outcome.ERROR, None, 0, 0.1, reason)


def hear_all(failures: Failures, *reports: TrialReport) -> None:
    for report in reports:
        failures.hear(report, LOG)


@pytest.mark.parametrize(
    "first",
    [
        TrialReport(0, None, 0.5, 1, 0.1, paused=True),
        TrialReport(0, Outcome.COMPLETE, 0.5, 1, 0.1),
        TrialReport(0, Outcome.PRUNED, 0.5, 1, 0.1),
        failed(0, "KeyError: 'other'"),
    ],
    ids=["paused", "complete", "pruned", "other"],
)
def test_failures_are_the_trials_own_once_one_has_got_further(studies: Studies, first: TrialReport) -> None:
    with studies.open(*SCHEDULED) as (view,):
        hear_all(Failures(view, 1), first, *map(failed, range(1, 9)))


def test_the_third_that_fails_alike_ends_the_study(studies: Studies) -> None:
    with studies.open(*SCHEDULED) as (view,):
        failures = Failures(view, 1)
        # One that waits again says nothing.
        hear_all(failures, failed(0), TrialReport(1, None, None, 0, 0.1), failed(1))
        with pytest.raises(StudyError, match="the first 3 trials failed alike:\n  ValueError: so much dropout"):
            failures.hear(failed(2), LOG)


@pytest.mark.parametrize(
    "said",
    ["No space left on device", "Disk quota exceeded", "Read-only file system"],
    ids=["full", "quota", "read"],
)
def test_trials_that_can_not_write_end_a_study_that_has_succeeded(studies: Studies, said: str) -> None:
    complete, full = TrialReport(0, Outcome.COMPLETE, 0.5, 1, 0.1), f"checkpoint a.pt can't be written: {said}; …"
    with studies.open(*SCHEDULED) as (view,):
        failures = Failures(view, 1)
        hear_all(
            failures, complete, failed(1, full), failed(2, full), complete, failed(3, full), failed(4), failed(5)
        )
        hear_all(
            failures, TrialReport(9, Outcome.PRUNED, 0.5, 1, 0.1), failed(6, f"OSError: [Errno 28] {said}: '/a'")
        )
        with pytest.raises(StudyError, match="3 trials could not write to a disk, and none has got further"):
            failures.hear(failed(7, full), LOG)
        hear_all(failures, failed(8), failed(9, full))  # while the study ends


def test_trials_that_a_person_has_failed_say_nothing_of_the_study(studies: Studies) -> None:
    with studies.open(*SCHEDULED) as (view,):
        failures = Failures(view, 1)
        hear_all(failures, *(replace(failed(number), outside=True) for number in range(3)))
        hear_all(failures, failed(3), failed(4))
        with pytest.raises(StudyError, match="the first 3 trials failed alike"):
            failures.hear(failed(5), LOG)


@pytest.mark.parametrize("reason", ["ImportError: no module named gone", failed(0).reason], ids=["other", "same"])
def test_a_worker_that_fails_is_none_of_the_trials(studies: Studies, reason: str) -> None:
    with studies.open(*SCHEDULED) as (view,):
        failures = Failures(view, 1)
        failures.hear(Failed(reason), LOG)
        hear_all(failures, failed(0), failed(1))
        with pytest.raises(StudyError, match="the first 3 trials failed alike"):
            failures.hear(failed(2), LOG)


def pause(view: Any) -> None:
    trial = ask(view)[0]
    view.storage.set_trial_intermediate_value(trial._trial_id, 1, 0.5)
    view.storage.pause(trial._trial_id, 1)


def end(view: Any) -> None:
    view.study.tell(ask(view)[0], 0.5)


@pytest.mark.parametrize("before", [pause, end])
def test_what_an_earlier_run_has_paused_or_ended_counts(studies: Studies, before: Any) -> None:
    with studies.open(*SCHEDULED) as (view,):
        before(view)
        hear_all(Failures(view, 1), *map(failed, range(1, 9)))
