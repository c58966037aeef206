"""What a study costs by a few batches of it: measured on each device, and estimated for the whole of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpo.checks.findings import Finding
from hpo.config.spec import StudySpec


@dataclass(frozen=True)
class Measured:
    """What one config does on one device.

    Attributes:
        params: What of the search space was set, beside the base config.
        parameters: Numbers that the model learns.
        inputs: Shapes of a training batch's tensors.
        outputs: Shapes of the model's outputs for it.
        memory_bytes: Peak memory: what torch took of a GPU's, or by how much the process grew.
        batch_s: Seconds a training batch takes.
        batches: Training batches of an epoch; None if unknown.
        epochs: Epochs of a trial.
        epoch_s: Seconds an epoch takes, with its validation; None without ``batches``.
        trial_s: Seconds a whole trial takes.
    """

    params: Mapping[str, Any]
    parameters: int
    inputs: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    memory_bytes: int
    batch_s: float
    batches: int | None
    epochs: int
    epoch_s: float | None
    trial_s: float | None


@dataclass(frozen=True)
class DevicePreflight:
    """What was found on one device.

    Attributes:
        device: Its name.
        workers: How many workers the study would have on it.
        base: The base config.
        largest: Every size that is searched at its high end; None where none is, or it does not run.
        warnings: What does not stop a trial, and yet is not as it should be.
    """

    device: str
    workers: int
    base: Measured
    largest: Measured | None
    warnings: list[Finding] = field(default_factory=list)


def estimated_seconds(spec: StudySpec, devices: Sequence[DevicePreflight]) -> float | None:
    """Seconds for the whole study if no trial ends early, each as slow as the slower config; None if unknown.

    Where trials differ in length, each is as long as the longest.
    """
    rate = 0.0
    for device in devices:
        slowest = [_longest_s(spec, item) for item in (device.base, device.largest) if item is not None]
        if None in slowest:
            return None
        rate += device.workers / max(item for item in slowest if item is not None)
    workers = sum(device.workers for device in devices)
    if (trials := trials_of_epochs(spec)) is not None:
        return trials / rate
    # The last round is as long as any, however few trials are left for it.
    return math.ceil(spec.study.n_trials / workers) * workers / rate


def _longest_s(spec: StudySpec, cost: Measured) -> float | None:
    """Seconds that the longest trial would take with this config; None if unknown."""
    if not spec.searches_length or cost.trial_s is None or cost.epoch_s is None:
        return cost.trial_s
    longest = spec.longest_trial
    return None if longest is None else cost.trial_s + max(0, longest - cost.epochs) * cost.epoch_s


def trials_of_epochs(spec: StudySpec) -> float | None:
    """How many of the longest trials ``study.epochs`` comes to, if fewer than ``n_trials``; else None."""
    epochs, each = spec.study.epochs, spec.longest_trial if spec.searches_length else spec.trainer.known_epochs
    if epochs is None or each is None or epochs >= spec.study.n_trials * each:
        return None
    return epochs / each
