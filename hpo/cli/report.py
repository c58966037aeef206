"""`hpo report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hpo.cli.answers import looked_up, print_json
from hpo.cli.options import Debug, Json, OutputDir, Overrides, Storage, StudyFile, read_spec
from hpo.console.output import read_by_others
from hpo.console.slow import slow_steps


def report(
    study: StudyFile,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File for the page.",
            show_default="report.html in the output folder",
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the figures as PNG files.", show_default=False),
    ] = None,
    json_: Json = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Write a report: best trials, learning curves, parameter importance, failures, time use.

    The report is one HTML file that opens offline. Prints the files' names, and with --json the figures' data too.

    Example: hpo report study.yaml -o report.html --png figures
    """
    del debug
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    path = spec.output_dir / "report.html" if output is None else output
    with slow_steps() as say:
        say("importing what draws the figures")
        import optuna

        from hpo.report.data import report_data, study_report
        from hpo.report.page import write_report

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        say("computing the report's figures")
        found = looked_up(spec, study_report)
        say("writing the page")
        write_report(found, path)
    pictures: list[Path] = []
    if png is not None:
        from hpo.report.pictures import write_pictures

        pictures = write_pictures(found, png)
    if json_:
        print_json({"path": str(path), "pictures": list(map(str, pictures)), **report_data(found)})
        return
    with read_by_others():
        print(*(path, *pictures), sep="\n")
