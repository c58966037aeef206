"""`hpo train`."""

from __future__ import annotations

import contextlib
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.cli.options import Debug, Json, OutputDir, Overrides, Storage, StudyFile, read_spec
from hpo.errors import InputError

if TYPE_CHECKING:
    from hpo.config import StudySpec
    from hpo.final import Start


def train(
    study: StudyFile,
    overrides: Overrides = None,
    trial: Annotated[
        str | None, typer.Option(metavar="best|N", help="Trial to go on from; without it the base config.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs to train; trainer.max_epochs if not given.")
    ] = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Use the trial's parameters, not its weights.")
    ] = False,
    json_: Json = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Train for good: from a trial's best checkpoint, anew with its parameters, or the base config."""
    del debug
    if trial is not None and trial != "best" and not trial.isdecimal():
        raise InputError("is neither `best` nor a number", path="--trial", value=trial, fix="see `hpo trials`")
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    # What people read goes to stderr when a program reads stdout.
    with contextlib.redirect_stdout(sys.stderr) if json_ else contextlib.nullcontext():
        result = _train(spec, trial, epochs, from_scratch=from_scratch)
    if json_:
        from hpo.outcome import finite

        print(json.dumps(finite(result), indent=2, allow_nan=False))
        return
    numbers = ", ".join(f"{name} {value:.5g}" for name, value in result["metrics"].items())
    print(f"\nbest epoch {result['best_epoch']} of {result['epochs']}: {numbers}\nmodel: {result['model']}")


def _train(spec: StudySpec, trial: str | None, epochs: int | None, *, from_scratch: bool) -> dict[str, Any]:
    import torch

    from hpo.build import Builder, offered_callbacks
    from hpo.check import check_metric, check_spec
    from hpo.check_callbacks import check_callbacks
    from hpo.final import start_of_base, train_final

    for warning in check_spec(spec, callbacks=offered_callbacks(), search=trial is not None):
        print(f"warning: {warning}", file=sys.stderr)
    check_metric(spec, check_callbacks(spec))
    start = start_of_base(spec) if trial is None else _looked_up_start(spec, trial, from_scratch=from_scratch)
    device = torch.device(spec.trainer.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    way = f"going on from epoch {start.epoch}" if start.checkpoint else "from scratch"
    print(f"final training of {spec.study.name}, {start.name}, {way}, on {device}", flush=True)
    return train_final(Builder(spec), start, epochs=epochs, device=device)


def _looked_up_start(spec: StudySpec, trial: str, *, from_scratch: bool) -> Start:
    from hpo.final import start_of_trial
    from hpo.study import load_study

    opened = load_study(spec)
    try:
        return start_of_trial(opened, trial, from_scratch=from_scratch)
    finally:
        opened.storage.close()
