"""`hpo run`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final, TextIO

import typer

from hpo.cli.options import (
    AcceptCodeChange,
    Agents,
    Debug,
    Devices,
    DryRun,
    Events,
    On,
    OutputDir,
    Overrides,
    Quiet,
    Storage,
    StudyFile,
    Workers,
    read_spec,
    refuse_both,
)
from hpo.console.output import read_by_others
from hpo.console.slow import slow_steps
from hpo.errors import InputError, StudyError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpo.checks.findings import Finding
    from hpo.config.spec import StudySpec
    from hpo.console.events import EventWriter
    from hpo.console.lines import Reporter
    from hpo.execution.placing import Placing
    from hpo.study.open_study import OpenStudy


_NTrials = Annotated[
    int | None, typer.Option(min=1, help="Trials to finish in all, earlier runs included.", show_default=False)
]
_Timeout = Annotated[
    str | None,
    typer.Option(
        metavar="2h", help="Time limit of this run; the next run resumes unfinished trials.", show_default=False
    ),
]
_Detach = Annotated[
    bool, typer.Option("--detach", help="With --on: place the agents, then exit and let them work.")
]
# Names the `hpo submit` that started this driver; its time limit counts from the first start.
_Submission = Annotated[str | None, typer.Option("--submission", hidden=True)]
_NO_ENGINE: Final = "is about agents that an engine places"
_Widen = Annotated[
    bool, typer.Option("--widen", help="Continue with a wider search space than the study was started with.")
]


def run(
    study: StudyFile,
    overrides: Overrides = None,
    workers: Workers = None,
    n_trials: _NTrials = None,
    timeout: _Timeout = None,
    storage: Storage = None,
    devices: Devices = None,
    output_dir: OutputDir = None,
    on: On = None,
    agents: Agents = None,
    detach: _Detach = False,
    submission: _Submission = None,
    dry_run: DryRun = False,
    accept_code_change: AcceptCodeChange = False,
    widen: _Widen = False,
    quiet: Quiet = False,
    json_: Events = False,
    debug: Debug = False,
) -> None:
    """Start or resume a study, and run it until all its trials have finished.

    In a terminal, the bottom lines show what each worker is doing; elsewhere use `hpo status --watch`.

    With --on, an engine places agents on machines, and this process itself trains nothing. Ctrl-C asks the agents
    to leave. After SIGTERM or a closed terminal they continue to work, and the same command finds them again. Exit
    code 75: such a signal ended this process before the study was done.

    Example: hpo run study.yaml --workers 4 --n-trials 100
    """
    del debug  # `main` looks for it
    refuse_both(quiet=quiet, json_=json_)
    options = {"workers": workers, "n_trials": n_trials, "timeout": timeout, "devices": devices}
    places = {"storage": storage, "output_dir": output_dir, "on": on, "agents": agents}
    spec = read_spec(study, overrides, require_search_space=True, **options, **places)
    placing = _placing(spec, overrides, {"--agents": agents, "--detach": detach, "--dry-run": dry_run})
    if placing is not None and dry_run:
        with read_by_others():
            print(placing.script(), end="")
        return
    if not (quiet or json_):
        with read_by_others():
            print(f"checking {spec.path}")
    with listening(quiet=quiet, json_=json_) as listen:
        if placing is None:
            from hpo.execution.run import run_study

            ending = run_study(spec, listen, warn, accept_code_change=accept_code_change, widen=widen)
        else:
            from hpo.execution.placing import run_on

            on_engine = partial(run_on, detach=detach, submission=submission)
            ending = on_engine(placing, listen, warn, accept_code_change=accept_code_change, widen=widen)
    from hpo.console.lines import kept_arguments

    _say_end(spec, ending.value, kept_arguments(study, overrides, storage, output_dir), quiet=quiet or json_)


def _placing(spec: StudySpec, overrides: list[str] | None, given: dict[str, object]) -> Placing | None:
    """The placing of agents on an engine; None if this machine's workers train."""
    if spec.run.on is not None:
        from hpo.execution.placing import placing_of

        return placing_of(spec, overrides or ())
    for option, value in given.items():
        if value:
            raise InputError(_NO_ENGINE, path=option, fix="give the engine with `--on`")
    return None


def _say_end(spec: StudySpec, ending: str, arguments: str, *, quiet: bool) -> None:
    from hpo.console.lines import same_command

    interrupted = ending in ("interrupted", "stopped")
    if interrupted:
        with read_by_others():
            print(f"{ending}; resume with:\n  {same_command()}", file=sys.stderr)
    if ending in ("detached", "left"):
        with read_by_others(), contextlib.suppress(OSError):
            stop = f"`hpo stop {arguments}` ends them"
            print(f"the agents go on working; {stop}; see them again with:\n  {same_command()}", file=sys.stderr)
    elif not quiet:
        # If the database can't be reached, an interrupted run still ends as interrupted.
        with contextlib.suppress(*[StudyError] if interrupted else []):
            _summarise(spec, arguments, ending)
    if interrupted:
        raise typer.Exit(130)
    if ending == "left":
        from hpo.execution.engines.engine import LEFT_EARLY

        raise typer.Exit(LEFT_EARLY)


@contextlib.contextmanager
def listening(*, quiet: bool, json_: bool) -> Iterator[Callable[[OpenStudy], Reporter | EventWriter]]:
    """Yield a function that creates the listener of a run; until it is called, slow steps are printed."""
    out = sys.stdout
    waiting = contextlib.ExitStack()

    def listen(opened: OpenStudy) -> Reporter | EventWriter:
        waiting.close()
        return _reporter(opened, out, quiet=quiet, json_=json_)

    # A sampler from the hub may print when it is imported, which is not an event.
    with waiting, contextlib.redirect_stdout(sys.stderr) if json_ else contextlib.nullcontext():
        waiting.enter_context(slow_steps(shown=not quiet))("importing torch and what the study names")
        yield listen


def warn(finding: Finding) -> None:
    """Print a warning of the checks."""
    print(f"warning: {finding}", file=sys.stderr)


def _reporter(opened: OpenStudy, out: TextIO, *, quiet: bool, json_: bool) -> Reporter | EventWriter:
    """The listener that prints lines for people, or events for programs."""
    if json_:
        from hpo.console.events import EventWriter

        return EventWriter(opened, out)
    from hpo.console.lines import LiveReporter, Reporter
    from hpo.console.screen import is_drawable

    return Reporter(opened, quiet=quiet) if quiet or not is_drawable() else LiveReporter(opened)


def _summarise(spec: StudySpec, arguments: str, ending: str) -> None:
    """Print the study's result from the storage, as other agents may have worked on it, too."""
    from hpo.console.lines import print_summary
    from hpo.study.open_study import load_study

    with load_study(spec) as opened, read_by_others(), opened.storage.patience.whole():
        print_summary(opened, arguments, ending)
