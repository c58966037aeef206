"""A callback-driven PyTorch training loop that stands on its own."""

from trainer.callback import Callback, register_global_callback
from trainer.checkpoint import newest_checkpoint
from trainer.data import BatchOptions
from trainer.state import TrainState
from trainer.trainer import Trainer
from trainer.whole_set import WholeSet

__all__ = [
    "BatchOptions",
    "Callback",
    "TrainState",
    "Trainer",
    "WholeSet",
    "newest_checkpoint",
    "register_global_callback",
]
