"""The `hpo` command and its exit codes."""

import contextlib
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import Annotated, NoReturn

try:
    import typer

    from hpo.cli import (
        best,
        care,
        check,
        doctor,
        enqueue,
        export,
        init,
        logs,
        manage,
        replay,
        report,
        run,
        schema,
        show,
        stop,
        submit,
        train,
        worker,
    )
    from hpo.cli.usage import Command
    from hpo.console.output import ready_streams
    from hpo.errors import HpoError, refuse_other_systems, refuse_process_groups
except KeyboardInterrupt:  # Ctrl-C during the imports
    sys.exit(130)

app = typer.Typer(
    name="hpo",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
COMMANDS = (
    *(doctor.doctor,),
    *(init.init, check.check, schema.schema),
    *(run.run, worker.worker, submit.submit, stop.stop, logs.logs),
    *(show.status, best.best, show.trials, report.report, replay.replay, train.train),
    *(export.export,),
    *(enqueue.enqueue, care.repair, care.retry, care.clean, manage.dashboard, manage.delete),
)
for command in COMMANDS:
    app.command(cls=Command)(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"hpo-service {version('hpo-service')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    """Hyperparameter optimisation for PyTorch: parallel Optuna studies from one YAML file."""


def main() -> NoReturn:
    """Run the command line.

    Exit codes: 0 done, 1 a question was answered with no, or an error in this program, 2 bad input, 3 the study
    failed, 75 asked to leave, 130 interrupted.
    """
    debug = "--debug" in sys.argv
    ready_streams()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, exit codes of children are lost
    try:
        refuse_other_systems()
        refuse_process_groups()
        with _interruptible():
            app()
    except HpoError as error:
        if debug:
            traceback.print_exc()
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if "torch" not in sys.modules:  # the command has only read, so nothing needs a finaliser
            gc.freeze()  # Python's last garbage collection takes a sixth of such a command's time
    sys.exit(0)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C during an import end the process immediately: an exception would leave a half-imported module."""
    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    inside = frame
    while inside is not None:
        if inside.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(130)
        inside = inside.f_back
    signal.default_int_handler(number, frame)
