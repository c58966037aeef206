"""Everything about a study that can be found out without running it: imports, then meaning."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from pathlib import Path

import optuna

from hpo.checks.check import check_metric, check_spec
from hpo.checks.check_callbacks import check_callbacks
from hpo.checks.check_forks import check_forks
from hpo.checks.check_metrics import check_metrics
from hpo.checks.findings import Finding
from hpo.checks.meaning import check_meaning
from hpo.checks.schedule_errors import check_schedule
from hpo.config.paths import join_path
from hpo.config.spec import StudySpec
from hpo.errors import InputError
from hpo.storage.engines import normalize_url
from hpo.study.open_study import start_study
from hpo.trial.callbacks import CALLBACKS, offered_callbacks


def check_study(spec: StudySpec, *, search: bool = True) -> list[Finding]:
    """Check a study that `load_spec` has read, before anything of it runs.

    Args:
        spec: The study.
        search: Also check what the search space may set; otherwise the base config must be complete alone.

    Returns:
        Warnings: what can't be checked before it runs, and likely mistakes.

    Raises:
        InputError: An import path, an argument, a schedule, a metric or a callback does not fit.
    """
    return [*check_imports(spec, search=search), *check_meaning(spec, search=search)]


def check_imports(spec: StudySpec, *, search: bool = True) -> list[Finding]:
    """The first part of `check_study`: the study file against the code that it names.

    Raises:
        InputError: An import path, an argument, a schedule, a metric or a callback does not fit.
    """
    found = check_spec(spec, callbacks=offered_callbacks(), search=search)
    found += check_metrics(spec)
    check_schedule(spec, search=search)
    if search:
        check_forks(spec)
    written, followed = check_callbacks(spec)
    found += followed
    several = spec.study.objectives is not None
    for metric in spec.study.goals:
        path = join_path(("study", "objectives", metric)) if several else "study.metric"
        found += _check_metric(spec, written, metric, path)
    for bound in spec.study.bounds:
        found += _check_metric(spec, written, bound.metric, join_path(("study", "constraints", bound.metric)))
    _check_database(spec)
    return found


def _check_metric(spec: StudySpec, written: Collection[str], metric: str, path: str) -> list[Finding]:
    try:
        return check_metric(spec, written, metric, path=path)
    except InputError as error:
        writer = next((name for name, row in CALLBACKS.items() if metric in row.kind.writes), None)
        if writer is not None:
            error.fix = f"`callbacks: {{{writer}: true}}` records it; {error.fix}"
        raise


def _check_database(spec: StudySpec) -> None:
    try:
        normalize_url(spec.storage_url)
    except InputError as error:
        raise spec.error(error.problem, path="run.storage", value=error.value, fix=error.fix) from error


def check_search(spec: StudySpec) -> None:
    """Start the study in a database that is thrown away: sampler, pruner, and anything else that a start refuses.

    Raises:
        InputError: What `hpo run` would raise.
        StudyError: As well.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="hpo-check-") as folder:
        database = Path(folder, "study.db")
        start_study(spec.with_options(storage=f"sqlite:///{database}")).storage.close()
