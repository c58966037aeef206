"""What a trial process reports of its trial when that ends; imports no torch, for the supervisor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpo.study.outcome import Outcome


@dataclass(frozen=True)
class TrialReport:
    """What a worker reports to its supervisor about a trial.

    Attributes:
        number: The trial.
        outcome: How it ended; None when it waits or is paused, or another attempt has it.
        value: Its best value of the study's metric, None where there is none.
        epochs: Epochs it has finished.
        duration_s: Seconds that this attempt took.
        reason: The error's text, for a failure; why it was requeued, where there is more to say.
        params: Its parameters.
        paused: Whether it is paused, after the last of those epochs.
        outside: Whether it was ended from outside while it ran, as a person may do in the dashboard.
        bounded: Whether constraints are stored with it: its value alone does not say its rank.
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
