"""The `study` section of a study file: what is searched, by what, and how it is judged."""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from hpo.config.schema_types import (
    MAX_NUMBER,
    MAX_SEED,
    MAY_CHANGE,
    TARGET,
    Section,
    fail,
)

Direction = Literal["minimize", "maximize"]

#: The name that lets the search space decide on the sampler.
AUTO: Final = "auto"
#: The name for no pruner.
NO_PRUNER: Final = "none"
#: The name for no scheduler, needed if one would be the default.
NO_SCHEDULER: Final = "none"
#: The metric of a function that draws its parameters itself, if the file names no metric.
OWN_METRIC: Final = "value"
#: The names that a study, and its own metric, may have.
METRIC_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
#: At most this many characters of a study's name: folders and files, with names of at most 255, have it in theirs.
MAX_NAME: Final = 200
_SEVERAL: Final = 2
#: Farther outside of a limit than any measured value.
FARTHEST: Final = sys.float_info.max
_BOUND: Final = re.compile(r"\s*(<=|>=)\s*(\S+)\s*")


def _study_name(value: str) -> str:
    if len(value) > MAX_NAME:
        raise fail(f"has {len(value)} characters", f"it names a folder too: write at most {MAX_NAME}")
    if not METRIC_NAME.fullmatch(value):
        problem = "may hold only letters (a to z, A to Z), digits, `.`, `_` and `-`, and not start with `.` or `-`"
        raise fail(problem, "it names the study's folder too; write for example `digits-mlp`")
    return value


def _named(value: Any) -> Any:
    return {} if value is None else _node(value)


def _node(value: Any) -> Any:
    if isinstance(value, Mapping) and TARGET in value:
        path = value[TARGET]
        name = path.rpartition(".")[2] if isinstance(path, str) else "…"
        fix = f"write `name: {name}` in its place; docs/reference/samplers.md has the names that there are"
        # Without a name, the error is that of the whole section.
        raise fail("is chosen by its name, not by an import path", fix, TARGET if "name" in value else "")
    return {"name": value} if isinstance(value, str) else value


def is_no_scheduler(value: Any) -> bool:
    """Whether a study file's scheduler is ``none`` or missing; arguments left beside that name don't count."""
    return value is None or (value.get("name") if isinstance(value, Mapping) else value) == NO_SCHEDULER


def _scheduler(value: Any) -> Any:
    return None if is_no_scheduler(value) else _node(value)


_NAMED_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "null"},
        {"type": "object", "properties": {"name": {"type": "string"}}},
    ]
}


@dataclass(frozen=True)
class Bound:
    """A limit on a recorded metric: ``<= 1e6``.

    Attributes:
        metric: The metric's name.
        relation: ``"<="`` or ``">="``.
        limit: The limit.
    """

    metric: str
    relation: str
    limit: float

    def violation(self, value: float) -> float:
        """How far a value violates the limit, in the metric's unit; 0 or less if it keeps to the limit.

        Always finite, since it is stored as JSON. NaN, a value that could not be measured, violates every limit.
        """
        beyond = value - self.limit if self.relation == "<=" else self.limit - value
        return FARTHEST if math.isnan(beyond) else max(-FARTHEST, min(beyond, FARTHEST))

    def comes_nearer(self, values: Sequence[float]) -> bool:
        """Whether a later value is nearer to the limit than the first, or farther within it."""
        first, *later = map(self.violation, values)
        return min(later) < first

    def value(self, violation: float) -> float:
        """The value with this violation; NaN if it was not known."""
        if abs(violation) >= FARTHEST:
            return math.nan
        return self.limit + violation if self.relation == "<=" else self.limit - violation


def _bound(metric: str, text: Any) -> Bound:
    fix = 'write `"<= 1e6"` or `">= 0.9"`, in quotes'
    match = _BOUND.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise fail("is not a bound", fix, metric)
    try:
        limit = float(match[2].replace("_", ""))
    except ValueError as error:
        raise fail("is not a bound: its limit is not a number", fix, metric) from error
    if not math.isfinite(limit):
        raise fail("is not a bound: its limit must be finite", fix, metric)
    return Bound(metric, match[1], limit)


