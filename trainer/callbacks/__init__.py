"""The shipped callbacks, one file each."""

from trainer.callback import Callback
from trainer.callbacks.batch_size_schedule import BatchSizeSchedule
from trainer.callbacks.best_weights import BestWeights
from trainer.callbacks.checkpoint import Checkpoint
from trainer.callbacks.config_saver import ConfigSaver
from trainer.callbacks.console_logging import ConsoleLogging
from trainer.callbacks.csv_logging import CSVLogging
from trainer.callbacks.early_stopping import EarlyStopping
from trainer.callbacks.ema import EMA
from trainer.callbacks.garbage_collection import GarbageCollection
from trainer.callbacks.gpu_memory import GPUMemory
from trainer.callbacks.gradient_accumulation import GradientAccumulation
from trainer.callbacks.gradient_clipping import GradientClipping
from trainer.callbacks.gradient_monitor import GradientMonitor
from trainer.callbacks.json_logging import JSONLogging
from trainer.callbacks.loss_prediction import LossPrediction
from trainer.callbacks.lr_finder import LRFinder
from trainer.callbacks.mlflow_logging import MLflowLogging
from trainer.callbacks.nan_detection import NaNDetection
from trainer.callbacks.notifier import Notifier
from trainer.callbacks.optimizer_mode import OptimizerMode
from trainer.callbacks.overfit_detection import OverfitDetection
from trainer.callbacks.parameter_count import ParameterCount
from trainer.callbacks.profiler import Profiler
from trainer.callbacks.stability_monitor import StabilityMonitor
from trainer.callbacks.tensor_statistics import TensorStatistics
from trainer.callbacks.tensorboard_logging import TensorBoardLogging
from trainer.callbacks.throughput import Throughput
from trainer.callbacks.time_limit import TimeLimit
from trainer.callbacks.wandb_logging import WandbLogging
from trainer.callbacks.weight_averaging import WeightAveraging

__all__ = [
    "EMA",
    "BatchSizeSchedule",
    "BestWeights",
    "CSVLogging",
    "Checkpoint",
    "ConfigSaver",
    "ConsoleLogging",
    "EarlyStopping",
    "GPUMemory",
    "GarbageCollection",
    "GradientAccumulation",
    "GradientClipping",
    "GradientMonitor",
    "JSONLogging",
    "LRFinder",
    "LossPrediction",
    "MLflowLogging",
    "NaNDetection",
    "Notifier",
    "OptimizerMode",
    "OverfitDetection",
    "ParameterCount",
    "Profiler",
    "StabilityMonitor",
    "TensorBoardLogging",
    "TensorStatistics",
    "Throughput",
    "TimeLimit",
    "WandbLogging",
    "WeightAveraging",
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
