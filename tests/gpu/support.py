"""Training on a GPU: a model with all that is hard there, and runs of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from tests.unit.trainer.support import make_model, regression
from trainer import BatchOptions, Callback, Trainer

DEVICE: Final = "cuda"
#: Each module of this folder is skipped by it on a machine without a GPU.
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
#: A last batch of three samples.
SAMPLES: Final = 47
OPTIMIZERS: Final[dict[str, Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, amsgrad=True, foreach=True),
}
SCHEDULERS: Final[dict[str, Any]] = {
    "none": lambda optimizer: None,
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 36),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=36),
    "warm-up": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30),
        ],
        [6],
    ),
    "plateau": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
}


def gpu_trainer(
    callbacks: Iterable[Callback] = (),
    *,
    optimizer: str = "adamw",
    scheduler: str = "none",
    model: nn.Module | None = None,
    **options: Any,
) -> Trainer:
    """A trainer on the GPU, of three epochs with batches of 4; ``options`` are the Trainer's."""
    model = make_model() if model is None else model
    made = OPTIMIZERS[optimizer](model.parameters())
    options.setdefault("max_epochs", 3)
    options.setdefault("device", DEVICE)
    return Trainer(
        model,
        made,
        nn.functional.mse_loss,
        callbacks=callbacks,
        scheduler=SCHEDULERS[scheduler](made),
        scheduler_interval="epoch" if scheduler == "plateau" else "step",
        batching=BatchOptions(batch_size=4),
        **options,
    )


def fit(trainer: Trainer) -> Trainer:
    trainer.fit(regression(SAMPLES), regression(9, seed=8))
    return trainer


def on_cpu(value: Any) -> Any:
    """The same with its tensors on the CPU, to be compared."""
    if isinstance(value, Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: on_cpu(item) for key, item in value.items()}
    return [on_cpu(item) for item in value] if isinstance(value, list | tuple) else value
