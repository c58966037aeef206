"""The shipped callbacks, one file each."""

from trainer.callback import Callback
from trainer.callbacks.batch_size_schedule import BatchSizeSchedule
from trainer.callbacks.best_weights import BestWeights
from trainer.callbacks.checkpoint import Checkpoint
from trainer.callbacks.comet_logging import CometLogging
from trainer.callbacks.config_saver import ConfigSaver
from trainer.callbacks.console_logging import ConsoleLogging
from trainer.callbacks.csv_logging import CSVLogging
from trainer.callbacks.early_stopping import EarlyStopping
from trainer.callbacks.ema import EMA
from trainer.callbacks.evaluator import Evaluator
from trainer.callbacks.freeze import Freeze
from trainer.callbacks.garbage_collection import GarbageCollection
from trainer.callbacks.gpu_memory import GPUMemory
from trainer.callbacks.gradient_accumulation import GradientAccumulation
from trainer.callbacks.gradient_clipping import GradientClipping
from trainer.callbacks.gradient_dump import GradientDump
from trainer.callbacks.gradient_monitor import GradientMonitor
from trainer.callbacks.json_logging import JSONLogging
from trainer.callbacks.loss_prediction import LossPrediction
from trainer.callbacks.lr_finder import LRFinder
from trainer.callbacks.metric_saver import MetricSaver
from trainer.callbacks.mlflow_logging import MLflowLogging
from trainer.callbacks.model_summary import ModelSummary
from trainer.callbacks.nan_detection import NaNDetection
from trainer.callbacks.notifier import Notifier
from trainer.callbacks.optimizer_mode import OptimizerMode
from trainer.callbacks.overfit_detection import OverfitDetection
from trainer.callbacks.parameter_count import ParameterCount
from trainer.callbacks.profiler import Profiler
from trainer.callbacks.progress_bar import ProgressBar
from trainer.callbacks.sanity_validation import SanityValidation
from trainer.callbacks.save_pretrained import SavePretrained
from trainer.callbacks.sequence_length_schedule import SequenceLengthSchedule
from trainer.callbacks.stability_monitor import StabilityMonitor
from trainer.callbacks.step_metrics import StepMetrics
from trainer.callbacks.tensor_statistics import TensorStatistics
from trainer.callbacks.tensorboard_logging import TensorBoardLogging
from trainer.callbacks.throughput import Throughput
from trainer.callbacks.time_limit import TimeLimit
from trainer.callbacks.wandb_logging import WandbLogging
from trainer.callbacks.weight_averaging import WeightAveraging
from trainer.callbacks.weight_merging import WeightMerging
from trainer.distributed.ranks import world_size

__all__ = [
    "EMA",
    "BatchSizeSchedule",
    "BestWeights",
    "CSVLogging",
    "Checkpoint",
    "CometLogging",
    "ConfigSaver",
    "ConsoleLogging",
    "EarlyStopping",
    "Evaluator",
    "Freeze",
    "GPUMemory",
    "GarbageCollection",
    "GradientAccumulation",
    "GradientClipping",
    "GradientDump",
    "GradientMonitor",
    "JSONLogging",
    "LRFinder",
    "LossPrediction",
    "MLflowLogging",
    "MetricSaver",
    "ModelSummary",
    "NaNDetection",
    "Notifier",
    "OptimizerMode",
    "OverfitDetection",
    "ParameterCount",
    "Profiler",
    "ProgressBar",
    "SanityValidation",
    "SavePretrained",
    "SequenceLengthSchedule",
    "StabilityMonitor",
    "StepMetrics",
    "TensorBoardLogging",
    "TensorStatistics",
    "Throughput",
    "TimeLimit",
    "WandbLogging",
    "WeightAveraging",
    "WeightMerging",
    "default_callbacks",
]


def default_callbacks() -> list[Callback]:
    """The callbacks that need no argument and that every run should have.

    In a run of several processes `GarbageCollection` is among them, so that they pause together.
    """
    together = [GarbageCollection()] if world_size() > 1 else []
    return [
        *together,
        NaNDetection(),
        OptimizerMode(),
        GradientMonitor(),
        LossPrediction(),
        OverfitDetection(),
        ConsoleLogging(),
    ]
