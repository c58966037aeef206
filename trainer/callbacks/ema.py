"""EMA: evaluates and saves an exponential moving average of the weights."""

from torch.optim.swa_utils import get_ema_multi_avg_fn

from trainer.callback import TrainerView
from trainer.callbacks.averaged import AveragedWeights


class EMA(AveragedWeights):
    """Evaluates and saves an exponential moving average of the weights.

    After each optimizer step, average = decay · average + (1 - decay) · weights, starting from the weights after
    the first step. Validation, checkpoints and the model after the fit have the average; training continues with
    its own weights. The running statistics of BatchNorm are averaged alike; see
    `trainer.callbacks.averaged.AveragedWeights` for that and for when the weights are exchanged. Costs one copy of
    the weights, a second one while an epoch is evaluated, and an in-place update a step that waits for nothing.

    Example::

        Trainer(model, optimizer, loss, callbacks=[EMA(0.9999)])

        callbacks: {ema: {decay: 0.9999}}

    Args:
        decay: Share of the old average that a step keeps, from 0 to below 1; it covers about the last 1 / (1 -
            decay) steps.
        warmup: Whether the decay of the update that follows n others is at most (1 + n) / (10 + n), so that a
            short run is not held back by its first weights; the formula is that of TensorFlow's
            tf.train.ExponentialMovingAverage with ``num_updates``.

    Raises:
        ValueError: ``decay`` is out of range; or see the base class.
    """

    def __init__(self, decay: float = 0.999, *, warmup: bool = True) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay}: give a number from 0 to below 1, such as 0.999")
        super().__init__()
        self.decay = decay
        self.warmup = warmup

    def _after_step(self, trainer: TrainerView, step: int) -> None:  # noqa: ARG002
        """Update the average with the new weights."""
        decay = min(self.decay, (1 + self._updates) / (10 + self._updates)) if self.warmup else self.decay
        self._update(trainer, get_ema_multi_avg_fn(decay))  # type: ignore[no-untyped-call]
