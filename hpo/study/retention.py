"""Decides which checkpoints of a study are kept, and removes the others.

Kept are, of the best complete trials, the best epoch's checkpoint and the newest one; and of trials that may still
resume (waiting, paused, paused when the study ended, or failed), the newest readable one and the best epoch's up
to it. Running trials are left alone. Under a scheduler that forks trials, checkpoints from which a trial may still
be forked are kept too. All other checkpoints may be removed, and so may files that killed writers left
half-written. Nothing else in a trial's folder is touched.
"""

from __future__ import annotations

import errno
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import optuna
from optuna.exceptions import StorageInternalError
from optuna.trial import FrozenTrial, TrialState

from hpo.errors import StudyError
from hpo.search.schedulers.places import left_early, replaced
from hpo.storage.attributes import BEST_ATTR
from hpo.storage.cache import StudyCache
from hpo.storage.engines import display_url
from hpo.storage.grants import grants_of
from hpo.storage.lineage import epochs_reached, forked_from, inherited_epochs, trained_as
from hpo.storage.optuna_private import id_of_trial
from hpo.storage.outage import DatabaseError, first_line
from hpo.storage.pausing import paused_at, pruned_at_end
from hpo.study.checkpoint_files import HALF_WRITTEN, StoredFile, scan, total_size, unlink
from hpo.study.folders import CHECKPOINTS, attempt_folders
from hpo.study.outcome import outcome_of
from hpo.study.own_trials import own_trials, ranked_trials
from hpo.study.standing import seen, standing_of
from hpo.wording import file_size
from trainer.checkpoint.files import CheckpointError, CheckpointFile, list_checkpoints

if TYPE_CHECKING:
    from hpo.study.open_study import OpenStudy

logger = logging.getLogger(__name__)

_RESUMABLE: Final = (TrialState.WAITING, TrialState.FAIL)
#: The rank in the order of removal of trials that may resume: after all others.
_SPARE_ONLY: Final = 2
#: Errors that mean a damaged file, not a failing disk: no file, and an invalid offset read from the file.
_UNREADABLE: Final = (errno.ENOENT, errno.EINVAL)


