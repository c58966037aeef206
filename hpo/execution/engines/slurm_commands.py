"""Slurm's commands, of version 22.05 and later: neither its accounting nor its JSON is needed."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hpo.config.variables import without_token
from hpo.errors import StudyError
from hpo.execution.engines.commands import ended
from hpo.execution.engines.engine import PLACEMENT_ENV, EngineAwayError

#: What a line of a script with an option of sbatch begins with.
SBATCH: Final = "#SBATCH "
#: Variables of the job that this process runs in, which a new job would take over, and a person's defaults for
#: these commands: SQUEUE_PARTITION would hide jobs.
_LEFT_OUT: Final = ("SLURM_", "SLURMD_", "SRUN_", "SQUEUE_", "SCANCEL_", "SINFO_")
#: What commands print where the controller can't be reached, or has too much to do.
_AWAY: Final = re.compile(
    r"[Uu]nable to contact|Socket timed out|[Cc]onnection refused|[Cc]onnection failure|[Cc]onnection timed out"
    r"|Zero Bytes|standby mode|Resource temporarily unavailable|try again"
)
#: What commands print about a job that has ended, or is forgotten.
_ENDED: Final = re.compile(r"already completing or completed|already finished|Invalid job id")
#: Slurm's errors of the same meaning (ESLURM_INVALID_JOB_ID, ESLURM_ALREADY_DONE) as exit codes: scancel may end
#: with one and print nothing.
_ENDED_CODES: Final = (2017 % 256, 2021 % 256)
_REFUSED: Final = (
    "\n  fix: change that in `--on slurm:…`, or in `run.resources`; `--dry-run` prints what sbatch is asked for"
)
_FIELDS: Final = ("ArrayJobID", "ArrayTaskID", "State", "RestartCnt", "BatchHost", "Reason")
_QUEUED: Final = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
_RUNS: Final = {"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
_COMPLETING: Final = "COMPLETING"
#: The states of a machine that no job can run on any more.
_DOWN: Final = ("down", "powered_down", "powering_down")


@dataclass(frozen=True)
class Job:
    """A job as Slurm knows it.

    Attributes:
        id: ``JOB_TASK`` of an array.
        state: Its state, in Slurm's words.
        restarts: How often it was requeued.
        host: Its machine; empty where it has none.
        reason: Why it waits, or failed.
    """

    id: str
    state: str
    restarts: int
    host: str
    reason: str

    @property
    def queued(self) -> bool:
        """It waits for a machine."""
        return self.state in _QUEUED

    @property
    def runs(self) -> bool:
        """It has a machine, and has not ended."""
        return self.state in _RUNS

    @property
    def ended(self) -> bool:
        """It will run no more, unless somebody requeues it."""
        return not (self.queued or self.runs or self.completing)

    @property
    def completing(self) -> bool:
        """Its processes end; then it has ended, or is requeued."""
        return self.state == _COMPLETING


class SlurmCommands:
    """What is asked of Slurm.

    Where a question has been answered before, one that fails will be answered again, whatever is said: munge or a
    name server may be away.
    """

    def __init__(self) -> None:
        self._has_answered = False

    def submit(self, script: str) -> str:
        """Queue a script; the job's id."""
        # As arguments, too: a person's SBATCH_PARTITION would outdo the script, but gives what that leaves open.
        lines = [line.removeprefix(SBATCH) for line in script.splitlines() if line.startswith(SBATCH)]
        options = [word for line in lines for word in shlex.split(line)]
        said = self._run("sbatch", "--parsable", "--export=ALL", *options, given=script, fix=_REFUSED)
        return said.strip().partition(";")[0]

    def jobs(self, names: Iterable[str]) -> dict[str, Job]:
        """This user's jobs of these names by their id, as long as Slurm remembers them."""
        columns = ",".join(f"{field}:|" for field in _FIELDS)
        options = ("--me", "--noheader", "--states=all", "--array", f"--name={','.join(sorted(names))}")
        lines = self._asked("squeue", *options, f"--Format={columns}").splitlines()
        return {job.id: job for job in map(_job, lines)}

    def cancel(self, jobs: Sequence[str], *options: str) -> None:
        """Send jobs a signal, or end them; those that have ended are no error."""
        if jobs:
            self._run("scancel", *options, *jobs, harmless=_ENDED)

    def forbid_requeue(self, job: str) -> None:
        """See to it that a job, once it has ended, is not started again."""
        self._run("scontrol", "update", f"JobId={job}", "Requeue=0", harmless=_ENDED)

    def is_down(self, host: str) -> bool:
        """Whether a machine is gone, as far as Slurm knows."""
        states = self._asked("sinfo", "--noheader", "--Node", f"--nodes={host}", "--format=%T").split()
        return any(state.startswith(_DOWN) for state in states)

    def exit_code(self, job: str) -> tuple[int, int]:
        """The exit code of a job that has ended, and the signal that ended it."""
        shown = self._asked("scontrol", "--oneliner", "show", "job", job, harmless=_ENDED)
        found = re.search(r"\bExitCode=(\d+):(\d+)", shown)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def _asked(self, program: str, *options: str, harmless: re.Pattern[str] | None = None) -> str:
        """What a question is answered."""
        try:
            answer = self._run(program, *options, harmless=harmless)
        except StudyError as error:
            if self._has_answered:
                raise EngineAwayError(str(error)) from error
            raise
        self._has_answered = True
        return answer

    def _run(
        self,
        program: str,
        *options: str,
        given: str = "",
        harmless: re.Pattern[str] | None = None,
        fix: str = "",
    ) -> str:
        """What a command prints; its complaints are no error where all of them are harmless."""
        missing = (
            f"Slurm's command {program} is not on this machine\n"
            "  fix: run this on a login node, or add `--dry-run` and take the script there"
        )
        done = ended([program, *options], program, missing, given=given, env=_environment(os.environ))
        lines = done.stderr.strip().splitlines()
        is_harmless = all(map(harmless.search, lines)) if harmless else False
        if done.returncode == 0 or (is_harmless and (lines or done.returncode in _ENDED_CODES)):
            return done.stdout
        is_away = done.returncode < 0 or _AWAY.search(done.stderr)  # the first: a signal has ended it
        kind = EngineAwayError if is_away else StudyError
        said = "; ".join(line.removeprefix(f"{program}: error: ") for line in lines)
        raise kind(f"{program}: {said or f'it ended with exit code {done.returncode}'}{'' if is_away else fix}")


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """This environment, which jobs get, without what would change the meaning of a command."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
    return {
        name: value
        for name, value in without_token(given).items()
        if name in kept or not (name.startswith(_LEFT_OUT) or name == PLACEMENT_ENV)
    }


def _job(line: str) -> Job:
    try:
        array, task, state, restarts, host, reason, *_ = (part.strip() for part in line.split("|"))
        return Job(f"{array}_{task}", state, int(restarts), "" if host == "n/a" else host, reason)
    except ValueError as error:
        raise EngineAwayError(f"squeue: {line.strip()!r} is not about a job") from error
