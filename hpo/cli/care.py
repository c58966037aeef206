"""`hpo repair`, `hpo retry`, `hpo clean`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli.answers import looked_up, print_json
from hpo.cli.confirm import Yes, ask, must_be_sure
from hpo.cli.options import Debug, Json, OutputDir, Overrides, Storage, StudyFile, read_spec
from hpo.console.output import read_by_others
from hpo.errors import InputError
from hpo.wording import count_of, file_size, listed

if TYPE_CHECKING:
    from hpo.study.open_study import OpenStudy
    from hpo.study.repair import Repair
    from hpo.study.retention import CleanReport
    from hpo.study.retry import Prospect, Reopened

DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; only print what would be done.")]


def repair(
    study: StudyFile,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    json_: Json = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Requeue or fail the trials of dead workers, and end the leases that no process holds.

    Example: hpo repair study.yaml --dry-run
    """
    del debug
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    from hpo.study.repair import repair as put_right

    report = looked_up(spec, lambda opened: put_right(opened, dry_run=dry_run))
    if json_:
        print_json({"study": spec.study.name, "dry_run": dry_run, **asdict(report)})
        return
    with read_by_others():
        for entry in report.done:
            print(_repaired(entry, dry_run=dry_run))
        for entry in report.left:
            print(f"trial {entry.trial}{_attempt(entry)} left alone: {entry.reason}")
        if not report.done:
            print("nothing to repair")


def _repaired(entry: Repair, *, dry_run: bool) -> str:
    whose = "a deleted trial" if entry.trial is None else f"trial {entry.trial}"
    return f"{whose}{_attempt(entry)} {'would be ' if dry_run else ''}{entry.action}: {entry.reason}"


def _attempt(entry: Repair) -> str:
    return f", attempt {entry.attempt}" if entry.attempt else ""


def retry(
    study: StudyFile,
    overrides: Overrides = None,
    failed: Annotated[bool, typer.Option("--failed", help="Requeue all failed trials.")] = False,
    trial: Annotated[
        list[int] | None, typer.Option(metavar="N", min=0, help="Number of a failed trial; may be repeated.")
    ] = None,
    dry_run: DryRun = False,
    json_: Json = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Requeue failed trials; free workers or the next `hpo run` resume them from their checkpoints.

    Example: hpo retry study.yaml --trial 3 --trial 8
    """
    del debug
    if failed == bool(trial):
        problem = "give one of them, not both" if failed else "neither says which trials"
        fix = "`--failed` for all that have failed, or `--trial N`, repeated for several"
        raise InputError(problem, path="--failed, --trial", fix=fix)
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    from hpo.study.retry import failed_trials, prospect_if_known, reopen

    def requeue(opened: OpenStudy) -> tuple[list[Reopened], tuple[Prospect | None, str]]:
        done = reopen(opened, trial or failed_trials(opened), dry_run=dry_run)
        is_said = done and not dry_run and not json_
        return done, prospect_if_known(opened, [entry.trial for entry in done]) if is_said else (None, "")

    done, (expected, unknown) = looked_up(spec, requeue)
    if json_:
        print_json({"study": spec.study.name, "dry_run": dry_run, "retried": [asdict(entry) for entry in done]})
        return
    with read_by_others():
        for entry in done:
            waits = "would be requeued" if dry_run else "is requeued"
            reason = f": {entry.reason.partition(chr(10))[0]}" if entry.reason else ""
            print(
                f"trial {entry.trial} {waits} after {count_of(entry.attempts, 'attempt')} "
                f"({entry.outcome}{reason})"
            )
        if not done:
            print("no trial has failed")
        elif expected is not None:
            print(_next_run(expected, len(done)))
        elif unknown:
            print(f"warning: {unknown}", file=sys.stderr)


def _next_run(expected: Prospect, count: int) -> str:
    """A text on what `hpo run` will do with so many requeued trials."""
    left, cut = expected.without_epochs, expected.cut
    if expected.reached is not None:
        return f"`hpo run` resumes none of them: {expected.reached}"
    end = f"; trial {cut[0]} trains up to epoch {cut[1]}, for `study.epochs` has no more" if cut else ""
    if not left:
        return f"`hpo run` resumes them{end}"
    if len(left) == count:
        return (
            "`hpo run` resumes none of them: `study.epochs` leaves no epochs; it resumes them with a larger number"
        )
    who = f"trials {listed(left)} wait" if len(left) > 1 else f"trial {left[0]} waits"
    return f"`hpo run` resumes the others; {who} for larger `study.epochs`{end}"


def clean(
    study: StudyFile,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    keep_best: Annotated[
        int | None,
        typer.Option(min=1, help="How many complete trials keep theirs; by default run.keep_best."),
    ] = None,
    yes: Yes = False,
    json_: Json = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Remove the checkpoints that no trial resumes from: of pruned, diverged and lesser complete trials.

    Example: hpo clean study.yaml --keep-best 3 --dry-run
    """
    del debug
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    must_be_sure("clean", f"removes checkpoints of the study {spec.study.name}", yes=yes or dry_run)
    report = looked_up(spec, lambda opened: _cleaned(opened, keep_best, dry_run=dry_run, asks=not yes))
    if json_:
        print_json({"study": spec.study.name, "dry_run": dry_run, **_as_data(report)})
        return

    would = "would go" if dry_run else "removed"
    with read_by_others():
        for each in report.removed:
            print(
                f"trial {each.number} ({each.outcome}): {count_of(len(each.files), 'file')}, "
                f"{file_size(each.bytes)} {would}"
            )
        total = f"{file_size(report.freed)} {would} in all" if report.removed else "nothing to remove"
        print(f"{total}; {file_size(report.stays)} of checkpoints stay")


def _cleaned(opened: OpenStudy, keep_best: int | None, *, dry_run: bool, asks: bool) -> CleanReport:
    """Remove checkpoints and return what was removed; with ``asks`` it first asks, with what would be removed."""
    from hpo.study.retention import clean as clean_up

    if dry_run or asks:
        plan = clean_up(opened, keep_best=keep_best, dry_run=True)
        if dry_run or not plan.removed:
            return plan
        count = count_of(len(plan.removed), "trial")
        ask(f"This removes {file_size(plan.freed)} of checkpoints, of {count}; `--dry-run` lists them.")
    return clean_up(opened, keep_best=keep_best)


def _as_data(report: CleanReport) -> dict[str, object]:
    removed = [
        {
            "trial": each.number,
            "outcome": each.outcome,
            "files": [str(file.path) for file in each.files],
            "bytes": each.bytes,
        }
        for each in report.removed
    ]
    return {"removed": removed, "freed_bytes": report.freed, "left_bytes": report.stays}
