"""Final training with a function that trains by itself: called once more, with a trial's parameters."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from optuna.trial import FixedTrial

from hpo.config.code import code_identity
from hpo.config.spec import StudySpec
from hpo.config.targets import TARGET
from hpo.errors import InputError, StudyError
from hpo.final.stamp import write_json
from hpo.final.starting import Start
from hpo.final.training import DivergedError
from hpo.search.schedulers.scheduler import Decision
from hpo.storage.ledger import Lease
from hpo.study.folders import CHECKPOINTS
from hpo.trial.builder import Builder
from hpo.trial.checkpoints import Checkpoints
from hpo.trial.named_in import draws_parameters
from hpo.trial.reports import Reports
from hpo.trial.session import Session
from hpo.trial.stopping import StopRequest
from hpo.trial.training_code import came_to, function_code


class _Unstored(Reports):
    """Reports of a training that is not a trial: none is stored, and the training is never pruned or paused."""

    def __init__(self, metric: str) -> None:
        self.metric = metric

    def resume(self, history: Sequence[Mapping[str, float]]) -> Decision:  # noqa: ARG002 - as of `Reports`
        """CONTINUE."""
        return Decision.CONTINUE

    def report(self, step: int, value: float, *, ask: bool) -> Decision:  # noqa: ARG002 - as of `Reports`
        """CONTINUE."""
        return Decision.CONTINUE

    def passed(self, step: int) -> Decision:  # noqa: ARG002 - as of `Reports`
        """CONTINUE."""
        return Decision.CONTINUE


def _session(spec: StudySpec, start: Start, folder: Path, device: torch.device) -> Session:
    """A session without a trial: it stores nothing, and no request stops it."""
    return Session(
        number=-1 if start.trial is None else start.trial,
        params=start.params,
        config=spec.resolve(start.params),
        folder=folder,
        device=device,
        seed=start.seed,
        mode=spec.study.mode,
        reports=_Unstored(spec.study.metric),
        checkpoints=Checkpoints([folder], device),
        request=StopRequest(),
        lease=Lease(0, 1),
        process=os.getpid(),
        pulse=lambda _: None,
        max_epochs=spec.trainer.known_epochs or 0,
    )


def _refuse_what_none_can_repeat(builder: Builder, start: Start) -> None:
    if start.lineage:
        raise StudyError(
            f"{start.name} is a fork: its parameters changed while it trained, which a function can't repeat\n"
            "  fix: use the checkpoint that `hpo best` names, or train another trial"
        )
    builder.import_targets()
    spec, node = builder.spec, builder.spec.config.objective
    assert node is not None
    if start.trial is None and spec.defines_by_run and draws_parameters(builder.resolver.resolve(node[TARGET])):
        problem = f"`{node[TARGET]}` draws its parameters itself, so there is no base config to train"
        raise InputError(problem, path="--trial", fix="add `--trial best`, or a trial's number")


def train_function(builder: Builder, start: Start, *, device: torch.device) -> dict[str, Any]:
    """Call the study's function from scratch, and write ``final/`` in the output folder.

    Args:
        builder: The study's builder.
        start: The parameters and the seed.
        device: The device for the function.

    Returns:
        What ``final/metrics.json`` holds: that of `hpo.final.training.train_final`, with the metrics of the best
        epoch, and its checkpoint in place of a model, or None if the function has saved none.

    Raises:
        DivergedError: No epoch has a finite value of the study's metric.
        InputError: There is no trial, and the function draws its parameters itself.
        StudyError: The trial is a fork.
    """
    spec = builder.spec
    _refuse_what_none_can_repeat(builder, start)
    folder = spec.output_dir / "final"
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    session = _session(spec, start, folder, device)
    session.keep_config(session.config)
    code = function_code(spec, builder.resolver, FixedTrial(dict(start.params), session.number))
    stopped = code.train(session)
    found = came_to(code, spec.study.metric, spec.study.mode)
    if found is None:
        raise DivergedError(f"final training ended without an epoch with a finite {spec.study.metric}")
    epoch, metrics = found
    saved = session.checkpoints.of_epoch(epoch)
    result = {
        "study": spec.study.name,
        "trial": start.trial,
        "value": metrics[spec.study.metric],
        "epochs": len(code.history),
        "best_epoch": epoch,
        "stopped": stopped,
        "metrics": dict(metrics),
        "model": None,
        "checkpoint": None if saved is None else str(saved.path),
        "code": code_identity(spec).hash,
        "trial_code": start.code,
    }
    write_json(folder / "metrics.json", result)
    return result
