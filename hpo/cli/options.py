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
    typer.Argument(
        metavar="[key=value]…", help="Values that override the study file, by dotted path.", show_default=False
    ),
]
Storage = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Database to use instead of the study file's.", show_default=False),
]
OutputDir = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Folder for everything that the study writes.", show_default=False),
]
Workers = Annotated[int | None, typer.Option(min=1, help="Number of worker processes.", show_default=False)]
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="auto|cpu|cuda:0,cuda:1",
        help="Devices that the workers share; cuda:0+cuda:1,cuda:2+cuda:3 are groups, if a trial needs several.",
        show_default=False,
    ),
]
On = Annotated[
    str | None,
    typer.Option(
        metavar="ENGINE",
        help="Engine that places agents on machines: local, slurm:…, ray:…, k8s:…, with its options.",
        show_default=False,
    ),
]
Agents = Annotated[
    str | None, typer.Option(metavar="MIN..MAX", help="How many agents the engine places.", show_default=False)
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print the script or manifest for the engine.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")]
Events = Annotated[
    bool, typer.Option("--json", help="Print events as JSON, one per line; docs/reference/events.md lists them.")
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
            # The command imports none of the study's code, or the file can't be read.
            if not require_search_space or isinstance(error.__cause__, OSError):
                raise
            with slow_steps() as say:
                say("looking for what else is wrong")
                from hpo.checks.checks import all_that_is_wrong

                wrong = all_that_is_wrong(study, overrides or (), error)
            raise wrong from error
    return spec.with_options(**options)


def refuse_both(*, quiet: bool, json_: bool) -> None:
    """Refuse `--quiet` together with `--json`."""
    if quiet and json_:
        raise InputError("give one of them, not both", path="--quiet, --json", fix="leave `--quiet` out")


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Turn garbage collection off while modules are imported and a study is read.

    All these objects stay; collections over them take a tenth of a short command's time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
