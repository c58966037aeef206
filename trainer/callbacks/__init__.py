"""The shipped callbacks, one file each."""

from trainer.callback import Callback
from trainer.callbacks.checkpoint import Checkpoint
from trainer.callbacks.console_logging import ConsoleLogging
from trainer.callbacks.csv_logging import CSVLogging
from trainer.callbacks.early_stopping import EarlyStopping
from trainer.callbacks.gradient_monitor import GradientMonitor
from trainer.callbacks.loss_prediction import LossPrediction
from trainer.callbacks.nan_detection import NaNDetection
from trainer.callbacks.optimizer_mode import OptimizerMode
from trainer.callbacks.overfit_detection import OverfitDetection
from trainer.callbacks.wandb_logging import WandbLogging

__all__ = [
    "CSVLogging",
    "Checkpoint",
    "ConsoleLogging",
    "EarlyStopping",
    "GradientMonitor",
    "LossPrediction",
    "NaNDetection",
    "OptimizerMode",
    "OverfitDetection",
    "WandbLogging",
    "default_callbacks",
]


def default_callbacks() -> list[Callback]:
    """The callbacks that need no argument and that every run should have."""
    return [
        NaNDetection(),
        OptimizerMode(),
        GradientMonitor(),
        LossPrediction(),
        OverfitDetection(),
        ConsoleLogging(),
    ]
