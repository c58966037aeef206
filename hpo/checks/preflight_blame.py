"""Finds the part of a study file that an exception comes from, and writes the error for it."""

from __future__ import annotations

import inspect
import io
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch

from hpo.checks.known_errors import fix_of
from hpo.checks.preflight_probe import (
    BACKWARD,
    BATCH,
    EPOCH_END,
    METRICS,
    OPTIMIZER,
    SCHEDULER,
    START,
    VALIDATION,
    Probe,
    shapes_of,
)
from hpo.config.paths import join_path, lookup, split_path
from hpo.config.targets import TARGET, instantiate
from hpo.errors import InputError
from hpo.study.outcome import Outcome
from hpo.trial.builder import Builder, make_metric
from hpo.trial.callbacks import CALLBACKS
from hpo.trial.failure import failure_outcome
from hpo.trial.optimizer import make_optimizers, make_schedulers
from trainer import Callback, Trainer, runner
from trainer.callbacks import Checkpoint
from trainer.checkpoint.files import CheckpointError
from trainer.checkpoint.manager import CheckpointWriteError
from trainer.checkpoint.readable import readable
from trainer.data import batches
from trainer.distributed.rank_error import RankError
from trainer.error_text import error_text
from trainer.metrics.objects import measured_alone, metric_at_work
from trainer.recorded import MetricError
from trainer.step.parts import compiled

#: A place in the study file, and what hpo was doing with it.
_Stage = tuple[str, str]

_SAVED: Final = ("model", "optimizer", "scheduler", "callbacks", "state")
#: The folder of the trainer's files that read the data.
_OF_DATA: Final = Path(inspect.getfile(batches)).parent
#: The file that refuses callbacks.
_RUNNER: Final = Path(inspect.getfile(runner))
#: The fix by section, for errors in a library's code.
_HINTS: Final = {
    "data": "return data sets whose items are (inputs, targets), or give a `step` of your own",
    "model": "compare these shapes with those that its first layers take",
    "loss": "let the model's outputs and the targets have the shapes and types that this loss takes",
    "step": "compare these shapes with those that it takes",
    "callbacks": "correct the callback, or leave it out",
}
#: The section that runs in a phase, and what it does, for phases of a single section.
_AT_WORK: Final[Mapping[str, _Stage]] = {
    BATCH: ("data", "getting a batch"),
    BACKWARD: ("model", "the backward pass"),
    OPTIMIZER: ("optimizer", "the optimizer's step"),
    SCHEDULER: ("lr_scheduler", "the scheduler's step"),
    EPOCH_END: ("callbacks", "the end of the first epoch"),
}


