"""Arguments that callbacks refuse when they are made, not in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from trainer.callbacks import (
    Checkpoint,
    ConsoleLogging,
    EarlyStopping,
    Evaluator,
    GarbageCollection,
    GradientDump,
    LossPrediction,
    LRFinder,
    MetricSaver,
    NaNDetection,
    OverfitDetection,
    Profiler,
    SanityValidation,
    StabilityMonitor,
    StepMetrics,
    TensorStatistics,
    WeightMerging,
)

# What takes a count, the argument's name, and the smallest that will do.
COUNTS: list[tuple[Callable[..., Any], str, int]] = [
    (lambda **given: Checkpoint("c", **given), "keep_last", 1),
    (lambda **given: Checkpoint("c", **given), "cooldown_steps", 0),
    (ConsoleLogging, "every_n_epochs", 1),
    (ConsoleLogging, "every_n_steps", 1),
    (EarlyStopping, "patience", 1),
    (Evaluator, "every_n_steps", 1),
    (GarbageCollection, "every_n_steps", 1),
    (lambda **given: GradientDump("g", **given), "every_n_steps", 1),
    (LossPrediction, "min_epochs", 1),
    (LRFinder, "steps", 2),
    (lambda **given: MetricSaver("m", **given), "every_n_steps", 1),
    (NaNDetection, "every_n_batches", 1),
    (OverfitDetection, "window_size", 1),
    (OverfitDetection, "warmup_epochs", 0),
    (lambda **given: Profiler("p", **given), "active", 1),
    (SanityValidation, "batches", 1),
    (StabilityMonitor, "window", 2),
    (StabilityMonitor, "rolling_window", 1),
    (lambda **given: StepMetrics("s", **given), "every_n_steps", 1),
    (TensorStatistics, "every_n_steps", 1),
    (lambda **given: WeightMerging("w", **given), "every_n_steps", 1),
]


@pytest.mark.parametrize(("build", "name", "least"), COUNTS)
def test_a_count_is_an_integer(build: Callable[..., Any], name: str, least: int) -> None:
    for value in (least - 1, least + 2.5, float(least + 2), True, "3"):
        with pytest.raises(ValueError, match=f"^{name} is {value!r}: give a whole number of at least {least}"):
            build(**{name: value})
    build(**{name: least + 2})
    build(**{name: np.int64(least + 2)})


def test_steps_to_act_at_are_integers() -> None:
    for build in (
        lambda steps: Checkpoint("c", at_steps=steps),
        lambda steps: Evaluator(at_steps=steps),
        lambda steps: MetricSaver("m", at_steps=steps),
        lambda steps: WeightMerging("w", at_steps=steps),
    ):
        with pytest.raises(ValueError, match=r"a step in at_steps is 2\.5: give a whole number of at least 1"):
            build([1, 2.5])
