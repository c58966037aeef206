"""`hpo train`."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from hpo.cli.answers import looked_up, print_json
from hpo.cli.options import AcceptCodeChange, Debug, Json, OutputDir, Overrides, Storage, StudyFile, read_spec
from hpo.cli.tables import cell, print_table
from hpo.console.output import UnreadError, flushed, read_by_others
from hpo.console.slow import slow_steps
from hpo.errors import InputError, StudyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from hpo.config.spec import StudySpec
    from hpo.final.starting import Start
    from hpo.study.open_study import OpenStudy
    from hpo.trial.builder import Builder
    from hpo.trial.peers import Peers

_DEFAULT_SEEDS: Final = (0, 1, 2)
#: A single number above this is a seed, not a number of trainings.
_MOST_SEEDS: Final = 100
#: The same as `hpo.config.schema_types.MAX_EPOCHS`, whose import is slow.
_MOST_EPOCHS: Final = 1_000_000
_SEEDS_FIX: Final = "write a number of seeds, `5`, or the seeds themselves, `0,1,2`; `7,` is the seed 7 alone"


@dataclass(frozen=True)
class _Choice:
    """The options that say what to train."""

    trial: str | None
    top_k: int | None
    seeds: tuple[int, ...] | None
    epochs: int | None
    from_scratch: bool
    accept_code_change: bool


def train(
    study: StudyFile,
    overrides: Overrides = None,
    trial: Annotated[
        str | None, typer.Option(metavar="best|N", help="Trial to start from; by default, train the base config.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, max=_MOST_EPOCHS, help="Epochs to train; by default trainer.max_epochs.")
    ] = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Use the trial's parameters, but not its weights.")
    ] = False,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="N|A,B,…", help="Train from scratch with the seeds 0 to N-1, or with these."),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            "--top-k", min=1, help="Train the best K trials with several seeds each, and rank them by their mean."
        ),
    ] = None,
    accept_code_change: AcceptCodeChange = False,
    json_: Json = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Train the final model: from a trial's best checkpoint, from scratch with its parameters, or the base config.

    --seeds trains from scratch once per seed, and prints the mean with its 95 % confidence interval (Student's t);
    final/model.pt is the model of the best seed. --top-k does this for each of the best K trials, by default with
    the seeds 0, 1, 2, and keeps the trial with the best mean, so that a lucky seed does not decide. After an
    interruption the same command resumes from the newest checkpoint; finished seeds are not trained again.

    Example: hpo train study.yaml --top-k 5 --seeds 3
    """
    del debug
    if trial is not None and trial != "best" and not trial.isdecimal():
        raise InputError("is neither `best` nor a number", path="--trial", value=trial, fix="see `hpo trials`")
    if trial is not None and top_k is not None:
        fix = "leave one out: `--top-k` takes the best trials itself"
        raise InputError("can't stand beside --top-k", path="--trial", value=trial, fix=fix)
    chosen = None if seeds is None else _seeds(seeds)
    choice = _Choice(trial, top_k, chosen, epochs, from_scratch, accept_code_change)
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    if spec.config.objective is not None:
        _refuse_for_a_function(choice)
    # With --json, the lines for people go to stderr.
    with contextlib.redirect_stdout(sys.stderr) if json_ else contextlib.nullcontext():
        result = _train(spec, choice)
    if json_:
        print_json(result)
    else:
        _print(result)


def _print(result: dict[str, Any]) -> None:
    """Print the result of a training."""
    if "ranking" in result:
        with read_by_others():
            print()
        _print_seeds(result)
        return
    numbers = ", ".join(f"{name} {value:.5g}" for name, value in result["metrics"].items())
    is_model = "checkpoint" not in result
    kept = f"model: {result['model']}" if is_model else f"checkpoint: {result['checkpoint'] or 'none'}"
    print(f"\nbest epoch {result['best_epoch']} of {result['epochs']}: {numbers}\n{kept}")


def _refuse_for_a_function(choice: _Choice) -> None:
    """Refuse options that need the Trainer, for a study of a function."""
    given = {"--epochs": choice.epochs, "--seeds": choice.seeds, "--top-k": choice.top_k}
    for option, value in given.items():
        if value is not None:
            problem = "is not for a study with `objective`, whose function trains by itself"
            fix = "leave it out; what the function takes can be overridden, as in `objective.seed=1`"
            raise InputError(problem, path=option, fix=fix)