@dataclass
class Attempt:
    """The state of a run that is tried out.

    Attributes:
        builder: Builds the run.
        config: Its resolved config.
        device: The device that it runs on.
        probe: The callback that watches it.
        trainer: The trainer; None until it is built.
    """

    builder: Builder
    config: Mapping[str, Any]
    device: torch.device
    probe: Probe
    trainer: Trainer | None = None

    def explained(self, error: BaseException) -> InputError:
        """An InputError for an exception, at the place in the study file that it comes from."""
        if isinstance(error, InputError):
            return error
        if failure_outcome(error) == Outcome.OUT_OF_MEMORY:
            return self._out_of_memory(error)
        if isinstance(error, RankError):
            problem, fix = str(error), "see how it trains on one device: `trainer.devices=1`"
            return self.builder.spec.error(problem, path="trainer.devices", fix=fix)
        if self.trainer is None:
            return self._said(*self._unbuilt(error), error)
        callback = _callback_in(error.__traceback__) or self._recorder_of(error)
        if isinstance(callback, Checkpoint) or isinstance(error, CheckpointError | CheckpointWriteError):
            return self.unsaved(error)
        if callback is not None:
            return self._said(self._path_of(callback), f"{type(callback).__name__}", error)
        return self._said(*self._at_work(error), error)

    def _recorder_of(self, error: BaseException) -> Callback | None:
        """The callback that recorded a value that is not a metric; its hook is not in the traceback."""
        source = error.source if isinstance(error, MetricError) else ""
        callbacks = self.trainer.callbacks.callbacks if self.trainer and source else ()
        return next((callback for callback in callbacks if callback.name == source), None)

    def unsaved(self, error: BaseException) -> InputError:
        """An InputError for the part of a checkpoint that can't be saved or read back."""
        assert self.trainer is not None
        path = "callbacks.checkpoint"
        state = self.trainer.state_dict()
        parts = {name: state[name] for name in _SAVED}
        parts |= {f"callbacks ({name})": value for name, value in state["callbacks"].items()}
        for name, part in parts.items():
            try:
                _through_a_file(part)
            except Exception:  # noqa: BLE001 - pickle and torch raise many kinds
                path = name
        rest = path.partition(" ")[2]
        problem = f"what a checkpoint holds of it{' ' + rest if rest else ''} can't be saved and read back"
        fix = "keep tensors and plain values only in its state_dict"
        return self.builder.spec.error(f"{problem}: {_first_line(error)}", path=section_of(path), fix=fix)

    def _unbuilt(self, error: BaseException) -> _Stage:
        """The part that can't be built, found by building the parts again, one by one."""
        if _passed(error, _RUNNER):
            return "callbacks", "taking them"
        return ("data", "making batches of it") if _of_data(error) else _reached(self._building())

    def _building(self) -> Iterator[_Stage]:
        """Build the parts again, and yield each before it is built."""
        resolver, config = self.builder.resolver, self.config
        yield "data", "building it"
        self.builder.data(config)
        yield "model", "building it"
        model = instantiate(resolver, config["model"]).to(self.device)
        yield "optimizer", "building it"
        spec = self.builder.spec
        optimizer = make_optimizers(spec, resolver, config["optimizer"], model)
        if config["lr_scheduler"] is not None:
            yield "lr_scheduler", "building it"
            make_schedulers(spec, resolver, config["lr_scheduler"], optimizer)
        callbacks = {join_path(("callbacks", name)): node for name, node in config["callbacks"].items()}
        for path, node in {"loss": config["loss"], "step": config["step"], **callbacks}.items():
            if isinstance(node, Mapping) and TARGET in node:
                yield path, "building it"
                instantiate(resolver, node, _as_function=True)
        for name, node in config["metrics"].items():
            yield join_path(("metrics", name)), "building it"
            make_metric(resolver, node)
        if options := config["trainer"]["compile"]:
            yield "trainer.compile", "torch.compile"
            compiled(model, options)
        yield "trainer", "building the trainer"

    def _at_work(self, error: BaseException) -> _Stage:
        phase = self.probe.phase
        if name := metric_at_work(error):
            return join_path(("metrics", name)), "the metric"
        if phase == START:
            return ("data", "making batches of it") if _of_data(error) else ("trainer", "starting the training")
        if phase in _AT_WORK:
            return _AT_WORK[phase]
        where = " of a validation batch" if phase == VALIDATION else ""
        return self._forward(where)

    def _forward(self, where: str) -> _Stage:
        """Which of model, loss, step and metrics fails, found by calling them again, one by one."""
        assert self.trainer is not None
        batch = self.probe.failed
        if self.config["step"] is not None:
            return "step", f"the step{where} ({shapes_of(batch)})"
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            return "data", f"taking inputs and targets from a batch{where}"
        inputs, targets = batch
        with torch.no_grad():
            return _reached(self._calling(self.trainer, inputs, targets, where))

    def _calling(self, trainer: Trainer, inputs: Any, targets: Any, where: str) -> Iterator[_Stage]:
        """Call model and metrics again, as far as the run got, and yield each before it is called."""
        yield "model", f"the forward pass{where} (inputs {shapes_of(inputs)})"
        outputs = trainer.model(inputs)
        shapes = f"outputs {shapes_of(outputs)}, targets {shapes_of(targets)}"
        for name, metric in trainer.metrics.items() if self.probe.phase == METRICS or where else ():
            yield join_path(("metrics", name)), f"the metric{where} ({shapes})"
            torch.as_tensor(measured_alone(metric, outputs, targets)).reshape(())
        yield "loss", f"the loss{where} ({shapes})"

    def _path_of(self, callback: Callback) -> str:
        for name, row in CALLBACKS.items():
            if type(callback) is row.kind:
                return join_path(("callbacks", name))
        for name, node in self.config["callbacks"].items():
            if isinstance(node, Mapping) and str(node.get(TARGET, "")).endswith(type(callback).__name__):
                return join_path(("callbacks", name))
        return "callbacks"

    def _said(self, section: str, doing: str, error: BaseException) -> InputError:
        spec = self.builder.spec
        node: Any = lookup(self.config, split_path(section))
        target = str(node[TARGET]) if isinstance(node, Mapping) and TARGET in node else ""
        place = _own_line(error, spec.folder)
        fix = (
            f"see {place}"
            if place
            else _HINTS.get(section, "see its arguments") + "; `--debug` shows the whole story"
        )
        if known := fix_of(_first_line(error)):
            fix = f"{known} ({place})" if place else known
        path = f"{section}.{TARGET}" if target else section
        return spec.error(f"{doing} failed: {_first_line(error)}", path=path, value=target, fix=fix)

    def _out_of_memory(self, error: BaseException) -> InputError:
        batch = self.config["loader"]["batch_size"]
        fix = "make the batch or the model smaller, or use `trainer.precision: bf16`"
        problem = f"memory runs out on {self.device}: {_first_line(error)}"
        return self.builder.spec.error(problem, path="loader.batch_size", value=batch, fix=fix)


def section_of(part: str) -> str:
    """The section of a study file for a part of a checkpoint: ``callbacks`` for ``callbacks (Name)``."""
    name = part.partition(" ")[0]
    return "lr_scheduler" if name == "scheduler" else name


def _reached(stages: Iterator[_Stage]) -> _Stage:
    """The stage at which the code fails again, or the last one; Ctrl-C does not count as a failure."""
    stage = next(stages)
    try:
        for stage in stages:  # noqa: B007 - what is looked for
            pass
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - it is raised already; this finds out where
        return stage
    return stage


def _of_data(error: BaseException) -> bool:
    """Whether an exception came from the trainer's own code that reads data."""
    return _passed(error, _OF_DATA)


def _passed(error: BaseException, place: Path) -> bool:
    """Whether an exception came through this file, or through a file in this folder."""
    return any(Path(frame.filename).is_relative_to(place) for frame in traceback.extract_tb(error.__traceback__))


def _through_a_file(part: Any) -> None:
    file = io.BytesIO()
    torch.save(readable(part), file)
    file.seek(0)
    torch.load(file, weights_only=True)


def _callback_in(trace: TracebackType | None) -> Callback | None:
    """The callback whose hook an exception came from, the innermost of several."""
    found = None
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, Callback) and not isinstance(owner, Probe):
            found = owner
        trace = trace.tb_next
    return found


def _own_line(error: BaseException, folder: Path) -> str:
    """The file and line of the study's own code that an exception came from; empty if none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(folder.resolve())]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


def _first_line(error: BaseException) -> str:
    return error_text(error).strip().partition("\n")[0]
