"""Gives the checks for likely mistakes the values of a study that they need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpo.checks.findings import Finding, finding
from hpo.config.marks import COMMAND_LINE
from hpo.config.paths import join_path, show
from hpo.config.schema_space import ParamSpec
from hpo.config.spec import StudySpec
from hpo.config.targets import TARGET

Findings = Iterator[Finding]


@dataclass(frozen=True)
class Reader:
    """A study, its base config and its search space, with look-ups for the checks."""

    spec: StudySpec
    config: dict[str, Any]
    space: Mapping[str, ParamSpec]

    def warn(self, problem: str, path: str, value: Any, fix: str) -> Finding:
        """A finding at a dotted path of the study file."""
        return finding(self.spec, problem, path=path, value=show(value), fix=fix)

    @property
    def epochs(self) -> int | None:
        """The epochs of a trial, if they are known and the same for all trials; else None."""
        return self.spec.trial_epochs if self.space else self.spec.trainer.known_epochs

    def number(self, *keys: str) -> int | float | None:
        """The base config's number at these keys; None if it is not a number, or is searched."""
        node: Any = self.config
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        numeric = isinstance(node, int | float) and not isinstance(node, bool)
        return node if numeric and join_path(keys) not in self.space else None

    def target(self, section: str) -> str:
        """The name of the class that a section builds; empty if there is none, or it is searched."""
        node = self.config[section]
        fixed = isinstance(node, dict) and TARGET in node and join_path((section, TARGET)) not in self.space
        return str(node[TARGET]).rpartition(".")[2] if fixed else ""

    def written(self, path: str) -> bool:
        """Whether a value does not come from an override."""
        return self.spec.location(path)[0] != COMMAND_LINE


def below(length: float, *, otherwise: str) -> str:
    """The fix for a span that does not end before a trial; it can't be shorter than a trial of one epoch."""
    return f"write less than {length}" if length > 1 else f"let trials be longer, or {otherwise}"


Check = Callable[[Reader], Findings]
