"""Warns about likely mistakes in a valid study file, such as schedules that do not fit, or useless ranges."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from math import prod
from typing import Any, Final

from hpo.checks.filesystems import network_file_system
from hpo.checks.findings import Finding
from hpo.checks.reader import Check, Findings, Reader, below
from hpo.checks.schedules import SCHEDULES
from hpo.checks.wandb_login import check_wandb
from hpo.config.paths import join_path, lookup, show, split_path
from hpo.config.schema_space import CategoricalParam, FloatParam, IntParam, ParamSpec, numbers_of
from hpo.config.several import is_several
from hpo.config.spec import StudySpec
from hpo.config.targets import TARGET
from hpo.search.auto_sampler import chosen_sampler
from hpo.search.by_name import known_class
from hpo.search.pruners import PRUNERS
from hpo.search.samplers import SAMPLERS
from hpo.search.schedulers.pbt.scheduler import Pbt
from hpo.storage.engines import display_url
from hpo.wording import count_of

#: Learning rates outside of which an optimizer learns nothing or diverges, by its class's name. They are wide: the
#: warning is for a wrong unit or digit, not for a bold choice. Optimizers that scale their own steps (Adadelta,
#: Prodigy, …) are left out.
_ADAPTIVE: Final = (1e-8, 1.0)
_SENSIBLE_LR: Final[Mapping[str, tuple[float, float]]] = {
    **dict.fromkeys(("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Lion"), _ADAPTIVE),
    **dict.fromkeys(("AdamWScheduleFree", "RAdamScheduleFree"), _ADAPTIVE),
    **dict.fromkeys(("SGD", "ASGD", "SGDScheduleFree"), (1e-8, 10.0)),
}
_ABSENT: Final = object()
#: The ratio of high to low from which a linear range leaves most orders of magnitude unsearched.
_DECADES: Final = 1000
#: In bytes; a process that has imported torch takes more.
_LEAST_MEMORY: Final = 64 * 2**20
#: In bytes; the checkpoint of a model with a single weight takes 17 kB.
_LEAST_CHECKPOINT: Final = 10_000
#: Samplers that try every point.
_GRIDS: Final = (SAMPLERS["grid"], SAMPLERS["brute_force"])
#: Samplers that people choose for the points that they draw, not for how well they search.
_CHOSEN_FOR_POINTS: Final = (*_GRIDS, SAMPLERS["partial_fixed"])
#: How the names of metrics end that are better when larger; and of those that are better when smaller.
_LARGER: Final = ("accuracy", "auc", "auroc", "f1", "iou", "dice", "precision", "recall", "r2", "bleu")
_SMALLER: Final = ("loss", "error", "mae", "mse", "rmse", "perplexity")


def check_meaning(spec: StudySpec, *, search: bool = True) -> list[Finding]:
    """Warnings about what a study file says, without running anything.

    Args:
        spec: The study.
        search: Also check the search space, the sampler, the pruner and the storage; otherwise only what a single
            training uses.
    """
    reader = Reader(spec, spec.base_config(), spec.search_space if search else {})
    training = _TRAINING if spec.config.objective is None else (_direction,)
    found = [found for check in (*training, *(_SEARCH if search else ())) for found in check(reader)]
    return found + check_wandb(spec)


def _patience(reader: Reader) -> Findings:
    node, epochs = reader.config["callbacks"].get("early_stopping", False), reader.epochs
    if node is False or epochs is None or "callbacks.early_stopping.patience" in reader.space:
        return
    from hpo.trial.callbacks import CALLBACKS

    default = inspect.signature(CALLBACKS["early_stopping"].kind).parameters["patience"].default
    given = node.get("patience", default) if isinstance(node, dict) else default
    if isinstance(given, int) and given >= epochs:
        problem = f"with patience {given} nothing stops early: a trial has {count_of(epochs, 'epoch')}"
        fix = below(epochs, otherwise="leave `early_stopping` out")
        yield reader.warn(problem, "callbacks.early_stopping.patience", given, fix)


def _learning_rate(reader: Reader) -> Findings:
    if is_several(reader.config["optimizer"]):  # of a GAN, say, with other usual rates
        return
    entry = reader.space.get("optimizer.lr")
    base = reader.number("optimizer", "lr")
    if entry is None:
        path, ends = "optimizer.lr", [] if base is None else [base]
    else:
        path, ends = "search_space[optimizer.lr]", numbers_of(entry)
    limits = _lr_limits(reader)
    if limits is None or not ends:
        return
    low, high = limits
    names = " and ".join(_optimizers(reader))
    fix = f"{names} learns between {low:g} and {high:g}, mostly far inside"
    if max(ends) > high:
        yield reader.warn(
            f"a learning rate of {max(ends):g} diverges with {names}", path, _shown(entry, base), fix
        )
    if 0 < min(ends) < low:
        yield reader.warn(
            f"with a learning rate of {min(ends):g} {names} stands still", path, _shown(entry, base), fix
        )


def _shown(entry: ParamSpec | None, base: Any) -> Any:
    if entry is None:
        return base
    return (
        list(entry.choices) if isinstance(entry, CategoricalParam) else f"{show(entry.low)} to {show(entry.high)}"
    )


def _optimizers(reader: Reader) -> list[str]:
    """The names of the optimizers that trials may use."""
    entry = reader.space.get("optimizer._target_")
    chosen = entry.choices if isinstance(entry, CategoricalParam) else (reader.config["optimizer"][TARGET],)
    return [str(item).rpartition(".")[2] for item in chosen]


def _lr_limits(reader: Reader) -> tuple[float, float] | None:
    """The learning rates that at least one of the optimizers can use; None if one has no known limits."""
    known = [_SENSIBLE_LR.get(name) for name in _optimizers(reader)]
    if None in known:
        return None
    limits = [item for item in known if item is not None]
    return min(low for low, _ in limits), max(high for _, high in limits)


def _direction(reader: Reader) -> Findings:
    study = reader.spec.study
    for metric, direction in study.goals.items():
        words = metric.lower()
        path = "study.direction" if study.objectives is None else join_path(("study", "objectives", metric))
        if direction == "minimize" and words.endswith(_LARGER):
            yield reader.warn(f"`{metric}` is better when larger", path, direction, "write `maximize`")
        if direction == "maximize" and words.endswith(_SMALLER):
            yield reader.warn(f"`{metric}` is better when smaller", path, direction, "write `minimize`")


def _modes(reader: Reader) -> Findings:
    """Callbacks that follow another metric than the study's: for them less is better, unless ``mode`` is set."""
    for name, key in (("early_stopping", "monitor"), ("loss_prediction", "metric")):
        node = reader.config["callbacks"].get(name)
        metric = node.get(key) if isinstance(node, dict) and TARGET not in node else None
        if not isinstance(metric, str):
            continue
        mode = node.get("mode", None if metric == reader.spec.study.metric else "min")
        path = join_path(("callbacks", name, key))
        if mode == "min" and metric.lower().endswith(_LARGER):
            yield reader.warn(f"`{metric}` is better when larger", path, metric, "write `mode: max` beside it")
        if mode == "max" and metric.lower().endswith(_SMALLER):
            yield reader.warn(f"`{metric}` is better when smaller", path, metric, "write `mode: min` beside it")


