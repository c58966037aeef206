"""A study from its spec to the end of its trials: what `hpo run` and `hpo.run` share."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from hpo.config.spec import StudySpec
from hpo.config.study_modules import forget_modules, public_name
from hpo.errors import HpoError, InputError, StudyError

if TYPE_CHECKING:
    from hpo.checks.findings import Finding
    from hpo.execution.messages import Message, Notice, Tick
    from hpo.execution.supervisor import Ending, Supervisor
    from hpo.search.schedulers.scheduler import Scheduler
    from hpo.storage.recovery import Settled
    from hpo.study.open_study import OpenStudy
    from hpo.trial.resources import Slot


class Listener(Protocol):
    """Shows a person, or a program, what happens; an OSError of its methods means that the reader is gone."""

    def begin(self, slots: list[Slot]) -> None:
        """All is checked and the study is open; workers start after this."""

    def heard(self, label: str, message: Message | Settled | Notice | Tick) -> None:
        """A worker, or the supervisor, says something."""

    def end(self, ending: str, reason: str | None = None) -> None:
        """The run has ended, as `hpo.execution.supervisor.Ending` has it, or has ``failed`` for a reason."""

    def close(self) -> None:
        """Nothing more is said of workers."""


def run_study(
    spec: StudySpec,
    listen: Callable[[OpenStudy], Listener],
    warn: Callable[[Finding], None],
    *,
    accept_code_change: bool = False,
    scheduler: Scheduler | None = None,
) -> Ending:
    """Bring a study's trials to their end, with workers on this machine.

    Args:
        spec: The study.
        listen: Called once, with the study when it is open.
        warn: Called with what the checks find that stops nothing.
        accept_code_change: Continue a study whose code has changed since it was started.
        scheduler: Decides which trials run, and for how long; None: the study's pruner does.

    Returns:
        Why it ended.

    Raises:
        InputError: The study does not fit the code that it names, or was started with another config or other
            code.
        StudyError: The study failed, or all its trials have ended and none of them is complete.
    """
    _refuse_odd_places()
    forget_modules(spec.folder)
    from hpo.execution.launchers.forkserver import start_fork_server

    # Its imports run beside ours; at a Ctrl-C it would end them with a traceback.
    with _without_interrupt():
        start_fork_server(spec)
    from hpo.execution.checking import checked
    from hpo.execution.launchers.local import LocalLauncher
    from hpo.execution.supervisor import Supervisor
    from hpo.study.folders import make_output_folder, worker_logs
    from hpo.study.open_study import start_study

    found = checked(spec)
    for finding in found.findings:
        warn(finding)
    with _quiet_optuna():
        opened = start_study(spec, accept_code_change=accept_code_change)
        if scheduler is not None:
            opened = replace(opened, scheduler=scheduler)
        try:
            make_output_folder(spec)
            listener = listen(opened)
            launcher = LocalLauncher(found.slots, worker_logs(spec))
            supervisor = Supervisor(opened, launcher, listener.heard, spec.run.timeout)
            return _supervised(opened, supervisor, listener, found.slots)
        finally:
            opened.storage.close()


def _supervised(opened: OpenStudy, supervisor: Supervisor, listener: Listener, slots: list[Slot]) -> Ending:
    from hpo.execution.supervisor import Ending
    from hpo.study.status import refuse_without_result

    try:
        try:
            listener.begin(slots)
        except OSError:  # the reader is gone
            return Ending.INTERRUPTED
        ending = supervisor.run()
        if ending in (Ending.DONE, Ending.GOAL):
            refuse_without_result(opened)
    except HpoError as error:
        with contextlib.suppress(OSError):
            listener.end("failed", str(error))
        raise
    finally:
        listener.close()
    with contextlib.suppress(OSError):
        listener.end(ending.value)
    return ending


def _refuse_odd_places() -> None:
    """Refuse to run inside the import of a study's own module, which every worker does, and in other threads."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - the only way to see who calls
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_name == "<module>" and public_name(name) != name:
            raise InputError(
                f"`{public_name(name)}` starts a study whenever it is imported, as workers do",
                file=frame.f_code.co_filename,
                line=frame.f_lineno,
                fix='put what starts the study under `if __name__ == "__main__":`',
            )
        frame = frame.f_back
    if threading.current_thread() is not threading.main_thread():
        raise StudyError(
            "a study is run from a program's main thread, which hears signals\n"
            "  fix: call it there, or start the command `hpo run`"
        )


@contextlib.contextmanager
def _without_interrupt() -> Iterator[None]:
    """What is started inside hears no Ctrl-C; one that comes meanwhile is heard here afterwards."""
    from multiprocessing import resource_tracker

    # Its start would let the signal through again.
    resource_tracker.ensure_running()
    kept = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, kept)


@contextlib.contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Optuna's own lines are left out: the listener shows the same."""
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
