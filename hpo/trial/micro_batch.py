"""Cuts batches into parts whose gradients make one optimizer step: the same training step in less memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from trainer.callback import Callback, TrainerView
from trainer.callbacks import GradientAccumulation

_ACCUMULATION: Final = "gradient_accumulation"
_SAVED: Final = "micro_batches"
#: Keys of a checkpoint's progress with a number of samples per batch; None or 0 unless a callback has set it.
_SIZES: Final = ("batch_size", "pass_batch_size")


def finer(config: Mapping[str, Any], parts: int, samples: int | None = None) -> int | None:
    """The number of parts into which to cut batches next: of equal size, and at most half as large as now.

    Args:
        config: The trial's resolved config.
        parts: Parts into which a batch is cut now.
        samples: Samples of a pass over the training data; None where that is not known.

    Returns:
        The number of parts; None where batches can't be cut further, for one of these reasons. They have one
        sample for each device. Their size changes as the trial runs. A smaller last batch is dropped, which would
        not be dropped if it were cut. An epoch is a fraction of a pass and might end inside a batch. An epoch is a
        number of steps, and the last batch of a pass would have fewer parts, so that its step would wait for parts
        of the next pass. Or a limit counts batches, and would cover other samples.
    """
    if any(value is not None for name, value in config["loader"].items() if name.endswith("_batches")):
        return None
    schedule = config["callbacks"].get("batch_size_schedule", False) is not False
    if config["loader"]["drop_last"] or schedule or isinstance(config["trainer"]["validate_every"], float):
        return None
    batch = int(config["loader"]["batch_size"])
    most = batch // config["trainer"]["devices"]
    whole_passes = config["trainer"]["validate_every"] is None
    numbers = (number for number in range(2 * parts, most + 1, parts) if batch % number == 0)
    return next((each for each in numbers if whole_passes or _all_have(each, batch, samples)), None)


def _all_have(parts: int, batch: int, samples: int | None) -> bool:
    """Whether each batch of a pass, also a smaller last one, is cut into ``parts`` parts."""
    if samples is None:
        return False
    rest = samples % batch
    return rest == 0 or math.ceil(rest / (batch // parts)) == parts


def cut(config: dict[str, Any], parts: int) -> dict[str, Any]:
    """The config with each batch cut into ``parts`` parts, whose gradients are accumulated.

    The optimizer's steps equal those of the whole batches, up to rounding, except that a model whose output
    depends on the other samples of its batch (batch norm) sees the parts. Validation batches get smaller too; the
    recorded metrics stay equal, up to rounding, except for a metric that is a plain function and not a mean over
    samples.
    """
    if parts == 1:
        return config
    loader = dict(config["loader"])
    loader["batch_size"] //= parts
    loader["eval_batch_size"] = max(1, loader["eval_batch_size"] // parts)
    given = config["callbacks"].get(_ACCUMULATION, False)
    given = given if isinstance(given, Mapping) else {"batches": 1}
    accumulation = {_ACCUMULATION: {**given, "batches": given["batches"] * parts}}
    return {**config, "loader": loader, "callbacks": {**config["callbacks"], **accumulation}}


def state_in_parts(checkpoint: Mapping[str, Any], parts: int) -> dict[str, Any]:
    """A checkpoint's progress, with batches counted as in a run that cuts each into ``parts`` parts.

    Inside an epoch the number of parts only grows. A run with fewer parts (a fork, the final training) begins at
    an epoch's end and so after a whole batch; if a callback has ended the epoch inside a batch, the batch is
    trained again rather than left out.

    Args:
        checkpoint: A trial's checkpoint; it is not changed.
        parts: The parts of the run that continues from it.
    """
    state, saved = checkpoint["state"], checkpoint.get(_SAVED, 1)
    batches = {name: state[name] * parts // saved for name in ("batch_index", "data_batch", "cut_batches")}
    sizes = {name: max(1, state[name] * saved // parts) for name in _SIZES if state.get(name)}
    size, done = state.get("pass_batch_size") or 0, state["data_batch"] - state["cut_batches"]
    if size * saved % parts and done:  # of a size that a hook has set: the pass continues behind their samples
        batches["cut_batches"] = batches["data_batch"]
        sizes["cut_samples"] = state["cut_samples"] + done * size
    return {**state, **batches, **sizes}


class MicroBatches(Callback):
    """Stores the number of parts in each checkpoint, and converts a loaded one to this run's number of parts.

    Args:
        parts: Parts into which this run cuts a batch.
    """

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def on_save_checkpoint(self, trainer: TrainerView, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Store the number of parts."""
        checkpoint[_SAVED] = self.parts

    def on_before_load_checkpoint(self, trainer: TrainerView, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Convert the checkpoint's progress to parts of this run."""
        checkpoint["state"] = state_in_parts(checkpoint, self.parts)
        group = checkpoint["callbacks"].get(GradientAccumulation.__name__)
        if group is not None:  # at an epoch's end, where parts may become fewer, no group is open
            group["gradients"] = group["gradients"] * self.parts // checkpoint.get(_SAVED, 1)
