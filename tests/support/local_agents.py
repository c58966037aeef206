"""The agents of a study that the engine `local` has started on this machine."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hpo.config.spec import load_spec
from hpo.execution.engines.engine import Engine, Placement
from hpo.execution.engines.local import LocalEngine
from hpo.execution.placing import placing_of


def found(study: Path, engine: Engine | None = None) -> list[Placement]:
    """The study's agents that live."""
    return (engine or LocalEngine()).find(placing_of(load_spec(study, ["run.on=local"])).order)


@contextlib.contextmanager
def none_left(study: Path) -> Iterator[None]:
    """Kill the study's agents that live at the end of the block, also where a test has failed."""
    try:
        yield
    finally:
        engine = LocalEngine()
        engine.kill(found(study, engine))
