"""`hpo doctor`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from hpo.cli.answers import print_json
from hpo.cli.options import Debug, Json, OutputDir, Overrides, Storage, read_spec
from hpo.console.output import read_by_others


def doctor(
    study: Annotated[
        Path | None,
        typer.Argument(metavar="[STUDY.yaml]", help="The study that should run.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    json_: Json = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Check whether this machine has what a study needs: versions, GPUs, the database, W&B, disk space.

    A warning or an error also says what to do. Exit code 3 if there is an error.

    Example: hpo doctor studies/digits/study.yaml
    """
    del debug
    spec = None if study is None else read_spec(study, overrides, storage=storage, output_dir=output_dir)
    from hpo.checks.doctor import examine

    lines = examine(spec, storage=storage if spec is None else None)
    if json_:
        print_json([asdict(line) for line in lines])
    else:
        width = max(len(line.name) for line in lines)
        with read_by_others():
            for line in lines:
                print(f"{line.status:<7}  {line.name:<{width}}  {line.found}")
                if line.fix:
                    print(f"{'':<7}  {'':<{width}}  → {line.fix}")
    if any(line.status == "error" for line in lines):
        raise typer.Exit(3)
