"""`hpo dashboard` and `hpo delete`."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli.options import Debug, OutputDir, Overrides, Storage, StudyFile, read_spec
from hpo.errors import InputError, StudyError

if TYPE_CHECKING:
    from hpo.study import OpenStudy


def dashboard(
    study: StudyFile,
    overrides: Overrides = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="TCP port; 0 picks a free one.")] = 8080,
    host: Annotated[str, typer.Option(help="Interface; the dashboard has no password.")] = "127.0.0.1",
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Serve optuna-dashboard on the study's storage."""
    del debug
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    from hpo.dashboard import serve
    from hpo.study import load_study

    opened = load_study(spec)
    try:
        serve(opened, port, host)
    finally:
        opened.storage.close()


def delete(
    study: StudyFile,
    overrides: Overrides = None,
    yes: Annotated[bool, typer.Option("--yes", help="Really delete.")] = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Delete a study: its trials in the storage, and its output folder."""
    del debug
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    if not yes:
        raise InputError(
            f"deletes the study {spec.study.name}, and the trials, the logs and the final training in "
            f"{spec.output_dir}",
            path="delete",
            fix="say so with `--yes`",
        )
    from hpo.study import load_study

    opened = load_study(spec)
    try:
        _delete(opened)
    finally:
        opened.storage.close()
    print(f"deleted the study {spec.study.name}")


def _delete(opened: OpenStudy) -> None:
    import shutil

    from optuna.trial import TrialState

    opened.requeue_dead()
    running = opened.count(TrialState.RUNNING)
    if running:
        raise StudyError(f"{running} trials are running\n  fix: end the `hpo run` that runs them first")
    opened.storage.delete_study(opened.study_id)
    for name in ("trials", "final", "logs"):
        folder = opened.spec.output_dir / name
        if folder.exists():
            shutil.rmtree(folder)
    with contextlib.suppress(OSError):  # what else lies there, such as the database, stays
        opened.spec.output_dir.rmdir()
