"""Builds a Trainer from a resolved config: data, model, loss, optimizer, scheduler, callbacks."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import torch
from threadpoolctl import threadpool_limits
from torch import nn

from hpo.config.argument_types import refuse_wrong_types
from hpo.config.file_paths import home
from hpo.config.paths import join_path
from hpo.config.schema_metrics import METRIC_KEYS
from hpo.config.spec import StudySpec
from hpo.config.targets import TARGET, TargetResolver, instantiate, is_refused, named_targets
from hpo.errors import InputError
from hpo.trial.callbacks import CALLBACKS, configured
from hpo.trial.lightning_module import refuse_lightning
from hpo.trial.optimizer import make_optimizers, make_schedulers
from hpo.trial.place import RunPlace
from hpo.trial.run_length import NO_PROGRESS, Progress, plan_of, with_numbers
from hpo.trial.trackers import Shown
from trainer import BatchOptions, Callback, Trainer, load_weights
from trainer.checkpoint.files import CheckpointError
from trainer.data.random_state import seed_all
from trainer.metrics.objects import Metric
from trainer.metrics.whole_set import MAX_BYTES, WholeSet

#: Keys of the section `trainer` that are passed to the Trainer unchanged.
_HANDED_OVER: Final = ("validate_every", "precision", "compile", "cuda_graph", "strategy", "deterministic")
#: The form of the error in which a callback refuses the value of one argument.
_OF_ONE: Final = re.compile(r"(?P<name>\w+) is (?P<value>.+): (?P<fix>give .+)")


@dataclass
class Builder:
    """Builds trainers for one study; caches the data for trials with the same data config.

    Attributes:
        spec: The study file.
    """

    spec: StudySpec
    _data: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _imported: bool = False

    @cached_property
    def resolver(self) -> TargetResolver:
        """Resolves import paths, in the study's folder first."""
        return TargetResolver(self.spec.folder)

    def import_targets(self) -> None:
        """Import all targets that the study names, always in the same order.

        So side effects of imports are the same in each trial, whichever targets it uses. A target that can't be
        imported is skipped: the error is reported when it is built.
        """
        if self._imported:
            return
        self._imported = True
        for target in dict.fromkeys(named_targets(self.spec.config)):
            with contextlib.suppress(
                InputError, TypeError
            ):  # a callable that can't be hashed is checked again in each trial
                is_refused(self.resolver.resolve(target))  # cached, so that no trial has to ask Hydra

    def data(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The data sets ``train``, ``val`` and optionally ``test``.

        They are made with the study's seed, not the trial's, so that every trial gets the same split, and on one
        thread, so that every machine and worker gets the same bits.

        Raises:
            InputError: The target did not return such a mapping.
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
            # Only the latest is kept, so that a searched data argument does not fill the memory.
            self._data = {key: made}
        return self._data[key]

    def laid_out(
        self, config: Mapping[str, Any], data: Mapping[str, Any], after: Progress = NO_PROGRESS
    ) -> dict[str, Any]:
        """The config with the lengths that follow from the data filled in; see `hpo.trial.run_length`.

        Raises:
            InputError: The config uses a length that the data does not have, or a OneCycleLR is too short.
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
            config: A resolved config with its lengths (see `laid_out`).
            place: Where the training writes.
            seed: Seed of initialisation, data order and training.
            device: The device to train on.
            after: What has been trained already; the config's length is added to it.
            bridge: hpo's own callbacks, such as the pruner's.
        """
        seed_all(seed)
        model = self._model(config).to(device)
        optimizer = make_optimizers(self.spec, self.resolver, config["optimizer"], model)
        scheduler, interval = make_schedulers(self.spec, self.resolver, config["lr_scheduler"], optimizer)
        plan = plan_of(config, after)
        loss, step = (make_loss(self.resolver, config[name]) for name in ("loss", "step"))
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
            **{name: config["trainer"][name] for name in _HANDED_OVER},
            batching=make_batching(self.resolver, config["loader"]),
            seed=seed,
            device=device,
        )

    def _model(self, config: Mapping[str, Any]) -> nn.Module:
        """The model with its initial weights.

        Raises:
            InputError: It is not a module of torch, or it is Lightning's; or the weights do not fit.
        """
        model: object = instantiate(self.resolver, config["model"])
        if not isinstance(model, nn.Module):
            raise self.spec.error(
                f"made no torch.nn.Module but an object of {type(model).__name__}",
                path="model._target_",
                value=config["model"]["_target_"],
                fix="name a class derived from torch.nn.Module, or a function that returns an object of one",
            )
        refuse_lightning(self.spec, type(model))
        self._load_weights(model, config["trainer"]["weights"])
        return model

    def _load_weights(self, model: nn.Module, weights: Mapping[str, Any]) -> None:
        """Give the model the weights of ``trainer.weights``, if the study file names any.

        Raises:
            InputError: The file can't be read, or does not fit the model.
        """
        if weights["path"] is None:
            return
        try:
            load_weights(model, self.spec.folder / home(weights["path"]), strict=weights["strict"])
        except (CheckpointError, ImportError, ValueError) as error:
            fix = "name a file of this model's weights; `strict: false` takes those that fit"
            path = "trainer.weights.path"
            raise self.spec.error(str(error), path=path, value=weights["path"], fix=fix) from error

    def callbacks(self, config: Mapping[str, Any], place: RunPlace) -> list[Callback]:
        """All configured callbacks: defaults, those that the study file names, and its own classes."""
        built: list[Callback] = []
        for name, arguments in configured(config).items():
            if TARGET in arguments:
                built.append(self._own_callback(name, arguments))
            else:
                built.append(self.built_in(name, arguments, place, config))
        return built

    def _own_callback(self, name: str, arguments: Mapping[str, Any]) -> Callback:
        """A callback that the study file names by its import path.

        Raises:
            InputError: The target does not make a callback.
        """
        callback: object = instantiate(self.resolver, arguments)
        if not isinstance(callback, Callback):
            raise self.spec.error(
                f"made no trainer.Callback but an object of {type(callback).__name__}",
                path=join_path(("callbacks", name, TARGET)),
                value=arguments[TARGET],
                fix="name a class derived from trainer.Callback, or a function that returns an object of one",
            )
        return callback

    def built_in(
        self,
        name: str,
        arguments: Mapping[str, Any],
        place: RunPlace,
        config: Mapping[str, Any] = MappingProxyType({}),
    ) -> Callback:
        """One of `CALLBACKS`, with the arguments of the study file and those that hpo gives.

        Args:
            name: Its name in a study file.
            arguments: Its arguments in the study file.
            place: Where the training writes.
            config: The resolved config, which some callbacks show.

        Raises:
            InputError: The callback refuses an argument.
        """
        row = CALLBACKS[name]
        refuse_wrong_types(self.spec, join_path(("callbacks", name)), row.kind, arguments)
        shown = Shown(self.spec, place, config)
        try:
            return row.kind(**row.fill(shown, arguments))
        except ImportError as error:
            raise self.spec.error(str(error), path=f"callbacks.{name}") from error
        except (TypeError, ValueError) as error:
            if (match := _OF_ONE.fullmatch(str(error))) and _is_of(match, arguments):
                raise self.spec.error(
                    f"`{name}` refuses this value",
                    path=join_path(("callbacks", name, match["name"])),
                    value=match["value"],
                    fix=match["fix"],
                ) from error
            fix = f"it takes {', '.join(inspect.signature(row.offered).parameters) or 'no argument'}"
            raise self.spec.error(str(error), path=f"callbacks.{name}", fix=fix) from error


