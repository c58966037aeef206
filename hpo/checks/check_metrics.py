"""Checks a study's metrics: how each is computed, that names differ, and that the metrics in use are recorded."""

import inspect
import re
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from typing import Any, Final

from hpo.checks.findings import Finding, finding
from hpo.config.paths import join_path, suggest_name
from hpo.config.several import is_several
from hpo.config.spec import StudySpec
from hpo.config.targets import TARGET, TargetResolver
from trainer.metrics.objects import METHODS, is_object
from trainer.recorded import names_in

#: Words in the names of metrics whose value for a data set is not the mean of its batches' values.
_OF_THE_SET: Final = frozenset(
    {
        *(
            "auc",
            "auroc",
            "auprc",
            "rocauc",
            "gini",
            "ap",
            "map",
            "f1",
            "fbeta",
            "mcc",
            "kappa",
            "precision",
            "recall",
        ),
        *(
            "iou",
            "miou",
            "dice",
            "jaccard",
            "r2",
            "rmse",
            "correlation",
            "pearson",
            "spearman",
            "median",
            "perplexity",
        ),
    }
)
_WORD: Final = re.compile(r"[a-z]+\d?")


def check_metrics(spec: StudySpec, broken: Collection[str] = ()) -> list[Finding]:
    """Refuse metrics that can't be computed as the study file says.

    Args:
        spec: The study.
        broken: Sections, and parts of them as ``metrics.accuracy``, that are known to be wrong: they are left out.

    Returns:
        Warnings about functions whose mean over batches is probably not meant.

    Raises:
        InputError: An object is given ``over``, a class makes no metrics, or the step records a metric's name.
    """
    resolver, step = TargetResolver(spec.folder), None if "step" in broken else spec.config.step
    recorded = () if step is None else names_in(getattr(resolver.resolve(step[TARGET]), "records", ()))
    found: list[Finding] = []
    for name, node in spec.config.metrics.items():
        path = join_path(("metrics", name))
        if path in broken:
            continue
        if name in recorded:
            problem = f"the step `{step[TARGET] if step else ''}` records `{name}` too"
            raise spec.error(problem, path=path, fix="rename one of the two")
        target = resolver.resolve(node[TARGET])
        if not inspect.isclass(target):
            found += _means_of_batches(spec, name, node)
            continue
        if is_object(target) and "over" in node:
            fix = "remove it: an object with update, compute and reset is computed once an epoch anyway"
            raise spec.error(
                "only functions take `over`", path=join_path(("metrics", name, "over")), value="epoch", fix=fix
            )
        if not is_object(target) and not any("__call__" in vars(base) for base in target.__mro__):
            fix = f"give it {', '.join(METHODS[:-1])} and {METHODS[-1]}, or name a function of (outputs, targets)"
            raise spec.error(
                "is a class, and its objects are no metrics",
                path=join_path(("metrics", name, TARGET)),
                value=node[TARGET],
                fix=fix,
            )
    return found


def _means_of_batches(spec: StudySpec, name: str, node: dict[str, Any]) -> Iterator[Finding]:
    """Warn about a function that gets one batch at a time, but by its name needs the whole data set."""
    words = {word for text in (name, node[TARGET]) for word in _WORD.findall(text.lower())}
    if "over" not in node and words & _OF_THE_SET:
        problem = (
            "is recorded as the mean of its values for the batches, and its name says that it is no such mean"
        )
        fix = "add `over: epoch`: it then gets all outputs and targets of the set at once"
        yield finding(spec, problem, path=join_path(("metrics", name)), value=node[TARGET], fix=fix)


def recorded_metrics(spec: StudySpec, extra: Collection[str]) -> list[str]:
    """The metrics that every epoch records: losses, lr, those of `metrics`, `step` and callbacks, and `extra`."""
    resolver = TargetResolver(spec.folder)
    named = list(spec.config.metrics)
    if spec.config.step is not None:
        named += names_in(getattr(resolver.resolve(spec.config.step[TARGET]), "records", ()))
    known = ["train_loss", "val_loss", "lr"]
    known += [f"{phase}_{name}" for name in named for phase in ("train", "val")]
    for node in spec.config.callbacks.values():
        if isinstance(node, dict) and TARGET in node:
            known += names_in(getattr(resolver.resolve(node[TARGET]), "writes", ()))
    return list(dict.fromkeys((*known, *sorted(extra))))


def check_metric(
    spec: StudySpec, extra: Collection[str] = (), metric: str | None = None, path: str = "study.metric"
) -> list[Finding]:
    """Refuse a metric that nothing records: the study's, or the one that `path` names.

    The metrics that a user's step records beside its loss are only known before a run if it has an attribute
    ``records``; without it, there is a warning.

    Args:
        spec: The study.
        extra: The metrics that callbacks write.
        metric: The metric; None: the study's.
        path: Where it is written.

    Raises:
        InputError: Nothing records it.
    """
    wanted, known = metric or spec.study.metric, recorded_metrics(spec, extra)
    if any(fnmatchcase(wanted, name) for name in (*known, *_of_each_optimizer(spec, known))):
        return []
    fix = suggest_name(wanted, known, what="recorded are")
    if _may_come_from_the_step(spec, wanted):
        problem = "only the step could record this metric, which is not known before it runs"
        fix = f"name it in an attribute `records` of the step if it does; else {fix}"
        return [finding(spec, problem, path=path, value=wanted, fix=fix)]
    if (name := _set_that_may_record(wanted, known)) is not None:
        problem = f"is recorded only where `data` returns several validation sets, one of them called `{name}`"
        fix = f"return {{'train': …, 'val': {{'main': …, '{name}': …}}}} if it does not; else {fix}"
        return [finding(spec, problem, path=path, value=wanted, fix=fix)]
    raise spec.error("nothing records this metric", path=path, value=wanted, fix=fix)


def _of_each_optimizer(spec: StudySpec, known: Collection[str]) -> Iterator[str]:
    """The metrics of each of several optimizers; gradient norms only with a `step`, which updates them by name."""
    optimizers = spec.config.optimizer
    if optimizers is None or not is_several(optimizers):
        return
    for name in optimizers:
        yield f"lr_{name}"
        if "max_grad_norm" in known and spec.config.step is not None:
            yield f"max_grad_norm_{name}"


def _set_that_may_record(metric: str, known: Collection[str]) -> str | None:
    """The name of a further validation set that ``metric`` may belong to; None if it can't."""
    for name in (each.removeprefix("val_") for each in known if each.startswith("val_")):
        found = re.fullmatch(rf"val_(\w+)_{re.escape(name)}", metric)
        if found:
            return found[1]
    return None


def _may_come_from_the_step(spec: StudySpec, metric: str) -> bool:
    if spec.config.step is None or not metric.startswith(("train_", "val_")):
        return False
    return not hasattr(TargetResolver(spec.folder).resolve(spec.config.step[TARGET]), "records")
