"""A callback-driven PyTorch training loop that stands on its own."""

from typing import TYPE_CHECKING

from trainer.lazy import lazy_names

if TYPE_CHECKING:
    from trainer.callback import Callback, FunctionCallback, register_global_callback
    from trainer.checkpoint.manager import newest_checkpoint
    from trainer.checkpoint.weights import load_weights
    from trainer.data.options import BatchOptions
    from trainer.metrics.whole_set import WholeSet
    from trainer.model_summary import summary
    from trainer.rehearsal import rehearse
    from trainer.runner import CallbackRunner
    from trainer.state import TrainState
    from trainer.step.groups import parameter_groups
    from trainer.step.manual import Update
    from trainer.trainer import Trainer

__all__ = [
    "BatchOptions",
    "Callback",
    "CallbackRunner",
    "FunctionCallback",
    "TrainState",
    "Trainer",
    "Update",
    "WholeSet",
    "load_weights",
    "newest_checkpoint",
    "parameter_groups",
    "register_global_callback",
    "rehearse",
    "summary",
]

# Not imported at once: what reads a study takes predictions and seeds from here, and no torch.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "trainer.callback": ("Callback", "FunctionCallback", "register_global_callback"),
        "trainer.checkpoint.manager": ("newest_checkpoint",),
        "trainer.checkpoint.weights": ("load_weights",),
        "trainer.rehearsal": ("rehearse",),
        "trainer.runner": ("CallbackRunner",),
        "trainer.data.options": ("BatchOptions",),
        "trainer.state": ("TrainState",),
        "trainer.step.manual": ("Update",),
        "trainer.step.groups": ("parameter_groups",),
        "trainer.model_summary": ("summary",),
        "trainer.trainer": ("Trainer",),
        "trainer.metrics.whole_set": ("WholeSet",),
    },
)
