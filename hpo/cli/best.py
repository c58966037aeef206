"""`hpo best`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.cli.answers import looked_up, print_json
from hpo.cli.options import Debug, Json, OutputDir, Overrides, Storage, StudyFile, read_spec, uncollected
from hpo.cli.tables import cell, param_cell, param_names, print_table
from hpo.console.output import read_by_others
from hpo.errors import InputError
from hpo.wording import granted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpo.config.spec import StudySpec


def best(
    study: StudyFile,
    overrides: Overrides = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write its model: .safetensors, .pt (weights), .pt2 (torch.export), a folder (save_pretrained).",
        ),
    ] = None,
    trial: Annotated[
        str | None, typer.Option(metavar="best|N", help="The trial to export, if not the best.")
    ] = None,
    json_: Json = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Show the best trial: value, parameters, metrics, and where its checkpoint is.

    With several objectives it lists the Pareto front. --export writes the model to FILE, which it replaces if it
    exists, and a model card to FILE.md. A .pt2 file holds the whole model (torch.export), for batches of any size.

    Example: hpo best study.yaml --export model.safetensors
    """
    del debug
    if trial is not None and trial != "best" and not trial.isdecimal():
        raise InputError("is neither `best` nor a number", path="--trial", value=trial, fix="see `hpo trials`")
    if trial is not None and export is None:
        fix = "add `--export FILE`; `hpo trials` shows every trial"
        raise InputError("needs --export", path="--trial", value=trial, fix=fix)
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    if export is not None:
        _export(spec, trial or "best", export, json_=json_)
        return
    with uncollected():
        from hpo.study.status import study_best

    data = looked_up(spec, study_best)
    if json_:
        print_json(data)
    elif isinstance(data, list):
        _print_front(spec, data)
    else:
        _print_best(spec, data)


def _print_best(spec: StudySpec, data: dict[str, Any]) -> None:
    rows = [("trial", str(data["trial"])), (spec.study.metric, cell(data["value"]))]
    params = data["params"]
    rows += _block("parameters", {name: param_cell(params, name) for name in params})
    rows += _block(f"metrics of epoch {data['epoch']}", data["metrics"])
    kept = data["internals"]
    rows += _block("predictions and internals", {**kept["metrics"], "seed": kept["seed"], **_last_grant(kept)})
    print_table(f"best of {data['study']}", ("", ""), rows, below=f"checkpoint: {_shown(data['checkpoint'])}\n")


def _shown(checkpoint: str | None) -> str:
    if checkpoint is None:
        return "none"
    # Unlike Path.exists, this is False if this user may not read the folder.
    there = os.path.exists(checkpoint)  # noqa: PTH110
    return checkpoint if there else f"{checkpoint} (there is no such file here)"


def _last_grant(kept: Mapping[str, Any]) -> dict[str, str]:
    """The last grant of a scheduler; empty without one."""
    if not kept["grants"]:
        return {}
    return {"last granted": granted(kept["grants"][-1]["until"], kept["grants"][-1]["why"])}


def _block(title: str, values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values under a title; empty without values."""
    return [(title, ""), *((f"  {name}", cell(value)) for name, value in values.items())] if values else []


def _print_front(spec: StudySpec, front: list[dict[str, Any]]) -> None:
    """Print the Pareto front, one trial a row."""
    goals, names = list(front[0]["values"]), param_names(spec, front)
    rows = [
        (
            str(entry["trial"]),
            *(cell(entry["values"][name]) for name in goals),
            *(param_cell(entry["params"], name) for name in names),
        )
        for entry in front
    ]
    below = "none of these beats another in everything; `hpo best --json` has metrics and checkpoints\n"
    print_table(f"Pareto front of {spec.study.name}", ("trial", *goals, *names), rows, below=below)


def _relative(argument: str) -> str:
    """An absolute path as a relative one, so that the card does not show this machine's folders."""
    return os.path.relpath(argument) if Path(argument).is_absolute() else argument


def _export(spec: StudySpec, trial: str, path: Path, *, json_: bool) -> None:
    from hpo.config.hidden import hidden_argument
    from hpo.final.export_model import check_export_path, export_model

    check_export_path(path)
    # Other people will read the card, so secrets are hidden.
    command = shlex.join(["hpo", *(hidden_argument(_relative(each)) for each in sys.argv[1:])])
    done = looked_up(spec, lambda opened: export_model(opened, trial, path, command=command))
    if json_:
        print_json({"study": spec.study.name, **done})
        return
    if done["warning"]:
        print(f"warning: {done['warning']}", file=sys.stderr)
    with read_by_others():
        print(f"trial {done['trial']}, epoch {done['epoch']}, {done['parameters']:,} parameters")
        print(f"model: {done['path']}\ncard: {done['card']}")
