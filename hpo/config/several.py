"""Reads the sections with one node or several named ones: ``optimizer`` and ``lr_scheduler``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpo.config.schema_types import TARGET


def is_several(node: Any) -> bool:
    """Whether a section has several nodes by name."""
    return isinstance(node, Mapping) and TARGET not in node and any(_has_target(each) for each in node.values())


def lr_schedulers(config: Mapping[str, Any]) -> dict[tuple[str, ...], Mapping[str, Any]]:
    """The node of each learning-rate scheduler in a config, by the keys that lead to it."""
    node = config["lr_scheduler"]
    if node is None:
        return {}
    if is_several(node):
        return {("lr_scheduler", name): each for name, each in node.items()}
    return {("lr_scheduler",): node}


def _has_target(node: Any) -> bool:
    return isinstance(node, Mapping) and TARGET in node
