"""`hpo report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpo.cli.options import Debug, Json, OutputDir, Overrides, Storage, StudyFile, read_spec
from hpo.cli.output import read_by_others
from hpo.cli.show import looked_up, print_json


def report(
    study: StudyFile,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where the page goes.",
            show_default="report.html in the output folder",
        ),
    ] = None,
    json_: Json = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Write a page about the study: curves, the best, predictions, what pruning saved.

    One HTML file, which opens without a network. With --json its figures are printed too.
    """
    del debug
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    from hpo.report import report_data, study_report, write_report

    path = spec.output_dir / "report.html" if output is None else output
    found = looked_up(spec, study_report)
    write_report(found, path)
    if json_:
        print_json({"path": str(path), **report_data(found)})
        return
    with read_by_others():
        print(path)
