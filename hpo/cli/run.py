"""`hpo run`."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.cli.options import Debug, OutputDir, Overrides, Storage, StudyFile, read_spec

if TYPE_CHECKING:
    from hpo.config import StudySpec
    from hpo.study import OpenStudy
    from hpo.worker import Message


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
    from hpo.forkserver import start_fork_server

    # Its imports run beside ours.
    context = start_fork_server(spec)
    from hpo.supervisor import Ending, Supervisor

    slots = _checked_slots(spec)
    import optuna

    from hpo.folders import make_output_folder
    from hpo.study import start_study

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    opened = start_study(spec)
    try:
        make_output_folder(spec)
        reporter = _Reporter(opened)
        reporter.begin(slots)
        opened.requeue_dead()
        ending = Supervisor(opened, slots, context, reporter.heard, spec.study.timeout).run()
        arguments = _kept_arguments(study, overrides, storage, output_dir)
        _summary(opened, arguments, ending is Ending.TIMEOUT)
    finally:
        opened.storage.close()
    if ending is Ending.INTERRUPTED:
        print(f"interrupted; go on with:\n  {_same_command()}", file=sys.stderr)
        raise typer.Exit(130)


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


class _Reporter:
    """Prints a line for each thing that happens."""

    def __init__(self, opened: OpenStudy) -> None:
        from hpo.progress import study_status

        self._opened = opened
        self._status = study_status(opened)
        self._finished: int = self._status["finished"]
        self._total: int = self._status["n_trials"]
        self._best: tuple[float, int] | None = None
        if self._status["best"] is not None:
            self._best = (self._status["best"]["value"], self._status["best"]["trial"])

    def begin(self, slots: list[Any]) -> None:
        """Say what is about to run."""
        from hpo.database import display_url

        spec = self._opened.spec
        devices = ", ".join(dict.fromkeys(slot.label for slot in slots))
        before = f", {self._finished} of them done" if self._finished else ""
        print(f"study {spec.study.name}: {self._total} trials{before}, {len(slots)} workers on {devices}")
        print(f"storage {display_url(spec.storage_url)}", flush=True)

    def heard(self, label: str, message: Message) -> None:
        """Print a worker's message."""
        from hpo.objective import TrialReport
        from hpo.worker import Failed

        if isinstance(message, Failed):
            print(f"{label} failed: {message.message}", file=sys.stderr, flush=True)
        elif isinstance(message, TrialReport) and message.outcome is not None:
            self._finished += 1
            self._keep_best(message)
            print(self._line(message), flush=True)

    def _keep_best(self, report: Any) -> None:
        if report.outcome != "complete" or report.value is None:
            return
        sign = 1 if self._opened.spec.study.direction == "minimize" else -1
        if self._best is None or sign * report.value < sign * self._best[0]:
            self._best = (report.value, report.number)

    def _line(self, report: Any) -> str:
        value = "-" if report.value is None else f"{report.value:.5g}"
        metric = self._opened.spec.study.metric
        best = "" if self._best is None else f"best {self._best[0]:.5g} (trial {self._best[1]})"
        line = (
            f"[{self._finished:>{len(str(self._total))}}/{self._total}] trial {report.number:<4} "
            f"{report.outcome:<13} {metric} {value:<10} {report.epochs:>4} epochs "
            f"{report.duration_s:>7.1f} s   {best}"
        )
        return f"{line}\n    {report.reason}" if report.reason else line


def _summary(opened: OpenStudy, arguments: str, timed_out: bool) -> None:
    from hpo.progress import study_status

    status = study_status(opened)
    counts = ", ".join(f"{count} {name}" for name, count in status["outcomes"].items() if count)
    print(f"\n{status['finished']} of {status['n_trials']} trials finished: {counts or 'none'}")
    if timed_out:
        print(f"the time is over; {status['waiting']} trials wait to go on with the next `hpo run`")
    elif status["n_trials"] < opened.spec.study.n_trials:
        print(f"the grid is exhausted: it has {status['n_trials']} points")
    if status["running"]:
        print(f"{status['running']} trials are still running elsewhere")
    if status["best"] is not None:
        _print_best(opened, status["best"], arguments)


def _print_best(opened: OpenStudy, best: dict[str, Any], arguments: str) -> None:
    spec = opened.spec
    print(f"best: trial {best['trial']}, {spec.study.metric} {best['value']:.6g}")
    for name, value in best["params"].items():
        print(f"    {name} = {value:.6g}" if isinstance(value, float) else f"    {name} = {value}")
    print("  metrics: " + ", ".join(f"{k} {v:.4g}" for k, v in best["metrics"].items() if v is not None))
    print(f"  checkpoint: {best['checkpoint']}")
    print("next:")
    print(f"  {_command()} trials {arguments}")
    print(f"  {_command()} train {arguments} --trial best")
    print(f"  {_command()} dashboard {arguments}")


def _kept_arguments(study: Path, overrides: list[str] | None, storage: str | None, output_dir: str | None) -> str:
    """What the next commands on this study need as well, as a shell reads it."""
    options = {"--storage": storage, "--output-dir": output_dir}
    kept = [str(study), *(overrides or ())]
    for name, value in options.items():
        kept += [] if value is None else [name, value]
    return shlex.join(kept)


def _same_command() -> str:
    return f"{_command()} {shlex.join(sys.argv[1:])}"


def _command() -> str:
    """How this command was called, in words that a shell finds again."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m hpo"
    return "hpo" if shutil.which("hpo") or called.name == str(called) else shlex.quote(str(called))
