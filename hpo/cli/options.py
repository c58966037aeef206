"""Arguments and options that several commands share."""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hpo.config.spec import StudySpec

StudyFile = Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="The study file.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value]…", help="Dotted overrides of the study file.", show_default=False),
]
Storage = Annotated[
    str | None, typer.Option(metavar="URL", help="Database in place of the study file's.", show_default=False)
]
OutputDir = Annotated[
    str | None, typer.Option(metavar="DIR", help="Folder of everything the study writes.", show_default=False)
]
AcceptCodeChange = Annotated[
    bool, typer.Option("--accept-code-change", help="Continue although the study's code has changed.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def read_spec(
    study: Path, overrides: list[str] | None, *, require_search_space: bool = False, **options: Any
) -> "StudySpec":
    """The study file with overrides and options applied."""
    with uncollected():
        from hpo.config.spec import load_spec

        spec = load_spec(study, overrides or (), require_search_space=require_search_space)
    return spec.with_options(**options)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Look for no garbage while modules are imported and a study is read.

    All of that stays: looking through it, again and again, takes a tenth of a short command's time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
