"""Runs Slurm's commands (version 22.05 or later); neither Slurm's accounting nor its JSON output is needed."""

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

#: Begins a line of a script with an option for sbatch.
SBATCH: Final = "#SBATCH "
#: Prefixes of variables that commands must not get: those of the job that this process runs in, which a new job
#: would inherit, and a person's defaults for the commands (SQUEUE_PARTITION, say, would hide jobs).
_LEFT_OUT: Final = ("SLURM_", "SLURMD_", "SRUN_", "SQUEUE_", "SCANCEL_", "SINFO_")
#: What commands print if the controller can't be reached or is overloaded.
_AWAY: Final = re.compile(
    r"[Uu]nable to contact|Socket timed out|[Cc]onnection refused|[Cc]onnection failure|[Cc]onnection timed out"
    r"|Zero Bytes|standby mode|Resource temporarily unavailable|try again"
)
#: What commands print about a job that has ended, or that Slurm has forgotten.
_ENDED: Final = re.compile(r"already completing or completed|already finished|Invalid job id")
#: Slurm's error codes for the same (ESLURM_INVALID_JOB_ID, ESLURM_ALREADY_DONE) as exit codes: scancel may exit
#: with one of them and print nothing.
_ENDED_CODES: Final = (2017 % 256, 2021 % 256)
_REFUSED: Final = (
    "\n  fix: change that in `--on slurm:…`, or in `run.resources`; `--dry-run` prints what sbatch is asked for"
)
_FIELDS: Final = ("ArrayJobID", "ArrayTaskID", "State", "RestartCnt", "BatchHost", "Reason")
_QUEUED: Final = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
_RUNS: Final = {"RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
_COMPLETING: Final = "COMPLETING"
#: States of a machine on which no job can run any more, or prefixes of them.
_DOWN: Final = ("down", "powered_down", "powering_down")


@dataclass(frozen=True)
class Job:
    """A job as Slurm knows it.

    Attributes:
        id: ``JOB_TASK`` of an array.
        state: Slurm's name of its state.
        restarts: How many times it was requeued.
        host: Its machine; empty if it has none.
        reason: Why it waits, or failed.
    """

    id: str
    state: str
    restarts: int
    host: str
    reason: str

    @property
    def queued(self) -> bool:
        """Whether it waits for a machine."""
        return self.state in _QUEUED

    @property
    def runs(self) -> bool:
        """Whether it has a machine and has not ended."""
        return self.state in _RUNS

    @property
    def ended(self) -> bool:
        """Whether it will not run again, unless a person requeues it."""
        return not (self.queued or self.runs or self.completing)

    @property
    def completing(self) -> bool:
        """Whether its processes are ending; afterwards it has ended, or is requeued."""
        return self.state == _COMPLETING


class SlurmCommands:
    """Queries and commands for Slurm.

    Once a query has succeeded, any later failure of a query counts as temporary, whatever the error says: munge or
    a name server may be away.
    """

    def __init__(self) -> None:
        self._has_answered = False

    def submit(self, script: str) -> str:
        """Queue a script; returns the job's id."""
        # Options are also given as arguments, so that a person's SBATCH_PARTITION, say, can't override the script;
        # it still sets what the script leaves open.
        lines = [line.removeprefix(SBATCH) for line in script.splitlines() if line.startswith(SBATCH)]
        options = [word for line in lines for word in shlex.split(line)]
        said = self._run("sbatch", "--parsable", "--export=ALL", *options, given=script, fix=_REFUSED)
        return said.strip().partition(";")[0]

    def jobs(self, names: Iterable[str]) -> dict[str, Job]:
        """This user's jobs of these names that Slurm still remembers, by id."""
        columns = ",".join(f"{field}:|" for field in _FIELDS)
        options = ("--me", "--noheader", "--states=all", "--array", f"--name={','.join(sorted(names))}")
        lines = self._asked("squeue", *options, f"--Format={columns}").splitlines()
        return {job.id: job for job in map(_job, lines)}

    def cancel(self, jobs: Sequence[str], *options: str) -> None:
        """Send jobs a signal, or end them; jobs that have ended already are no error."""
        if jobs:
            self._run("scancel", *options, *jobs, harmless=_ENDED)

    def forbid_requeue(self, job: str) -> None:
        """Keep Slurm from starting a job again after it has ended."""
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
        """The output of a query; see the class about failures."""
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
        """The output of a command; a failure is no error if every line on stderr matches ``harmless``."""
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
    """The environment for a command, which new jobs inherit; without variables that would change its meaning."""
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
