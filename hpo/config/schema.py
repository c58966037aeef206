"""The sections of a study file as frozen pydantic models; imports nothing heavier than pydantic."""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from hpo.config.paths import Keys
from hpo.config.schema_loader import LoaderSection
from hpo.config.schema_metrics import Metrics
from hpo.config.schema_nodes import OptimizerNode, SchedulerNode
from hpo.config.schema_run import RunSection
from hpo.config.schema_space import ParamSpec, numbers_of
from hpo.config.schema_study import StudySection
from hpo.config.schema_types import (
    MAX_EPOCHS,
    MAX_PROCESSES,
    MAX_SEED,
    MAX_STEPS,
    MAY_CHANGE,
    TARGET,
    CompileOptions,
    Interval,
    Section,
    TargetNode,
    fail,
    with_target,
)

#: Sections of the Trainer, which `objective` excludes; and those of them that are required without it.
OF_THE_TRAINER = ("data", "loader", "model", "loss", "step", "optimizer", "lr_scheduler", "metrics", "callbacks")
REQUIRED = ("data", "model", "optimizer")
#: Keys of `trainer` that are also allowed for a function that trains by itself.
OF_A_FUNCTION = ("max_epochs", "seed", "device")
#: Sections whose keys are arguments of the user's code, in the order in which they are built.
FREE_SECTIONS = ("objective", "data", "model", "loss", "step", "optimizer", "lr_scheduler", "metrics", "callbacks")


def _callback(value: Any) -> Any:
    if value is None:  # `early_stopping:` without a value enables it with its defaults
        return {}
    if not isinstance(value, bool | dict):
        is_path = isinstance(value, str) and "." in value
        fix = f"write `{{_target_: {value}}}`" if is_path else "write `{}` for its defaults"
        raise fail("must be a mapping of arguments, true or false", fix)
    return with_target(value) if isinstance(value, dict) and TARGET in value else value


CallbackNode = Annotated[
    Any,
    BeforeValidator(_callback),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "null"}]}),
]


