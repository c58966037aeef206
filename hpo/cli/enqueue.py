"""`hpo enqueue`."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from hpo.cli.answers import print_json
from hpo.cli.options import Debug, Json, OutputDir, Storage, StudyFile, read_spec
from hpo.config.paths import suggest_name
from hpo.console.output import read_by_others
from hpo.errors import BudgetExhaustedError, InputError, StudyError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hpo.study.open_study import OpenStudy
    from hpo.study.retry import Prospect

Params = Annotated[
    list[str],
    typer.Argument(
        metavar="path=value…",
        help="Values of searched parameters. Keys of study, run and search_space that are not searched override "
        "the study file.",
        show_default=False,
    ),
]
#: A key of a section without searched values.
_KEY: Final = re.compile(r"\s*(study|run)\.(\w+)")


def enqueue(
    study: StudyFile,
    params: Params,
    json_: Json = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Queue a trial with chosen parameters; workers take it before they draw new ones.

    The sampler draws the other values when the trial starts. The trial counts towards `n_trials`. A
    study that does not exist yet is created; a running study takes the trial.

    Example: hpo enqueue study.yaml optimizer.lr=1e-3 model.hidden=64 study.n_trials=50
    """
    del debug
    overrides = [text for text in params if _is_override(text)]
    given = _given([text for text in params if text not in overrides])
    spec = read_spec(study, overrides, require_search_space=True, storage=storage, output_dir=output_dir)
    import optuna

    from hpo.config.schema_space import label
    from hpo.config.space import SearchSpace
    from hpo.search.samplers import make_sampler
    from hpo.study.open_study import start_study
    from hpo.study.queue import checked_point
    from hpo.study.queue import enqueue as put
    from hpo.study.retry import prospect_if_known

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = SearchSpace.from_spec(spec)
    if spec.defines_by_run:
        point = {name: label(value) for name, value in given.items()}
    else:
        point = checked_point(space, make_sampler(spec, space), given)
    with start_study(spec, keep_budget=True) as opened:
        notes = [*opened.notes, *_unheard_of(opened, given)]
        try:
            number, earlier = put(spec, opened.storage, opened.study, point)
        except BudgetExhaustedError as error:
            raise StudyError(
                f"{error}\n  fix: give the study more with `study.n_trials` in its file; enqueued trials count"
            ) from error
        expected, unknown = (None, "") if json_ else prospect_if_known(opened, [number])
    if json_:
        print_json({"study": spec.study.name, "trial": number, "params": spec.values(point), "same_as": earlier})
        return
    with read_by_others():
        for note in notes:
            print(note)
        print(f"trial {number} waits{_what_for(expected)}")
        if earlier:
            print(f"duplicate: trial {', '.join(map(str, earlier))} has the same parameters")
        if unknown:
            print(f"warning: {unknown}", file=sys.stderr)


def _what_for(expected: Prospect | None) -> str:
    """A text on what a queued trial waits for, by what `hpo run` will do with it."""
    if expected is not None and expected.reached is not None:
        return f", and `hpo run` does not take it: {expected.reached}"
    if expected is not None and expected.without_epochs:
        return " for larger `study.epochs`, of which none are left"
    return " for the next free worker"


def _unheard_of(opened: OpenStudy, given: Mapping[str, Any]) -> list[str]:
    """Warnings about parameters that no trial has drawn, for a function that draws them itself: typos, perhaps."""
    trials = opened.study.get_trials(deepcopy=False) if opened.spec.defines_by_run else []
    known = list(dict.fromkeys(name for trial in trials for name in trial.params))
    new = [name for name in given if name not in known] if known else []
    return [f"no trial has drawn `{name}` so far: {suggest_name(name, known, what='known are')}" for name in new]


def _is_override(text: str) -> bool:
    """Whether a text sets a key of the file; a function that draws its parameters may name one `run.length`."""
    from hpo.config.schema_run import RunSection
    from hpo.config.schema_study import StudySection
    from hpo.config.schema_types import Section

    if text.lstrip().startswith(("search_space.", "search_space[")):
        return True
    sections: dict[str, type[Section]] = {"study": StudySection, "run": RunSection}
    key = _KEY.match(text)
    return key is not None and key[2] in sections[key[1]].model_fields


def _given(params: list[str]) -> dict[str, Any]:
    if not params:
        fix = "add one, for example `optimizer.lr=1e-3`"
        raise InputError("no value of a parameter is given", file="command line", path="enqueue", fix=fix)
    given: dict[str, Any] = {}
    for path, value in map(_parsed, params):
        if path in given:
            raise InputError("is given twice", file="command line", path=path, fix="leave one of them out")
        given[path] = value
    return given


def _parsed(text: str) -> tuple[str, Any]:
    from hpo.config.yaml_source import parse_given

    path, equals, value = text.partition("=")
    if not equals:
        fix = "write it as `path=value`, for example `optimizer.lr=1e-3`"
        raise InputError("is not a parameter with its value", file="command line", path=path, fix=fix)
    try:
        return path.strip(), parse_given(value)
    except InputError as error:
        raise InputError(error.problem, file="command line", path=path, value=value, fix=error.fix) from error
