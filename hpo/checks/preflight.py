"""Tries a study out on each device: trains a few batches, from the data to a checkpoint."""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpo.checks.findings import Finding, finding
from hpo.checks.known_errors import broadcast_in
from hpo.checks.largest import largest_params, smallest_params
from hpo.checks.peak_memory import PeakMemory
from hpo.checks.preflight_batches import TriedBatches, tried_batches
from hpo.checks.preflight_blame import Attempt
from hpo.checks.preflight_costs import DevicePreflight, Measured
from hpo.checks.preflight_probe import (
    BACKWARD,
    FORWARD,
    METRICS,
    OPTIMIZER,
    SCHEDULER,
    VALIDATION,
    Probe,
)
from hpo.checks.preflight_round_trip import round_trip
from hpo.checks.schedules import check_span
from hpo.config.paths import join_path, split_path
from hpo.config.schema_space import CategoricalParam
from hpo.config.space import SearchSpace
from hpo.config.spec import StudySpec
from hpo.config.targets import instantiate
from hpo.errors import InputError
from hpo.trial.builder import Builder, make_loss
from hpo.trial.callbacks import CALLBACKS
from hpo.trial.peer import Seat
from hpo.trial.peers import Peers
from hpo.trial.place import RunPlace
from hpo.trial.process_forks import only_in
from hpo.trial.resources import Slot
from hpo.wording import listed
from trainer import Trainer
from trainer.data.batches import is_batched, known_length
from trainer.data.sets import first_set
from trainer.metrics.objects import is_object
from trainer.state import DIVERGED, best_epoch
from trainer.step.parts import is_compiled


def preflight(spec: StudySpec, slots: Sequence[Slot]) -> list[DevicePreflight]:
    """Train a few batches of the base config on each device, and of the largest config that may be drawn.

    It leaves nothing behind: files go to a folder that is removed, the storage is not opened, and callbacks that
    send data to other services (W&B, MLflow, notifier) are left out.

    Args:
        spec: The study, checked by `hpo.checks.checks.check_study`.
        slots: The slots that the workers would use.

    Raises:
        InputError: The base config does not train; the error names the part and the cause.
    """
    builder = Builder(spec)
    space = SearchSpace.from_spec(spec)
    found = []
    threads = torch.get_num_threads()
    try:
        for label in dict.fromkeys(slot.label for slot in slots if _is_seen(slot)):
            mine = [slot for slot in slots if slot.label == label]
            torch.set_num_threads(mine[0].threads)
            with contextlib.closing(Peers(builder, mine[0].names)) as peers:
                found.append(_on_devices(peers, space, mine[0], len(mine)))
    finally:
        torch.set_num_threads(threads)
    return found


def _is_seen(slot: Slot) -> bool:
    """Whether this process sees a slot's first device: of several MIG parts of GPUs, it sees only one."""
    device = torch.device(slot.names[0])
    return device.type != "cuda" or (device.index or 0) < torch.cuda.device_count()


def _on_devices(peers: Peers, space: SearchSpace, slot: Slot, workers: int) -> DevicePreflight:
    builder, device = peers.builder, torch.device(slot.names[0])
    memory = PeakMemory(device)
    notes: list[Finding] = []
    base = _tried(peers, {}, device, memory, notes)
    largest = None
    params = largest_params(builder.spec, space)
    if params:
        try:
            largest = _tried(peers, params, device, memory, [])
        except InputError as error:
            out = "memory runs out" in error.problem
            alone = [] if out else list(_alone(params, lambda one: _tried(peers, one, device, memory, [])))
            notes += [_at_its_range(builder.spec, *each) for each in alone]
            shown = ", ".join(f"{path}={value}" for path, value in params.items())
            problem = f"the largest config that may be drawn ({shown}) does not run: {error.path}: {error.problem}"
            fix = error.fix
            if out and builder.spec.run.on_oom == "fail":
                fix += ", narrow the search space, or set `run.on_oom: retry_with_accumulation`"
            if not alone:
                notes.append(finding(builder.spec, problem, path="search_space", fix=fix))
    notes += _low_ends(builder, space, device)
    each = max(item.memory_bytes for item in (base, largest) if item)
    # Each GPU has its own memory; on the CPU a trial's processes share it.
    notes += memory.too_little(builder.spec, workers, each if device.type == "cuda" else each * slot.size)
    return DevicePreflight(slot.label, workers, base, largest, notes)


