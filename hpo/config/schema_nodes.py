"""The nodes of `optimizer` and `lr_scheduler` in a study file: one thing, or several by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from hpo.config.lengths import is_length
from hpo.config.paths import suggest_name
from hpo.config.schema_types import TARGET, fail, target_schema, with_target
from hpo.config.several import is_several

#: Keys of `lr_scheduler` that are not arguments of its target.
SCHEDULER_KEYS = ("interval", "warmup", "optimizer")
#: Keys of `optimizer` that are not arguments of its target.
OPTIMIZER_KEYS = ("groups", "parameters")


def _with_pace(node: dict[str, Any]) -> dict[str, Any]:
    interval, warmup = node.get("interval", "epoch"), node.get("warmup", 0)
    if interval not in ("epoch", "step"):
        raise fail("must be `epoch` or `step`", suggest_name(interval, ("epoch", "step")), "interval")
    if not is_length(warmup) and (not isinstance(warmup, int) or isinstance(warmup, bool) or warmup < 0):
        raise fail(
            "must be a whole number of at least 0", "it counts epochs or steps, as `interval` says", "warmup"
        )
    return {**node, "interval": interval, "warmup": warmup}


def _with_groups(node: dict[str, Any]) -> dict[str, Any]:
    groups = node.get("groups", {})
    if not isinstance(groups, dict):
        raise fail("must be a mapping of groups", "write for example `groups: {encoder: {lr: 1e-4}}`", "groups")
    for name, group in groups.items():
        if not isinstance(group, dict):
            fix = "write for example `{lr: 1e-4}`"
            raise fail(f"the group `{name}` must be a mapping of arguments", fix, "groups")
        patterns = group.get("parameters", name)
        patterns = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(patterns, list) or not all(isinstance(each, str) for each in patterns) or not patterns:
            problem = f"`parameters` of the group `{name}` must be a pattern or a list of patterns"
            raise fail(problem, 'write for example `parameters: "encoder.*"`', "groups")
    return node


def _optimizers(node: dict[str, Any]) -> dict[str, Any]:
    """One optimizer, or several by name; each of these has parameters of its own."""
    if not is_several(node):
        if "parameters" in node:
            raise fail("says whose parameters one of several optimizers gets", "leave it out", "parameters")
        return with_target(_with_groups(node))
    return {name: _one_of(name, each, _with_parameters) for name, each in node.items()}


def _schedulers(node: dict[str, Any]) -> dict[str, Any]:
    """One scheduler, or several by name."""
    if not is_several(node):
        if "optimizer" in node:
            raise fail("says which optimizer one of several schedulers is over", "leave it out", "optimizer")
        return with_target(_with_pace(node))
    return {name: _one_of(name, each, _with_pace) for name, each in node.items()}


def _one_of(name: str, node: Any, check: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    if not name.isidentifier():
        raise fail("is not a name", "write a name such as `generator`, of letters, digits and _", name)
    if not isinstance(node, dict) or TARGET not in node:
        raise fail("must be a mapping with `_target_`, as beside it", "write `{_target_: …}`", name)
    try:
        return with_target(check(node))
    except PydanticCustomError as error:
        context = error.context or {}
        raise fail(context["problem"], context["fix"], name, *context["keys"]) from error


def _with_parameters(node: dict[str, Any]) -> dict[str, Any]:
    if "groups" in node:
        fix = "give their parameters an optimizer of their own, beside this one"
        raise fail("`groups` go with a single optimizer", fix, "groups")
    patterns = node.get("parameters", [])
    if not isinstance(patterns, str) and not (
        isinstance(patterns, list) and all(isinstance(each, str) for each in patterns)
    ):
        raise fail("must be a pattern or a list of patterns", 'write for example `"generator.*"`', "parameters")
    return node


def _or_several(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "object", "additionalProperties": schema}]}


SchedulerNode = Annotated[
    dict[str, Any],
    AfterValidator(_schedulers),
    WithJsonSchema(
        _or_several(
            target_schema(
                interval={"enum": ["epoch", "step"]},
                warmup={"type": "integer", "minimum": 0},
                optimizer={"type": "string"},
            )
        )
    ),
]
OptimizerNode = Annotated[
    dict[str, Any],
    AfterValidator(_optimizers),
    WithJsonSchema(
        _or_several(
            target_schema(
                groups={"type": "object", "additionalProperties": {"type": "object"}},
                parameters={"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            )
        )
    ),
]