class WeightsSection(Section):
    """The weights that a model starts with, in place of its own initialisation."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="A file of weights, relative to the study file's folder: a checkpoint, a state dict of "
        "torch.save, or .safetensors. A trial that resumes or is forked loads its checkpoint instead.",
        examples=["pretrained.pt"],
    )
    strict: bool = Field(
        default=True,
        description="Whether all weights must match by name and shape. If false, those that match are loaded, and "
        "the log lists the others.",
        examples=[False],
    )


class TrainerSection(Section):
    """How long and where a trial trains."""

    max_epochs: int | None = Field(
        default=20,
        ge=1,
        le=MAX_EPOCHS,
        description="Passes over the data; no limit if only max_steps is given. With an `objective` function: how "
        "many epochs it reports, if that is known.",
        examples=[20],
    )
    max_steps: int | None = Field(
        default=None,
        ge=1,
        le=MAX_STEPS,
        description="Optimizer steps after which a trial ends.",
        examples=[10_000],
    )
    validate_every: Interval = Field(
        default=None,
        description="Validate after every so many steps, or this fraction of a pass; an epoch is then what lies "
        "between two validations.",
        examples=[500],
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="Precision of the forward pass.", examples=["bf16"]
    )
    compile: CompileOptions = Field(
        default=False, description="Run the model through torch.compile.", examples=[True]
    )
    cuda_graph: bool = Field(
        default=False, description="Run the training step as one CUDA graph.", examples=[False]
    )
    weights: WeightsSection = WeightsSection()
    deterministic: bool = Field(
        default=False,
        description="Let torch use deterministic algorithms only: slower on a GPU, but the same bits each time.",
        examples=[True],
    )
    seed: int | None = Field(
        default=None,
        ge=0,
        le=MAX_SEED,
        description="The study's seed; by default `study.sampler.seed`. Data are loaded with it, and each trial's "
        "own seed is derived from it and the trial's number. If it is searched, its value is the trial's own "
        "seed; data are still loaded with the value in the file.",
        examples=[0],
    )
    device: Annotated[str | None, MAY_CHANGE] = Field(
        default=None, min_length=1, description="Device to train on.", examples=["cuda:0"]
    )
    devices: Annotated[int, MAY_CHANGE] = Field(
        default=1,
        ge=1,
        le=MAX_PROCESSES,
        description="Devices that train one trial together, one process each; they split each batch between them.",
        examples=[2],
    )
    strategy: Annotated[Literal["ddp", "fsdp"], MAY_CHANGE] = Field(
        default="ddp",
        description="With several devices: `ddp`, each holds the whole model, or `fsdp`, each holds a part of it.",
        examples=["fsdp"],
    )

    @model_validator(mode="before")
    @classmethod
    def _length(cls, data: Any) -> Any:
        """Without ``max_epochs``, ``max_steps`` alone limits the run."""
        if not isinstance(data, Mapping) or "max_epochs" in data:
            return data
        return {**data, "max_epochs": None} if data.get("max_steps") is not None else data

    @model_validator(mode="after")
    def _of_several(self) -> Self:
        if self.devices > 1 and self.cuda_graph:
            raise fail("can't record a step of several devices", "set it to false, or `devices: 1`", "cuda_graph")
        return self

    @property
    def known_epochs(self) -> int | None:
        """The epochs of a whole trial; None if they depend on the data."""
        if self.validate_every is None and self.max_steps is None:
            return self.max_epochs
        if self.max_epochs is None and self.max_steps and isinstance(self.validate_every, int):
            return math.ceil(self.max_steps / self.validate_every)
        return None


def _expressions(value: Any) -> Any:
    value = [value] if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise fail("must be a list of expressions", 'write for example `where: ["model.a <= model.b"]`')
    return tuple(value)


Where = Annotated[
    tuple[str, ...],
    BeforeValidator(_expressions),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


class StudyFile(Section):
    """A whole study file, interpolations resolved."""

    study: StudySection
    run: Annotated[RunSection, MAY_CHANGE] = RunSection()
    objective: TargetNode | None = Field(
        default=None,
        description="A function with its own training loop, in place of `data`, `model`, `loss`, `optimizer` and "
        "the other sections of the Trainer.",
        examples=[{"_target_": "train.run", "lr": 1e-3}],
    )
    data: TargetNode | None = Field(
        default=None,
        validate_default=True,
        description="Returns the datasets: a mapping with `train`, `val` and, optionally, `test`.",
        examples=[{"_target_": "data.load"}],
    )
    loader: LoaderSection = LoaderSection()
    model: TargetNode | None = Field(
        default=None,
        validate_default=True,
        description="The module to train.",
        examples=[{"_target_": "model.Net"}],
    )
    loss: TargetNode | None = Field(
        default=None,
        description="Called with (outputs, targets); returns the loss of a batch.",
        examples=[{"_target_": "torch.nn.MSELoss"}],
    )
    step: TargetNode | None = Field(
        default=None,
        description="Called with (model, batch), in place of the loss.",
        examples=[{"_target_": "model.step"}],
    )
    optimizer: OptimizerNode | None = Field(
        default=None,
        validate_default=True,
        description="Created with the model's parameters. `groups` gives some of them other arguments; a group's "
        "key, or its `parameters`, is the name of a module or parameter, or a pattern.",
        examples=[
            {"_target_": "torch.optim.AdamW", "lr": 1e-3},
            {"_target_": "torch.optim.AdamW", "lr": 1e-3, "groups": {"encoder": {"lr": 1e-4}}},
        ],
    )
    lr_scheduler: SchedulerNode | None = Field(
        default=None,
        description="Changes the learning rate. Beside its arguments hpo has three keys: `interval` (`epoch`, the "
        "default, or `step`), `warmup` (how many of these the rate rises at first), and, with several optimizers, "
        "`optimizer` (whose rate it changes).",
        examples=[{"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 5}],
    )
    metrics: Metrics = Field(
        default={},
        description="Metrics by name. Each is computed for every batch and averaged over the samples; with "
        "`over: epoch` it is computed once, over the whole dataset.",
        examples=[{"accuracy": {"_target_": "model.accuracy"}, "auc": {"_target_": "model.auc", "over": "epoch"}}],
    )
    trainer: TrainerSection = TrainerSection()
    callbacks: dict[str, CallbackNode] = Field(default={}, examples=[{"early_stopping": {"patience": 5}}])
    search_space: dict[str, ParamSpec] = Field(
        default={}, examples=[{"optimizer.lr": {"type": "float", "low": 1e-5, "high": 0.1, "log": True}}]
    )
    where: Where = Field(
        default=(),
        description="Conditions on parameters, as expressions; every trial meets them.",
        examples=[["model.hidden % model.heads == 0"]],
    )

    @model_validator(mode="before")
    @classmethod
    def _loss_or_step(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and all(data.get(name) is None for name in ("objective", "loss", "step")):
            fix = "add `loss: {_target_: torch.nn.CrossEntropyLoss}`, or a `step` of your own"
            raise fail("required section is missing", fix, "loss")
        return data

    @field_validator(*OF_THE_TRAINER, mode="before")
    @classmethod
    def _trainer_or_function(cls, value: Any, info: ValidationInfo) -> Any:
        """A section of the Trainer: required without a function that trains by itself, refused beside one."""
        if "objective" not in info.data:  # it is invalid, which is reported already
            return value
        if info.data["objective"] is None:
            if value is None and info.field_name in REQUIRED:
                raise PydanticCustomError("missing", "required")
        elif value and value != LoaderSection().model_dump():
            problem = "can't stand beside `objective`, whose function trains by itself"
            raise fail(problem, "leave it out: what the function needs are arguments of its own, in `objective`")
        return value

    @field_validator("trainer")
    @classmethod
    def _length(cls, trainer: TrainerSection, info: ValidationInfo) -> TrainerSection:
        if info.data.get("objective") is None:
            if "objective" in info.data and trainer.max_epochs is None and trainer.max_steps is None:
                raise fail("nothing ends the training", "give a number of epochs, or max_steps", "max_epochs")
            return trainer
        for name, field in TrainerSection.model_fields.items():
            if name not in OF_A_FUNCTION and getattr(trainer, name) != field.default:
                problem = "can't stand beside `objective`, whose function trains by itself"
                fix = f"leave it out; with `objective` the keys here are {', '.join(OF_A_FUNCTION)}"
                raise fail(problem, fix, name)
        return trainer

    @field_validator("trainer")
    @classmethod
    def _enough_for_each_device(cls, trainer: TrainerSection, info: ValidationInfo) -> TrainerSection:
        """Refuse more devices for a trial than a batch has samples, or than a worker has GPUs."""
        if (loader := info.data.get("loader")) is not None and loader.batch_size < trainer.devices:
            problem = f"is more than the {loader.batch_size} samples of a batch, which the devices share"
            fix = f"use fewer devices, or `loader.batch_size` of {trainer.devices} or more"
            raise fail(problem, fix, "devices")
        gpus = None if (run := info.data.get("run")) is None else run.resources.gpu
        if trainer.devices > 1 and gpus and gpus < trainer.devices:
            problem = f"is more than the GPUs of a worker, {gpus:g} by `run.resources.gpu`"
            raise fail(problem, f"set `run.resources.gpu` to {trainer.devices}", "devices")
        return trainer

    @field_validator("search_space")
    @classmethod
    def _leaves_the_devices(cls, space: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        """Refuse to search the devices or the strategy of a trial, or batches with fewer samples than devices."""
        for path in ("trainer.devices", "trainer.strategy"):
            if path in space:
                fix = "give it in `trainer`: slots are dealt out before a trial draws its parameters"
                raise fail("can't be searched", fix, path)
        trainer, path = info.data.get("trainer"), "loader.batch_size"
        devices = 1 if trainer is None else trainer.devices
        if devices > 1 and path in space and (least := min(numbers_of(space[path]), default=devices)) < devices:
            problem = f"may draw a batch of {least}, fewer samples than the {devices} `trainer.devices`"
            raise fail(problem, f"begin with {devices} or more", path)
        return space

    @field_validator("search_space")
    @classmethod
    def _reaches_the_function(cls, space: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if info.data.get("objective") is not None:
            for path in space:
                if not path.startswith("objective."):
                    problem = "names no argument of the function that `objective` names"
                    raise fail(problem, "write `objective.` and the name of one of its arguments", path)
        return space


def known_keys(model: type[BaseModel] = StudyFile, above: Keys = ()) -> Iterator[Keys]:
    """Every key of the schema, as the keys that lead to it; each section comes before its own keys."""
    for name, field in model.model_fields.items():
        yield (*above, name)
        if inner := model_of(field):
            yield from known_keys(inner, (*above, name))


def model_of(field: FieldInfo) -> type[BaseModel] | None:
    """The pydantic model of a field that is a section; None for any other field."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None
