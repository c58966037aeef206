"""The sections of a study file, as frozen pydantic models; nothing here is heavier than pydantic."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    model_validator,
)

from hpo.paths import suggest_name
from hpo.schema_space import ParamSpec
from hpo.schema_types import CompileOptions, Devices, Duration, Interval, Seconds, Size, fail

__all__ = ["FREE_SECTIONS", "LoaderSection", "PrunerSection", "SamplerSection", "StudyFile", "StudySection"]

#: Keys of `scheduler` that are not arguments of its target.
SCHEDULER_KEYS = ("interval", "warmup")
#: Sections whose keys belong to the person's own code, in the order in which they are built.
FREE_SECTIONS = ("data", "model", "loss", "step", "optimizer", "scheduler", "metrics", "callbacks")

#: Seconds; of the time after which a silent worker is taken for dead, a beat takes a sixth.
MIN_LOST_AFTER = 3

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
_BUILT_IN_METRICS = ("loss", "lr")


def _study_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        problem = "may hold only letters, digits, `.`, `_` and `-`, and not start with `.` or `-`"
        raise fail(problem, "it names the study's folder too; write for example `digits-mlp`")
    return value


def _metric_names(value: dict[str, Any]) -> dict[str, Any]:
    for name in value:
        if name in _BUILT_IN_METRICS:
            raise fail(f"`{name}` is recorded already", "give this metric another name", name)
        if not _NAME.fullmatch(name):
            fix = "use letters, digits, `.`, `_` and `-`"
            raise fail("is not a name for a metric", fix, name)
    return value


def _with_target(node: dict[str, Any]) -> dict[str, Any]:
    fix = "write the import path of a class or function, such as `torch.nn.Linear` or `model.MLP`"
    if "_target_" not in node:
        raise fail("required key is missing", fix, "_target_")
    if not isinstance(node["_target_"], str) or not _TARGET.fullmatch(node["_target_"]):
        raise fail("is not an import path", fix, "_target_")
    return node


def _with_pace(node: dict[str, Any]) -> dict[str, Any]:
    interval, warmup = node.get("interval", "epoch"), node.get("warmup", 0)
    if interval not in ("epoch", "step"):
        raise fail("must be `epoch` or `step`", suggest_name(interval, ("epoch", "step")), "interval")
    if not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0:
        raise fail(
            "must be a whole number of at least 0", "it counts epochs or steps, as `interval` says", "warmup"
        )
    return {**node, "interval": interval, "warmup": warmup}


def _callback(value: Any) -> Any:
    if value is None:  # `early_stopping:` alone switches it on with its defaults
        return {}
    if not isinstance(value, bool | dict):
        raise fail("must be a mapping of arguments, true or false", "write `{}` for its defaults")
    return _with_target(value) if isinstance(value, dict) and "_target_" in value else value


def _named(value: Any) -> Any:
    if value is None:
        return {"name": "none"}
    return {"name": value} if isinstance(value, str) else value


_NAMED_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "null"},
        {"type": "object", "properties": {"name": {"type": "string"}}},
    ]
}
_TARGET_SCHEMA = {
    "type": "object",
    "properties": {"_target_": {"type": "string"}},
    "required": ["_target_"],
}

TargetNode = Annotated[dict[str, Any], AfterValidator(_with_target), WithJsonSchema(_TARGET_SCHEMA)]
SchedulerNode = Annotated[
    dict[str, Any],
    AfterValidator(_with_pace),
    AfterValidator(_with_target),
    WithJsonSchema(
        {
            **_TARGET_SCHEMA,
            "properties": {
                **_TARGET_SCHEMA["properties"],
                "interval": {"enum": ["epoch", "step"]},
                "warmup": {"type": "integer", "minimum": 0},
            },
        }
    ),
]
CallbackNode = Annotated[
    Any,
    BeforeValidator(_callback),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "null"}]}),
]


class Section(BaseModel):
    """Base of every section: frozen, strict about types, and without room for unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SamplerSection(Section):
    """Which sampler draws the trials; further keys are its arguments."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(default="tpe", description="The sampler's name.", examples=["tpe"])
    seed: int = Field(default=0, ge=0, description="Seed of the study's randomness.", examples=[0])
    allow_pickle: bool = Field(
        default=False, description="Let the sampler keep pickled state in the storage.", examples=[False]
    )

    @property
    def kwargs(self) -> dict[str, Any]:
        """The further arguments of the Optuna sampler."""
        return dict(self.model_extra or {})


class PrunerSection(Section):
    """Which pruner ends trials early; further keys are its arguments."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(default="median", description="The pruner's name, or none.", examples=["median"])

    @property
    def kwargs(self) -> dict[str, Any]:
        """The further arguments of the Optuna pruner."""
        return dict(self.model_extra or {})