def _bounds(value: dict[str, Any]) -> dict[str, Any]:
    for metric, text in value.items():
        _bound(metric, text)
    return value


class _NamedSection(Section):
    """What is chosen by its name; further keys are its arguments."""

    model_config = ConfigDict(extra="allow")

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments, beside the section's own keys."""
        return dict(self.model_extra or {})


class SamplerSection(_NamedSection):
    """Which sampler draws the parameters; further keys are its arguments."""

    name: str = Field(default=AUTO, description="The sampler's name.", examples=["tpe"])
    seed: int = Field(default=0, ge=0, le=MAX_SEED, description="Seed of the study's randomness.", examples=[0])
    allow_pickle: bool = Field(
        default=False, description="Let the sampler keep pickled state in the database.", examples=[False]
    )


class PrunerSection(_NamedSection):
    """Which pruner ends trials early; further keys are its arguments."""

    name: str = Field(default="median", description="The pruner's name, or none.", examples=["median"])

    @property
    def prunes(self) -> bool:
        """Whether there is a pruner: its name is none of the names for no pruner."""
        return self.name.lower() != NO_PRUNER and self.name != "NopPruner"


class SchedulerSection(_NamedSection):
    """Which scheduler pauses and resumes trials; further keys are its arguments."""

    name: str = Field(description="The scheduler's name.", examples=["freeze_thaw"])


Constraints = Annotated[
    dict[str, Any],
    AfterValidator(_bounds),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string", "pattern": "^\\s*(<=|>=)"}}),
]
Sampler = Annotated[SamplerSection, BeforeValidator(_named), WithJsonSchema(_NAMED_SCHEMA)]
Pruner = Annotated[PrunerSection, BeforeValidator(_named), WithJsonSchema(_NAMED_SCHEMA)]
Scheduler = Annotated[
    SchedulerSection | None,
    BeforeValidator(_scheduler),
    WithJsonSchema(_NAMED_SCHEMA),
]