def _network(reader: Reader) -> Findings:
    kind = network_file_system(reader.spec.storage_url)
    if kind is not None:
        problem = (
            f"the database is on a network file system ({kind}): SQLite's log and locks work on one machine only, "
            "and several machines, or a lost lock, can damage the file"
        )
        fix = "put it on a local disk, or use a server: `storage: postgresql://user@host/name`"
        yield reader.warn(problem, "run.storage", display_url(reader.spec.storage_url), fix)


def _ranges(reader: Reader) -> Findings:
    for name, entry in reader.space.items():
        path = join_path(("search_space", name))
        if isinstance(entry, CategoricalParam):
            if len(entry.choices) == 1:
                yield _one_point(reader, path, entry.choices[0])
        elif entry.low == entry.high:
            yield _one_point(reader, path, entry.low)
        elif _wants_log(entry) and not _is_seed(name):
            problem = (
                f"from {show(entry.low)} to {show(entry.high)} in equal steps: small values are hardly ever tried"
            )
            yield reader.warn(problem, path, _shown(entry, None), "add `log: true`")
        if _is_seed(name):
            fix = "leave the seed out, and see afterwards how much it matters with `hpo train`"
            yield reader.warn("a seed is searched: the best trial is the luckiest", path, _shown(entry, None), fix)


def _one_point(reader: Reader, path: str, value: Any) -> Finding:
    fix = "give it a range, or write the value in its section and leave this out"
    return reader.warn("has one value only, so nothing is searched", path, value, fix)


def _wants_log(entry: FloatParam | IntParam) -> bool:
    return not entry.log and entry.step in (None, 1) and entry.low > 0 and entry.high / entry.low >= _DECADES


