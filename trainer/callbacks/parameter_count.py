"""ParameterCount: records the number of parameters of a model."""

from __future__ import annotations

import logging

from torch import nn

from trainer.callback import Callback, TrainerView
from trainer.distributed.ranks import rank
from trainer.step.parts import bare_model, lazy_parameters

logger = logging.getLogger(__name__)

_OWN = "(the model itself)"


class ParameterCount(Callback):
    """Records ``parameters`` and ``trainable_parameters``, so that a study can bound or minimise them.

    A parameter that several modules share counts once, for the first of them. Trainable are those that require
    gradients when an epoch ends. The log has a table by the model's children at the start of a fit, or, where
    lazy modules have no shapes yet, at the end of its first epoch.

    Example::

        Trainer(model, optimizer, loss, callbacks=[ParameterCount()])

        callbacks: {parameter_count: true}

    Raises:
        ValueError: An epoch has ended and a lazy module has still not been called.
    """

    priority = 60
    writes = ("parameters", "trainable_parameters")
    transient = ("_logged",)

    def __init__(self) -> None:
        self._logged = False

    def on_fit_start(self, trainer: TrainerView) -> None:
        """Log the table if all shapes are known."""
        self._logged = False
        model = bare_model(trainer.model)
        if not lazy_parameters(model):
            self._log(model)

    def on_epoch_end(self, trainer: TrainerView) -> None:
        """Add the counts to the epoch's metrics."""
        model = bare_model(trainer.model)
        if lazy := lazy_parameters(model):
            raise ValueError(
                f"the parameters {', '.join(lazy)} have no shape, because their lazy modules were not called in "
                f"epoch {trainer.state.epoch}: call them in the model's forward, or take them out of the model"
            )
        if not self._logged:
            self._log(model)
        total, trainable = _totals(model)
        trainer.state.metrics["parameters"] = float(total)
        trainer.state.metrics["trainable_parameters"] = float(trainable)

    def _log(self, model: nn.Module) -> None:
        self._logged = True
        if not rank():
            logger.info("parameters of the model\n%s", parameter_table(model))


def parameter_table(model: nn.Module) -> str:
    """A text table of the parameters, and of the trainable ones, of each child of ``model``, with their sums."""
    rows: dict[str, tuple[int, int]] = {}
    for name, parameter in model.named_parameters():  # each parameter once, under its first name
        child = name.partition(".")[0] if "." in name else _OWN
        count, trainable = rows.get(child, (0, 0))
        size = parameter.numel()
        rows[child] = (count + size, trainable + (size if parameter.requires_grad else 0))
    table = [("child", "parameters", "trainable")]
    table += [(child, f"{count:,}", f"{trainable:,}") for child, (count, trainable) in rows.items()]
    total, trainable = _totals(model)
    table.append(("total", f"{total:,}", f"{trainable:,}"))
    width = max(len(child) for child, _, _ in table)
    return "\n".join(f"{child:<{width}}  {count:>15}  {trainable:>15}" for child, count, trainable in table)


def _totals(model: nn.Module) -> tuple[int, int]:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trainable in sizes if trainable)
