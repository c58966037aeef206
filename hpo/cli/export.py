"""`hpo export`."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hpo.cli.answers import looked_up
from hpo.cli.options import Debug, OutputDir, Overrides, Storage, StudyFile, read_spec
from hpo.console.output import read_by_others
from hpo.errors import InputError


class Format(StrEnum):
    """The formats of a table."""

    CSV = "csv"
    PARQUET = "parquet"
    JSON = "json"


def export(
    study: StudyFile,
    overrides: Overrides = None,
    form: Annotated[
        Format | None,
        typer.Option("--format", help="Format of the table.", show_default="by FILE's suffix, else csv"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write to.", show_default="standard output"),
    ] = None,
    curves: Annotated[
        bool, typer.Option("--curves", help="Write learning curves instead of trials: one row per epoch.")
    ] = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Write all trials as a table: outcome, value, parameters, metrics of the best epoch, times.

    FILE is replaced if it exists. Parquet needs a file, and `pip install 'hpo-service[parquet]'`.

    Example: hpo export study.yaml --format csv -o trials.csv
    """
    del debug
    chosen = form or _format_of(output)
    if output is None and chosen == Format.PARQUET:
        fix = "name a file with `-o trials.parquet`"
        raise InputError("can't be printed", path="--format", value=chosen, fix=fix)
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    from hpo.report.tables import curves_table, table_text, trials_table, write_table

    table = looked_up(spec, curves_table if curves else trials_table)
    if output is None:
        with read_by_others():
            sys.stdout.write(table_text(table, chosen))
        return
    write_table(table, chosen, output)
    with read_by_others():
        print(f"{len(table.rows)} {'epochs' if curves else 'trials'}: {output}")


def _format_of(output: Path | None) -> Format:
    """The format of a file's suffix; CSV without a file."""
    if output is None:
        return Format.CSV
    suffix = output.suffix.removeprefix(".")
    if suffix not in list(Format):
        fix = "end it in .csv, .json or .parquet, or say which with `--format`"
        raise InputError("has a suffix that names no format", path="--output", value=str(output), fix=fix)
    return Format(suffix)
