"""Builds the ``optimizer`` and ``lr_scheduler`` sections: one object or several by name, with parameter groups."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpo.config.schema_nodes import OPTIMIZER_KEYS, SCHEDULER_KEYS
from hpo.config.several import is_several
from hpo.config.spec import StudySpec
from hpo.config.targets import TargetResolver, instantiate
from trainer.lr_schedulers import Warmup
from trainer.step.groups import PARAMETERS, parameter_groups, parameters_of


def make_optimizers(
    spec: StudySpec, resolver: TargetResolver, node: Mapping[str, Any], model: nn.Module
) -> Optimizer | dict[str, Optimizer]:
    """The optimizer of a model, or several by name, each with its own parameters.

    One of several optimizers gets the parameters that its key ``parameters`` names; by default those of the part
    of the model that has the optimizer's name.

    Raises:
        InputError: A group or an optimizer gets no parameter of the model.
    """
    if not is_several(node):
        return _one(spec, resolver, node, model)
    made: dict[str, Optimizer] = {}
    for name, own in node.items():
        arguments = {key: value for key, value in own.items() if key not in OPTIMIZER_KEYS}
        try:
            found = parameters_of(model, own.get(PARAMETERS, name))
        except ValueError as error:
            fix = 'name the parameters that it trains, for example `parameters: "generator.*"`'
            raise spec.error(str(error), path=f"optimizer.{name}", fix=fix) from error
        made[name] = instantiate(resolver, arguments, list(found.values()))
    return made


def make_schedulers(
    spec: StudySpec,
    resolver: TargetResolver,
    node: Mapping[str, Any] | None,
    optimizer: Optimizer | Mapping[str, Optimizer],
) -> tuple[LRScheduler | dict[str, LRScheduler] | None, Any]:
    """The scheduler of an ``lr_scheduler`` section, or several by name, and the interval at which each steps.

    One of several schedulers belongs to the optimizer that its key ``optimizer`` names; by default to the one of
    its own name, or to the only one.

    Raises:
        InputError: There is no such optimizer.
    """
    if node is None:
        return None, "epoch"
    if isinstance(optimizer, Mapping) and (unfit := unmatched(node, optimizer)) is not None:
        raise spec.error(unfit.problem, path=unfit.path, fix=unfit.fix)
    if not is_several(node):
        assert isinstance(optimizer, Optimizer)
        return make_scheduler(resolver, node, optimizer), node["interval"]
    made: dict[str, LRScheduler] = {}
    for name, own in node.items():
        over = optimizer[own.get("optimizer", name)] if isinstance(optimizer, Mapping) else optimizer
        made[name] = make_scheduler(resolver, own, over)
    return made, {name: own["interval"] for name, own in node.items()}


class Unmatched(NamedTuple):
    """A scheduler that belongs to none of several optimizers.

    Attributes:
        path: Its path in the study file.
        problem: Why it belongs to none.
        fix: What to write instead.
    """

    path: str
    problem: str
    fix: str


def unmatched(node: Mapping[str, Any], optimizers: Collection[str]) -> Unmatched | None:
    """The first scheduler of an ``lr_scheduler`` section that belongs to none of several optimizers, if any."""
    if not is_several(node):
        first = next(iter(optimizers))
        fix = f"write `lr_scheduler: {{{first}: {{_target_: …}}}}`, by the names of the optimizers"
        return Unmatched("lr_scheduler", "is one scheduler, and there are several optimizers", fix)
    for name, own in node.items():
        chosen = own.get("optimizer", name)
        if chosen not in optimizers:
            fix = f"write `optimizer:` and one of {', '.join(optimizers)}"
            return Unmatched(f"lr_scheduler.{name}", f"no optimizer is called `{chosen}`", fix)
    return None


def make_scheduler(resolver: TargetResolver, node: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    """The scheduler of one node, after its warm-up if it has one."""
    arguments = {key: value for key, value in node.items() if key not in SCHEDULER_KEYS}
    scheduler: LRScheduler = instantiate(resolver, arguments, optimizer)
    return Warmup(optimizer, scheduler, node["warmup"]) if node["warmup"] else scheduler


def _one(spec: StudySpec, resolver: TargetResolver, node: Mapping[str, Any], model: nn.Module) -> Optimizer:
    """One optimizer over all parameters; those named in ``groups`` have their own arguments."""
    arguments = {key: value for key, value in node.items() if key not in OPTIMIZER_KEYS}
    params: Any = model.parameters()
    if node.get("groups"):
        try:
            params = parameter_groups(model, node["groups"])
        except ValueError as error:
            fix = "name a module or parameter of the model, or a pattern such as `encoder.*`"
            raise spec.error(str(error), path="optimizer.groups", fix=fix) from error
    optimizer: Optimizer = instantiate(resolver, arguments, params)
    return optimizer
