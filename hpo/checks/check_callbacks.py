"""Builds a trial's callbacks before a run, to find what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, Final

from hpo.checks.check_metrics import check_metric
from hpo.checks.findings import Finding
from hpo.config.paths import join_path, split_path
from hpo.config.schema_space import values_or_ends
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.config.targets import TARGET
from hpo.errors import InputError, collected
from hpo.trial.builder import Builder
from hpo.trial.callbacks import CALLBACKS, configured
from hpo.trial.place import RunPlace
from trainer import Callback
from trainer.callbacks import NaNDetection
from trainer.recorded import names_in

_ALWAYS_ON: Final = "can't be switched off"
_NEEDED: Final = "outcomes and resuming depend on it"


def check_callbacks(
    spec: StudySpec, broken: Collection[str], errors: list[InputError]
) -> tuple[set[str], list[Finding]]:
    """Refuse to switch off a required callback, and arguments that a built-in callback refuses.

    Args:
        spec: The study.
        broken: Sections, and parts of them as ``callbacks.ema``, that are known to be wrong: they are left out.
        errors: Gets an error for each callback that is switched off but required, lacks another one, can't be
            built (also with a searched value), or follows a metric that nothing records.

    Returns:
        The names of the metrics that the built-in callbacks write; warnings about metrics that callbacks follow.
    """
    for name, row in CALLBACKS.items():
        if row.required and spec.config.callbacks.get(name) is False:
            fix = f"remove the line: {_NEEDED}"
            errors.append(spec.error(_ALWAYS_ON, path=f"callbacks.{name}", value=False, fix=fix))
    with collected(errors):
        _check_steps(spec)
    builder, place = Builder(spec), RunPlace(spec.output_dir, "check")
    made, written = _made(builder, place, broken, errors)
    searched = _check_search(builder, place, broken, errors)
    found: list[Finding] = []
    for name, arguments in configured(spec.base_config()).items():
        path = join_path(("callbacks", name))
        if name in made and name in spec.config.callbacks:
            with collected(errors):
                found += _check_followed(spec, written, made[name], path, arguments)
        if TARGET in arguments and path not in broken:
            with collected(errors):
                kind = builder.resolver.resolve(arguments[TARGET])
                found += _check_followed(spec, written, kind, path, arguments)
    for path, callback in searched:
        with collected(errors):
            found += _check_followed(spec, written, callback, path)
    return written, found


def _check_steps(spec: StudySpec) -> None:
    """Refuse a console that prints single steps if no callback records them."""
    run = configured(spec.base_config())
    every = run.get("console", {}).get("every_n_steps")
    if every is not None and "step_metrics" not in run and not any(TARGET in node for node in run.values()):
        fix = "add step_metrics: true to the callbacks, or remove the line"
        problem = "the console can't print steps that nothing records"
        raise spec.error(problem, path="callbacks.console.every_n_steps", value=every, fix=fix)


def _made(
    builder: Builder, place: RunPlace, broken: Collection[str], errors: list[InputError]
) -> tuple[dict[str, Callback], set[str]]:
    """The built-in callbacks of the base config, and the metrics that they write."""
    made: dict[str, Callback] = {}
    written: set[str] = set()
    for name, arguments in configured(builder.spec.base_config()).items():
        if name not in CALLBACKS or TARGET in arguments:
            continue
        writes: Any = CALLBACKS[name].kind.writes
        if f"callbacks.{name}" not in broken:
            with collected(errors):
                made[name] = builder.built_in(name, arguments, place)
                writes = made[name].writes
        written |= set(writes) if isinstance(writes, tuple) else set()
    return made, written


def _check_followed(
    spec: StudySpec,
    written: Collection[str],
    callback: Callback | Callable[..., Any],
    path: str,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> list[Finding]:
    """Check that something records the metrics that a callback, or a class of the user's, declares to follow."""
    names = set(names_in(getattr(callback, "reads", ())))
    if isinstance(callback, NaNDetection):
        names |= set(callback.metrics)
    if isinstance(callback, type) and issubclass(callback, Callback) and isinstance(arguments.get("monitor"), str):
        names.add(arguments["monitor"])
    # The study's own metrics are checked separately.
    wanted = sorted(names - {"*", *spec.study.goals})
    found = ((metric, _given_at(path, arguments, metric)) for metric in wanted)
    return [item for metric, place in found for item in check_metric(spec, written, metric, path=place)]


def _given_at(path: str, arguments: Mapping[str, Any], metric: str) -> str:
    """The path of the callback's argument that names a metric; the callback's path if its class names it."""
    for name, value in arguments.items():
        if metric in (value if isinstance(value, list) else [value]):
            return join_path((*split_path(path), name))
    return path


def _refuse_without(name: str, config: Mapping[str, Any]) -> None:
    if CALLBACKS[name].required and config["callbacks"].get(name) is False:
        raise InputError(_ALWAYS_ON, fix=f"remove the choice: {_NEEDED}")


def _check_search(
    builder: Builder, place: RunPlace, broken: Collection[str], errors: list[InputError]
) -> list[tuple[str, Callback]]:
    """Try all choices and ends of the entries of the trainer, the loader and the built-in callbacks.

    Returns:
        The callbacks that were built, each with its entry's path.
    """
    spec, made = builder.spec, []
    for path, param in SearchSpace.from_spec(spec).params.items():
        section, *rest = split_path(path)
        if section not in {"trainer", "loader", "callbacks"} or join_path((section, *rest[:1])) in broken:
            continue
        here = join_path(("search_space", path))
        for value in values_or_ends(param):
            try:
                config = spec.resolve({path: value})
                if section == "callbacks" and rest[0] in CALLBACKS:
                    _refuse_without(str(rest[0]), config)
                    arguments = configured(config).get(str(rest[0]), {})
                    if TARGET not in arguments:
                        made.append((here, builder.built_in(str(rest[0]), arguments, place)))
            except InputError as error:
                errors.append(spec.error(error.problem, path=here, value=value, fix=error.fix))
                break
    return made
