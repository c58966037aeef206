"""The costs of a few batches on each device, and the estimate for the whole study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpo.checks.findings import Finding
from hpo.config.spec import StudySpec


@dataclass(frozen=True)
class Measured:
    """The costs of one config on one device.

    Attributes:
        params: The parameters of the search space that were set over the base config.
        parameters: How many numbers the model learns.
        inputs: The shapes of a training batch's tensors.
        outputs: The shapes of the model's outputs for it.
        memory_bytes: The peak memory: what torch allocated on a GPU, or by how much the process grew.
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
    """The results of one device.

    Attributes:
        device: Its name.
        workers: How many workers the study would have on it.
        base: The costs of the base config.
        largest: The costs with every searched size at its high end; None if no size is searched, or if that fails.
        warnings: Findings that don't stop a trial.
    """

    device: str
    workers: int
    base: Measured
    largest: Measured | None
    warnings: list[Finding] = field(default_factory=list)


def estimated_seconds(spec: StudySpec, devices: Sequence[DevicePreflight]) -> float | None:
    """Seconds for the whole study if no trial ends early and each has the slower config's costs; None if unknown.

    If trials differ in length, each counts as the longest.
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
    # The last round takes as long as the others, even with fewer trials.
    return math.ceil(spec.study.n_trials / workers) * workers / rate


def _longest_s(spec: StudySpec, cost: Measured) -> float | None:
    """Seconds of the longest trial with this config's costs; None if unknown."""
    if not spec.searches_length or cost.trial_s is None or cost.epoch_s is None:
        return cost.trial_s
    longest = spec.longest_trial
    return None if longest is None else cost.trial_s + max(0, longest - cost.epochs) * cost.epoch_s


def trials_of_epochs(spec: StudySpec) -> float | None:
    """How many of the longest trials ``study.epochs`` is enough for, if fewer than ``n_trials``; else None."""
    epochs, each = spec.study.epochs, spec.longest_trial if spec.searches_length else spec.trainer.known_epochs
    if epochs is None or each is None or epochs >= spec.study.n_trials * each:
        return None
    return epochs / each
