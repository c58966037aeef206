"""The table of callbacks that a study file configures by name; each row has all that hpo knows about one.

A new callback or tracker needs its class in `trainer.callbacks`, a row here, and a line in docs/callbacks.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from hpo.trial.trackers import Shown
from trainer import Callback, callbacks

#: Makes all arguments of a callback from those in the study file.
Fill = Callable[[Shown, Mapping[str, Any]], dict[str, Any]]

#: Arguments by which a tracker names a study; their default is the study's name.
_NAMED_AFTER_STUDY: Final = frozenset({"project", "experiment"})
_FOLLOWED: Final = ("monitor", "mode")


def _as_written(run: Shown, written: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG001 - a Fill
    return dict(written)


def _followed(run: Shown, written: Mapping[str, Any]) -> dict[str, Any]:
    return {**written, **run.followed}


def _watched(run: Shown, written: Mapping[str, Any]) -> dict[str, Any]:
    metrics = written.get("metrics", ("train_loss", "val_loss"))
    return {**written, "metrics": tuple(dict.fromkeys((*metrics, run.spec.study.metric)))}


def _stopped_by(run: Shown, written: Mapping[str, Any]) -> dict[str, Any]:
    metric = written.get("monitor", run.spec.study.metric)
    return {"monitor": metric, "mode": _mode_of(run, metric), **written}


def _predicted(run: Shown, written: Mapping[str, Any]) -> dict[str, Any]:
    return {"mode": _mode_of(run, written["metric"]), **written} if "metric" in written else dict(written)


def _mode_of(run: Shown, metric: str) -> str:
    return run.spec.study.mode if metric == run.spec.study.metric else "min"


def _checkpointed(run: Shown, written: Mapping[str, Any]) -> dict[str, Any]:
    return {**_followed(run, written), "folder": run.place.checkpoints}


def _notified(run: Shown, written: Mapping[str, Any]) -> dict[str, Any]:
    return {**_followed(run, written), "name": f"{run.spec.study.name}, {run.place.name}"}


def _in_folder(argument: str, file: str) -> Fill:
    def fill(run: Shown, written: Mapping[str, Any]) -> dict[str, Any]:
        return {**written, argument: run.place.folder / file}

    return fill


@dataclass(frozen=True)
class Row:
    """What hpo knows about a callback.

    Attributes:
        kind: Its class.
        default: Whether it runs unless the study file switches it off.
        required: Whether it can't be switched off: without it outcomes would be wrong, or trials not resumable.
        outside: Whether it shows the run outside of its folder; it is left out where a config is only tried out.
        private: Whether its arguments may contain a secret address; they are left out of what is passed on.
        given: Arguments that hpo gives and a study file may not give.
        fill: Adds these arguments, and defaults that depend on the study.
    """

    kind: type[Callback]
    default: bool = False
    required: bool = False
    outside: bool = False
    private: bool = False
    given: tuple[str, ...] = ()
    fill: Fill = _as_written

    @property
    def offered(self) -> Callable[..., Callback]:
        """A function that makes the callback, with the arguments that a study file may give as its signature."""
        kind, signature = self.kind, inspect.signature(self.kind)
        left = [
            parameter.replace(default=None) if parameter.name in _NAMED_AFTER_STUDY else parameter
            for parameter in signature.parameters.values()
            if parameter.name not in self.given
        ]

        def make(**arguments: Any) -> Callback:
            return kind(**arguments)

        make.__name__ = kind.__name__
        make.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return make


CALLBACKS: Final[Mapping[str, Row]] = MappingProxyType(
    {
        "nan_detection": Row(callbacks.NaNDetection, default=True, required=True, fill=_watched),
        "optimizer_mode": Row(callbacks.OptimizerMode, default=True),
        "gradient_monitor": Row(callbacks.GradientMonitor, default=True),
        "loss_prediction": Row(callbacks.LossPrediction, default=True, fill=_predicted),
        "overfit_detection": Row(callbacks.OverfitDetection, default=True),
        "console": Row(callbacks.ConsoleLogging, default=True, outside=True),
        "csv": Row(callbacks.CSVLogging, default=True, given=("path",), fill=_in_folder("path", "metrics.csv")),
        "checkpoint": Row(
            callbacks.Checkpoint, default=True, required=True, given=("folder", *_FOLLOWED), fill=_checkpointed
        ),
        "early_stopping": Row(callbacks.EarlyStopping, fill=_stopped_by),
        "gradient_clipping": Row(callbacks.GradientClipping),
        "gradient_accumulation": Row(callbacks.GradientAccumulation),
        "batch_size_schedule": Row(callbacks.BatchSizeSchedule),
        "freeze": Row(callbacks.Freeze),
        "sequence_length_schedule": Row(callbacks.SequenceLengthSchedule),
        "evaluator": Row(callbacks.Evaluator),
        "sanity_validation": Row(callbacks.SanityValidation),
        "ema": Row(callbacks.EMA),
        "weight_averaging": Row(callbacks.WeightAveraging),
        "weight_merging": Row(callbacks.WeightMerging, given=("folder",), fill=Shown.merging),
        "best_weights": Row(callbacks.BestWeights, given=_FOLLOWED, fill=_followed),
        "stability_monitor": Row(callbacks.StabilityMonitor),
        "tensor_statistics": Row(callbacks.TensorStatistics),
        "parameter_count": Row(callbacks.ParameterCount),
        "model_summary": Row(callbacks.ModelSummary),
        "throughput": Row(callbacks.Throughput),
        "gpu_memory": Row(callbacks.GPUMemory),
        "garbage_collection": Row(callbacks.GarbageCollection),
        "profiler": Row(callbacks.Profiler, given=("folder",), fill=_in_folder("folder", "profile")),
        "time_limit": Row(callbacks.TimeLimit),
        "wandb": Row(
            callbacks.WandbLogging,
            outside=True,
            given=("folder", "earlier", "checkpoints", "run_id", "config", *_FOLLOWED),
            fill=Shown.wandb,
        ),
        "mlflow": Row(
            callbacks.MLflowLogging,
            outside=True,
            given=("folder", "run_key", "params", *_FOLLOWED),
            fill=Shown.mlflow,
        ),
        "comet": Row(
            callbacks.CometLogging,
            outside=True,
            given=("folder", "run_key", "params", *_FOLLOWED),
            fill=Shown.comet,
        ),
        "tensorboard": Row(callbacks.TensorBoardLogging, given=("folder", "hparams"), fill=Shown.tensorboard),
        "progress_bar": Row(callbacks.ProgressBar, outside=True),
        "gradient_dump": Row(callbacks.GradientDump, given=("folder",), fill=_in_folder("folder", "gradients")),
        "metric_saver": Row(callbacks.MetricSaver, given=("folder",), fill=_in_folder("folder", "metrics")),
        "step_metrics": Row(callbacks.StepMetrics, given=("folder", "earlier"), fill=Shown.step_metrics),
        "save_pretrained": Row(
            callbacks.SavePretrained, given=("folder",), fill=_in_folder("folder", "pretrained")
        ),
        "json": Row(callbacks.JSONLogging, given=("path",), fill=_in_folder("path", "metrics.jsonl")),
        "notifier": Row(
            callbacks.Notifier, outside=True, private=True, given=("name", *_FOLLOWED), fill=_notified
        ),
    }
)


def offered_callbacks() -> dict[str, Callable[..., Callback]]:
    """The built-in callbacks by name, with the arguments that a study file may give."""
    return {name: row.offered for name, row in CALLBACKS.items()}


def configured(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Name → arguments of every callback that runs with this config."""
    chosen: dict[str, Any] = {name: True for name, row in CALLBACKS.items() if row.default}
    chosen |= config["callbacks"]
    return {name: {} if node is True else dict(node) for name, node in chosen.items() if node is not False}
