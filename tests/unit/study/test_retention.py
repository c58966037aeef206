"""Which checkpoints a clean and a quota leave, for studies of all kinds of trials."""

from __future__ import annotations

import errno
import functools
import io
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState

from hpo.errors import StudyError
from hpo.storage.attributes import BEST_ATTR, OUTCOME_ATTR, SAME_AS_ATTR
from hpo.storage.outage import DatabaseError
from hpo.study.checkpoint_files import scan
from hpo.study.folders import attempt_folders
from hpo.study.open_study import OpenStudy, load_study
from hpo.study.retention import _remove, clean, enforce_quota, kept, removals
from hpo.study.retry import reopen
from hpo.study.status import study_best
from tests.support.studies import Studies, ask
from trainer.checkpoint.files import CheckpointError, CheckpointFile
from trainer.checkpoint.manager import find_checkpoint, load_checkpoint, newest_checkpoint

pytestmark = pytest.mark.full

KINDS = ("complete", "pruned", "diverged", "failed", "waiting", "running")
EPOCHS = 4


@dataclass(frozen=True, order=True)
class File:
    """A checkpoint of a made-up trial."""

    attempt: int
    epoch: int
    batch: int = 0
    sound: bool = field(default=True, compare=False)


@dataclass(frozen=True)
class Made:
    """A made-up trial: its values by epoch, and its files."""

    kind: str
    values: tuple[float, ...]
    files: tuple[File, ...]

    @property
    def best_epoch(self) -> int:
        return self.values.index(min(self.values)) + 1


def complete(*values: float, epochs: Sequence[int] = (1, 2, 3, 4)) -> Made:
    return Made("complete", values, tuple(File(1, epoch) for epoch in epochs))


def made(kind: str, *epochs: int) -> Made:
    return Made(kind, (2.0, 1.0, 3.0, 4.0), tuple(File(1, epoch) for epoch in epochs or (1, 2, 3, 4)))


FILES = st.builds(
    File,
    st.integers(1, 2),
    st.integers(1, EPOCHS),
    st.sampled_from([0, 0, 5]),
    st.sampled_from([True, True, False]),
)
TRIALS = st.builds(
    Made,
    st.sampled_from(KINDS),
    st.lists(st.integers(1, 9).map(float), min_size=EPOCHS, max_size=EPOCHS).map(tuple),
    st.sets(FILES, max_size=5).map(lambda files: tuple(sorted(files))),
)


@functools.cache
def content() -> bytes:
    buffer = io.BytesIO()
    torch.save({"state": {"epoch": 1}}, buffer)
    return buffer.getvalue()


def checkpoints(opened: OpenStudy, number: int) -> list[Path]:
    trial = opened.spec.output_dir / "trials" / str(number)
    return [trial / f"attempt-{attempt}" / "checkpoints" for attempt in (1, 2)]


def play(view: OpenStudy, trials: Sequence[Made]) -> None:
    """Trials that ended as they are to, with their files, without training."""
    waiting = []
    for one in trials:
        trial, _ = ask(view)
        for step, value in enumerate(one.values, start=1):
            trial.report(value, step)
        for file in one.files:
            name = f"epoch-{file.epoch:05d}" + (f"-batch-{file.batch:06d}" if file.batch else "")
            path = checkpoints(view, trial.number)[file.attempt - 1] / f"{name}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content() if file.sound else b"damaged")
            (path.parent.parent / "metrics.csv").write_text("epoch")
        if one.kind == "complete":
            found = find_checkpoint(checkpoints(view, trial.number), one.best_epoch)
            relative = None if found is None else str(found[0].path.relative_to(view.spec.output_dir))
            trial.set_user_attr(BEST_ATTR, {"epoch": one.best_epoch, "metrics": {}, "checkpoint": relative})
            view.study.tell(trial, min(one.values))
        elif one.kind == "diverged":
            trial.set_user_attr(OUTCOME_ATTR, "diverged")
            view.study.tell(trial, math.inf)
        elif one.kind == "waiting":
            waiting.append(trial._trial_id)
        elif one.kind != "running":
            view.study.tell(trial, state=TrialState.PRUNED if one.kind == "pruned" else TrialState.FAIL)
    for trial_id in waiting:  # now, or the next ask would take it
        view.storage.requeue(trial_id)


