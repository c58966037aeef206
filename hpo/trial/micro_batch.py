"""The same training step in less memory: a batch cut into parts whose gradients make one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from trainer.callback import Callback, TrainerView
from trainer.callbacks import GradientAccumulation

_ACCUMULATION: Final = "gradient_accumulation"
_SAVED: Final = "micro_batches"
#: What a checkpoint's progress says of samples a batch; what no callback has set is None or 0.
_SIZES: Final = ("batch_size", "pass_batch_size")


def finer(config: Mapping[str, Any], parts: int, samples: int | None = None) -> int | None:
    """Into how many parts to cut batches next: at most half as large as now, and all of one size.

    Args:
        config: The trial's resolved config.
        parts: Parts that a batch is cut into now.
        samples: Samples of a pass over the training data; None where that is not known.

    Returns:
        None where batches can't be cut further: they have one sample for each device, their size changes as the
        trial runs, a last, smaller one is dropped, which cut batches would not drop, an epoch is a fraction of a
        pass, which might end inside a batch, or so many steps while the last batch of a pass would have fewer
        parts, so that its step would wait for parts of the next pass, or a limit counts batches, which would then
        be other samples.
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
    """Whether each batch of a pass is cut into so many parts, also a last, smaller one."""
    if samples is None:
        return False
    rest = samples % batch
    return rest == 0 or math.ceil(rest / (batch // parts)) == parts


def cut(config: dict[str, Any], parts: int) -> dict[str, Any]:
    """The config with each batch in so many parts, whose gradients are accumulated.

    The optimizer's steps are those of the whole batches, to rounding; a model whose output depends on the other
    samples of its batch (batch norm) sees the small ones. Batches of validation get smaller too; what is recorded
    there stays the same, to rounding, but for a metric that is a plain function and no mean over samples.
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
    """A checkpoint's progress, its batches counted as by a run that cuts each into so many parts.

    Inside an epoch parts only become more. A run of fewer (a fork, the final training) begins at an epoch's end,
    and so after a whole batch; where a callback has ended the epoch inside one, that is trained again, not left
    out.

    Args:
        checkpoint: Of a trial; it is left as it is.
        parts: Of the run that continues there.
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
    """Notes in each checkpoint how finely batches were cut, and counts its batches anew when that has changed.

    Args:
        parts: Parts that a batch is cut into in this run.
    """

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def on_save_checkpoint(self, trainer: TrainerView, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Note the parts."""
        checkpoint[_SAVED] = self.parts

    def on_before_load_checkpoint(self, trainer: TrainerView, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002
        """Say in parts of this run where the checkpoint stands."""
        checkpoint["state"] = state_in_parts(checkpoint, self.parts)
        group = checkpoint["callbacks"].get(GradientAccumulation.__name__)
        if group is not None:  # at an epoch's end, where parts may become fewer, no group is open
            group["gradients"] = group["gradients"] * self.parts // checkpoint.get(_SAVED, 1)