def _seeds(text: str) -> tuple[int, ...]:
    """The seeds that `--seeds` names."""
    items = [item.strip() for item in text.split(",")]
    if len(items) > 1 and not items[-1]:
        items.pop()
    if not all(item.isdecimal() and item.isascii() for item in items):
        raise InputError("is not a list of seeds", path="--seeds", value=text, fix=_SEEDS_FIX)
    numbers = tuple(map(int, items))
    if "," in text:
        if len(set(numbers)) < len(numbers):
            raise InputError("names a seed twice", path="--seeds", value=text, fix="leave the second one out")
        if max(numbers) >= 2**32:
            raise InputError(
                "names a seed of 2**32 or more", path="--seeds", value=text, fix="write smaller seeds"
            )
        return numbers
    if not numbers[0]:
        raise InputError("asks for no seed", path="--seeds", value=text, fix=_SEEDS_FIX)
    if numbers[0] > _MOST_SEEDS:
        fix = f"for the seed {numbers[0]} alone write `--seeds {numbers[0]},`"
        raise InputError(f"asks for {numbers[0]} trainings", path="--seeds", value=text, fix=fix)
    return tuple(range(numbers[0]))


def _checked(spec: StudySpec, choice: _Choice) -> None:
    with slow_steps() as say:
        say("importing torch and what the study names")
        from hpo.checks.checks import check_study

        searched = choice.trial is not None or choice.top_k is not None
        for warning in check_study(spec, search=searched):
            print(f"warning: {warning}", file=sys.stderr)


def _refuse_unwritable(spec: StudySpec) -> None:
    """Refuse to train if the result can't be written."""
    from hpo.checks.filesystems import refused_writing

    problem = refused_writing(spec.output_dir / "final")
    if problem is not None:
        raise StudyError(f"{problem}\n  fix: run this as a user who may write there")


def _train(spec: StudySpec, choice: _Choice) -> dict[str, Any]:
    _checked(spec, choice)
    _refuse_unwritable(spec)
    from hpo.final.lock import alone_in
    from hpo.trial.builder import Builder

    starts = _starts(spec, choice)
    builder = Builder(spec)
    with alone_in(spec.output_dir / "final"), contextlib.closing(_peers(builder)) as peers:
        return _train_on(peers, starts, choice)


def _peers(builder: Builder) -> Peers:
    """The processes of a training, this one among them, on the devices that a trial would have."""
    import torch

    from hpo.trial.peers import Peers
    from hpo.trial.resources import training_slot

    slot = training_slot(builder.spec)
    torch.set_num_threads(slot.threads)
    return Peers(builder, slot.names)


def _train_on(peers: Peers, starts: list[Start], choice: _Choice) -> dict[str, Any]:
    import torch

    from hpo.final.function_training import train_function
    from hpo.final.training import train_final

    builder, device = peers.builder, torch.device(peers.devices[0])
    spec, where = builder.spec, "+".join(peers.devices)
    if choice.seeds is not None or choice.top_k is not None:
        return _train_over_seeds(peers, starts, choice)
    start = starts[0]
    way = f"from epoch {start.epoch}" if start.checkpoint else "from scratch"
    if len(start.stages) > 1:
        before = ", ".join(f"trial {stage.trial} to epoch {stage.until}" for stage in start.lineage)
        way = f"{way} along its lineage ({before})"
    print(f"final training of {spec.study.name}, {start.name}, {way}, on {where}", flush=True)
    if spec.config.objective is not None:
        return train_function(builder, start, device=device)
    with _resumable():
        return train_final(builder, start, epochs=choice.epochs, device=device, peers=peers)


def _starts(spec: StudySpec, choice: _Choice) -> list[Start]:
    from hpo.final.seeds import leaders
    from hpo.final.starting import start_of_base, start_of_trial
    from hpo.study.joining import config_warning

    which, top_k, accept = choice.trial, choice.top_k, choice.accept_code_change
    from_scratch = choice.from_scratch or choice.seeds is not None or spec.config.objective is not None
    if which is None and top_k is None:
        return [start_of_base(spec)]

    def found(opened: OpenStudy) -> list[Start]:
        if warning := config_warning(opened):
            print(f"warning: {warning}", file=sys.stderr)
        if which is not None:
            return [start_of_trial(opened, which, from_scratch=from_scratch, accept_code_change=accept)]
        assert top_k is not None
        return leaders(opened, top_k, accept_code_change=accept)

    starts: list[Start] = looked_up(spec, found)
    return starts


