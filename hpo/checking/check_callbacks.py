"""Finding out before anything runs what building a trial's callbacks would refuse."""

from __future__ import annotations

from hpo.build import CALLBACKS, REQUIRED, Builder, RunPlace, configured
from hpo.checking.check import check_metric
from hpo.config import StudySpec
from hpo.errors import InputError
from hpo.space import SearchSpace
from hpo.studyfile.paths import join_path, split_path
from hpo.studyfile.schema_space import CategoricalParam
from hpo.studyfile.targets import TARGET


def check_callbacks(spec: StudySpec) -> set[str]:
    """Refuse to do without a callback that a study needs, and arguments that a built-in one refuses.

    Returns:
        Names of the metrics that the built-in callbacks write.

    Raises:
        InputError: One of these is switched off or can't be made, also with a value that is searched, or follows
            a metric that nothing records.
    """
    for name in REQUIRED:
        if spec.config.callbacks.get(name) is False:
            fix = "remove the line: without it outcomes or resuming could not be trusted"
            raise spec.error("can't be switched off", path=f"callbacks.{name}", value=False, fix=fix)
    builder, place = Builder(spec), RunPlace(spec.output_dir, "check")
    made = {
        name: builder.built_in(name, arguments, place)
        for name, arguments in configured(spec.base_config()).items()
        if name in CALLBACKS and TARGET not in arguments
    }
    _check_search(builder, place)
    written = {metric for callback in made.values() for metric in callback.writes}
    for name in made.keys() & spec.config.callbacks.keys():
        # What a callback follows because the study does is looked at as the study's.
        for metric in set(made[name].reads) - {"*", *spec.study.goals}:
            check_metric(spec, written, metric, path=f"callbacks.{name}")
    return written


def _check_search(builder: Builder, place: RunPlace) -> None:
    """Try the choices and ends of what is searched in the trainer, the loader and the built-in callbacks."""
    spec = builder.spec
    for path, param in SearchSpace.from_spec(spec).params.items():
        section, *rest = split_path(path)
        if section not in {"trainer", "loader", "callbacks"}:
            continue
        for value in param.choices if isinstance(param, CategoricalParam) else (param.low, param.high):
            try:
                config = spec.resolve({path: value})
                if section == "callbacks" and rest[0] in CALLBACKS:
                    arguments = configured(config).get(str(rest[0]), {})
                    if TARGET not in arguments:
                        builder.built_in(str(rest[0]), arguments, place)
            except InputError as error:
                here = join_path(("search_space", path))
                raise spec.error(error.problem, path=here, value=value, fix=error.fix) from error
