"""A callback-driven PyTorch training loop that stands on its own."""

from typing import TYPE_CHECKING

from trainer.lazy import lazy_names

if TYPE_CHECKING:
    from trainer.callback import Callback, register_global_callback
    from trainer.checkpoint.manager import newest_checkpoint
    from trainer.data.batches import BatchOptions
    from trainer.metrics.whole_set import WholeSet
    from trainer.state import TrainState
    from trainer.trainer import Trainer

__all__ = [
    "BatchOptions",
    "Callback",
    "TrainState",
    "Trainer",
    "WholeSet",
    "newest_checkpoint",
    "register_global_callback",
]

# Not imported at once: what reads a study takes predictions and seeds from here, and no torch.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "trainer.callback": ("Callback", "register_global_callback"),
        "trainer.checkpoint.manager": ("newest_checkpoint",),
        "trainer.data.batches": ("BatchOptions",),
        "trainer.state": ("TrainState",),
        "trainer.trainer": ("Trainer",),
        "trainer.metrics.whole_set": ("WholeSet",),
    },
)
