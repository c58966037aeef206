"""A callback-driven PyTorch training loop that stands on its own."""

import importlib
from typing import TYPE_CHECKING, Any

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

_HOMES = {
    "trainer.callback": ("Callback", "register_global_callback"),
    "trainer.checkpoint.manager": ("newest_checkpoint",),
    "trainer.data.batches": ("BatchOptions",),
    "trainer.state": ("TrainState",),
    "trainer.trainer": ("Trainer",),
    "trainer.metrics.whole_set": ("WholeSet",),
}


def __getattr__(name: str) -> Any:
    # Imported when it is asked for: what reads a study takes predictions and seeds from here, and no torch.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
