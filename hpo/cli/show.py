"""`hpo status`, `hpo trials`."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from hpo.cli.answers import looked_up, print_json
from hpo.cli.options import Debug, Json, OutputDir, Overrides, Storage, StudyFile, read_spec, uncollected
from hpo.cli.tables import cell, param_cell, param_names, print_table
from hpo.errors import InputError
from hpo.wording import count_of, granted, percent, study_progress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpo.config.spec import StudySpec

_REASON_WIDTH = 80


def status(
    study: StudyFile,
    overrides: Overrides = None,
    watch: Annotated[bool, typer.Option("--watch", help="Update until the study is done.")] = False,
    interval: Annotated[
        float | None,
        typer.Option(min=0.1, help="Seconds between two updates; 2 if not given.", show_default=False),
    ] = None,
    json_: Json = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Show the progress of a study.

    --watch updates it every few seconds. It reads only the database, so it works on any machine. With --json, each
    update is one line of JSON.

    Example: hpo status study.yaml --watch --interval 5
    """
    del debug
    if interval is not None and not watch:
        raise InputError("is about `--watch`", path="--interval", value=str(interval), fix="give `--watch` too")
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    if watch:
        from hpo.console.watch import watch as watch_study

        watch_study(spec, 2.0 if interval is None else interval, json_=json_)
        return
    with uncollected():
        from hpo.search.auto_sampler import ChosenSampler
        from hpo.study.outcome import UNFINISHED
        from hpo.study.status import best_in_words, study_status

    data = looked_up(spec, study_status)
    if json_:
        print_json(data)
        return
    done, of, unit = study_progress(data)
    rows = [("trials", f"{data['finished']} finished" if unit == "epochs" else f"{done} of {of} finished")]
    rows += [("epochs", f"{done} of {of}")] if unit == "epochs" else []
    rows += [(name, str(data[name])) for name in UNFINISHED if data[name]]
    rows += [(name, str(count)) for name, count in data["outcomes"].items() if count]
    rows += best_in_words(spec, data)
    rows += [("goal", data["goal"])] if data["goal"] else []
    sampler = ChosenSampler(**data["sampler"])
    rows += [("sampler", str(sampler))] if sampler.why else []
    scheduler = spec.study.scheduler
    rows += [] if scheduler is None else [("scheduler", scheduler.name)]
    rows += _code_rows(data["code"])
    rows += _pruning_rows(data["pruning"])
    rows += [(f"agent {entry['agent']}", _described_agent(entry)) for entry in data["agents"]]
    rows += [(f"trial {entry['trial']}", _whose(entry)) for entry in data["running_trials"]]
    print_table(data["study"], ("", ""), rows)


