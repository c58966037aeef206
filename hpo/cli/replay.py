"""`hpo replay`: replays a study's decisions under other pruners or schedulers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.cli.answers import looked_up, print_json
from hpo.cli.options import Debug, Json, OutputDir, Overrides, Storage, StudyFile, read_spec
from hpo.cli.tables import print_table
from hpo.wording import count_of, not_replayed, shown

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
    scheduler: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,key=value]…",
            help="A scheduler to replay in place of pruners, such as `asha,factor=4`; may be repeated.",
            show_default=False,
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(min=1, help="Epochs that a scheduler may train. Default: the study's.", show_default=False),
    ] = None,
    orders: Annotated[
        int,
        typer.Option(
            min=1, help="Number of orders in which trials are replayed: the study's own, then random ones."
        ),
    ] = 4,
    workers: Annotated[int, typer.Option(min=1, help="Number of trials that run at the same time.")] = 1,
    json_: Json = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Replay a finished study under other pruners or schedulers, without training.

    Prints for each pruner: the share of the study's epochs that it uses; the regret, from 0 if it still finds the
    best trial to 1 if it finds none better than the median; and the wrongly pruned trials, which would have ended
    better than the best trial that it finds. Trials that the study itself cut short are replayed only up to that
    epoch. Forks and trials that reused a known result are left out; the table says how many.

    With --scheduler: the epochs and grants that each scheduler would use, the best value that it would find, and
    how many trials it would train past their last stored epoch; these count as ended there.

    Example: hpo replay study.yaml --pruner median,n_warmup_steps=5 --pruner predicted_loss
    """
    del debug
    _refuse_both(pruner, scheduler, epochs)
    read = partial(_read, study, tuple(overrides or ()), storage=storage, output_dir=output_dir)
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if scheduler:
        _replay_schedulers(read, scheduler, epochs, orders=orders, workers=workers, json_=json_)
        return
    _replay_pruners(read, pruner, orders=orders, workers=workers, json_=json_)


def _replay_pruners(
    read: Callable[..., StudySpec], typed: list[str] | None, *, orders: int, workers: int, json_: bool
) -> None:
    from hpo.study.replay_study import replay_study

    contestants = _contestants(read, typed)
    data = looked_up(read(), partial(replay_study, contestants=contestants, orders=orders, workers=workers))
    if json_:
        print_json(data)
        return
    _print_replays(data)


def _read(study: Any, overrides: tuple[str, ...], *more: str, **options: Any) -> StudySpec:
    return read_spec(study, [*overrides, *more], **options)


def _contestants(read: Callable[..., StudySpec], typed: list[str] | None) -> dict[str, StudySpec]:
    """The study file with each pruner in place of its own, by the pruner's name for people."""
    if typed:
        return {text: _with(read, "--pruner", text) for text in typed}
    own = read()
    if own.study.objectives is not None:
        problem = "can't be replayed: pruners and schedulers compare trials by one value"
        raise own.error(problem, path="study.objectives", fix="replay a study with one `metric`")
    others = {text: _with(read, "--pruner", text) for text in _DEFAULT}
    return {f"{own.study.pruner.name} (the study's own)": own} | {
        text: spec for text, spec in others.items() if spec.study.pruner != own.study.pruner
    }


def _with(read: Callable[..., StudySpec], option: str, text: str) -> StudySpec:
    """The study file with the pruner or scheduler of an option's text; refuses one that can't be built."""
    from hpo.errors import InputError
    from hpo.study.replay_schedulers import checked_scheduler
    from hpo.study.replay_study import check_pruner, retold, typed_mapping

    other = {"--pruner": "study.scheduler=none", "--scheduler": "study.pruner=none"}[option]
    override = f"study.{option[2:]}={typed_mapping(text, option)}"
    try:
        spec = read(override, other)
        if option == "--pruner":
            check_pruner(spec)
        else:
            checked_scheduler(spec)
    except InputError as error:
        raise retold(error, text, option) from error
    return spec


def _refuse_both(pruner: list[str] | None, scheduler: list[str] | None, epochs: int | None) -> None:
    from hpo.errors import InputError

    if pruner and scheduler:
        raise InputError("can't stand beside `--pruner`", path="--scheduler", fix="replay one kind at a time")
    if epochs is not None and not scheduler:
        raise InputError("is about `--scheduler`", path="--epochs", value=str(epochs), fix="give one too")


def _replay_schedulers(
    read: Callable[..., StudySpec],
    typed: list[str],
    epochs: int | None,
    *,
    orders: int,
    workers: int,
    json_: bool,
) -> None:
    from hpo.study.replay_schedulers import replay_schedulers

    spec = read()
    contestants = {text: _with(read, "--scheduler", text) for text in typed}
    limit = spec.study.epochs if epochs is None else epochs
    question = partial(replay_schedulers, contestants=contestants, orders=orders, workers=workers, epochs=limit)
    data = looked_up(spec, question)
    if json_:
        print_json(data)
        return
    _print_schedules(data)


def _print_schedules(data: dict[str, Any]) -> None:
    itself = ["the study itself", str(data["epochs"]), "100.0%", shown(data["found"]), "", "", str(data["trials"])]
    rows = [[*itself, "", "", ""]]
    rows += [
        [
            entry["scheduler"],
            f"{entry['epochs_used']:.0f}",
            f"{entry['epochs_used'] / data['epochs']:.1%}",
            shown(entry["found"]),
            f"{entry['regret']:.4f}",
            f"{entry['worst_regret']:.4f}",
            f"{entry['trials']:.1f}",
            f"{entry['grants']:.1f}",
            f"{entry['at_edge']:.1f}",
            f"{entry['decision_ms']:.3f}",
        ]
        for entry in data["schedulers"]
    ]
    figures = ("epochs", "of all", "best", "regret", "worst", "trials", "grants", "at the edge", "ms a decision")
    print_table(_title(data), ("scheduler", *figures), rows, below=_left_out(data) + _edge(data))


def _edge(data: dict[str, Any]) -> str:
    if not data["cut_short"]:
        return ""
    return (
        f"cut short by the study: {data['cut_short']} of {data['trials']} trials; what they would have come to is "
        "not known, so a scheduler that resumes many of them at the edge may do better than shown\n"
    )


def _audit_cells(entry: dict[str, Any]) -> tuple[str, str]:
    """The cells with the number of audit runs and the last `alpha`."""
    return ("-", "-") if entry["alpha"] is None else (f"{entry['audited']:.1f}", f"{entry['alpha']:.2g}")


def _print_replays(data: dict[str, Any]) -> None:
    with_audits = any(entry["alpha"] is not None for entry in data["pruners"])
    rows = [
        (
            entry["pruner"],
            f"{entry['epochs_used']:.0f}",
            f"{entry['epochs_fraction']:.1%}",
            f"{entry['regret']:.4f}",
            f"{entry['worst_regret']:.4f}",
            f"{entry['wrongly_pruned']:.1f}",
            f"{entry['top_pruned']:.0%}",
            *(_audit_cells(entry) if with_audits else ()),
            f"{entry['decision_ms']:.3f}",
        )
        for entry in data["pruners"]
    ]
    figures = ("epochs", "of all", "regret", "worst", "wrongly pruned", "best 5% pruned")
    header = ("pruner", *figures, *(("audited", "alpha at last") if with_audits else ()), "ms a decision")
    print_table(_title(data), header, rows, below=_left_out(data) + _cut_short(data))


def _left_out(data: dict[str, Any]) -> str:
    others = not_replayed(**data["left_out"])
    return f"left out: {others}\n" if others else ""


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
