"""Reads existing studies for commands, and prints answers as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from hpo.cli.options import uncollected
from hpo.console.output import read_by_others
from hpo.console.slow import slow_steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpo.study.open_study import OpenStudy


def looked_up(spec: Any, question: Callable[[OpenStudy], Any]) -> Any:
    """Open an existing study, and return the answer of `question` about it."""
    with slow_steps() as say:
        say(f"reading the study from {spec.output_dir}")
        with uncollected():
            from hpo.study.folders import rights_explained
            from hpo.study.open_study import load_study

            opened = load_study(spec)
        with opened, uncollected(), rights_explained(spec):
            return question(opened)


def print_json(data: Any) -> None:
    """Print data as JSON; numbers that are not finite become null."""
    from hpo.study.outcome import finite

    with read_by_others():
        print(json.dumps(finite(data), indent=2, allow_nan=False))
