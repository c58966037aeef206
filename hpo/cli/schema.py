"""`hpo schema`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hpo.cli.options import Debug
from hpo.console.output import read_by_others
from hpo.errors import InputError


def schema(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write to.", show_default="standard output"),
    ] = None,
    debug: Debug = False,
) -> None:
    """Print the JSON Schema of study.yaml, with which an editor completes and checks the file.

    Example: hpo schema -o study.schema.json, with this as the first line of study.yaml:
    # yaml-language-server: $schema=study.schema.json
    """
    del debug
    from hpo.checks.json_schema import study_schema
    from trainer.files import replacing

    text = json.dumps(study_schema(), indent=2)
    if output is None:
        with read_by_others():
            print(text)
        return
    try:
        with replacing(output) as file:
            file.write(text + "\n")
    except OSError as error:
        problem = f"can't be written: {error.strerror or error}"
        raise InputError(problem, path="--output", value=str(output), fix="give another file") from error