class StudySection(Section):
    """What is searched, by what, and how it is judged."""

    # May change: another name makes another study of the same search.
    name: Annotated[str, AfterValidator(_study_name), MAY_CHANGE] = Field(
        description="The study's name in the database and, by default, of its folder.", examples=["digits"]
    )
    metric: str = Field(
        default="val_loss",
        description="The metric to optimise. Default for a function that draws its parameters itself: `value`.",
        examples=["val_loss"],
    )
    direction: Direction = Field(
        default="minimize",
        description="Whether small or large values are better; required unless the metric's name ends in `loss`.",
        examples=["minimize"],
    )
    objectives: dict[str, Direction] | None = Field(
        default=None,
        description="Several metrics with their directions, in place of `metric` and `direction`. Where only "
        "one metric can be used, it is the first.",
        examples=[{"val_loss": "minimize", "parameters": "minimize"}],
    )
    constraints: Constraints = Field(
        default={},
        description="Bounds on recorded metrics; a trial that violates one is never the best trial.",
        examples=[{"parameters": "<= 1e6"}],
    )
    n_trials: Annotated[int, MAY_CHANGE] = Field(
        default=100,
        ge=1,
        le=MAX_NUMBER,
        description="Trials to finish. If only `epochs` is given, the default is that number.",
        examples=[100],
    )
    epochs: Annotated[int | None, MAY_CHANGE] = Field(
        default=None,
        ge=1,
        le=MAX_NUMBER,
        description="Epochs that all trials together may train.",
        examples=[1000],
    )
    target_value: Annotated[float | None, MAY_CHANGE] = Field(
        default=None, description="The study ends once its best value is at least this good.", examples=[0.05]
    )
    stop_after_no_improvement: Annotated[int | None, MAY_CHANGE] = Field(
        default=None,
        ge=1,
        le=MAX_NUMBER,
        description="The study ends after this many trials in a row without a new best value.",
        examples=[30],
    )
    baseline: bool = Field(
        default=False, description="Let the first trial use the values in this file.", examples=[True]
    )
    warm_start: str | None = Field(
        default=None,
        min_length=1,
        description="Another study's file, relative to this one; the sampler starts with its finished trials.",
        examples=["../pilot/study.yaml"],
    )
    duplicates: Literal["resample", "reuse", "allow"] = Field(
        default="resample",
        description="What to do if the sampler draws parameters that were tried before: draw others, reuse the "
        "known result, or train them again.",
        examples=["reuse"],
    )
    sampler: Sampler = Field(
        default=SamplerSection(),
        description="Draws the parameters of new trials: a name, or a mapping with `name` and arguments.",
        examples=["tpe"],
    )
    pruner: Pruner = Field(
        default=PrunerSection(),
        description="Ends unpromising trials early: a name, or a mapping with `name` and arguments.",
        examples=["median"],
    )
    scheduler: Scheduler = Field(
        default=None,
        description="Pauses trials and resumes the promising ones, in place of a pruner: a name, or a mapping "
        "with `name` and arguments. The default is `none`; for a study of the Trainer with `epochs` and neither "
        "`n_trials`, sampler nor pruner it is `freeze_thaw`.",
        examples=["asha"],
    )

    @model_validator(mode="before")
    @classmethod
    def _direction_of_metric(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        if data.get("objectives") is not None:
            return _led(data)
        if data.get("direction") is not None:
            return data
        metric = data.get("metric", "val_loss")
        if isinstance(metric, str) and not metric.endswith("loss"):
            fix = f"write `direction: maximize` or `direction: minimize` for `{metric}`"
            raise fail("required key is missing; only a metric named …loss has a default", fix, "direction")
        return {**data, "direction": "minimize"}

    @model_validator(mode="after")
    def _one_best_value_only(self) -> Self:
        if self.objectives is not None and self.target_value is not None:
            raise fail("needs a single metric", "leave it out where a study has `objectives`", "target_value")
        if self.objectives is not None and self.pruner.prunes:
            fix = "write `pruner: none`: a pruner compares trials by one value"
            raise fail("can't be used with several objectives", fix, "pruner")
        return self

    @model_validator(mode="after")
    def _schedules_by_one_value(self) -> Self:
        if self.scheduler is None:
            return self
        if self.objectives is not None:
            fix = "leave it out: a scheduler compares trials by one value"
            raise fail("can't be used with several objectives", fix, "scheduler")
        if self.pruner.prunes:
            fix = "leave one of the two out: a scheduler decides by itself which trials are worth more epochs"
            raise fail("can't stand beside `scheduler`", fix, "pruner")
        return self

    @property
    def goals(self) -> Mapping[str, Direction]:
        """The direction of each metric that is optimised, the leading metric first."""
        return {self.metric: self.direction} if self.objectives is None else self.objectives

    @property
    def mode(self) -> Literal["min", "max"]:
        """The direction of the leading metric, as the trainer names it."""
        return "min" if self.direction == "minimize" else "max"

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """The constraints, parsed."""
        return tuple(_bound(metric, text) for metric, text in self.constraints.items())


def _led(data: Mapping[str, Any]) -> Any:
    """With several objectives, make the first one `metric` and `direction`, for all that needs a single metric."""
    for key in ("metric", "direction"):
        if data.get(key) is not None:
            raise fail("can't stand beside `objectives`", "leave it out: the first objective leads", key)
    objectives, leading = data["objectives"], ("val_loss", "minimize")
    if isinstance(objectives, Mapping):
        if len(objectives) < _SEVERAL:
            raise fail(
                "needs at least two objectives",
                "for a single one write `metric: …` and `direction: …`",
                "objectives",
            )
        leading = next(iter(objectives.items()))
    # If the first objective is invalid, the error is reported at its own place.
    metric, direction = leading if leading[1] in get_args(Direction) else ("val_loss", "minimize")
    return {**data, "metric": metric, "direction": direction}
