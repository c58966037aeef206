"""What `import hpo` gives to Python code: studies run, read back, and their models, as the commands do it.

Every function takes a study file or an `hpo.Study`, and says what is wrong with `hpo.InputError` (something given
can't be used) or `hpo.StudyError` (the study failed, or lacks what was asked for).
"""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from hpo.api.function_study import study_of_function
from hpo.api.run_result import RunResult
from hpo.api.study import Study, refuse_unwritable
from hpo.api.values import Call
from hpo.config.marks import COMMAND_LINE
from hpo.config.paths import nearest, show
from hpo.config.spec import StudySpec, load_spec
from hpo.config.study_modules import forget_modules
from hpo.errors import InputError, each_error

if TYPE_CHECKING:
    import optuna
    import torch
    from torch import nn

    from hpo.checks.findings import Finding
    from hpo.execution.placing import Placing
    from hpo.execution.run import Listener
    from hpo.study.open_study import OpenStudy

Overrides = Sequence[str] | Mapping[str, Any]


def run(
    study: str | Path | Study | Call | Callable[..., Any],
    overrides: Overrides = (),
    *,
    search_space: Mapping[str, Any] | None = None,
    metric: str | None = None,
    direction: str | None = None,
    name: str | None = None,
    workers: int | None = None,
    n_trials: int | None = None,
    timeout: float | str | None = None,
    devices: str | Sequence[str] | None = None,
    storage: str | None = None,
    output_dir: str | Path | None = None,
    accept_code_change: bool = False,
    widen: bool = False,
    progress: bool = True,
    **section: Any,
) -> RunResult:
    """Start or resume a study, and run it until its trials have ended, as `hpo run` does.

    Workers are separate processes that do not run the calling script. So no ``if __name__ == "__main__":`` is
    needed, unless that script defines the study's classes or function. If the study names an engine (``run.on``),
    agents on other machines train, as with ``hpo run --on``.

    Args:
        study: The study file, an `hpo.Study`, a function that trains, an Optuna objective, or an ``hpo.Call``.
        overrides: ``key=value`` texts as on the command line, or dotted path → value.
        search_space: For a function that trains: argument → `hpo.Float`, `hpo.Int` or `hpo.Categorical`.
        metric: For a function: the metric to optimise. Default: ``val_loss``, or ``value`` without a search space.
        direction: For a function: ``"minimize"`` or ``"maximize"``; required unless the metric is a loss.
        name: For a function: the study's name. Default: made of the names of its module and of the function.
        workers: Number of worker processes. Default: one for each GPU, or one.
        n_trials: Total number of trials to finish, earlier runs included.
        timeout: Time after which workers checkpoint their trials and stop: seconds, or text such as ``"2h"``.
        devices: Devices to share, such as ``"cuda:0,cuda:1"``; ``"auto"``: every GPU, or the CPU.
        storage: URL of the database; replaces the one of the study.
        output_dir: Folder for everything that the study writes.
        accept_code_change: Continue a study whose code has changed since its start; see docs/reliability.md.
        widen: Continue with a wider search space than at the study's start; see docs/how-to/search-spaces.md.
        progress: Print a line for each trial that ends; if False, only warnings and errors.
        **section: For a function: further keys of the ``study`` section, such as ``sampler`` and ``pruner``.

    Raises:
        InputError: The study or an argument can't be used; nothing has been started.
        StudyError: The study failed, or all its trials have ended and none of them is complete.
        KeyboardInterrupt: Ctrl-C or a signal, after each worker has saved its trial; the same call resumes it.
            With an engine, only Ctrl-C stops the agents; after a signal the result's ``ending`` is ``left``.
    """
    options = {"workers": workers, "n_trials": n_trials, "timeout": timeout, "devices": devices}
    switches = {"accept_code_change": accept_code_change, "widen": widen, "progress": progress}
    of_function = {"search_space": search_space, "metric": metric, "direction": direction, "name": name, **section}
    with _spoken_in_python():
        _refuse_other_than_booleans(switches)
        study = _known(study, of_function, n_trials)
        spec = _spec(study, overrides, search=True, storage=storage, output_dir=output_dir, **options)
        ending = _ran(study, _plan(study, overrides, spec), **switches)
    if ending == "interrupted":
        raise KeyboardInterrupt
    return _result(spec, ending)


