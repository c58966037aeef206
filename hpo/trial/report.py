"""The report that a trial's process sends to the supervisor at its end; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpo.study.outcome import Outcome


@dataclass(frozen=True)
class TrialReport:
    """What a worker reports to its supervisor about a trial.

    Attributes:
        number: The trial's number.
        outcome: Its outcome; None if it was requeued or paused, or another attempt has it.
        value: Its best value of the study's metric; None without one.
        epochs: Epochs that it has finished.
        duration_s: Seconds that this attempt took.
        reason: The error's text for a failure, or a reason for another end.
        params: Its parameters.
        paused: Whether it is paused after the last of these epochs.
        outside: Whether it was ended from outside while it ran, as a person may do in the dashboard.
        bounded: Whether constraints are stored with it, so that its rank does not follow from its value alone.
    """

    number: int
    outcome: Outcome | None
    value: float | None
    epochs: int
    duration_s: float
    reason: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    paused: bool = False
    outside: bool = False
    bounded: bool = False