Sampler = Annotated[SamplerSection, BeforeValidator(_named), WithJsonSchema(_NAMED_SCHEMA)]
Pruner = Annotated[PrunerSection, BeforeValidator(_named), WithJsonSchema(_NAMED_SCHEMA)]


class StudySection(Section):
    """What is optimised, how often, by what, and where it is kept."""

    name: Annotated[str, AfterValidator(_study_name)] = Field(
        description="The study's name, in the storage and on disk.", examples=["digits"]
    )
    metric: str = Field(default="val_loss", description="The metric to optimise.", examples=["val_loss"])
    direction: Literal["minimize", "maximize"] = Field(
        default="minimize", description="Needed unless the metric is a loss.", examples=["minimize"]
    )
    n_trials: int = Field(default=100, ge=1, description="Trials to bring to an end.", examples=[100])
    timeout: Duration = Field(default=None, description='Seconds, or "2h", "1h30m", "1d".', examples=["2h"])
    sampler: Sampler = Field(default=SamplerSection(), description="A name, or a mapping.", examples=["tpe"])
    pruner: Pruner = Field(default=PrunerSection(), description="A name, or a mapping.", examples=["median"])
    storage: str | None = Field(
        default=None,
        min_length=1,
        description="URL of the database; a file in the output folder when left out.",
        examples=["sqlite:///study.db"],
    )
    output_dir: str | None = Field(
        default=None, min_length=1, description="Folder of results, seen from this file.", examples=["runs/digits"]
    )
    workers: int | None = Field(default=None, ge=1, description="Processes to run side by side.", examples=[4])
    devices: Devices = Field(
        default=None, description="Devices that the workers share.", examples=["cuda:0,cuda:1"]
    )
    max_retries: int = Field(
        default=3, ge=0, description="Deaths of its worker that a trial survives.", examples=[3]
    )
    trial_timeout: Duration = Field(
        default=None, description="Time that a trial may take, over all its attempts.", examples=["6h"]
    )
    no_progress_timeout: Duration = Field(
        default=None, description="Time after which a trial without a finished batch is ended.", examples=["30m"]
    )
    trial_memory: Size = Field(
        default=None, description="Main memory that a trial's processes may use.", examples=["16GiB"]
    )
    on_oom: Literal["fail", "retry_with_accumulation"] = Field(
        default="fail",
        description="What to do when a device's memory runs out; the other choice halves the micro-batch.",
        examples=["retry_with_accumulation"],
    )
    lost_after: Seconds = Field(
        default=60.0,
        description="Silence after which a worker on another machine counts as dead.",
        examples=["60s"],
    )
    background_reports: bool = Field(
        default=False,
        description="Report beside the training; pruning then acts at most one epoch late.",
        examples=[True],
    )
    keep_best: int = Field(
        default=5, ge=1, description="Complete trials whose checkpoints `hpo clean` keeps.", examples=[5]
    )
    disk_quota: Size = Field(
        default=None,
        description="Room for checkpoints; above it the study is cleaned as it runs.",
        examples=["200GB"],
    )

    @model_validator(mode="after")
    def _beats_fit_into_the_silence(self) -> Self:
        if self.lost_after < MIN_LOST_AFTER:
            fix = f"a worker gives a sign of life several times in that time; write {MIN_LOST_AFTER} s or more"
            raise fail("is too short", fix, "lost_after")
        return self

    @model_validator(mode="before")
    @classmethod
    def _direction_of_metric(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("direction") is not None:
            return data
        metric = data.get("metric", "val_loss")
        if isinstance(metric, str) and not metric.endswith("loss"):
            fix = f"write `direction: maximize` or `direction: minimize` for `{metric}`"
            raise fail("required key is missing; only a metric named …loss has a default", fix, "direction")
        return {**data, "direction": "minimize"}


class LoaderSection(Section):
    """How a dataset is batched; a ready DataLoader is left as it is."""

    batch_size: int = Field(default=32, ge=1, description="Samples in a training batch.", examples=[32])
    eval_batch_size: int | None = Field(
        default=None, ge=1, description="Samples in an evaluation batch; batch_size when left out.", examples=[256]
    )
    num_workers: int = Field(default=0, ge=0, description="Processes that load data.", examples=[0])
    drop_last: bool = Field(default=False, description="Leave a short last batch out.", examples=[False])
    shuffle: bool = Field(default=True, description="Shuffle the training data.", examples=[True])


class TrainerSection(Section):
    """How long and where a trial trains."""

    max_epochs: int | None = Field(
        default=20, ge=1, description="Passes over the data; no limit when only max_steps is given.", examples=[20]
    )
    max_steps: int | None = Field(default=None, ge=1, description="Optimizer steps.", examples=[10_000])
    validate_every: Interval = Field(
        default=None,
        description="Steps, or a fraction of a pass, between two validations, which make an epoch.",
        examples=[500],
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="Numbers of the forward pass.", examples=["bf16"]
    )
    compile: CompileOptions = Field(
        default=False, description="Run the model through torch.compile.", examples=[True]
    )
    cuda_graph: bool = Field(default=False, description="Record the step as one CUDA graph.", examples=[False])
    seed: int | None = Field(default=None, ge=0, description="Seed of a trial's own randomness.", examples=[0])
    device: str | None = Field(
        default=None, min_length=1, description="Device of the training.", examples=["cuda:0"]
    )

    @model_validator(mode="before")
    @classmethod
    def _length(cls, data: Any) -> Any:
        """With ``max_steps`` alone, steps alone limit the run."""
        if not isinstance(data, Mapping) or "max_epochs" in data:
            return data
        return {**data, "max_epochs": None} if data.get("max_steps") is not None else data

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if self.max_epochs is None and self.max_steps is None:
            raise fail("has no end", "give a number of epochs, or max_steps", "max_epochs")
        return self

    @property
    def known_epochs(self) -> int | None:
        """Epochs of a whole trial, None where they depend on the data."""
        if self.validate_every is None and self.max_steps is None:
            return self.max_epochs
        if self.max_epochs is None and self.max_steps and isinstance(self.validate_every, int):
            return math.ceil(self.max_steps / self.validate_every)
        return None


class StudyFile(Section):
    """A whole study file, interpolations resolved."""

    study: StudySection
    data: TargetNode = Field(description="Returns the datasets.", examples=[{"_target_": "data.load"}])
    loader: LoaderSection = LoaderSection()
    model: TargetNode = Field(description="The module to train.", examples=[{"_target_": "model.Net"}])
    loss: TargetNode | None = Field(
        default=None, description="Called with (outputs, targets).", examples=[{"_target_": "torch.nn.MSELoss"}]
    )
    step: TargetNode | None = Field(
        default=None,
        description="Called with (model, batch) in place of the loss.",
        examples=[{"_target_": "model.step"}],
    )
    optimizer: TargetNode = Field(examples=[{"_target_": "torch.optim.AdamW", "lr": 1e-3}])
    scheduler: SchedulerNode | None = Field(
        default=None, examples=[{"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 5}]
    )
    metrics: Annotated[dict[str, TargetNode], AfterValidator(_metric_names)] = Field(
        default={}, examples=[{"accuracy": {"_target_": "model.accuracy"}}]
    )
    trainer: TrainerSection = TrainerSection()
    callbacks: dict[str, CallbackNode] = Field(default={}, examples=[{"early_stopping": {"patience": 5}}])
    search_space: dict[str, ParamSpec] = Field(
        default={}, examples=[{"optimizer.lr": {"type": "float", "low": 1e-5, "high": 0.1, "log": True}}]
    )

    @model_validator(mode="before")
    @classmethod
    def _loss_or_step(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and data.get("loss") is None and data.get("step") is None:
            fix = "add `loss: {_target_: torch.nn.CrossEntropyLoss}`, or a `step` of your own"
            raise fail("required section is missing", fix, "loss")
        return data