def _code_rows(code: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows about the study's code if it has changed, with the trials that ran under several versions."""
    if len(code["versions"]) <= 1:
        return []
    changes = len(code["versions"]) - 1
    rows = [("code", f"{code['hash']}, changed {'once' if changes == 1 else f'{changes} times'} since the start")]
    return rows + [("", f"trial {number} ran under more than one code") for number in code["mixed_trials"]]


def _pruning_rows(pruning: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows about what pruning saved, if it ended trials, and about the audit, if there was one."""
    rows = []
    if pruning["pruned"]:
        summary = f"{pruning['pruned']} of {pruning['ended']} pruned"
        if pruning["epochs_unpruned"]:
            saved, of = pruning["epochs_saved"], pruning["epochs_unpruned"]
            summary += f", {saved} of {of} epochs saved ({percent(saved / of)})"
        if pruning["alpha"] is not None:
            summary += f", alpha {pruning['alpha']:.2g} at last"
        rows.append(("pruning", summary))
    if pruning["audited"]:
        wrong, of, rate = (pruning[name] for name in ("wrongly_condemned", "audited", "false_prune_rate"))
        low, high = pruning["false_prune_interval"]
        shares = f"{percent(rate)}, 95 % interval {percent(low)} to {percent(high)}"
        rows.append(("audit", f"{wrong} of {count_of(of, 'audited trial')} ended among the best ({shares})"))
    return rows


def _described_agent(entry: dict[str, Any]) -> str:
    """An agent on one line: its place, its workers, its pace."""
    placed = f" ({entry['placement']})" if entry["placement"] else ""
    return (
        f"{entry['host']}{placed}, {entry['devices']}, {entry['running']} of "
        f"{count_of(entry['workers'], 'worker')} at work, {entry['ended_per_hour']:.0f} trials an hour, "
        f"last beat {entry['last_beat_s']:.0f} s ago"
    )


def _whose(entry: dict[str, Any]) -> str:
    """The worker that runs a trial, and the time since its last beat."""
    if entry["attempt"] is None:
        return "runs without a lease"
    device = f" ({entry['device']})" if entry["device"] else ""
    heard = f"last beat {entry['last_beat_s']:.0f} s ago"
    if entry["alive"] is False:
        heard = "its process is gone: `hpo run` resumes it"
    return f"{entry['worker']} on {entry['host']}{device}, attempt {entry['attempt']}, {heard}"


def trials(
    study: StudyFile,
    overrides: Overrides = None,
    internals: Annotated[
        bool, typer.Option("--internals", help="Also show attempts, workers, seeds, grants and predictions.")
    ] = False,
    last: Annotated[
        int | None,
        typer.Option(min=1, help="Show only the last N trials.", show_default=False),
    ] = None,
    json_: Json = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """List all trials, or the last ones: outcome, values, parameters, epochs, and why a trial was stopped.

    --internals adds a second table, with what hpo records besides. --json prints both.

    Example: hpo trials study.yaml --last 20
    """
    del debug
    if internals and json_:
        fix = "leave it out: with --json they are the key `internals` of each trial"
        raise InputError("can't be given with --json", path="--internals", fix=fix)
    spec = read_spec(study, overrides, storage=storage, output_dir=output_dir)
    with uncollected():
        from hpo.study.trial_entries import study_trials

    data = looked_up(spec, partial(study_trials, last=last, brief=not (internals or json_)))
    if json_:
        print_json(data)
        return
    more = _MORE if sys.stdout.isatty() else ""  # in a pipe, each line is a trial
    _print_trials(spec, data, below="\n" if internals else more)
    if internals:
        _print_internals(data)


_MORE: Final = "`--internals` adds attempts, workers, seeds, grants and predictions\n"


def _print_trials(spec: StudySpec, data: Sequence[dict[str, Any]], *, below: str) -> None:
    """Print the table of results: values, parameters, and how each trial ended."""
    names, bounded = param_names(spec, data), bool(spec.study.constraints)
    with_reasons = any(entry["reason"] for entry in data)
    several = len({code for entry in data for code in _codes(entry)}) > 1
    rows = [
        (
            str(entry["trial"]),
            entry["outcome"],
            *(cell(value) for value in _values(entry)),
            *([_kept(entry["constraints"])] if bounded else []),
            *(param_cell(entry["params"], name) for name in names),
            str(entry["epochs"]),
            "-" if entry["duration_s"] is None else f"{entry['duration_s']:.1f}",
            *([" → ".join(_codes(entry)) or "-"] if several else []),
            *([_first_line(entry["reason"])] if with_reasons else []),
        )
        for entry in data
    ]
    metrics = [*spec.study.goals, *(["bounds"] if bounded else [])]
    last = [*(["code"] if several else []), *(["reason"] if with_reasons else [])]
    print_table(spec.study.name, ("trial", "outcome", *metrics, *names, "epochs", "s", *last), rows, below=below)


def _print_internals(data: Sequence[dict[str, Any]]) -> None:
    """Print the table of internals: who ran a trial, its grants and predictions."""
    kept = [(entry["trial"], entry["internals"]) for entry in data]
    metrics = list(dict.fromkeys(name for _, each in kept for name in each["metrics"]))
    with_grants = any(each["grants"] for _, each in kept)
    rows = [
        (
            str(number),
            str(len(each["attempts"])),
            cell(each["worker"] or None),
            cell(each["device"] or None),
            str(each["seed"]),
            *(cell(each["metrics"].get(name)) for name in metrics),
            *([_last_grant(each["grants"], each["fork"])] if with_grants else []),
        )
        for number, each in kept
    ]
    last = ["last granted"] if with_grants else []
    header = ("trial", "attempts", "worker", "device", "seed", *metrics, *last)
    print_table("predictions and internals", header, rows)


def _last_grant(grants: Sequence[dict[str, Any]], fork: dict[str, Any] | None) -> str:
    """The last grant of a trial and its reason; for a fork, also where it began."""
    if not grants:
        return "-"
    said = granted(grants[-1]["until"], grants[-1]["why"])
    if fork is None or len(grants) == 1:
        return said
    return f"{said}; fork of trial {fork['parent']} after epoch {fork['epoch']}"


def _codes(entry: dict[str, Any]) -> list[str]:
    """The hashes of the code that a trial ran under: several if it resumed under other code."""
    return list(dict.fromkeys(each["code"] for each in entry["internals"]["attempts"] if each["code"]))


def _values(entry: dict[str, Any]) -> list[Any]:
    """A trial's value for each objective; for the first, the leading one, also while it runs."""
    return [entry["value"], *list(entry.get("values", {}).values())[1:]]


def _kept(violations: dict[str, float | None]) -> str:
    """A text on the bounds that a trial violates, or ``kept``; a dash without bounds."""
    beyond = [name for name, violation in violations.items() if violation is None or violation > 0]
    return "beyond " + ", ".join(beyond) if beyond else "kept" if violations else "-"


def _first_line(reason: str | None) -> str:
    line = (reason or "").partition("\n")[0]
    return line if len(line) <= _REASON_WIDTH else line[: _REASON_WIDTH - 1] + "…"