@contextmanager
def study_of(studies: Studies, trials: Sequence[Made], *overrides: str) -> Iterator[OpenStudy]:
    """A study of such trials as the command line sees it."""
    with studies.open("study.n_trials=20", *overrides) as (view,):
        play(view, trials)
        with load_study(view.spec) as plain:
            yield plain


def left(opened: OpenStudy, number: int) -> list[str]:
    return [path.name for folder in checkpoints(opened, number) for path in sorted(folder.glob("*"))]


def everything(opened: OpenStudy) -> set[Path]:
    return {path for path in opened.spec.output_dir.rglob("*") if path.is_file() and "study.db" not in path.name}


def loaded(opened: OpenStudy, number: int, epoch: int | None = None) -> Path | None:
    """The file that a worker, or final training, would resume from."""
    folders = checkpoints(opened, number)
    found = newest_checkpoint(folders) if epoch is None else find_checkpoint(folders, epoch)
    return None if found is None else found[0].path


def matters(opened: OpenStudy, trials: Sequence[Made], best: int) -> list[set[Path | None]]:
    """For each trial what may still be loaded; for a running one all that there is."""
    order = sorted((min(one.values), number) for number, one in enumerate(trials) if one.kind == "complete")
    first = {number for _, number in order[:best]}
    needed: list[set[Path | None]] = []
    for number, one in enumerate(trials):
        if one.kind == "running":
            needed.append({path for folder in checkpoints(opened, number) for path in folder.glob("*")})
        elif one.kind in {"failed", "waiting"} or number in first:
            newest = loaded(opened, number)
            reached = one.values if newest is None else one.values[: int(newest.name[6:11])]
            best_so_far = one.best_epoch if one.kind == "complete" else reached.index(min(reached)) + 1
            needed.append({newest, loaded(opened, number, best_so_far)})
        else:
            needed.append(set())
    return needed


@settings(max_examples=12, deadline=None)
@given(trials=st.lists(TRIALS, min_size=1, max_size=7), best=st.integers(1, 3))
def test_what_may_be_loaded_stays_and_a_second_clean_finds_nothing(
    ready_sqlite_file: Path, trials: list[Made], best: int
) -> None:
    with TemporaryDirectory() as folder, study_of(Studies(Path(folder), ready_sqlite_file), trials) as opened:
        needed, before = matters(opened, trials, best), everything(opened)
        planned = clean(opened, keep_best=best, dry_run=True)
        assert everything(opened) == before
        done = clean(opened, keep_best=best)
        assert (done.removed, done.stays) == (planned.removed, planned.stays)
        gone = {file.path for removal in done.removed for file in removal.files}
        assert everything(opened) == before - gone
        assert all(path.parent.name == "checkpoints" for path in gone)
        assert matters(opened, trials, best) == needed
        touched = {removal.number for removal in done.removed}  # of others nothing may go, damaged or not
        for number, (one, paths) in enumerate(zip(trials, needed, strict=True)):
            if one.kind in {"pruned", "diverged"}:
                assert left(opened, number) == []
            elif one.kind != "running" and None not in paths and number in touched:
                assert set(left(opened, number)) == {path.name for path in paths if path}
        assert clean(opened, keep_best=best).removed == []


CHECKPOINTS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=6).map(
    lambda found: [CheckpointFile(epoch, batch, Path(str(i))) for i, (epoch, batch) in enumerate(sorted(found))]
)


