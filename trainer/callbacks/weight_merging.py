"""WeightMerging: saves means of the weights over ranges of steps as files, while training continues."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_swa_multi_avg_fn

from trainer.callback import TrainerView
from trainer.callbacks.averaged import AfterEachStep, Places, precise
from trainer.checkpoint.manager import CheckpointWriteError, write_whole
from trainer.checkpoint.versions import versioned
from trainer.checks import check_count
from trainer.step.parts import bare_model

logger = logging.getLogger(__name__)


class WeightMerging(AfterEachStep):
    """Saves, at chosen steps, the mean of the weights over the last steps; training itself is not changed.

    A merge at step t is the mean of the weights after each of the steps t - ``last_steps`` + 1 to t, all counting
    the same, in 32 bits or more; the running statistics of normalisation layers are averaged with them, other
    buffers are those of step t. It lies in ``folder`` as ``merged-step-00001000.pt``, for `trainer.load_weights`:
    ``model`` are the weights, ``step`` is t, and ``steps`` says how many were averaged. These are fewer where the
    run had no more, and, with a warning, where it took this callback on inside the stretch. A file of the same
    step is replaced.

    Costs one copy of the weights for each stretch that is under way, and an in-place update a step that waits for
    nothing. What has been averaged is part of a checkpoint, so a resumed run saves the same files to the bit. To
    train on with an average, or validate it, use `EMA` or `WeightAveraging`.

    Example::

        Trainer(model, optimizer, loss, callbacks=[WeightMerging("merged", 500, every_n_steps=5000)])

        callbacks: {weight_merging: {last_steps: 500, every_n_steps: 5000}}

    Args:
        folder: Where the files go; made if needed.
        last_steps: Optimizer steps that a merge averages, at least 1; these ranges may overlap.
        every_n_steps: Optimizer steps between two merges; None: only ``at_steps``.
        at_steps: Further optimizer steps after which to merge.

    Raises:
        ValueError: An argument is out of range; nothing says when to merge; the saved state is another model's.
        CheckpointWriteError: A file can't be written.
    """

    priority = 10
    graph_safe = True
    rank_zero_only = True
    needs_whole_model = "saves the weights in rank 0"

    def __init__(
        self,
        folder: Path | str,
        last_steps: int = 500,
        every_n_steps: int | None = None,
        at_steps: Sequence[int] = (),
    ) -> None:
        check_count("last_steps", last_steps)
        check_count("every_n_steps", every_n_steps, optional=True)
        for step in at_steps:
            check_count("a step in at_steps", step)
        if every_n_steps is None and not at_steps:
            raise ValueError("nothing says when to merge: give every_n_steps or at_steps")
        self.folder = Path(folder)
        self.last_steps = last_steps
        self.every_n_steps = every_n_steps
        self.at_steps = frozenset(at_steps)
        self._means: dict[int, dict[str, Tensor]] = {}
        self._counts: dict[int, int] = {}
        self._places = Places()

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Start without means, unless the run is resumed; its first step then takes the saved ones up."""
        if trainer.state.step == 0:
            self._means, self._counts = {}, {}

    @torch.no_grad()
    def _after_step(self, trainer: TrainerView, step: int) -> None:
        """Add the new weights to each open mean, and save the one that is complete."""
        if self._places.look_up(trainer.model):
            means = {target: self._places.placed(mean, "the saved merge") for target, mean in self._means.items()}
            self._means = means
        for target in self._targets(step):
            self._add(target)
        if step in self._means:
            self._save(bare_model(trainer.model), step)

    def teardown(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Drop the references to the model."""
        self._places.clear()

    def state_dict(self) -> dict[str, Any]:
        """The open means, and the number of steps in each."""
        return {"means": self._means, "counts": self._counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the means of merges still to come; copied, because updates change them in place."""
        self._means = {
            step: {name: tensor.clone() for name, tensor in mean.items()}
            for step, mean in state["means"].items()
            if self._is_target(step)
        }
        self._counts = {step: state["counts"][step] for step in self._means}

    def _is_target(self, step: int) -> bool:
        every = self.every_n_steps
        return step in self.at_steps or (every is not None and step % every == 0)

    def _targets(self, step: int) -> Iterator[int]:
        """The steps of the merges that include this step."""
        until = step + self.last_steps
        targets = {target for target in self.at_steps if step <= target < until}
        if every := self.every_n_steps:
            targets.update(range(-(-step // every) * every, until, every))
        yield from sorted(targets)

    def _add(self, target: int) -> None:
        weights, mean = self._places.weights(), self._means.get(target)
        if mean is None:
            self._means[target] = {name: weight.to(precise(weight), copy=True) for name, weight in weights.items()}
            self._counts[target] = 1
            return
        values = [weights[name].to(tensor.dtype) for name, tensor in mean.items()]
        get_swa_multi_avg_fn()(list(mean.values()), values, self._counts[target])  # type: ignore[no-untyped-call]
        self._counts[target] += 1

    def _save(self, model: nn.Module, step: int) -> None:
        mean, count = self._means.pop(step), self._counts.pop(step)
        if count < min(self.last_steps, step):
            logger.warning("the merge at step %d is the mean of the last %d steps, not of more", step, count)
        # By identity, as tied weights have two names.
        merged = {tensor: mean[name] for tensor, name in self._places.names().items()}
        own = model.state_dict(keep_vars=True)
        weights = {
            name: merged[id(value)].to(value.dtype) if id(value) in merged else value
            for name, value in own.items()
        }
        plain = {name: value.detach() if isinstance(value, Tensor) else value for name, value in weights.items()}
        path = self.folder / f"merged-step-{step:08d}.pt"
        try:
            write_whole({"model": versioned(plain, own), "step": step, "steps": count}, path)
        except OSError as error:
            fix = "free some room or choose another folder"
            text = f"merged weights {path} can't be written: {error.strerror or error}; {fix}"
            raise CheckpointWriteError(error.errno, text) from error
