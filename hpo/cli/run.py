"""`hpo run`."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.cli.options import Debug, OutputDir, Overrides, Storage, StudyFile, read_spec
from hpo.cli.output import read_by_others
from hpo.errors import StudyError

if TYPE_CHECKING:
    from hpo.config import StudySpec


def run(
    study: StudyFile,
    overrides: Overrides = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Worker processes.", show_default=False)] = None,
    n_trials: Annotated[
        int | None, typer.Option(min=1, help="Trials to bring to an end in all.", show_default=False)
    ] = None,
    timeout: Annotated[
        str | None,
        typer.Option(metavar="2h", help="No new trial after it; running ones wait.", show_default=False),
    ] = None,
    storage: Storage = None,
    devices: Annotated[
        str | None, typer.Option(metavar="cuda:0,cuda:1|cpu", help="Devices to share.", show_default=False)
    ] = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Start a study, or go on with it, until its trials are done."""
    del debug  # `main` looks for it
    spec = read_spec(
        study,
        overrides,
        require_search_space=True,
        workers=workers,
        n_trials=n_trials,
        timeout=timeout,
        storage=storage,
        devices=devices,
        output_dir=output_dir,
    )
    interrupted, timed_out = _work(spec)
    from hpo.cli.console import kept_arguments, same_command

    arguments = kept_arguments(study, overrides, storage, output_dir)
    if not interrupted:
        _summarise(spec, arguments, timed_out)
        return
    with read_by_others():
        print(f"interrupted; go on with:\n  {same_command()}", file=sys.stderr)
    with contextlib.suppress(StudyError):  # the database may be away: an interrupted run ends as one all the same
        _summarise(spec, arguments, timed_out)
    raise typer.Exit(130)


def _work(spec: StudySpec) -> tuple[bool, bool]:
    """Bring the study's trials to their end; whether that was interrupted, and whether the time is over."""
    from hpo.forkserver import start_fork_server

    # Its imports run beside ours.
    context = start_fork_server(spec)
    from hpo.supervisor import Ending, Supervisor

    slots = _checked_slots(spec)
    import optuna

    from hpo.cli.console import Reporter
    from hpo.folders import make_output_folder
    from hpo.study import start_study

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    opened = start_study(spec)
    try:
        make_output_folder(spec)
        reporter = Reporter(opened)
        try:
            reporter.begin(slots)
        except OSError:  # nobody reads it
            raise typer.Exit(130) from None
        ending = Supervisor(opened, slots, context, reporter.heard, spec.study.timeout).run()
    finally:
        opened.storage.close()
    return ending is Ending.INTERRUPTED, ending is Ending.TIMEOUT


def _summarise(spec: StudySpec, arguments: str, timed_out: bool) -> None:
    """Say what the study has come to, as it is stored now: others may have worked on it too."""
    from hpo.cli.console import print_summary
    from hpo.study import load_study

    opened = load_study(spec)
    try:
        with read_by_others(), opened.storage.patience.whole():
            print_summary(opened, arguments, timed_out)
    finally:
        opened.storage.close()


def _checked_slots(spec: StudySpec) -> list[Any]:
    """Check what needs imports, and deal the devices."""
    from hpo.build import offered_callbacks
    from hpo.check import check_metric, check_spec
    from hpo.check_callbacks import check_callbacks
    from hpo.devices import deal

    for warning in check_spec(spec, callbacks=offered_callbacks()):
        print(f"warning: {warning}", file=sys.stderr)
    check_metric(spec, check_callbacks(spec))
    own = None if spec.trainer.device is None else [spec.trainer.device]
    slots = deal(spec.study.devices or own, spec.study.workers)
    for slot in slots:
        if spec.trainer.cuda_graph and not slot.device.startswith("cuda"):
            fix = "set it to false, or give GPUs with `study.devices`"
            raise spec.error(
                f"needs CUDA devices, and a worker is on {slot.label}", path="trainer.cuda_graph", fix=fix
            )
    return slots