def _train_over_seeds(peers: Peers, starts: list[Start], choice: _Choice) -> dict[str, Any]:
    import torch

    from hpo.final.seed_run import SeedTrainer
    from hpo.final.seeds import train_over_seeds

    seeds = choice.seeds or _DEFAULT_SEEDS
    print(
        f"final training of {peers.builder.spec.study.name}, {_named(starts, choice.top_k)}, from scratch, "
        f"on {'+'.join(peers.devices)}; seeds {', '.join(map(str, seeds))}",
        flush=True,
    )
    device = torch.device(peers.devices[0])
    with _resumable():
        return train_over_seeds(SeedTrainer(peers.builder, choice.epochs, device, peers), starts, seeds)


def _named(starts: Sequence[Start], top_k: int | None) -> str:
    """A text on what is trained, with a remark if there are fewer trials than requested."""
    what = starts[0].name if len(starts) == 1 else f"the best {len(starts)} trials"
    fewer = top_k is not None and len(starts) < top_k
    return what + (f" ({top_k} were asked for: no other parameters have a rank)" if fewer else "")


@contextlib.contextmanager
def _resumable() -> Iterator[None]:
    """After Ctrl-C, or if the output's reader is gone, print that the same command resumes the training."""
    try:
        with flushed():
            yield
    except (KeyboardInterrupt, UnreadError) as error:
        print("\ninterrupted; the same command resumes it", file=sys.stderr)
        raise KeyboardInterrupt from error
    except BrokenPipeError as error:  # click would take it for standard output's, and end silently
        raise RuntimeError(f"a pipe of the study's own code broke: {error}") from error


def _print_seeds(result: Mapping[str, Any]) -> None:
    metric, kept = result["metric"], result["kept"]
    names = list(result["estimates"])
    names.sort(key=lambda name: name != metric)
    if len(result["ranking"]) > 1:
        _print_ranking(result, metric)
    rows = [
        [str(run["seed"]), *(_measured(run, name, metric) for name in names), cell(run["best_epoch"])]
        for run in result["runs"]
    ]
    rows.append([_counted(result), *(_estimated(result["estimates"][name]) for name in names), ""])
    whose = "base config" if result["trial"] is None else f"trial {result['trial']}"
    below = f"kept: seed {kept['seed']}, the best of them; the mean is what another training comes to\n"
    print_table(
        f"{whose} over seeds, mean ± 95 % confidence interval",
        ("seed", *names, "best epoch"),
        rows,
        below=f"{below}model: {result['model']}\n",
    )


def _print_ranking(result: Mapping[str, Any], metric: str) -> None:
    from hpo.final.seeds import together

    rows = [
        (
            str(entry["rank"]),
            str(entry["rank_before"]),
            str(entry["trial"]),
            cell(entry["study_value"]),
            _estimated(entry["estimates"].get(metric)),
            _counted(entry),
        )
        for entry in result["ranking"]
    ]
    close = together(result["ranking"], metric)
    found = [entry["estimates"].get(metric) for entry in result["ranking"]]
    lone = any(each is not None and each["half_width"] is None for each in found)
    why = "a single value has no interval" if lone else f"the intervals of {_listed(close)} meet the first's"
    below = f"{why}: more seeds may change the order\n" if close else ""
    header = ("rank", "before", "trial", f"{metric} in the study", f"{metric} over seeds", "seeds")
    print_table("ranked anew, mean ± 95 % confidence interval", header, rows, below=below)


def _measured(run: Mapping[str, Any], name: str, metric: str) -> str:
    if run["value"] is None:
        return "diverged"
    return cell(run["value"] if name == metric else run["metrics"].get(name))


def _estimated(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    return cell(found["mean"]) + ("" if found["half_width"] is None else f" ± {found['half_width']:.2g}")


def _counted(entry: Mapping[str, Any]) -> str:
    n, diverged = len(entry["runs"]), len(entry["diverged"])
    return f"{n - diverged} of {n}, {diverged} diverged" if diverged else f"mean of {n}"


def _listed(trials: Iterable[int]) -> str:
    return ", ".join(f"trial {number}" for number in trials)
