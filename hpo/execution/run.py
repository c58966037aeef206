"""Runs a study from its spec to the end of its trials: what `hpo run`, `hpo worker` and `hpo.run` share."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from hpo.config.spec import StudySpec
from hpo.config.study_modules import forget_modules, public_name
from hpo.errors import HpoError, InputError, StudyError, refuse_other_systems, refuse_process_groups
from hpo.execution.engines.engine import PLACEMENT_ENV

if TYPE_CHECKING:
    from hpo.checks.findings import Finding
    from hpo.execution.messages import Heard, Placed
    from hpo.execution.supervisor import Ending
    from hpo.study.open_study import OpenStudy
    from hpo.trial.resources import Slot


class Listener(Protocol):
    """Shows a person or a program what happens; an OSError from a method means that the reader is gone."""

    def begin(self, workers: Mapping[str, Slot], placed: Placed | None = None) -> None:
        """The study is checked and open; after this call these workers start, or agents are placed."""

    def heard(self, label: str, message: Heard) -> None:
        """A worker, or the supervisor, says something."""

    def end(self, ending: str, reason: str | None = None) -> None:
        """The run has ended with a value of `hpo.execution.supervisor.Ending`, or has ``failed`` for a reason."""

    def close(self) -> None:
        """No more messages about workers come."""


def run_study(
    spec: StudySpec,
    listen: Callable[[OpenStudy], Listener],
    warn: Callable[[Finding], None],
    *,
    accept_code_change: bool = False,
    widen: bool = False,
) -> Ending:
    """Run a study to its end, with workers on this machine.

    Args:
        spec: The study.
        listen: Called once, with the open study.
        warn: Called with each warning of the checks.
        accept_code_change: Continue a study whose code has changed since it was started.
        widen: Continue a study whose search space has been widened since.

    Returns:
        Why it ended.

    Raises:
        InputError: The study does not fit the code that it names, or was started with another config or other
            code.
        StudyError: The study failed, or all its trials have ended and none of them is complete.
    """

    def opened() -> OpenStudy:
        from hpo.study.moved import moved_away
        from hpo.study.open_study import closing_on_error, start_study

        study = start_study(spec, accept_code_change=accept_code_change, widen=widen)
        with closing_on_error(study.storage):
            return replace(study, notes=[*study.notes, *moved_away(study)])

    return work_on(spec, opened, listen, warn)


def work_on(
    spec: StudySpec,
    open_: Callable[[], OpenStudy],
    listen: Callable[[OpenStudy], Listener],
    warn: Callable[[Finding], None],
    *,
    leave_when_idle: float | None = None,
    stop_seen: str | None = None,
) -> Ending:
    """Work on a study as an agent: with a supervisor and workers on this machine.

    Args:
        spec: The study.
        open_: Opens the study after it has been checked.
        listen: See `run_study`.
        warn: See there.
        leave_when_idle: See `hpo.execution.supervisor.Supervisor`; None: it waits until the study has ended.
        stop_seen: See `hpo.execution.registered.Registered`.

    Returns:
        Why it ended.

    Raises:
        InputError: As `run_study` raises it.
        StudyError: As there; a study without a result is an error only without ``leave_when_idle``.
    """
    # Removed before anything is started, so that no process that a trial leaves behind looks like the agent.
    placement = os.environ.pop(PLACEMENT_ENV, "")
    slots = prepared(spec, warn)
    from hpo.study.folders import make_output_folder

    with quiet_optuna(), open_() as opened:
        make_output_folder(spec)
        return _supervised(opened, listen(opened), slots, leave_when_idle, stop_seen, placement)


def prepared(spec: StudySpec, warn: Callable[[Finding], None], *, here: bool = True) -> list[Slot]:
    """Check a study before it is worked on.

    Args:
        spec: The study.
        warn: See `run_study`.
        here: It trains on this machine.

    Returns:
        A device and threads for each worker; empty if it does not train here.

    Raises:
        HpoError: What the checks raise, or the output folder can't be written to.
    """
    refuse_other_systems()
    refuse_process_groups()
    _refuse_odd_places()
    forget_modules(spec.folder)
    from hpo.execution.launchers.forkserver import start_fork_server

    if here:  # its imports run while this process does its own
        start_fork_server(spec)
    from hpo.execution.checking import checked

    found = checked(spec, here=here)
    for finding in found.findings:
        warn(finding)
    _refuse_unwritable(spec)
    return found.slots


def _refuse_unwritable(spec: StudySpec) -> None:
    """Raise a StudyError for an output folder that can't be made or written to, before the study is stored."""
    from hpo.checks.filesystems import writing_error
    from hpo.study.folders import unwritable

    error = writing_error(spec.output_dir)
    if error is not None:
        raise unwritable(spec, error) from error


def _supervised(
    opened: OpenStudy,
    listener: Listener,
    slots: list[Slot],
    leave_when_idle: float | None,
    stop_seen: str | None,
    placement: str,
) -> Ending:
    from hpo.execution.launchers.local import LocalLauncher
    from hpo.execution.messages import Notice
    from hpo.execution.registered import registered
    from hpo.execution.sharing import sharing_connections
    from hpo.execution.supervisor import Supervisor
    from hpo.study.folders import worker_logs

    spec = opened.spec

    def say(text: str) -> None:
        with contextlib.suppress(OSError):  # the reader is gone, which a later message notices too
            listener.heard("", Notice(text))

    with (
        sharing_connections(opened.storage, len(slots), say),
        registered(opened, slots, say, stop_seen, placement) as agent,
    ):
        launcher = LocalLauncher(slots, worker_logs(spec), agent.agent.first_worker)
        supervisor = Supervisor(
            opened,
            launcher,
            listener.heard,
            spec.run.timeout,
            registered=agent,
            leave_when_idle=leave_when_idle,
        )
        refuse = leave_when_idle is None
        workers = launcher.labelled
        return listened_to(opened, listener, lambda: listener.begin(workers), supervisor.run, refuse=refuse)


def listened_to(
    opened: OpenStudy,
    listener: Listener,
    begin: Callable[[], None],
    work: Callable[[], Ending],
    *,
    refuse: bool = True,
) -> Ending:
    """Work on a study, and notify the listener when the work begins and ends.

    Args:
        opened: The study.
        listener: Notified of the end.
        begin: Notifies the listener that the work begins.
        work: Does the work; returns why it ended.
        refuse: Raise an error for a study that has ended without a result.

    Raises:
        HpoError: What ``work`` raises.
        StudyError: The study has no result, or has been deleted.
    """
    from hpo.execution.supervisor import Ending
    from hpo.study.status import refuse_without_result

    try:
        try:
            begin()
        except OSError:  # the reader is gone
            return Ending.INTERRUPTED
        try:
            ending = work()
        except KeyError:  # the database has no such row: another tool may delete a study that runs
            opened.refuse_deleted()
            raise
        if refuse and ending in (Ending.DONE, Ending.GOAL):
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
    """Refuse to run while a study's own module is imported (every worker imports it), or in another thread."""
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
def quiet_optuna() -> Iterator[None]:
    """Turn off Optuna's own log lines in the block: the listener shows the same."""
    import optuna

    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)