def _is_of(refusal: re.Match[str], arguments: Mapping[str, Any]) -> bool:
    """Whether the refused value is the one that the study file gives the argument."""
    written = arguments.get(refusal["name"])
    return refusal["value"] in (str(written), repr(written))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Make torch and the loaded OpenMP and BLAS libraries compute on one thread inside the block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(threads)


def make_batching(resolver: TargetResolver, node: Mapping[str, Any]) -> BatchOptions:
    """The options of a ``loader`` section."""
    collate = node["collate_fn"]
    made = None if collate is None else instantiate(resolver, collate, _as_function=True)
    return BatchOptions(**{**node, "collate_fn": made})


def make_metric(resolver: TargetResolver, node: Mapping[str, Any]) -> Metric:
    """One of the ``metrics``: a function, an object, or with ``over: epoch`` a function of the whole set."""
    arguments = {key: value for key, value in node.items() if key not in METRIC_KEYS}
    metric: Any = instantiate(resolver, arguments, _as_function=True)
    made: Metric = WholeSet(metric, node.get("max_bytes", MAX_BYTES)) if "over" in node else metric
    return made


def make_loss(resolver: TargetResolver, node: Mapping[str, Any] | None) -> Callable[..., Any] | None:
    """The ``loss`` or ``step``; numbers become tensors where the class of a loss takes a tensor."""
    if node is None:
        return None
    tensors = _tensors(resolver, node)
    written = {key: value for key, value in node.items() if key not in tensors}
    made: Callable[..., Any] = instantiate(resolver, written, _as_function=True, **tensors)
    return made


def _tensors(resolver: TargetResolver, node: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Numbers and lists of numbers as tensors, where a loss takes a tensor, such as ``weight``."""
    kind = resolver.resolve(node[TARGET])
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        return {}
    takes = inspect.signature(kind).parameters
    wanted = {key: node[key] for key in takes if key in node and "Tensor" in str(takes[key].annotation)}
    return {key: torch.tensor(value, dtype=torch.float32) for key, value in wanted.items() if _is_numeric(value)}


def _is_numeric(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_numeric, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


def _described(value: Any) -> str:
    return f"the keys {', '.join(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