@dataclass(frozen=True)
class Removal:
    """The files to remove of one trial.

    Attributes:
        trial_id: Optuna's id of the trial.
        number: The trial's number.
        outcome: Its outcome when it was looked at; it does not run.
        state: Its state when it was looked at.
        files: The files to remove.
    """

    trial_id: int
    number: int
    outcome: str
    state: TrialState
    files: tuple[StoredFile, ...]

    @property
    def bytes(self) -> int:
        """The files' total size."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class CleanReport:
    """The result of `clean`.

    Attributes:
        removed: What was removed, by trial; in a dry run, what would be.
        stays: Bytes of the remaining checkpoints.
    """

    removed: list[Removal]
    stays: int

    @property
    def freed(self) -> int:
        """Bytes that were removed."""
        return sum(removal.bytes for removal in self.removed)


@dataclass(frozen=True)
class QuotaReport:
    """The result of `enforce_quota` for a study above its quota.

    Attributes:
        quota: Bytes allowed.
        total: Bytes of the remaining checkpoints.
        removed: What was removed, by trial.
    """

    quota: int
    total: int
    removed: list[Removal]

    @property
    def exceeded(self) -> bool:
        """Whether the checkpoints are still above the quota, because nothing more may be removed."""
        return self.total > self.quota

    def __str__(self) -> str:
        if self.exceeded:
            return (
                f"disk_quota: {file_size(self.total)} of checkpoints, {file_size(self.quota)} allowed; "
                "nothing more can be removed\n  fix: give a larger run.disk_quota, or keep fewer with "
                "run.keep_best or callbacks.checkpoint"
            )
        freed = file_size(sum(removal.bytes for removal in self.removed))
        return f"disk_quota: removed {freed} of {len(self.removed)} trials' checkpoints"


def clean(opened: OpenStudy, *, keep_best: int | None = None, dry_run: bool = False) -> CleanReport:
    """Remove every checkpoint of the study that is not kept.

    Args:
        opened: The study.
        keep_best: How many of the best complete trials keep checkpoints, at least 1; None: as the study file says.
        dry_run: Only report what would be removed.

    Raises:
        StudyError: A file can't be removed, or a folder can't be read.
    """
    with _explained(opened):
        files = scan(opened.spec.output_dir)
        plan = removals(opened, files, keep_best or opened.spec.run.keep_best)
        removed = list(plan) if dry_run else [gone for each in plan if (gone := _remove(opened, each)) is not None]
    removed.sort(key=lambda removal: removal.number)
    return CleanReport(removed, total_size(files) - sum(removal.bytes for removal in removed))


def enforce_quota(opened: OpenStudy) -> QuotaReport | None:
    """Remove checkpoints, the least useful first, until the rest fit into ``run.disk_quota``.

    Below the quota this only walks through the checkpoint folders (about 0.1 ms per trial on a local disk) and
    does not read the database. A running trial's files count but are not removed.

    Returns:
        What was done; None without a quota, or where the checkpoints fit.

    Raises:
        StudyError: A file can't be removed, a folder can't be read, or the database fails.
    """
    quota = opened.spec.run.disk_quota
    if quota is None:
        return None
    removed: list[Removal] = []
    with _explained(opened):
        files = scan(opened.spec.output_dir)
        total = total_size(files)
        if total <= quota:
            return None
        for each in removals(opened, files, opened.spec.run.keep_best):
            gone = _remove(opened, each)
            if gone is not None:
                removed.append(gone)
                total -= gone.bytes
            if total <= quota:
                break
    return QuotaReport(quota, total, removed)


def removals(opened: OpenStudy, files: Mapping[int, Sequence[StoredFile]], keep_best: int) -> Iterator[Removal]:
    """What may be removed, the least useful first.

    First come the files of pruned and diverged trials, then those of complete trials that are not among the best,
    the worst first, then the spare checkpoints of all other trials. Which are spare is found by reading
    checkpoints, which takes long and is done only when these are reached.

    Args:
        opened: The study.
        files: The existing files, by trial.
        keep_best: How many of the best complete trials keep checkpoints.
    """
    present = _as_of_now(opened)
    held = held_for_forks(present)
    # A trial that took over a result has no checkpoints: those of the trial that trained the result are kept.
    trained = dict.fromkeys(trained_as(trial) for trial in ranked_trials(present))
    ranks = {number: rank for rank, number in enumerate(trained)}

    def order(trial: FrozenTrial) -> tuple[int, int]:
        rank = ranks.get(trial.number)
        if _may_resume(trial) or (rank is not None and rank < keep_best):
            return (_SPARE_ONLY, trial.number)
        return (0, trial.number) if rank is None else (1, -rank)

    for trial in sorted(own_trials(present), key=order):
        there = files.get(trial.number, ())
        if there and (trial.state != TrialState.RUNNING or paused_at(trial) is not None):
            going = _going(present, trial, there, held[trial.number], spare_only=order(trial)[0] == _SPARE_ONLY)
            if going:
                yield Removal(id_of_trial(trial), trial.number, outcome_of(trial), trial.state, going)


def _may_resume(trial: FrozenTrial) -> bool:
    """Whether a trial that does not run may still resume: by itself, when retried, or with a larger budget."""
    marks = (paused_at(trial), pruned_at_end(trial))
    return trial.state in _RESUMABLE or any(epoch is not None for epoch in marks)


def held_for_forks(opened: OpenStudy) -> Mapping[int, Collection[int]]:
    """By trial, the epochs whose checkpoints a fork needs or may need.

    A fork needs its parent's checkpoint until it has a result: before its first own checkpoint it begins anew,
    also when it has failed and is retried. A new fork begins where a grant has ended, no earlier than the last end
    of a grant of the trial that it replaces: an unfinished one, or a lost one that no fork has replaced yet. A
    trial that was pruned when the study ended is unfinished again with a larger budget.
    """
    held: defaultdict[int, set[int]] = defaultdict(set)
    if not opened.scheduler.forks:
        return held
    standing = standing_of(opened)  # read before the trials, as the last fork may be decided in between
    is_open = standing.new_left != 0 and standing.epochs_left != 0
    trials = own_trials(opened)
    for trial in trials:
        has_result = trial.state.is_finished() and trial.state not in _RESUMABLE
        if not has_result and (fork := forked_from(trial)) is not None:
            held[fork["parent"]].add(fork["epoch"])
    unfinished = [trial for trial in trials if not trial.state.is_finished() or pruned_at_end(trial) is not None]
    places = [*map(_last_end, unfinished), *(filter(None, map(_last_end, _lost(trials))) if is_open else ())]
    least = min(places, default=math.inf)
    for trial in trials:
        held[trial.number].update(end for end in _ends(trial) if end >= least)
    return held


def _lost(trials: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """Trials that ended before their training did, and whose places a fork may still take."""
    shown = [seen(trial) for trial in trials]
    numbers = left_early(shown) - replaced(shown)
    return [trial for trial in trials if trial.number in numbers]


def _last_end(trial: FrozenTrial) -> int:
    """The last epoch at which a grant of the trial has ended; the epoch at which it began if there is none."""
    reached = epochs_reached(trial)
    return max((end for end in _ends(trial) if end <= reached), default=inherited_epochs(trial))


def _ends(trial: FrozenTrial) -> Iterator[int]:
    return (end for grant in grants_of(trial) if (end := grant["until"]) is not None)


def _as_of_now(opened: OpenStudy) -> OpenStudy:
    """The study without this process's cache, which keeps a failed trial as it was even if it was retried."""
    try:
        study = optuna.load_study(study_name=opened.spec.study.name, storage=StudyCache(opened.storage))
    except KeyError:
        problem = f"{display_url(opened.spec.storage_url)}: the study {opened.spec.study.name} is gone"
        raise StudyError(f"{problem}\n  fix: start it again with `hpo run`") from None
    return replace(opened, study=study)


