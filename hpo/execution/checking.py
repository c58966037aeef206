"""Runs the checks before a run in a separate process.

They import torch and the study's modules, which takes seconds, and memory that the supervising process would then
hold for the whole run.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection

from hpo.checks.findings import Finding
from hpo.config.spec import StudySpec
from hpo.errors import HpoError, StudyError
from hpo.execution.launchers.forkserver import not_started, without_interrupt
from hpo.execution.limits import death_of, oom_kills
from hpo.trial.mainless import LoneContext, MainlessContext
from hpo.trial.resources import Slot


@dataclass(frozen=True)
class Checked:
    """The result of the checks for a study that can run.

    Attributes:
        findings: Warnings.
        slots: A device and threads for each worker; empty for a study that does not train here.
    """

    findings: list[Finding]
    slots: list[Slot]


def checked(spec: StudySpec, *, here: bool = True) -> Checked:
    """Check a study and find its devices, in a separate process that has ended when this returns.

    Args:
        spec: The study. With ``here``, the fork server has been started for it. Without, there is no fork server:
            a driver would hold its memory for as long as agents work.
        here: The study trains on this machine. If not, devices only need valid names, and there are no slots.

    Raises:
        HpoError: What the checks raise.
        StudyError: The process died, or could not be started.
    """
    context = MainlessContext() if here else LoneContext()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_check, args=(spec, theirs, here), name="checks")
    struck = oom_kills()
    try:
        # The fork server answers once it has imported its libraries, which takes long; it hears no Ctrl-C.
        with contextlib.nullcontext() if here else without_interrupt():
            process.start()
    except (OSError, EOFError) as error:  # no processes left, or the fork server is gone
        raise not_started("the process that checks the study", error, struck, "then run it again") from error
    theirs.close()
    answer: Checked | HpoError | None = None
    try:
        with contextlib.suppress(EOFError):
            answer = ours.recv()
    finally:
        ours.close()
        if answer is None and process.exitcode is None:
            process.kill()  # after a Ctrl-C; if the pipe has ended, so has the process
        process.join()
    if answer is None:
        died = death_of(process.exitcode, struck, who="the process that checks the study")
        raise StudyError(f"{died}\n  fix: see what the study's modules do when they are imported")
    if isinstance(answer, HpoError):
        raise answer
    return answer


def _check(spec: StudySpec, channel: Connection[Checked | HpoError, None], here: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the waiting process handles it, and kills this one
    os.dup2(2, 1)  # what the study's code prints on import must not mix with the run's own lines or events
    from hpo.checks.checks import check_study
    from hpo.trial.process_forks import only_in
    from hpo.trial.resources import devices_elsewhere, study_slots

    answer: Checked | HpoError
    with only_in(os.getpid()):
        try:
            findings = check_study(spec)
            if not here:
                devices_elsewhere(spec)
            answer = Checked(findings, study_slots(spec) if here else [])
        except HpoError as error:
            answer = error
    with contextlib.suppress(OSError):  # the other side is gone
        channel.send(answer)
