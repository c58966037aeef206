"""AveragedWeights: what the callbacks share that evaluate a mean of the weights instead of the latest."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.callback import Callback, TrainerView
from trainer.distributed.parts import held, part_like
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
        """The step of a batch, or of a group of them."""
        if not trainer.state.manual:
            self._after_step(trainer, trainer.state.step + 1)

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        """All updates that a step has made of its own."""
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
        self._places: dict[str, tuple[nn.Module, str]] = {}

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Look the weights up, and continue the average of a resumed run."""
        self._claim(trainer)
        self._places = averaged_places(bare_model(trainer.model))
        if trainer.state.step == 0:
            self._forget()
        self._average = self._placed(self._average)
        self._training = self._placed(self._training)
        if trainer.state.batch_index:  # an epoch that failed in its validation resumes without a start
            self._restore()

    def on_train_epoch_start(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """To the weights that are trained."""
        self._restore()

    def on_train_epoch_end(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """To the average, as soon as there is one."""
        self._show_average()

    def on_fit_end(self, trainer: TrainerView) -> None:
        """To the average again, where the run was stopped before an epoch's first batch."""
        if not trainer.state.batch_index and trainer.state.stop_reason != ERROR:
            self._show_average()

    def teardown(self, trainer: TrainerView) -> None:  # noqa: ARG002
        """Let the model go."""
        self._places = {}

    def state_dict(self) -> dict[str, Any]:
        """The average, the trained weights where the model does not hold them, and the number of updates."""
        return {"updates": self._updates, "average": self._average, "training": self._training}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume a saved average; it comes to the model's device when the fit starts."""
        self._updates = state["updates"]
        # Copied, because updates change it in place.
        self._average = {name: tensor.clone() for name, tensor in state["average"].items()}
        self._training = dict(state["training"])

    @torch.no_grad()
    def _update(self, update: Update) -> None:
        """Take the weights as they are into the average; the first ones are copied."""
        weights = self._weights()
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

    def _show_average(self) -> None:
        if self._average and not self._training:
            weights = self._weights()
            self._training = {name: weight.clone() for name, weight in weights.items()}
            _copy(self._average, weights)

    def _restore(self) -> None:
        if self._training:
            _copy(self._training, self._weights())
            self._training = {}

    def _weights(self) -> dict[str, Tensor]:
        # Looked up each time: a layer may put a new tensor in the place of a buffer.
        return {name: getattr(module, attribute).detach() for name, (module, attribute) in self._places.items()}

    def _placed(self, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if not saved:
            return {}
        weights = self._weights()
        if saved.keys() != weights.keys():
            names = ", ".join(sorted(saved.keys() ^ weights.keys()))
            raise ValueError(
                f"the saved state of {self.name} and the model differ in {names}: load a checkpoint of this model"
            )
        return {name: part_like(saved[name], weight) for name, weight in weights.items()}

    def _claim(self, trainer: TrainerView) -> None:
        owner = trainer.state.user_state.setdefault(_OWNER, self.name)
        for each in each_of(trainer.optimizer).values():
            if hasattr(each, "eval"):  # ScheduleFree, SPlus; see OptimizerMode
                owner = f"the optimizer {type(each).__name__}"
        if owner != self.name:
            raise ValueError(f"{owner} averages the weights of this run already: leave {self.name} out")


def averaged_places(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Module and attribute of everything that is averaged, by its name in the model."""
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
    """The type of an average of such weights: 32 bits or more."""
    return torch.promote_types(tensor.dtype, torch.float32)


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    for name, tensor in target.items():
        tensor.copy_(source[name])
