"""`hpo replay`: a study's pruning decisions, run again."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.cli.options import Debug, Json, OutputDir, Overrides, Storage, StudyFile, read_spec
from hpo.cli.show import looked_up, print_json, print_table
from hpo.wording import count_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpo.config.spec import StudySpec

_DEFAULT = ("none", "median", "predicted_loss")


def replay(
    study: StudyFile,
    overrides: Overrides = None,
    pruner: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,key=value]…",
            help="A pruner to replay, such as `median,n_warmup_steps=3`; may be repeated. "
            "By default the study's own, none, median and predicted_loss.",
            show_default=False,
        ),
    ] = None,
    orders: Annotated[
        int, typer.Option(min=1, help="Orders of the trials: the study's own, then random ones.")
    ] = 4,
    workers: Annotated[int, typer.Option(min=1, help="Trials that run at a time.")] = 1,
    json_: Json = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Replay the pruning decisions of a finished study under other pruners, without training.

    Prints for each pruner: the share of the study's epochs that it uses; the regret, 0 where it still finds the
    best trial and 1 where it finds no better one than the median; and the wrongly pruned trials, which would have
    ended better than the best found. A trial that the study itself cut short is replayed up to that epoch only.

    Example: hpo replay study.yaml --pruner median,n_warmup_steps=5 --pruner predicted_loss
    """
    del debug
    read = partial(_read, study, tuple(overrides or ()), storage=storage, output_dir=output_dir)
    spec = read()
    import optuna

    from hpo.study.replay_study import replay_study

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    contestants = _contestants(read, pruner)
    data = looked_up(spec, partial(replay_study, contestants=contestants, orders=orders, workers=workers))
    if json_:
        print_json(data)
        return
    _print_replays(data)


def _read(study: Any, overrides: tuple[str, ...], *more: str, **options: Any) -> StudySpec:
    return read_spec(study, [*overrides, *more], **options)


def _contestants(read: Callable[..., StudySpec], typed: list[str] | None) -> dict[str, StudySpec]:
    """The study file with each pruner in place of its own, by the name to show."""
    if typed:
        return {text: _with_pruner(read, text) for text in typed}
    own = read()
    others = {text: _with_pruner(read, text) for text in _DEFAULT}
    return {f"{own.study.pruner.name} (the study's own)": own} | {
        text: spec for text, spec in others.items() if spec.study.pruner != own.study.pruner
    }


def _with_pruner(read: Callable[..., StudySpec], text: str) -> StudySpec:
    from hpo.errors import InputError
    from hpo.study.replay_study import pruner_mapping, retold, try_out

    override = f"study.pruner={pruner_mapping(text)}"
    try:
        spec = read(override)
        try_out(spec)
    except InputError as error:
        raise retold(error, text) from error
    return spec


def _print_replays(data: dict[str, Any]) -> None:
    rows = [
        (
            entry["pruner"],
            f"{entry['epochs_used']:.0f}",
            f"{entry['epochs_fraction']:.1%}",
            f"{entry['regret']:.4f}",
            f"{entry['worst_regret']:.4f}",
            f"{entry['wrongly_pruned']:.1f}",
            f"{entry['top_pruned']:.0%}",
            f"{entry['decision_ms']:.3f}",
        )
        for entry in data["pruners"]
    ]
    header = ("pruner", "epochs", "of all", "regret", "worst", "wrongly pruned", "best 5% pruned", "ms a decision")
    print_table(_title(data), header, rows, below=_cut_short(data))


def _title(data: dict[str, Any]) -> str:
    trials, orders, workers = (count_of(data[f"{what}s"], what) for what in ("trial", "order", "worker"))
    return f"replay of {data['study']}: {trials} of {data['epochs']} epochs, {orders}, {workers}"


def _cut_short(data: dict[str, Any]) -> str:
    if not data["cut_short"]:
        return ""
    return (
        f"cut short by the study: {data['cut_short']} of {data['trials']} trials; "
        "regret and wrongly pruned are among the others\n"
    )
