"""`hpo init`."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Collection, Sequence
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Annotated, Final

import typer

from hpo.cli.options import Debug
from hpo.console.output import read_by_others
from hpo.console.slow import slow_steps
from hpo.errors import InputError

_SCHEMA: Final = "study.schema.json"
_STUDY: Final = "study.yaml"
_FILES: Final = (_STUDY, "model.py", "data.py", "README.md")
#: The fix if a file exists already; not for --from, whose folder is that of the modules.
_FIX: Final = "give a new folder, such as `hpo init my-study`, or `--force`"
_FIX_FROM: Final = "rename what is there, or replace it with `--force`"


class Template(StrEnum):
    """The studies to begin with."""

    CLASSIFICATION = "classification"
    REGRESSION = "regression"


def init(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="The study's folder.", show_default=False)
    ] = None,
    template: Annotated[
        Template | None,
        typer.Option(help="Kind of study to write; the default is classification."),
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="MODULE:NAME",
            help="Your model, or a function that trains, to write a study file for.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="With --from: a function that returns the data, or a Dataset.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite existing files.")] = False,
    debug: Debug = False,
) -> None:
    """Write a small study that is ready to run; with --from, a study file for your own code.

    With --from, DIR is the folder of your modules, by default the current one. Existing files are overwritten only
    with --force.

    Example: hpo init my-study; hpo init --from model:Net --data data:load
    """
    del debug
    if source is not None:
        if template is not None:
            raise InputError("give one of them, not both", path="--template, --from", fix="leave `--template` out")
        _init_from(folder or Path(), source, data, force=force)
        return
    if data is not None:
        raise InputError("goes with `--from`, the model", path="--data", fix="add `--from module:Model`")
    if folder is None:
        fix = "write `hpo init my-study`, or `hpo init --from module:Model --data module:load`"
        raise InputError("say where to, or from what", path="DIR, --from", fix=fix)
    _init_template(folder, template or Template.CLASSIFICATION, force=force)


def _init_template(folder: Path, template: Template, *, force: bool) -> None:
    source = resources.files("hpo") / "templates" / template
    texts = {name: (source / name).read_text(encoding="utf-8") for name in _FILES}
    _write(folder, texts | _schema(), _FIX, force=force)
    _print_next(folder, [*texts, _SCHEMA], ("check", "run", "train"))


def _init_from(folder: Path, source: str, data: str | None, *, force: bool) -> None:
    if not folder.is_dir():
        fix = "give the folder of your modules, or leave it out where it is the current one"
        raise InputError("is not a folder", path="DIR", value=str(folder), fix=fix)
    _refuse_existing(folder, [_STUDY], _FIX_FROM, force=force)
    with slow_steps() as say:
        say("importing torch")
        from hpo.draft.draft import draft_study

        with contextlib.redirect_stdout(sys.stderr):  # output of the person's code is not part of the answer
            drafted = draft_study(folder, source, data, _STUDY, say)
    _write(folder, drafted.texts | _schema(), _FIX_FROM, force=force, may_replace=(_SCHEMA,))
    _print_next(folder, [*drafted.texts, _SCHEMA], ("check", "run", "best"), drafted.missing, drafted.notes)


def _schema() -> dict[str, str]:
    from hpo.checks.json_schema import study_schema

    return {_SCHEMA: json.dumps(study_schema(), indent=2, ensure_ascii=False) + "\n"}


def _print_next(
    folder: Path,
    files: list[str],
    commands: tuple[str, ...],
    missing: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> None:
    study = shlex.quote(str(folder / _STUDY))
    with read_by_others():
        print(f"wrote {', '.join(files)} in {folder}")
        for note in notes:
            print(f"note: {note}")
        for place in missing:
            print(f"fill in {place}")
        print("next:" if not missing else "then:")
        for command in commands:
            print(f"  hpo {command} {study}{' --trial best' if command == 'train' else ''}")


def _refuse_existing(folder: Path, names: Collection[str], fix: str, *, force: bool) -> None:
    there = [name for name in names if (folder / name).exists() or (folder / name).is_symlink()]
    if there and not force:
        problem = f"has {', '.join(there)} already, and nothing is overwritten"
        raise InputError(problem, path="DIR", value=str(folder), fix=fix)


def _write(
    folder: Path, texts: dict[str, str], fix: str, *, force: bool, may_replace: Collection[str] = ()
) -> None:
    """Write all files, or none if one exists already; ``fix`` is the fix for that error."""
    _refuse_existing(folder, texts.keys() - set(may_replace), fix, force=force)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        problem = f"can't be written to: {error.strerror or error}"
        raise InputError(
            problem, path="DIR", value=str(folder), fix="give a folder that you may write to"
        ) from error