def _refuse_other_than_booleans(switches: Mapping[str, Any]) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):  # a text such as "no" would be true
            raise InputError(
                "must be true or false", path=name, value=show(repr(value)), fix=f"write `{name}=True`"
            )


def _ran(
    study: str | Path | Study, plan: StudySpec | Placing, *, progress: bool, accept_code_change: bool, widen: bool
) -> str:
    """Run a study here, or on an engine; returns why the run has ended.

    The file of an `hpo.Study` is written after all checks; whether it can be written is checked first.
    """
    from hpo.execution.placing import Placing, run_on
    from hpo.execution.run import run_study

    if isinstance(study, Study):
        refuse_unwritable(study)

    def listen(opened: OpenStudy) -> Listener:
        if isinstance(study, Study):
            study.write()
        from hpo.console.lines import Reporter

        return Reporter(opened, quiet=not progress)

    if isinstance(plan, Placing):
        return run_on(plan, listen, _warn, accept_code_change=accept_code_change, widen=widen).value
    return run_study(plan, listen, _warn, accept_code_change=accept_code_change, widen=widen).value


def _plan(study: str | Path | Study, overrides: Overrides, spec: StudySpec) -> StudySpec | Placing:
    """The study for workers here; or, with an engine, the placing of agents with what they need of this call."""
    if spec.run.on is None:
        return spec
    from hpo.execution.placing import placing_of

    return placing_of(spec, _texts(overrides), lambda texts: _spec(study, texts))


def load_study(
    study: str | Path | Study,
    overrides: Overrides = (),
    *,
    storage: str | None = None,
    output_dir: str | Path | None = None,
) -> optuna.Study:
    """The `optuna.Study` of a started study, read-only; works while the study runs, too.

    Everything that reads works on it: `optuna.visualization`, `optuna.importance`, ``trials_dataframe()``,
    ``best_trials``. Methods that write (``ask``, ``tell``, ``optimize``, ``enqueue_trial``, ``set_user_attr``)
    raise `hpo.StudyError`, because no worker would run a trial that is changed here. To experiment, copy the
    trials into a study of your own: ``optuna.create_study().add_trials(study.trials)``.

    Args:
        study: The study file, or an `hpo.Study`.
        overrides: As given to `hpo.run`.
        storage: As given to `hpo.run`.
        output_dir: As given to `hpo.run`.

    Raises:
        InputError: The study or an argument can't be used.
        StudyError: It has not been started.
    """
    with _spoken_in_python(), _opened(_spec(study, overrides, storage=storage, output_dir=output_dir)) as opened:
        return _for_reading(opened)


def best_params(
    study: str | Path | Study,
    overrides: Overrides = (),
    *,
    trial: str | int = "best",
    storage: str | None = None,
    output_dir: str | Path | None = None,
) -> dict[str, Any]:
    """The parameters of the best trial, or of the given one: dotted path → value.

    They can be passed as `overrides` to the functions here.

    Args:
        study: The study file, or an `hpo.Study`.
        overrides: As given to `hpo.run`.
        trial: ``"best"`` or a trial's number.
        storage: As given to `hpo.run`.
        output_dir: As given to `hpo.run`.

    Raises:
        InputError: The study or an argument can't be used.
        StudyError: There is no such study or trial, or several trials are best.
    """
    which = _which(trial)
    with _spoken_in_python(), _opened(_spec(study, overrides, storage=storage, output_dir=output_dir)) as opened:
        from hpo.final.models import find_trial

        return opened.spec.values(find_trial(opened, which).params)


def load_best_model(
    study: str | Path | Study,
    overrides: Overrides = (),
    *,
    trial: str | int = "best",
    device: str | torch.device = "cpu",
    storage: str | None = None,
    output_dir: str | Path | None = None,
) -> nn.Module:
    """The model of the best trial, or of the given one, with the weights of its best epoch, in eval mode.

    Warns if the study's code has changed since the trial ran: the same weights may then compute something else.

    Args:
        study: The study file, or an `hpo.Study`.
        overrides: As given to `hpo.run`.
        trial: ``"best"`` or a trial's number.
        device: The device that the model is moved to.
        storage: As given to `hpo.run`.
        output_dir: As given to `hpo.run`.

    Raises:
        InputError: The study or an argument can't be used.
        StudyError: There is no such study, trial or checkpoint, or the weights do not fit the model's code.
    """
    from hpo.final.models import load_model

    with _spoken_in_python():
        spec = _spec(study, overrides, storage=storage, output_dir=output_dir)
        forget_modules(spec.folder)
        return load_model(spec, _which(trial), device=device, warn=_warn)