@given(CHECKPOINTS, st.permutations(range(1, 6)), st.sets(st.integers(0, 5)))
def test_the_rule(files: list[CheckpointFile], best_first: list[int], damaged: set[int]) -> None:
    def readable(path: Path) -> bool:
        return int(path.name) not in damaged

    stays = [file for file in files if file.path in kept(files, best_first, readable)]
    sound = [file for file in files if readable(file.path)]
    if sound:
        assert sound[-1] in stays or len(stays) == len(files)
        reached = [epoch for epoch in best_first if epoch <= sound[-1].epoch]
        ends = [file for file in sound if reached and file.progress == (reached[0], 0)]
        assert ends[-1:] == [file for file in ends[-1:] if file in stays]
        assert len(stays) <= 2
    else:
        assert stays == files
    assert {file.path for file in stays} == kept(stays, best_first, readable)


def test_the_best_trials_checkpoint_is_there_after_a_clean(studies: Studies) -> None:
    trials = [complete(4, 3, 2, 5), complete(4, 1, 2, 5), complete(4, 3, 2.5, 5), complete(9, 9, 9, 9)]
    with study_of(studies, trials) as opened:
        clean(opened, keep_best=2)
        checkpoint = study_best(opened)["checkpoint"]
        assert checkpoint.endswith("trials/1/attempt-1/checkpoints/epoch-00002.pt")
        assert Path(checkpoint).exists()
        assert [left(opened, number) for number in (0, 2, 3)] == [["epoch-00003.pt", "epoch-00004.pt"], [], []]


def test_a_trial_that_took_over_a_result_keeps_those_of_the_trial_that_trained(studies: Studies) -> None:
    with studies.open("study.n_trials=20") as (view,):
        first, _ = ask(view)
        trials = [complete(1, 2, epochs=(1,)), complete(2, 3, epochs=(1,)), complete(3, 4, epochs=(1,))]
        play(view, trials)
        first.set_user_attr(BEST_ATTR, {"epoch": 1, "metrics": {}, "checkpoint": None})
        first.set_user_attr(SAME_AS_ATTR, 1)  # it was enqueued, and taken when the other had ended
        view.study.tell(first, 1.0)
        assert [removal.number for removal in clean(view, keep_best=2).removed] == [3]
        assert [left(view, number) for number in (1, 2)] == [["epoch-00001.pt"]] * 2


def test_what_killed_writers_left_goes_but_not_in_a_running_trial(studies: Studies) -> None:
    with study_of(studies, [made("running", 1), made("waiting", 1), complete(1, 2, epochs=[1])]) as opened:
        for number in range(3):
            (checkpoints(opened, number)[0] / ".epoch-00002.pt.4711").write_bytes(b"half")
            (checkpoints(opened, number)[0] / "notes.txt").write_text("mine")
        assert [removal.number for removal in clean(opened).removed] == [1, 2]
        half = ".epoch-00002.pt.4711"
        names = [half, "epoch-00001.pt", "notes.txt"]
        assert [left(opened, number) for number in range(3)] == [names, names[1:], names[1:]]


def test_a_trial_that_has_been_taken_since_the_look_is_left_alone(studies: Studies) -> None:
    with study_of(studies, [made("waiting")]) as opened:
        (plan,) = removals(opened, scan(opened.spec.output_dir), 1)
        opened.study.ask()
        assert _remove(opened, plan) is None
        assert len(left(opened, 0)) == 4


def test_a_file_that_is_newer_than_the_look_stays(studies: Studies) -> None:
    with study_of(studies, [made("pruned", 1, 2)]) as opened:
        (plan,) = removals(opened, scan(opened.spec.output_dir), 1)
        os.utime(plan.files[0].path, ns=(0, plan.files[0].changed + 1))
        plan.files[1].path.unlink()
        assert _remove(opened, plan) is None
        assert left(opened, 0) == ["epoch-00001.pt"]


