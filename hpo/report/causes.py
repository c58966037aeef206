"""Groups the failures of a study by their causes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from optuna.trial import FrozenTrial, TrialState

from hpo.report.timeline import Work
from hpo.storage.attributes import REASON_ATTR, STARTED_AGAIN_ATTR, TRACEBACK_ATTR
from hpo.study.outcome import STATE_OF, Outcome, outcome_of

# The parts that may differ between errors of one cause: sizes, addresses, process ids.
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+(\.\d+)?")
_DIVERGED: Final = "a metric was no finite number any more"
_AGAIN: Final = "trained again from the first epoch: no checkpoint was loaded"
#: The endings of attempts after which a trial resumes.
_INTERRUPTED: Final = ("lost", "requeued")


@dataclass(frozen=True)
class Cause:
    """A group of failures with the same outcome and reason.

    Attributes:
        outcome: The outcome of the trials, such as ``diverged``; ``lost attempt`` or ``requeued attempt`` for an
            attempt that did not end its trial; ``started again`` for trials that started again at epoch 1.
        reason: The first line of the reason of the first failure; the others may differ in numbers.
        trials: The trials' numbers.
        traceback: The first failure's; empty if nothing was raised.
    """

    outcome: str
    reason: str
    trials: Sequence[int]
    traceback: str = ""

    @property
    def is_end(self) -> bool:
        """Whether this ended the trials, rather than only an attempt."""
        return self.outcome in STATE_OF


def causes(trials: Iterable[FrozenTrial], work: Iterable[Work]) -> list[Cause]:
    """The causes of failed and diverged trials and of interrupted attempts, the most frequent first."""
    trials = list(trials)
    again = [trial.number for trial in trials if STARTED_AGAIN_ATTR in trial.user_attrs]
    found = [
        *_failed(trials),
        *_cut_off(work, {trial.number for trial in trials if trial.state == TrialState.FAIL}),
        *(Cause("started again", _AGAIN, [number]) for number in again),
    ]
    groups: defaultdict[tuple[str, str], list[Cause]] = defaultdict(list)
    for each in found:
        groups[each.outcome, _NUMBER.sub("#", each.reason)].append(each)
    joined = [
        Cause(alike[0].outcome, alike[0].reason, [each.trials[0] for each in alike], alike[0].traceback)
        for alike in groups.values()
    ]
    return sorted(joined, key=lambda cause: (-len(cause.trials), cause.trials[0]))


def _failed(trials: Iterable[FrozenTrial]) -> list[Cause]:
    found = []
    for trial in trials:
        outcome = outcome_of(trial)
        if outcome == Outcome.DIVERGED:
            found.append(Cause(outcome, _DIVERGED, [trial.number]))
        elif trial.state == TrialState.FAIL:
            reason = _first_line(trial.user_attrs.get(REASON_ATTR))
            found.append(Cause(outcome, reason, [trial.number], trial.user_attrs.get(TRACEBACK_ATTR) or ""))
    return found


def _cut_off(work: Iterable[Work], failed: Container[int]) -> list[Cause]:
    """Interrupted attempts whose trial resumed or still waits; not the lost last attempt of a `failed` trial."""
    work = list(work)
    last = {each.trial: each.attempt for each in sorted(work, key=lambda each: each.attempt)}
    return [
        Cause(f"{each.outcome} attempt", _first_line(each.reason), [each.trial])
        for each in work
        if each.outcome in _INTERRUPTED
        if each.outcome == "requeued" or each.attempt < last[each.trial] or each.trial not in failed
    ]


def _first_line(reason: str | None) -> str:
    return (reason or "").strip().partition("\n")[0] or "no reason is stored"