def _known(
    study: str | Path | Study | Call | Callable[..., Any], of_function: Mapping[str, Any], n_trials: int | None
) -> str | Path | Study:
    """The study, which is built first if a function was given."""
    given = {name: value for name, value in of_function.items() if value is not None}
    if isinstance(study, str | Path | Study):
        if given:
            name, fix = next(iter(given)), "write it into the study; it is for a function only"
            guess = nearest(name, [each for each in inspect.signature(run).parameters if each not in of_function])
            fix = f"did you mean `{guess}`? else {fix}" if guess else fix
            raise InputError("can't stand beside a study", path=name, fix=fix)
        return study
    if n_trials is not None:
        given["n_trials"] = n_trials
    return study_of_function(study, **given)


def _result(spec: StudySpec, ending: str) -> RunResult:
    from hpo.study.status import study_status

    with _opened(spec) as opened:
        status = study_status(opened)
        names = ("n_trials", "finished", "outcomes", "best")
        return RunResult(study=_for_reading(opened), **{name: status[name] for name in names}, ending=ending)


def _spec(study: str | Path | Study, overrides: Overrides, *, search: bool = False, **options: Any) -> StudySpec:
    texts = _texts(overrides)
    if isinstance(study, Study):
        return study.spec(texts).with_options(**options)
    if not isinstance(study, str | Path):
        problem, fix = f"is an object of {type(study).__name__}", "give a study file or an `hpo.Study`"
        raise InputError(problem, path="study", value=show(repr(study)), fix=fix)
    return load_spec(Path(study), texts, require_search_space=search).with_options(**options)


def _texts(overrides: Overrides) -> list[str]:
    """Overrides as on the command line, with values as JSON, which YAML can read."""
    if isinstance(overrides, str):
        raise InputError("is one text", path="overrides", value=overrides, fix="give a list of them, or a mapping")
    texts: list[str] = []
    if not isinstance(overrides, Mapping):
        texts += overrides if isinstance(overrides, Iterable) else [overrides]
        if not all(isinstance(text, str) for text in texts):
            fix = "give a list of texts such as `trainer.max_epochs=5`, or a mapping"
            raise InputError(
                "holds something that is not text", path="overrides", value=show(repr(overrides)), fix=fix
            )
        return texts
    for path, value in overrides.items():
        try:
            texts.append(f"{path}={json.dumps(value, allow_nan=False)}")
        except (TypeError, ValueError) as error:
            fix = "give text, a finite number, True, False, None, or lists and mappings of those"
            raise InputError(f"{error}", path=str(path), value=show(repr(value)), fix=fix) from error
    return texts


def _which(trial: str | int) -> str:
    if str(trial) != "best" and not str(trial).isdecimal():
        raise InputError("is neither `best` nor a number", path="trial", value=str(trial), fix="see `hpo trials`")
    return str(trial)


@contextlib.contextmanager
def _spoken_in_python() -> Iterator[None]:
    """Rewrite errors of the block for Python: they don't name the command line, and hide pydantic's own error."""
    try:
        yield
    except InputError as error:
        for each in {error, *each_error(error)}:
            if each.file == COMMAND_LINE:
                each.file = "this call"
        if isinstance(error.__cause__, ValidationError):
            raise error from None
        raise


def _warn(finding: Finding | str) -> None:
    """Warn, with the line that called into this package as the place."""
    level, frame = 1, sys._getframe()  # noqa: SLF001 - the only way to see who calls
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith("hpo."):
        level, frame = level + 1, frame.f_back
    warnings.warn(str(finding), stacklevel=level)


def _opened(spec: StudySpec) -> OpenStudy:
    from hpo.study import open_study

    return open_study.load_study(spec)


def _for_reading(opened: OpenStudy) -> optuna.Study:
    """The `optuna.Study` on a read-only storage, which opens its own connections when it is used."""
    import optuna

    from hpo.api.read_only import ReadOnlyCache

    return optuna.load_study(
        study_name=opened.spec.study.name,
        storage=ReadOnlyCache(opened.storage),
        sampler=opened.study.sampler,
        pruner=opened.study.pruner,
    )
