"""Checks a study's metrics against what they name: how each is computed, and that no two share a name."""

import inspect

from hpo.config import StudySpec
from hpo.studyfile.paths import join_path
from hpo.studyfile.targets import TARGET, TargetResolver
from trainer.metric_objects import METHODS, is_object


def check_metrics(spec: StudySpec) -> None:
    """Refuse metrics that can't be computed as the study file says.

    Raises:
        InputError: An object is given ``over``, a class makes no metrics, or the step records a metric's name.
    """
    resolver, step = TargetResolver(spec.folder), spec.config.step
    recorded = () if step is None else getattr(resolver.resolve(step[TARGET]), "records", ())
    for name, node in spec.config.metrics.items():
        path = join_path(("metrics", name))
        if name in recorded:
            problem = f"the step `{step[TARGET] if step else ''}` records `{name}` too"
            raise spec.error(problem, path=path, fix="rename one of the two")
        target = resolver.resolve(node[TARGET])
        if not inspect.isclass(target):
            continue
        if is_object(target) and "over" in node:
            fix = "leave it out: what has update, compute and reset is computed once an epoch anyway"
            raise spec.error("is for functions", path=join_path(("metrics", name, "over")), value="epoch", fix=fix)
        if not is_object(target) and not any("__call__" in vars(base) for base in target.__mro__):
            fix = f"give it {', '.join(METHODS[:-1])} and {METHODS[-1]}, or name a function of (outputs, targets)"
            raise spec.error(
                "makes no metrics", path=join_path(("metrics", name, TARGET)), value=node[TARGET], fix=fix
            )