def test_what_cannot_be_removed_is_named(studies: Studies) -> None:
    with study_of(studies, [made("pruned", 1)]) as opened:
        (checkpoints(opened, 0)[0] / "epoch-00002.pt").mkdir()
        with pytest.raises(StudyError, match=r"epoch-00002.pt: can't be removed: Is a directory\n  fix: "):
            clean(opened)


LEAST_USEFUL_FIRST = [
    made("running"),
    made("waiting"),
    complete(1, 2, 3, 4),
    complete(2, 3, 4, 5),
    complete(3, 4, 5, 6),
    made("failed"),
    made("pruned"),
    made("diverged"),
]


@pytest.mark.parametrize(
    ("files", "removed"),
    [
        (32, []),
        (31, [6]),
        (25, [6, 7]),
        (24, [6, 7]),
        (23, [4, 6, 7]),
        (17, [3, 4, 6, 7]),
        (15, [1, 3, 4, 6, 7]),
        (10, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_a_quota_takes_the_least_useful_first_and_no_more_than_needed(
    studies: Studies, files: int, removed: list[int]
) -> None:
    quota = f"run.disk_quota={files * len(content())}"
    with study_of(studies, LEAST_USEFUL_FIRST, quota, "run.keep_best=1") as opened:
        report = enforce_quota(opened)
        if report is None:
            assert removed == []
        else:
            assert sorted(removal.number for removal in report.removed) == removed
            assert report.exceeded is False
            assert "removed" in str(report)
        assert len(left(opened, 0)) == 4
        assert enforce_quota(opened) is None


def test_a_quota_that_cannot_be_kept_is_said(studies: Studies) -> None:
    with study_of(studies, [made("running"), made("waiting")], "run.disk_quota=1kB") as opened:
        first, second = enforce_quota(opened), enforce_quota(opened)
        assert first is not None
        assert second is not None
        assert first.exceeded
        assert second == replace(first, removed=[])
        assert "of checkpoints, 1 kB allowed; nothing more can be removed\n  fix: " in str(second)


NO_VERDICT = [OSError(errno.EIO, "Input/output error"), OSError(errno.EMFILE, "Too many files"), MemoryError()]


@pytest.mark.parametrize("error", NO_VERDICT, ids=["EIO", "EMFILE", "memory"])
def test_a_trial_whose_checkpoints_cannot_be_read_for_now_keeps_them_all(
    studies: Studies, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    with study_of(studies, [made("failed"), made("pruned")]) as opened:

        def load(path: Path) -> dict[str, Any]:
            if path.name == "epoch-00004.pt":
                raise CheckpointError("no readable checkpoint") from error
            return load_checkpoint(path)

        monkeypatch.setattr("trainer.checkpoint.manager.load_checkpoint", load)
        assert [removal.number for removal in clean(opened).removed] == [1]
        assert len(left(opened, 0)) == 4


@pytest.mark.parametrize(("files", "numbers"), [(12, set()), (11, {"1"})])
def test_a_quota_reads_no_checkpoints_before_it_needs_to(
    studies: Studies, monkeypatch: pytest.MonkeyPatch, files: int, numbers: set[str]
) -> None:
    read: list[Path] = []
    monkeypatch.setattr("hpo.study.retention._is_readable", lambda path: not read.append(path))
    trials = [made("pruned"), made("failed"), made("failed"), complete(1, 2, 3, 4)]
    with study_of(studies, trials, f"run.disk_quota={files * len(content())}") as opened:
        assert enforce_quota(opened) is not None
        assert {path.parents[2].name for path in read} == numbers


@pytest.mark.parametrize("end", ["pruned", "complete"])
def test_a_quota_knows_how_a_trial_that_was_retried_has_ended(studies: Studies, end: str) -> None:
    trials = [made("failed"), complete(2, 3, 4, 5)]
    with study_of(studies, trials, f"run.disk_quota={5 * len(content())}", "run.keep_best=1") as opened:
        assert len(opened.study.get_trials()) == 2  # from now on this process has seen it fail
        reopen(load_study(opened.spec), [0])
        again = load_study(opened.spec)
        trial = again.study.ask()
        if end == "complete":
            again.study.tell(trial, 1.0)
        else:
            again.study.tell(trial, state=TrialState.PRUNED)
        again.storage.close()
        enforce_quota(opened)
        assert [len(left(opened, number)) for number in (0, 1)] == ([4, 0] if end == "complete" else [0, 4])


def test_what_is_no_attempts_folder_is_left_alone(studies: Studies) -> None:
    with study_of(studies, [made("pruned"), made("waiting")]) as opened:
        for number in (0, 1):
            folder = checkpoints(opened, number)[0].parent
            shutil.copytree(folder, folder.with_name("attempt-1.bak"))
            (folder.parent / "attempt-10").mkdir()
            (folder.parent / "attempt-2").mkdir()
        assert [folder.name for folder in attempt_folders(opened.spec, 0)] == [
            "attempt-1",
            "attempt-2",
            "attempt-10",
        ]
        clean(opened)
        copies = [
            folder.parent.with_name("attempt-1.bak") for folder in (checkpoints(opened, n)[0] for n in (0, 1))
        ]
        assert [len(list((copy / "checkpoints").iterdir())) for copy in copies] == [4, 4]
        assert left(opened, 0) == []


@pytest.mark.parametrize("place", [".", "attempt-1", "attempt-1/checkpoints"])
def test_what_a_link_leads_to_is_not_cleaned(studies: Studies, place: str) -> None:
    """It may be what another study resumes from."""
    with study_of(studies, [made("pruned"), made("pruned")]) as opened:
        linked = opened.spec.output_dir / "trials" / "0" / place
        elsewhere = studies.folder / "elsewhere"
        linked.rename(elsewhere)
        linked.symlink_to(elsewhere, target_is_directory=True)
        report = clean(opened)
        assert [removal.number for removal in report.removed] == [1]
        assert report.stays == 0
        assert len(list(elsewhere.rglob("*.pt"))) == 4


def test_the_output_folder_may_be_a_link(studies: Studies) -> None:
    with study_of(studies, [made("pruned")]) as opened:
        place = opened.spec.output_dir
        place.rename(studies.folder / "elsewhere")
        place.symlink_to(studies.folder / "elsewhere", target_is_directory=True)
        assert len(clean(opened).removed[0].files) == 4


def test_a_quota_that_cannot_look_says_what_to_do(studies: Studies, monkeypatch: pytest.MonkeyPatch) -> None:
    with study_of(studies, [made("pruned")], "run.disk_quota=1kB") as opened:
        folder = checkpoints(opened, 0)[0]

        def refuse(path: Any) -> Any:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        with monkeypatch.context() as patch:
            patch.setattr(os, "scandir", refuse)
            with pytest.raises(StudyError, match=r"trials: can't be read: Permission denied\n  fix: "):
                enforce_quota(opened)
        with opened.storage.engine.begin() as conn:
            conn.exec_driver_sql("ALTER TABLE trials RENAME TO hidden")
        with pytest.raises(DatabaseError, match=r"study.db: .*no such table.*\n  fix: "):
            enforce_quota(opened)
        with opened.storage.engine.begin() as conn:
            conn.exec_driver_sql("ALTER TABLE hidden RENAME TO trials")
        opened.storage.delete_study(opened.study_id)
        with pytest.raises(StudyError, match=r"the study .* is gone\n  fix: "):
            enforce_quota(opened)
        assert len(list(folder.iterdir())) == 4


def test_without_a_quota_nothing_is_done(studies: Studies) -> None:
    with study_of(studies, [made("pruned")]) as opened:
        assert enforce_quota(opened) is None
        assert len(left(opened, 0)) == 4
