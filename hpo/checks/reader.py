"""What the checks for what is hardly meant ask a study for."""

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
    """A study and what its checks ask it for."""

    spec: StudySpec
    config: dict[str, Any]
    space: Mapping[str, ParamSpec]

    def warn(self, problem: str, path: str, value: Any, fix: str) -> Finding:
        """A finding at a dotted path of the study file."""
        return finding(self.spec, problem, path=path, value=show(value), fix=fix)

    @property
    def epochs(self) -> int | None:
        """Epochs of a trial, where they are known and the same for all trials."""
        return self.spec.trial_epochs if self.space else self.spec.trainer.known_epochs

    def number(self, *keys: str) -> int | float | None:
        """The base config's number there; None where there is none, or another one is searched."""
        node: Any = self.config
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        numeric = isinstance(node, int | float) and not isinstance(node, bool)
        return node if numeric and join_path(keys) not in self.space else None

    def target(self, section: str) -> str:
        """Name of the class that a section builds; empty where there is none, or several are tried."""
        node = self.config[section]
        fixed = isinstance(node, dict) and TARGET in node and join_path((section, TARGET)) not in self.space
        return str(node[TARGET]).rpartition(".")[2] if fixed else ""

    def written(self, path: str) -> bool:
        """Whether the file says it, rather than the command line."""
        return self.spec.location(path)[0] != COMMAND_LINE


def below(length: float, *, otherwise: str) -> str:
    """The fix of a span that is not over when a trial is; of a trial of one epoch there is no shorter one."""
    return f"write less than {length}" if length > 1 else f"let trials be longer, or {otherwise}"


Check = Callable[[Reader], Findings]
