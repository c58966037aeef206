"""The sections of a study file, as frozen pydantic models; nothing here is heavier than pydantic."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    WithJsonSchema,
    model_validator,
)
from pydantic.fields import FieldInfo

from hpo.config.lengths import is_length
from hpo.config.paths import Keys, suggest_name
from hpo.config.schema_metrics import Metrics
from hpo.config.schema_run import RunSection
from hpo.config.schema_space import ParamSpec
from hpo.config.schema_study import PrunerSection, SamplerSection, StudySection
from hpo.config.schema_types import (
    MAX_EPOCHS,
    MAX_NUMBER,
    MAX_PROCESSES,
    MAX_SEED,
    MAX_STEPS,
    MAY_CHANGE,
    TARGET_SCHEMA,
    CompileOptions,
    Interval,
    Section,
    TargetNode,
    fail,
    with_target,
)

__all__ = [
    "FREE_SECTIONS",
    "LoaderSection",
    "PrunerSection",
    "RunSection",
    "SamplerSection",
    "StudyFile",
    "StudySection",
]

#: Keys of `lr_scheduler` that are not arguments of its target.
SCHEDULER_KEYS = ("interval", "warmup")
#: Sections whose keys belong to the person's own code, in the order in which they are built.
FREE_SECTIONS = ("data", "model", "loss", "step", "optimizer", "lr_scheduler", "metrics", "callbacks")


def _with_pace(node: dict[str, Any]) -> dict[str, Any]:
    interval, warmup = node.get("interval", "epoch"), node.get("warmup", 0)
    if interval not in ("epoch", "step"):
        raise fail("must be `epoch` or `step`", suggest_name(interval, ("epoch", "step")), "interval")
    if not is_length(warmup) and (not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0):
        raise fail(
            "must be a whole number of at least 0", "it counts epochs or steps, as `interval` says", "warmup"
        )
    return {**node, "interval": interval, "warmup": warmup}


def _callback(value: Any) -> Any:
    if value is None:  # `early_stopping:` alone switches it on with its defaults
        return {}
    if not isinstance(value, bool | dict):
        raise fail("must be a mapping of arguments, true or false", "write `{}` for its defaults")
    return with_target(value) if isinstance(value, dict) and "_target_" in value else value


SchedulerNode = Annotated[
    dict[str, Any],
    AfterValidator(_with_pace),
    AfterValidator(with_target),
    WithJsonSchema(
        {
            **TARGET_SCHEMA,
            "properties": {
                **TARGET_SCHEMA["properties"],
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


class LoaderSection(Section):
    """How a dataset is batched; a ready DataLoader is left as it is."""

    batch_size: int = Field(
        default=32, ge=1, le=MAX_NUMBER, description="Samples in a training batch.", examples=[32]
    )
    eval_batch_size: int = Field(
        default=256,
        ge=1,
        le=MAX_NUMBER,
        description="Samples in an evaluation batch, independent of batch_size.",
        examples=[256],
    )
    num_workers: int = Field(
        default=0, ge=0, le=MAX_PROCESSES, description="Processes that load data.", examples=[0]
    )
    drop_last: bool = Field(default=False, description="Leave a short last batch out.", examples=[False])
    shuffle: bool = Field(default=True, description="Shuffle the training data.", examples=[True])


class TrainerSection(Section):
    """How long and where a trial trains."""

    max_epochs: int | None = Field(
        default=20,
        ge=1,
        le=MAX_EPOCHS,
        description="Passes over the data; no limit when only max_steps is given.",
        examples=[20],
    )
    max_steps: int | None = Field(
        default=None, ge=1, le=MAX_STEPS, description="Optimizer steps.", examples=[10_000]
    )
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
    seed: int | None = Field(
        default=None, ge=0, le=MAX_SEED, description="Seed of a trial's own randomness.", examples=[0]
    )
    device: Annotated[str | None, MAY_CHANGE] = Field(
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
            raise fail("nothing ends the training", "give a number of epochs, or max_steps", "max_epochs")
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
    run: Annotated[RunSection, MAY_CHANGE] = RunSection()
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
    lr_scheduler: SchedulerNode | None = Field(
        default=None, examples=[{"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 5}]
    )
    metrics: Metrics = Field(
        default={},
        description="By name: the mean over samples, or with `over: epoch` one value of the whole set.",
        examples=[{"accuracy": {"_target_": "model.accuracy"}, "auc": {"_target_": "model.auc", "over": "epoch"}}],
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


def known_keys(model: type[BaseModel] = StudyFile, above: Keys = ()) -> Iterator[Keys]:
    """Every key that a study file may have by its schema, as the keys that lead to it; sections come first."""
    for name, field in model.model_fields.items():
        yield (*above, name)
        if inner := model_of(field):
            yield from known_keys(inner, (*above, name))


def model_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a mapping with known keys; None for any other field."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
