"""What is computed for one batch: a separate, replaceable function."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

StepOutput = Tensor | Mapping[str, Any]
Step = Callable[[nn.Module, Any], StepOutput]
Metric = Callable[[Any, Any], Tensor | float]


class SupervisedStep:
    """``loss(model(x), y)`` for batches ``(x, y)``.

    Args:
        loss: Takes (outputs, targets), returns a scalar: the mean over the batch.
    """

    def __init__(self, loss: Callable[[Any, Any], Tensor]) -> None:
        self.loss = loss

    def __call__(self, model: nn.Module, batch: Any) -> StepOutput:
        """Loss and outputs of one batch."""
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TypeError(
                f"a batch is {type(batch).__name__}, not (inputs, targets): give the Trainer a `step` of your own "
                "in place of the loss"
            )
        inputs, targets = batch
        outputs = model(inputs)
        return {"loss": self.loss(outputs, targets), "outputs": outputs}


def split_output(output: StepOutput) -> tuple[Tensor, Any, Mapping[str, Any]]:
    """Loss, outputs and further scalars of what a step returned.

    A step returns the loss, or a mapping with ``"loss"``, optional ``"outputs"`` (handed to the metrics) and
    any other scalars, each recorded under its key.

    Raises:
        TypeError: It returned something else.
    """
    if isinstance(output, Tensor):
        return output, None, {}
    if isinstance(output, Mapping) and isinstance(output.get("loss"), Tensor):
        extra = {key: value for key, value in output.items() if key not in {"loss", "outputs"}}
        return output["loss"], output.get("outputs"), extra
    raise TypeError(f"a step returns a loss tensor or a mapping with 'loss', not {type(output).__name__}")
