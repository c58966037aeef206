"""`hpo run`."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from hpo.cli.options import AcceptCodeChange, Debug, OutputDir, Overrides, Storage, StudyFile, read_spec
from hpo.console.output import read_by_others
from hpo.errors import InputError, StudyError

if TYPE_CHECKING:
    from hpo.checks.findings import Finding
    from hpo.config.spec import StudySpec
    from hpo.console.events import EventWriter
    from hpo.console.lines import Reporter
    from hpo.study.open_study import OpenStudy


_Workers = Annotated[int | None, typer.Option(min=1, help="Worker processes.", show_default=False)]
_NTrials = Annotated[
    int | None, typer.Option(min=1, help="Trials to finish in all, earlier runs included.", show_default=False)
]
_Timeout = Annotated[
    str | None,
    typer.Option(metavar="2h", help="Time limit; the next run resumes unfinished trials.", show_default=False),
]
_Devices = Annotated[
    str | None, typer.Option(metavar="auto|cpu|cuda:0,cuda:1", help="Devices to share.", show_default=False)
]
_Quiet = Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")]
_Json = Annotated[
    bool, typer.Option("--json", help="Print one event a line, as JSON; docs/reference/events.md lists them.")
]


def run(
    study: StudyFile,
    overrides: Overrides = None,
    workers: _Workers = None,
    n_trials: _NTrials = None,
    timeout: _Timeout = None,
    storage: Storage = None,
    devices: _Devices = None,
    output_dir: OutputDir = None,
    accept_code_change: AcceptCodeChange = False,
    quiet: _Quiet = False,
    json_: _Json = False,
    debug: Debug = False,
) -> None:
    """Start or resume a study, and run it until its trials are done.

    On a terminal the bottom lines show what each worker does; `hpo status --watch` shows it elsewhere.

    Example: hpo run study.yaml --workers 4 --n-trials 100
    """
    del debug  # `main` looks for it
    if quiet and json_:
        raise InputError("give one of them, not both", path="--quiet, --json", fix="leave `--quiet` out")
    options = {"workers": workers, "n_trials": n_trials, "timeout": timeout, "devices": devices}
    places = {"storage": storage, "output_dir": output_dir}
    spec = read_spec(study, overrides, require_search_space=True, **options, **places)
    if not (quiet or json_):
        with read_by_others():
            print(f"checking {spec.path}")
    ending = _run(spec, quiet=quiet, json_=json_, accept_code_change=accept_code_change)
    from hpo.console.lines import kept_arguments, same_command

    interrupted = ending == "interrupted"
    if interrupted:
        with read_by_others():
            print(f"interrupted; resume with:\n  {same_command()}", file=sys.stderr)
    if not (quiet or json_):
        # The database may be away: an interrupted run ends as one all the same.
        with contextlib.suppress(*[StudyError] if interrupted else []):
            _summarise(spec, kept_arguments(study, overrides, storage, output_dir), ending == "timeout")
    if interrupted:
        raise typer.Exit(130)


def _run(spec: StudySpec, *, quiet: bool, json_: bool, accept_code_change: bool) -> str:
    """Run the study and show what happens; returns its ending."""
    from hpo.execution.run import run_study

    out = sys.stdout

    def listen(opened: OpenStudy) -> Reporter | EventWriter:
        return _reporter(opened, out, quiet=quiet, json_=json_)

    # What a sampler from the hub prints when it is imported is no event.
    with contextlib.redirect_stdout(sys.stderr) if json_ else contextlib.nullcontext():
        return run_study(spec, listen, _warn, accept_code_change=accept_code_change).value


def _warn(finding: Finding) -> None:
    print(f"warning: {finding}", file=sys.stderr)


def _reporter(opened: OpenStudy, out: TextIO, *, quiet: bool, json_: bool) -> Reporter | EventWriter:
    """The listener that shows a person, or a program, what happens."""
    if json_:
        from hpo.console.events import EventWriter

        return EventWriter(opened, out)
    from hpo.console.lines import LiveReporter, Reporter
    from hpo.console.screen import is_drawable

    return Reporter(opened, quiet=quiet) if quiet or not is_drawable() else LiveReporter(opened)


def _summarise(spec: StudySpec, arguments: str, timed_out: bool) -> None:
    """Say what the study has come to, as it is stored now: others may have worked on it too."""
    from hpo.console.lines import print_summary
    from hpo.study.open_study import load_study

    opened = load_study(spec)
    try:
        with read_by_others(), opened.storage.patience.whole():
            print_summary(opened, arguments, timed_out)
    finally:
        opened.storage.close()