def _low_ends(builder: Builder, space: SearchSpace, device: torch.device) -> list[Finding]:
    """Values of model and loss at the low ends of their ranges with which they can't be built; nothing is trained.

    Empty if the base config can't be built like this either, for example as it needs a length of the data.
    """
    params = smallest_params(builder.spec, space)
    params = {path: value for path, value in params.items() if split_path(path)[0] in ("model", "loss")}

    def build(params: Mapping[str, Any]) -> None:
        config = builder.spec.resolve(params)
        try:
            instantiate(builder.resolver, config["model"])
            make_loss(builder.resolver, config["loss"])
        except Exception as error:
            probe = Probe(
                lambda problem, path, fix: builder.spec.error(problem, path=path, fix=fix),
                loss_path="loss",
                precision="fp32",
            )
            raise Attempt(builder, config, device, probe).explained(error) from error

    if _fails(build, params) and not _fails(build, {}):
        return [_at_its_range(builder.spec, *each) for each in _alone(params, build)]
    return []


def _fails(attempt: Callable[[Mapping[str, Any]], object], params: Mapping[str, Any]) -> bool:
    with contextlib.suppress(InputError):
        attempt(params)
        return False
    return True


def _alone(
    params: Mapping[str, Any], attempt: Callable[[Mapping[str, Any]], object]
) -> Iterator[tuple[str, Any, InputError]]:
    """The parameters that fail alone, with all others as in the base config."""
    for path, value in params.items():
        try:
            attempt({path: value})
        except InputError as error:
            yield path, value, error


def _at_its_range(spec: StudySpec, path: str, value: Any, error: InputError) -> Finding:
    problem = f"a trial with this value does not run: {error.path}: {error.problem}"
    fix = f"narrow the search; or {error.fix}"
    return finding(spec, problem, path=join_path(("search_space", path)), value=value, fix=fix)


def _tried(
    peers: Peers, params: Mapping[str, Any], device: torch.device, memory: PeakMemory, notes: list[Finding]
) -> Measured:
    """Train a few batches with these parameters; warnings are added to ``notes``."""
    builder = peers.builder
    spec = builder.spec
    config = spec.resolve(params)
    quiet = {name: False for name, row in CALLBACKS.items() if row.outside}
    config = {**config, "callbacks": {**config["callbacks"], **quiet}}
    loss_path = "loss" if config["step"] is None else "step"
    gc.collect()
    memory.reset()
    with tempfile.TemporaryDirectory(prefix="hpo-check-") as folder:
        probe = Probe(
            lambda problem, path, fix: spec.error(problem, path=path, fix=fix),
            loss_path=loss_path,
            precision=config["trainer"]["precision"],
        )
        attempt = Attempt(builder, config, device, probe)
        try:
            with only_in(os.getpid()), _heard(spec, probe, loss_path, notes):
                return _trained(attempt, peers, params, Path(folder), memory, notes)
        except KeyboardInterrupt:  # Ctrl-C
            raise
        except BaseException as error:  # noqa: BLE001 - anything that a study's code raises is explained
            explained = attempt.explained(error)
            raise explained from (None if explained is error else error)


def _trained(
    attempt: Attempt,
    peers: Peers,
    params: Mapping[str, Any],
    folder: Path,
    memory: PeakMemory,
    notes: list[Finding],
) -> Measured:
    builder, config, probe = attempt.builder, attempt.config, attempt.probe
    with peers.at_work(_Part(config, params), folder):
        data = builder.data(config)
        config = attempt.config = builder.laid_out(config, data)
        notes += _small_data(builder.spec, config, data["train"])
        seed, place = builder.spec.seed, RunPlace(folder, "check", params)
        trainer = builder.trainer(config, place, seed=seed, device=attempt.device, bridge=[probe])
        attempt.trainer = trainer
        probe.metrics = trainer.metrics
        if config["trainer"]["compile"] or is_compiled(trainer.model):
            probe.warmup = 2  # hooks that look into the first batch keep it uncompiled; the second compiles
        peers.meet()
        val = tried_batches(trainer, data["val"])
        trainer.fit(data["train"], val)
        ended = time.perf_counter()
    notes += _after(attempt, folder)
    return _measured(attempt, params, memory, first_set(val), ended)


@dataclass(frozen=True)
class _Part:
    """The work of a peer process: its part of the same batches.

    Attributes:
        config: The resolved config.
        params: The parameters of the search space that were set.
    """

    config: Mapping[str, Any]
    params: Mapping[str, Any]

    def __call__(self, builder: Builder, seat: Seat) -> None:
        """Build the trainer and fit it."""
        data = builder.data(self.config)
        config = builder.laid_out(self.config, data)
        place = RunPlace(seat.folder, "check", self.params)
        trainer = builder.trainer(config, place, seed=builder.spec.seed, device=seat.device)
        seat.ready()
        trainer.fit(data["train"], tried_batches(trainer, data["val"]))


