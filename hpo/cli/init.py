"""`hpo init`."""

from __future__ import annotations

import json
import shlex
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Final

import typer

from hpo.cli.options import Debug
from hpo.console.output import read_by_others
from hpo.errors import InputError

_SCHEMA: Final = "study.schema.json"
_FILES: Final = ("study.yaml", "model.py", "data.py", "README.md")


class Template(StrEnum):
    """The studies to begin with."""

    CLASSIFICATION = "classification"
    REGRESSION = "regression"


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The study's folder.", show_default=False)],
    template: Annotated[
        Template, typer.Option(help="What kind of study to start from.")
    ] = Template.CLASSIFICATION,
    debug: Debug = False,
) -> None:
    """Write a small study that runs as it is: study.yaml, model.py, data.py, a README and a schema for editors.

    Nothing is overwritten.

    Example: hpo init my-study --template regression
    """
    del debug
    from hpo.checks.json_schema import study_schema

    source = resources.files("hpo") / "templates" / template
    texts = {name: (source / name).read_text(encoding="utf-8") for name in _FILES}
    texts[_SCHEMA] = json.dumps(study_schema(), indent=2, ensure_ascii=False) + "\n"
    _write(folder, texts)
    study = shlex.quote(str(folder / "study.yaml"))
    with read_by_others():
        print(f"wrote {', '.join(texts)} in {folder}")
        print(f"next:\n  hpo check {study}\n  hpo run {study}\n  hpo train {study} --trial best")


def _write(folder: Path, texts: dict[str, str]) -> None:
    """Write all the files, or none where one is there already."""
    there = [name for name in texts if (folder / name).exists() or (folder / name).is_symlink()]
    if there:
        problem = f"has {', '.join(there)} already, and nothing is overwritten"
        raise InputError(
            problem, path="DIR", value=str(folder), fix="give a new folder, such as `hpo init my-study`"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        problem = f"can't be written to: {error.strerror or error}"
        raise InputError(
            problem, path="DIR", value=str(folder), fix="give a folder that you may write to"
        ) from error