def _is_seed(name: str) -> bool:
    return str(split_path(name)[-1]) in {"seed", "random_state"}


def _sampler(reader: Reader) -> Findings:
    study = reader.spec.study
    if study.scheduler is not None and study.scheduler.name == "freeze_thaw":
        if known_class(study.sampler.name, SAMPLERS) in _CHOSEN_FOR_POINTS:
            problem = "draws no trial: freeze_thaw proposes them itself"
            fix = "leave the sampler's name out, or name the scheduler `asha`, which asks the sampler"
            yield reader.warn(problem, "study.sampler.name", study.sampler.name, fix)
        return
    which = "the only trial is" if study.n_trials == 1 else f"all {study.n_trials} trials are"
    yield from _startup(reader, "sampler", SAMPLERS, f"{which} drawn at random")
    if known_class(study.sampler.name, SAMPLERS) not in _GRIDS or reader.spec.where:
        return  # the number of points that `where` and dependent bounds leave is not known here
    sizes = [_points(entry) for entry in reader.space.values() if not entry.when]
    least = prod(size for size in sizes if size is not None)
    if None not in sizes and least > study.n_trials:
        problem = f"the grid has {least} points or more, and only {study.n_trials} of them are tried"
        yield reader.warn(
            problem, "study.n_trials", study.n_trials, f"write `n_trials: {least}`, or a coarser grid"
        )


def _points(entry: ParamSpec) -> int | None:
    """The number of an entry's values; None for a continuous entry, which a grid refuses."""
    if isinstance(entry, CategoricalParam):
        return len(entry.choices)
    if entry.step is None:
        return 1 if entry.low == entry.high else None
    count: float = (entry.high - entry.low) / entry.step
    return round(count) + 1


def _pruner(reader: Reader) -> Findings:
    study, epochs = reader.spec.study, reader.epochs
    which = "the only trial can't" if study.n_trials == 1 else f"none of the {study.n_trials} trials can"
    yield from _startup(reader, "pruner", PRUNERS, f"{which} be pruned")
    if epochs is None:
        return
    for key in ("n_warmup_steps", "n_warmup_epochs", "interval_steps", "min_epochs", "min_resource", "patience"):
        given = study.pruner.kwargs.get(key)
        if isinstance(given, int) and given >= epochs > 1:
            # At the last epoch itself a pruner may still end a trial.
            problem = f"pruning saves no epoch: a trial has {epochs}"
            yield reader.warn(problem, join_path(("study", "pruner", key)), given, f"write less than {epochs}")


def _startup(reader: Reader, part: str, known: Mapping[str, type], problem: str) -> Findings:
    """A sampler or a pruner with at least as many startup trials as the study has trials."""
    study = reader.spec.study
    if study.warm_start is not None:  # the trials of the other study count as startup trials
        return
    section, key = getattr(study, part), "n_startup_trials"
    name = chosen_sampler(reader.spec).name if part == "sampler" else section.name
    kind = known_class(name, known)
    parameters = {} if kind is None else inspect.signature(kind).parameters
    if key not in parameters:
        return
    given = section.kwargs.get(key)
    # A default is worth a warning if the file's own `n_trials` is too small, not that of an override.
    if given is None and not reader.written("study.n_trials"):
        return
    first = parameters[key].default if given is None else given
    if isinstance(first, int) and first >= study.n_trials:
        path = join_path(("study", part, key)) if given is not None else f"study.{part}"
        fix = f"write more trials, or `{key}` below {study.n_trials}"
        yield reader.warn(f"{problem}: {name} begins after {first}", path, first, fix)


def _workers(reader: Reader) -> Findings:
    workers, n_trials = reader.spec.run.workers, reader.spec.study.n_trials
    if workers is not None and workers > n_trials:
        there = "is 1 trial" if n_trials == 1 else f"are {n_trials} trials"
        problem = f"there {there} for {workers} workers: the others have nothing to do"
        yield reader.warn(problem, "run.workers", workers, f"write `workers: {n_trials}`, or more trials")


def _length(reader: Reader) -> Findings:
    """A budget of epochs, if each trial may use up all that is left."""
    spec = reader.spec
    is_known = spec.trial_epochs or spec.longest_trial
    # A scheduler grants epochs in portions.
    if spec.study.epochs is None or spec.run.workers == 1 or is_known or spec.study.scheduler is not None:
        return
    problem = "trials train one after another: how many epochs a trial has is not known, so each may take all"
    fix = "give `trainer.max_epochs`, which no trial exceeds, and no `max_steps`, `validate_every`; or a scheduler"
    yield reader.warn(problem, "study.epochs", spec.study.epochs, fix)


