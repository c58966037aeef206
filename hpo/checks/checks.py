"""Runs all checks of a study that need no training: the study file against its code, then likely mistakes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import optuna

from hpo.checks.check import check_spec, once
from hpo.checks.check_built import check_built
from hpo.checks.check_callbacks import check_callbacks
from hpo.checks.check_forks import check_forks
from hpo.checks.check_metrics import check_metric, check_metrics
from hpo.checks.check_model import check_model, check_weights
from hpo.checks.check_objective import check_objective, check_parameters
from hpo.checks.check_rates import check_rates
from hpo.checks.filesystems import refused_writing
from hpo.checks.findings import Finding
from hpo.checks.meaning import check_meaning
from hpo.checks.schedule_errors import check_schedule
from hpo.config.at_import import refuse_search_at_import
from hpo.config.fitting import load_fitting
from hpo.config.paths import PathError, join_path, split_path
from hpo.config.spec import StudySpec
from hpo.config.targets import TARGET
from hpo.errors import InputError, collected, each_error, together
from hpo.storage.engines import normalize_url
from hpo.study.open_study import start_study
from hpo.trial.callbacks import CALLBACKS


def check_study(spec: StudySpec, *, search: bool = True) -> list[Finding]:
    """Check a study that `load_spec` has read, without running it.

    Args:
        spec: The study.
        search: Also check what the search space may set; otherwise the base config must be complete alone.

    Returns:
        Warnings about what can't be checked before it runs, and about likely mistakes.

    Raises:
        InputError: An import path, an argument, a schedule, a metric or a callback does not fit.
    """
    return [*check_imports(spec, search=search), *check_meaning(spec, search=search)]


def all_that_is_wrong(path: Path, overrides: Sequence[str], error: InputError) -> InputError:
    """Combine an error of a study file's structure with those between the valid rest of the file and its code.

    Args:
        path: The study file.
        overrides: The overrides of the command line.
        error: The error that reading the file has raised.
    """
    spec, others = load_fitting(path, overrides)
    structure, imports = [*each_error(error), *others], list[InputError]()
    if spec is not None:
        with collected(imports):
            check_imports(spec)
    known = tuple(item.path for item in structure)
    # A section may look empty because its invalid entries were left out.
    new = (item for item in imports if not item.path.startswith(known) and not _encloses(item.path, known))
    return together([*structure, *new])


def _encloses(path: str, others: Iterable[str]) -> bool:
    return bool(path) and any(other.startswith((f"{path}.", f"{path}[")) for other in others)


def check_imports(spec: StudySpec, *, search: bool = True) -> list[Finding]:
    """The first part of `check_study`: check the study file against the code that it names.

    Raises:
        InputError: An import path, an argument, a schedule, a metric or a callback does not fit.
    """
    if spec.config.objective is not None:
        refuse_search_at_import(spec.folder, str(spec.config.objective[TARGET]))
        if search:
            check_parameters(spec)
    found: list[Finding] = []
    errors: list[InputError] = []
    with collected(errors):
        found += check_spec(spec, search=search)
    broken = {place for error in errors for place in _places_of(error)}
    if spec.config.objective is None:
        found += _check_trainer(spec, broken, errors, search=search)
    elif not broken:
        with collected(errors):
            found += check_objective(spec, search=search)
    with collected(errors):
        _check_database(spec)
    if errors:
        raise together(list(once(errors)))
    return found


def _places_of(error: InputError) -> list[str]:
    """The section that an error is in, and its part: ``callbacks`` and ``callbacks.ema``."""
    first, *rest = split_path(error.path) if error.path else ("",)
    if first == "search_space" and rest:
        with contextlib.suppress(PathError):  # the error is that it is not a path
            first, *rest = split_path(str(rest[0]))
    return [str(first), *([f"{first}.{rest[0]}"] if rest else [])]


def _check_trainer(spec: StudySpec, broken: set[str], errors: list[InputError], *, search: bool) -> list[Finding]:
    """Check what the Trainer uses, without the broken parts: model, metrics, rates, schedule, forks, callbacks."""
    found: list[Finding] = []
    if "model" not in broken:
        with collected(errors):
            check_model(spec, search=search)
    with collected(errors):
        check_weights(spec, search=search)
    with collected(errors):
        found += check_metrics(spec, broken)
    known = len(errors)
    if not broken & {"optimizer", "search_space"}:
        with collected(errors):
            check_rates(spec, search=search)
    if not broken & {"optimizer", "lr_scheduler", "search_space"}:
        with collected(errors):
            check_schedule(spec, search=search)
            if len(errors) == known:  # the checks above have clearer errors
                check_built(spec, search=search)
    if search and not broken & {"model", "search_space"}:
        with collected(errors):
            check_forks(spec)
    written, followed = check_callbacks(spec, broken, errors)
    found += followed
    own = {f"callbacks.{name}" for name in spec.config.callbacks.keys() - CALLBACKS.keys()}
    if not broken & {"step", *own}:  # a step or a user's callback may record any metric
        found += _check_goals(spec, written, errors)
    return found


def _check_goals(spec: StudySpec, written: Collection[str], errors: list[InputError]) -> list[Finding]:
    found: list[Finding] = []
    several = spec.study.objectives is not None
    places = [
        (metric, join_path(("study", "objectives", metric)) if several else "study.metric")
        for metric in spec.study.goals
    ]
    places += [(bound.metric, join_path(("study", "constraints", bound.metric))) for bound in spec.study.bounds]
    for metric, path in places:
        with collected(errors):
            found += _check_metric(spec, written, metric, path)
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
    """Start the study in a temporary database, to find what a start would refuse: sampler, pruner and others.

    Raises:
        InputError: `hpo run` would raise it.
        StudyError: `hpo run` would raise it.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="hpo-check-") as folder:
        database = Path(folder, "study.db")
        start_study(spec.with_options(storage=f"sqlite:///{database}")).storage.close()


def check_output_dir(spec: StudySpec) -> None:
    """Refuse an output folder that can't be created or written to; leaves nothing in it.

    Raises:
        InputError: The folder can't be used.
    """
    problem = refused_writing(spec.output_dir)
    if problem is not None:
        fix = "name a folder that you may write to, there or with `--output-dir`"
        raise spec.error(problem, path="run.output_dir", value=spec.output_dir, fix=fix)
