"""Arguments and options that several commands share."""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.console.slow import slow_steps
from hpo.errors import InputError

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
Workers = Annotated[int | None, typer.Option(min=1, help="Worker processes.", show_default=False)]
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="auto|cpu|cuda:0,cuda:1",
        help="Devices to share; cuda:0+cuda:1,cuda:2+cuda:3 are groups, for trials on several.",
        show_default=False,
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        metavar="ENGINE",
        help="Place agents with an engine: local, slurm:…, ray:…, k8s:…, each with its keys.",
        show_default=False,
    ),
]
Agents = Annotated[
    str | None, typer.Option(metavar="MIN..MAX", help="Agents that the engine places.", show_default=False)
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the script or manifest for the engine, and do nothing.")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")]
Events = Annotated[
    bool, typer.Option("--json", help="Print one event a line, as JSON; docs/reference/events.md lists them.")
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

        try:
            spec = load_spec(study, overrides or (), require_search_space=require_search_space)
        except InputError as error:
            # Nothing of the study's code is imported, or there is no file that could be read.
            if not require_search_space or isinstance(error.__cause__, OSError):
                raise
            with slow_steps() as say:
                say("looking for what else is wrong")
                from hpo.checks.checks import all_that_is_wrong

                wrong = all_that_is_wrong(study, overrides or (), error)
            raise wrong from error
    return spec.with_options(**options)


def refuse_both(*, quiet: bool, json_: bool) -> None:
    """Refuse two ways to print at once."""
    if quiet and json_:
        raise InputError("give one of them, not both", path="--quiet, --json", fix="leave `--quiet` out")


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
