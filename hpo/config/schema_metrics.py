"""The `metrics` section of a study file: functions and classes by name, and over what each is computed."""

from typing import Annotated, Any, Final

from pydantic import AfterValidator, WithJsonSchema

from hpo.config.schema_study import METRIC_NAME
from hpo.config.schema_types import TargetNode, fail, in_bytes, target_schema

#: Keys of a metric that are not arguments of its target.
METRIC_KEYS: Final = ("over", "max_bytes")
_BUILT_IN: Final = ("loss", "lr")


def _metric_names(value: dict[str, Any]) -> dict[str, Any]:
    for name in value:
        if name in _BUILT_IN:
            raise fail(f"`{name}` is recorded already", "give this metric another name", name)
        if not METRIC_NAME.fullmatch(name):
            fix = "use letters, digits, `.`, `_` and `-`"
            raise fail("is not a name for a metric", fix, name)
    return value


def _with_set(node: dict[str, Any]) -> dict[str, Any]:
    over = node.get("over", "epoch")
    if over != "epoch":
        fix = "write `over: epoch` for one value of the whole set, or leave it out for the mean over samples"
        raise fail("must be `epoch`", fix, "over")
    if "max_bytes" not in node:
        return node
    if "over" not in node:
        fix = "add `over: epoch`, or leave it out: no other metric keeps outputs"
        raise fail("belongs to a metric `over: epoch`", fix, "max_bytes")
    return {**node, "max_bytes": in_bytes(node["max_bytes"], "max_bytes")}


_SCHEMA: Final = target_schema(
    over={"enum": ["epoch"], "description": "Compute it once, from all outputs and targets of a dataset."},
    max_bytes={
        "type": ["integer", "string"],
        "description": "Limit on the outputs and targets that it keeps of a dataset, such as 4GiB.",
    },
)

Metrics = Annotated[
    dict[str, Annotated[TargetNode, AfterValidator(_with_set), WithJsonSchema(_SCHEMA)]],
    AfterValidator(_metric_names),
]