def _measured(
    attempt: Attempt, params: Mapping[str, Any], memory: PeakMemory, val: TriedBatches, ended: float
) -> Measured:
    trainer, probe = attempt.trainer, attempt.probe
    assert trainer is not None
    state, plan = trainer.state, trainer.plan
    batches = state.batches_per_epoch
    if plan.epoch_steps is not None:
        batches = plan.epoch_steps * state.batches_per_step
    whole = None if batches is None else batches * probe.batch_s + (probe.validated - probe.ended) * val.scale
    return Measured(
        params=dict(params),
        parameters=sum(item.numel() for item in trainer.model.parameters() if item.requires_grad),
        inputs=probe.shapes,
        outputs=probe.outputs,
        memory_bytes=memory.peak(),
        batch_s=probe.batch_s,
        batches=batches,
        epochs=state.max_epochs,
        epoch_s=whole,
        # The time after the epoch counts about once: checkpoints are limited to a share of the time.
        trial_s=None if whole is None else whole * state.max_epochs + (ended - probe.validated),
    )


def _after(attempt: Attempt, folder: Path) -> list[Finding]:
    """The findings of the short run, and of saving and loading its checkpoint."""
    trainer, probe, spec = attempt.trainer, attempt.probe, attempt.builder.spec
    assert trainer is not None
    notes = check_span(spec, attempt.config, trainer.state.total_steps)
    if probe.without_gradient:
        names = listed([f"`{name}`" for name in probe.without_gradient], 5)
        problem = f"no gradient reaches {names}: it never learns"
        fix = "use it in the forward pass, or freeze it with requires_grad=False"
        notes.append(finding(spec, problem, path="model", fix=fix))
    for path, missed in probe.untrained.items():
        names = listed([f"`{name}`" for name in missed], 5)
        problem = f"no optimizer trains {names}, though gradients reach it"
        fix = "have what is to be trained in the model and an optimizer, or freeze it with requires_grad=False"
        notes.append(finding(spec, problem, path=path, fix=fix))
    if trainer.state.stop_reason == DIVERGED:
        problem = f"the base config diverges within {probe.batches} batches"
        notes.append(finding(spec, problem, path="optimizer", fix="lower the learning rate"))
    else:
        _check_goals(attempt, trainer)
    return notes + round_trip(attempt, trainer, folder)


def _check_goals(attempt: Attempt, trainer: Trainer) -> None:
    """Refuse a metric of the study if the epoch has not recorded a finite number for it."""
    spec, recorded = attempt.builder.spec, trainer.state.metrics
    for metric in (*spec.study.goals, *(bound.metric for bound in spec.study.bounds)):
        if metric in recorded and is_object(trainer.metrics.get(metric.partition("_")[2])):
            continue  # it may have no value for so few batches
        if best_epoch([recorded], metric, "min") is None:
            seen = f"is {recorded[metric]}" if metric in recorded else "is not recorded"
            path = "study.metric" if spec.study.objectives is None else "study.objectives"
            fix = f"recorded are {', '.join(recorded)}"
            raise spec.error(f"{seen} after the first epoch", path=path, value=metric, fix=fix)


def _small_data(spec: StudySpec, config: Mapping[str, Any], train: Any) -> list[Finding]:
    """A warning if a batch is larger than the data."""
    data = train[0] if isinstance(train, tuple) else train  # of a tuple of tensors, each row is a sample
    samples = None if is_batched(data) else known_length(data)
    entry = spec.search_space.get("loader.batch_size")
    searched = entry is not None
    sizes = [config["loader"]["batch_size"]]
    if entry is not None:
        sizes = list(entry.choices) if isinstance(entry, CategoricalParam) else [entry.high]
    if samples is None or max(sizes) <= samples:
        return []
    path = join_path(("search_space", "loader.batch_size")) if searched else "loader.batch_size"
    problem = f"a batch of {max(sizes)} is more than all {samples} training samples"
    return [finding(spec, problem, path=path, value=max(sizes), fix=f"write at most {samples}")]


@contextlib.contextmanager
def _heard(spec: StudySpec, probe: Probe, loss_path: str, notes: list[Finding]) -> Iterator[None]:
    """Turn warnings of Python and torch inside the block into findings, each text once."""
    places = {
        FORWARD: loss_path,
        VALIDATION: loss_path,
        METRICS: "metrics",
        BACKWARD: "model",
        OPTIMIZER: "optimizer",
        SCHEDULER: "lr_scheduler",
    }
    said: set[str] = set()

    def hear(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        text = " ".join(str(message).split())
        problem, fix = broadcast_in(text) or (f"a warning while it is tried out: {text}", "")
        if issubclass(category, UserWarning | RuntimeWarning) and problem not in said:
            said.add(problem)
            path = places.get(probe.phase, "data" if probe.batches else "model")
            notes.append(finding(spec, problem, path=path, fix=fix))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = hear
        yield
