"""From a resolved config to a Trainer: data, model, loss, optimizer, scheduler, callbacks."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hpo.config.schema import SCHEDULER_KEYS
from hpo.config.schema_metrics import METRIC_KEYS
from hpo.config.spec import StudySpec
from hpo.config.targets import TARGET, TargetResolver, instantiate, named_targets
from hpo.errors import InputError
from hpo.trial.callbacks import CALLBACKS, configured
from hpo.trial.run_length import NO_PROGRESS, Progress, plan_of, with_numbers
from hpo.trial.trackers import Shown
from trainer import BatchOptions, Callback, Trainer
from trainer.data.random_state import seed_all
from trainer.lr_schedulers import Warmup
from trainer.metrics.objects import Metric
from trainer.metrics.whole_set import MAX_BYTES, WholeSet
from trainer.trainer import Interval


@dataclass(frozen=True)
class RunPlace:
    """Where one training run puts its things and what it is called there.

    Attributes:
        folder: Folder for its files.
        name: Name shown in W&B and MLflow.
        params: The trial's parameters.
    """

    folder: Path
    name: str
    params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "checkpoints"


@dataclass
class Builder:
    """Builds trainers for one study; keeps the data between trials that ask for the same.

    Attributes:
        spec: The study file.
    """

    spec: StudySpec
    _data: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _imported: bool = False

    @cached_property
    def resolver(self) -> TargetResolver:
        """Finds import paths, the study's folder first."""
        return TargetResolver(self.spec.folder)

    def import_targets(self) -> None:
        """Import all that the study names, always in the same order: what a module changes when it is imported is
        then the same for each trial, no matter what it uses.

        A target that can't be imported is skipped: building it says what is wrong.
        """
        if self._imported:
            return
        self._imported = True
        for target in dict.fromkeys(named_targets(self.spec.config)):
            with contextlib.suppress(InputError):
                self.resolver.resolve(target)

    def data(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The data sets ``train``, ``val`` and perhaps ``test``.

        They are made with the study's seed, not the trial's, so that every trial sees the same split, and on one
        thread, so that every machine and worker sees the same bits.

        Raises:
            InputError: The target returned no such mapping.
        """
        key = json.dumps(config["data"], sort_keys=True, default=str)
        if key not in self._data:
            self.import_targets()
            seed_all(self.spec.seed)
            with _one_thread():
                made = instantiate(self.resolver, config["data"])
            if not isinstance(made, Mapping) or not {"train", "val"} <= made.keys():
                raise self.spec.error(
                    "returned no mapping with `train` and `val`",
                    path="data._target_",
                    value=f"{config['data']['_target_']} returned {_described(made)}",
                    fix="return for example {'train': dataset, 'val': dataset, 'test': dataset}",
                )
            # Only the latest: a searched data argument must not fill the memory.
            self._data = {key: made}
        return self._data[key]

    def laid_out(
        self, config: Mapping[str, Any], data: Mapping[str, Any], after: Progress = NO_PROGRESS
    ) -> dict[str, Any]:
        """A resolved config with the lengths of its training, which the data decides: see `hpo.trial.run_length`.

        Raises:
            InputError: The config names a length that the data does not have, or a OneCycleLR is too short for it.
        """
        kinds = []
        for name, arguments in configured(config).items():
            own = TARGET in arguments
            kinds.append((self.resolver.resolve(arguments[TARGET]) if own else CALLBACKS[name].kind, arguments))
        return with_numbers(self.spec, config, data["train"], kinds, after)

    def trainer(
        self,
        config: Mapping[str, Any],
        place: RunPlace,
        *,
        seed: int,
        device: torch.device,
        after: Progress = NO_PROGRESS,
        bridge: Sequence[Callback] = (),
    ) -> Trainer:
        """Build a trainer; weights are initialised from ``seed``.

        Args:
            config: A resolved config, with its lengths (`laid_out`).
            place: Where it writes.
            seed: Seed of initialisation, data order and training.
            device: Where it trains.
            after: What is trained already; the config's length comes on top of it.
            bridge: Callbacks of the service, such as the pruner's.
        """
        seed_all(seed)
        model: nn.Module = instantiate(self.resolver, config["model"]).to(device)
        optimizer: Optimizer = instantiate(self.resolver, config["optimizer"], model.parameters())
        scheduler: LRScheduler | None = None
        interval: Interval = "epoch"
        if config["lr_scheduler"] is not None:
            scheduler = make_scheduler(self.resolver, config["lr_scheduler"], optimizer)
            interval = config["lr_scheduler"]["interval"]
        plan = plan_of(config, after)
        loss, step = (_optional(self.resolver, config[name]) for name in ("loss", "step"))
        if isinstance(loss, nn.Module):
            loss = loss.to(device)
        return Trainer(
            model,
            optimizer,
            loss if step is None else None,
            step=step,
            metrics={name: make_metric(self.resolver, node) for name, node in config["metrics"].items()},
            scheduler=scheduler,
            scheduler_interval=interval,
            scheduler_monitor=self.spec.study.metric,
            callbacks=self.callbacks(config, place),
            core_callbacks=bridge,
            max_epochs=plan.max_epochs,
            max_steps=plan.max_steps,
            **{name: config["trainer"][name] for name in ("validate_every", "precision", "compile", "cuda_graph")},
            batching=BatchOptions(**config["loader"]),
            seed=seed,
            device=device,
        )

    def callbacks(self, config: Mapping[str, Any], place: RunPlace) -> list[Callback]:
        """The default callbacks as configured, those named in the study file, and its own classes."""
        built: list[Callback] = []
        for name, arguments in configured(config).items():
            if TARGET in arguments:
                built.append(instantiate(self.resolver, arguments))
            else:
                built.append(self.built_in(name, arguments, place, config))
        return built

    def built_in(
        self,
        name: str,
        arguments: Mapping[str, Any],
        place: RunPlace,
        config: Mapping[str, Any] = MappingProxyType({}),
    ) -> Callback:
        """One of `CALLBACKS`, with the arguments of the study file and those that the service gives.

        Args:
            name: Its name in a study file.
            arguments: What the study file gives it.
            place: Where it writes.
            config: The resolved config that it is part of, which some show.

        Raises:
            InputError: The callback refuses an argument.
        """
        row = CALLBACKS[name]
        shown = Shown(self.spec, place.folder, place.name, place.params, config)
        try:
            return row.kind(**row.fill(shown, arguments))
        except ImportError as error:
            raise self.spec.error(str(error), path=f"callbacks.{name}") from error
        except (TypeError, ValueError) as error:
            fix = f"it takes {', '.join(inspect.signature(row.offered).parameters) or 'no argument'}"
            raise self.spec.error(str(error), path=f"callbacks.{name}", fix=fix) from error


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Torch, and the OpenMP and BLAS libraries that are loaded, compute on one thread inside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(threads)


def make_metric(resolver: TargetResolver, node: Mapping[str, Any]) -> Metric:
    """One of the ``metrics``: a function, an object, or with ``over: epoch`` a function of the whole set."""
    arguments = {key: value for key, value in node.items() if key not in METRIC_KEYS}
    metric: Any = instantiate(resolver, arguments, _as_function=True)
    made: Metric = WholeSet(metric, node.get("max_bytes", MAX_BYTES)) if "over" in node else metric
    return made


def make_scheduler(resolver: TargetResolver, node: Mapping[str, Any], optimizer: Optimizer) -> LRScheduler:
    """The scheduler of an ``lr_scheduler`` section, behind its warm-up if it has one."""
    arguments = {key: value for key, value in node.items() if key not in SCHEDULER_KEYS}
    scheduler: LRScheduler = instantiate(resolver, arguments, optimizer)
    return Warmup(optimizer, scheduler, node["warmup"]) if node["warmup"] else scheduler


def _optional(resolver: TargetResolver, node: Mapping[str, Any] | None) -> Callable[..., Any] | None:
    return None if node is None else instantiate(resolver, node, _as_function=True)


def _described(value: Any) -> str:
    return f"the keys {', '.join(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
