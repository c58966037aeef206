"""AveragedWeights: the base of callbacks that evaluate and save an average of the weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.callback import Callback, TrainerView
from trainer.distributed.tensor_shards import held, shard_like
from trainer.state import ERROR
from trainer.step.optimizers import each_of
from trainer.step.parts import bare_model

#: Takes (averages, weights, updates so far) and changes the averages in place, as in torch.optim.swa_utils.
Update = Callable[[list[Tensor], list[Tensor], int], None]

_STATISTICS = frozenset({"running_mean", "running_var"})
_OWNER = "averaged_weights"


class AfterEachStep(Callback, ABC):
    """Base of callbacks that act after each step that ``state.step`` counts, however many updates make it."""

    def on_after_optimizer_step(self, trainer: TrainerView) -> None:
        """Act after the optimizer step of a batch, or of a group of accumulated batches."""
        if not trainer.state.manual:
            self._after_step(trainer, trainer.state.step + 1)

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """Act after all updates of a step that makes its own."""
        if trainer.state.manual and not trainer.state.skipped_step:
            self._after_step(trainer, trainer.state.step)

    @abstractmethod
    def _after_step(self, trainer: TrainerView, step: int) -> None:
        """Act after step number ``step``, from 1."""


class AveragedWeights(AfterEachStep):
    """Base of callbacks that train one set of weights, and evaluate and save their average.

    The average is put into the model when an epoch's training ends, and the trained weights when the next epoch
    starts. So validation, checkpoints and all that runs in ``on_epoch_end`` see the same weights, and so does
    the code that uses the model after the fit, also where the fit stops at an epoch's start. A fit that stops
    inside an epoch leaves the trained weights, so that it can resume. The values change in place: parameters stay
    the objects that the optimizer knows.

    Averaged are the model's floating-point parameters and, with them, the running mean and variance of its
    normalisation layers. All other buffers keep the values of training: an average of counters, masks (with their
    infinities) or tables means nothing. Averages of weights below 32 bits are kept in 32, where small changes
    are not rounded away.

    A subclass calls ``_update`` from ``_after_step``. torch's AveragedModel does the same arithmetic,
    but asks the device at each step whether it is the first.

    Raises:
        ValueError: The run or the one it resumes averages its weights already, by another callback or in the
            optimizer; or the saved average is of other weights.
    """

    priority = 10
    graph_safe = True

    def __init__(self) -> None:
        self._average: dict[str, Tensor] = {}
        self._training: dict[str, Tensor] = {}  # the trained weights, while the model holds the average
        self._updates = 0
        self._places = Places()

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Check that nothing else averages; the saved average is matched to the model when it is first used."""
        self._claim(trainer)
        if trainer.state.step == 0:
            self._forget()
        if trainer.state.batch_index:  # an epoch that failed in its validation resumes without a start
            self._restore(trainer)

    def on_train_epoch_start(self, trainer: TrainerView) -> None:
        """Put the trained weights into the model."""
        self._restore(trainer)

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        """Put the average into the model, if there is one yet."""
        self._show_average(trainer)

    def on_fit_end(self, trainer: TrainerView) -> None:
        """Put the average into the model again if the run was stopped before an epoch's first batch."""
        if not trainer.state.batch_index and trainer.state.stop_reason != ERROR:
            self._show_average(trainer)

    def teardown(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Drop the references to the model."""
        self._places.clear()

    def state_dict(self) -> dict[str, Any]:
        """The average, the trained weights while the model holds the average, and the number of updates."""
        return {"updates": self._updates, "average": self._average, "training": self._training}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved average; it is moved to the model's device when it is first used."""
        self._updates = state["updates"]
        # Copied, because updates change it in place.
        self._average = {name: tensor.clone() for name, tensor in state["average"].items()}
        self._training = dict(state["training"])

    @torch.no_grad()
    def _update(self, trainer: TrainerView, update: Update) -> None:
        """Update the average with the present weights; the first time, copy them."""
        weights = self._weights(trainer)
        if self._average:
            averages = [held(average) for average in self._average.values()]
            update(
                averages, [held(weights[name]).to(self._average[name].dtype) for name in weights], self._updates
            )
        else:
            self._average = {name: weight.to(precise(weight), copy=True) for name, weight in weights.items()}
        self._updates += 1

    def _forget(self) -> None:
        self._average, self._training, self._updates = {}, {}, 0

    def _show_average(self, trainer: TrainerView) -> None:
        if self._average and not self._training:
            weights = self._weights(trainer)
            self._training = {name: weight.clone() for name, weight in weights.items()}
            _copy(self._average, weights)

    def _restore(self, trainer: TrainerView) -> None:
        if self._training:
            weights = self._weights(trainer)
            _copy(self._training, weights)
            self._training = {}

    def _weights(self, trainer: TrainerView) -> dict[str, Tensor]:
        """The weights of the present model; if it is new, match the average and the trained weights to it."""
        if self._places.look_up(trainer.model):
            of = f"the saved state of {self.name}"
            self._average = self._places.placed(self._average, of)
            self._training = self._places.placed(self._training, of)
        return self._places.weights()

    def _claim(self, trainer: TrainerView) -> None:
        owner = trainer.state.user_state.setdefault(_OWNER, self.name)
        for each in each_of(trainer.optimizer).values():
            if hasattr(each, "eval"):  # ScheduleFree, SPlus; see OptimizerMode
                owner = f"the optimizer {type(each).__name__}"
        if owner != self.name:
            raise ValueError(f"{owner} averages the weights of this run already: leave {self.name} out")


class Places:
    """Finds the averaged tensors of a fit's model, also after a hook has replaced the model."""

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._former: dict[int, str] | None = None

    def look_up(self, model: nn.Module) -> bool:
        """Find the tensors, if the model is not the one before; returns whether it is another one."""
        model = bare_model(model)
        if model is self._model:
            return False
        self._former = None if self._model is None else self.names()
        self._model, self._places = model, _places_in(model)
        return True

    def clear(self) -> None:
        """Drop the references to the model."""
        self._model, self._places, self._former = None, {}, None

    def weights(self) -> dict[str, Tensor]:
        """The present averaged tensors, by their names in the model."""
        # Looked up each time, as a layer may replace a buffer by a new tensor.
        return {name: getattr(*place).detach() for name, place in self._places.items()}

    def names(self) -> dict[int, str]:
        """The names of the averaged tensors, by their ids."""
        return {id(getattr(*place)): name for name, place in self._places.items()}

    def placed(self, kept: Mapping[str, Tensor], of: str) -> dict[str, Tensor]:
        """The kept tensors by the names, and on the devices, of the present model.

        After a hook has replaced the model, a tensor of the former model gets what was kept of it, whatever its
        name now is. If the two models share no tensor, the names count. For a new tensor, its present value is
        taken.

        Args:
            kept: The kept tensors, by their names in the former model, or in the model of the run that saved them.
            of: What ``kept`` is, for the error text.

        Raises:
            ValueError: ``kept`` was saved with another model.
        """
        if not kept:
            return {}
        weights = self.weights()
        if self._former is not None:
            former = {name: self._former.get(tensor, "") for tensor, name in self.names().items()}
            if not any(former.values()):
                former = {name: name for name in weights}
            begun = {name: weight.to(precise(weight), copy=True) for name, weight in weights.items()}
            kept = {name: kept.get(former[name], weight) for name, weight in begun.items()}
        if kept.keys() != weights.keys():
            names = ", ".join(sorted(kept.keys() ^ weights.keys()))
            raise ValueError(f"{of} and the model differ in {names}: load a checkpoint of this model")
        return {name: shard_like(kept[name], weight) for name, weight in weights.items()}


def _places_in(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Module and attribute of each averaged tensor, by its name in the model."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    tensors |= {name: buffer for name, buffer in model.named_buffers() if _split(name)[1] in _STATISTICS}
    return {
        name: (model.get_submodule(_split(name)[0]), _split(name)[1])
        for name, tensor in tensors.items()
        if tensor.is_floating_point() or tensor.is_complex()
    }


def _split(name: str) -> tuple[str, str]:
    owner, _, attribute = name.rpartition(".")
    return owner, attribute


def precise(tensor: Tensor) -> torch.dtype:
    """The type for an average of these weights: 32 bits or more."""
    return torch.promote_types(tensor.dtype, torch.float32)


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])