def _going(
    opened: OpenStudy,
    trial: FrozenTrial,
    files: Sequence[StoredFile],
    held: Collection[int],
    *,
    spare_only: bool,
) -> tuple[StoredFile, ...]:
    """The files of a trial that may be removed."""
    there = {file.path: file for file in files}
    folders = [folder / CHECKPOINTS for folder in attempt_folders(opened.spec, trial.number)]
    checkpoints = [file for file in list_checkpoints(folders) if file.path in there]
    going = {file.path for file in checkpoints if file.batch or file.epoch not in held}
    if spare_only:
        try:
            going -= kept(checkpoints, _best_first(trial, opened.spec.study.direction), _is_readable)
        except (OSError, MemoryError) as error:
            logger.warning("trial %d keeps all its checkpoints: one can't be read now: %s", trial.number, error)
            going = set()
    going |= {path for path in there if path.name.startswith(HALF_WRITTEN)}
    return tuple(there[path] for path in sorted(going))


def kept(
    checkpoints: Sequence[CheckpointFile], best_first: Sequence[int], readable: Callable[[Path], bool]
) -> set[Path]:
    """The checkpoints of a trial that are kept: the newest, and the one of the best epoch up to it.

    Instead of a damaged one, the one before it is kept. Where none can be read, all are kept, since the file
    system may only be unavailable for a moment.

    Args:
        checkpoints: The checkpoints of all attempts, the earliest progress first.
        best_first: Epochs of the trial, the best first.
        readable: Whether a file can be read; called only where other files would be removed.
    """
    sound = list(checkpoints)
    while sound:
        newest = sound[-1]
        best = next((epoch for epoch in best_first if epoch <= newest.epoch), None)
        ends = [file for file in sound if file.progress == (best, 0)]
        stays = {file.path for file in (newest, *ends[-1:])}
        broken = set() if len(stays) == len(checkpoints) else {path for path in stays if not readable(path)}
        if not broken:
            return stays
        sound = [file for file in sound if file.path not in broken]
    return {file.path for file in checkpoints}


def _best_first(trial: FrozenTrial, direction: str) -> list[int]:
    if trial.state == TrialState.COMPLETE:
        best: dict[str, Any] = trial.user_attrs.get(BEST_ATTR) or {}
        return [best["epoch"]] if "epoch" in best else []
    sign = 1 if direction == "minimize" else -1
    values = trial.intermediate_values.items()
    return [step for _, step in sorted((sign * value, step) for step, value in values if math.isfinite(value))]


def _is_readable(path: Path) -> bool:
    """Whether a checkpoint is undamaged.

    Raises:
        OSError: It can't be told now, such as when a network file system is unavailable.
        MemoryError: It can't be told now.
    """
    from trainer.checkpoint.manager import load_checkpoint  # only this needs torch

    try:
        load_checkpoint(path)
    except CheckpointError as error:
        cause = error.__cause__
        if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno not in _UNREADABLE):
            raise cause from None
        return False
    return True


@contextmanager
def _explained(opened: OpenStudy) -> Iterator[None]:
    """Turn errors of the folders and the database into errors that name the fix."""
    try:
        yield
    except StudyError:
        raise
    except OSError as error:
        problem = f"{error.filename or opened.spec.output_dir}: can't be read: {error.strerror or error}"
        raise StudyError(f"{problem}\n  fix: run this as a user who may read it, on a disk that works") from error
    except StorageInternalError as error:
        shown = display_url(opened.spec.storage_url)
        raise DatabaseError(
            f"{shown}: {first_line(error)}\n  fix: see that the database works, then try again"
        ) from error


def _remove(opened: OpenStudy, removal: Removal) -> Removal | None:
    """Remove the files that have not changed, if the trial has not changed either; None where none was removed."""
    try:
        trial = opened.storage.get_trial(removal.trial_id)  # not through a cache: a failed trial may wait again
    except KeyError:
        return None
    if (trial.state, outcome_of(trial)) != (removal.state, removal.outcome):
        return None
    gone = tuple(file for file in removal.files if unlink(file))
    return replace(removal, files=gone) if gone else None