def _population(reader: Reader) -> Findings:
    """A population that forks no trial, or that leaves workers idle."""
    section, study, run = reader.spec.study.scheduler, reader.spec.study, reader.spec.run
    if section is None or section.name != "pbt":
        return
    population, every = section.kwargs.get("population", Pbt.population), section.kwargs.get("every")
    if not isinstance(population, int):
        return
    if study.n_trials <= population:
        problem = f"no trial is forked: the first {population} take all {study.n_trials} trials"
        fix = "a fork is a trial: write more, or `epochs` in place of `n_trials`"
        yield reader.warn(problem, "study.n_trials", study.n_trials, fix)
    if run.workers is not None and run.workers > population:
        problem = f"{population} trials train at a time, for {run.workers} workers: the others have nothing to do"
        yield reader.warn(problem, "run.workers", run.workers, "write a larger `population`, or fewer workers")
    if isinstance(every, int) and reader.epochs is not None and every >= reader.epochs:
        problem = f"no trial is forked: a trial has {count_of(reader.epochs, 'epoch')}"
        fix = below(reader.epochs, otherwise="name another scheduler")
        yield reader.warn(problem, "study.scheduler.every", every, fix)


def _rungs(reader: Reader) -> Findings:
    """A first rung that is not before a trial's end."""
    section = reader.spec.study.scheduler
    given = None if section is None else section.kwargs.get("first_rung")
    if isinstance(given, int) and reader.epochs is not None and given >= reader.epochs > 1:
        problem = f"no trial pauses, so each trains to its end: it has {reader.epochs} epochs"
        yield reader.warn(problem, "study.scheduler.first_rung", given, f"write less than {reader.epochs}")


def _timeouts(reader: Reader) -> Findings:
    whole, idle = reader.spec.run.trial_timeout, reader.spec.run.no_progress_timeout
    if idle is not None and whole is not None and idle >= whole:
        problem = f"never acts: a trial is ended after {whole:.12g} s anyway"
        fix = "write less than `trial_timeout`"
        yield reader.warn(problem, "run.no_progress_timeout", idle, fix)


def _engine(reader: Reader) -> Findings:
    """Settings for an engine without an engine."""
    run = reader.spec.run
    if run.on is not None:
        return
    given = {key: value for key, value in run.resources.model_dump().items() if value is not None}
    agents = None if run.agents is None else "..".join(map(str, dict.fromkeys(run.agents)))
    for path, value in (("run.agents", agents), ("run.resources", given)):
        if value:
            problem = "has no effect: no engine places agents, so this machine's workers train"
            yield reader.warn(problem, path, value, "name the engine, as `run.on` or with `--on`, or leave it out")


def _memory(reader: Reader) -> Findings:
    """A memory limit that a trial exceeds before it trains."""
    given = reader.spec.run.trial_memory
    if given is not None and given < _LEAST_MEMORY:
        problem = "no trial can train: torch alone takes more than that"
        yield reader.warn(problem, "run.trial_memory", f"{given} bytes", 'write for example "16GiB"')


def _quota(reader: Reader) -> Findings:
    """A disk quota that is smaller than any checkpoint."""
    given = reader.spec.run.disk_quota
    if given is not None and given < _LEAST_CHECKPOINT:
        problem = "no checkpoint fits: that of the smallest model takes more"
        yield reader.warn(problem, "run.disk_quota", f"{given} bytes", 'write for example "200GB"')


def _overridden(reader: Reader) -> Findings:
    if reader.spec.study.baseline:  # then the base config is a trial
        return
    for path, entry in reader.space.items():
        value = lookup(reader.config, split_path(path), _ABSENT)
        if value is not _ABSENT and not reader.written(path):
            part = "choices=[…]" if isinstance(entry, CategoricalParam) else "low=…"
            fix = f"narrow the search itself, as `search_space[{path}].{part}`"
            yield reader.warn("has no effect on trials: they draw it from search_space", path, value, fix)


_TRAINING: Final[Collection[Check]] = (*SCHEDULES, _patience, _learning_rate, _direction, _modes)
_SEARCH: Final[Collection[Check]] = (
    _overridden,
    _ranges,
    _sampler,
    _pruner,
    _length,
    _population,
    _rungs,
    _workers,
    _timeouts,
    _engine,
    _memory,
    _quota,
    _network,
)
