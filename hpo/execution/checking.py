"""The checks before a run, in a process of their own: they import torch and the study's modules, which takes
seconds and a part of the memory that the process which supervises does without.
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
    """What the checks say of a study that can run.

    Attributes:
        findings: Warnings.
        slots: A device and threads for each worker.
    """

    findings: list[Finding]
    slots: list[Slot]


def checked(spec: StudySpec, *, here: bool = True) -> Checked:
    """Check a study, and find its devices, in a process of its own that has ended when this returns.

    Args:
        spec: The study; where it is to train here, the fork server, which has imported torch, has been started
            with it. Otherwise there is none: a driver would hold its memory for as long as agents work.
        here: It is to train on this machine; otherwise devices need a name that some machine has, and there are
            no slots.

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
            process.kill()  # a Ctrl-C; at the end of the pipe it has ended
        process.join()
    if answer is None:
        died = death_of(process.exitcode, struck, who="the process that checks the study")
        raise StudyError(f"{died}\n  fix: see what the study's modules do when they are imported")
    if isinstance(answer, HpoError):
        raise answer
    return answer


def _check(spec: StudySpec, channel: Connection[Checked | HpoError, None], here: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who waits for the answer hears it, and ends this process
    os.dup2(2, 1)  # what the study's code prints when it is imported is no line, and no event, of the run
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
