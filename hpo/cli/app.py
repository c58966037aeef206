"""The `hpo` command and its exit codes."""

import sys
import traceback
from typing import NoReturn

import typer

from hpo.cli import best, care, enqueue, manage, replay, report, run, show, train
from hpo.errors import HpoError

app = typer.Typer(
    name="hpo",
    help="Hyperparameter optimisation for PyTorch: parallel Optuna studies from one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
COMMANDS = (
    *(run.run, show.status, best.best, show.trials, report.report, replay.replay, train.train),
    *(enqueue.enqueue, care.repair, care.retry, care.clean, manage.dashboard, manage.delete),
)
for command in COMMANDS:
    app.command()(command)


def main() -> NoReturn:
    """Run the command line; exit codes: 0 done, 2 bad input, 3 the study can't go on, 130 interrupted."""
    debug = "--debug" in sys.argv
    try:
        app()
    except HpoError as error:
        if debug:
            traceback.print_exc()
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)
