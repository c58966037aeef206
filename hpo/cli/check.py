"""`hpo check`."""

from __future__ import annotations

import contextlib
import sys
import traceback
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpo.cli.options import Debug, Json, OutputDir, Overrides, Storage, StudyFile, Workers, read_spec
from hpo.console.output import read_by_others
from hpo.console.slow import slow_steps
from hpo.errors import HpoError, InputError, each_error, together
from hpo.wording import count_of, duration, listed

if TYPE_CHECKING:
    from collections.abc import Callable

    from hpo.checks.findings import Finding
    from hpo.checks.preflight_costs import DevicePreflight, Measured
    from hpo.config.spec import StudySpec
    from hpo.trial.resources import Slot

_MIB = 2**20
#: What a stage is doing, for stages that take long.
_LONG = {
    "structure": "reading the file",
    "imports": "importing torch and what the study names",
    "meaning": "looking at what is searched",
    "preflight": "loading the data, and training a few batches on each device",
}
_ELSEWHERE = "each agent that `{}` places checks its own machine's devices before it takes a trial"
_NO_PREFLIGHT = "`objective` trains by itself, so only a trial shows whether it runs; try `--n-trials 1`"


@dataclass
class _Stage:
    """One stage of the check and its result; ``reached`` is False if an earlier error prevented it."""

    name: str
    warnings: list[Finding] = field(default_factory=list)
    error: HpoError | None = None
    reached: bool = False
    left_out: str = ""
    note: str = ""

    @property
    def errors(self) -> list[HpoError]:
        """The single errors."""
        if isinstance(self.error, InputError):
            return list(each_error(self.error))
        return [] if self.error is None else [self.error]

    @property
    def status(self) -> str:
        if not self.reached:
            return "not reached"
        if self.error is not None:
            return "error"
        if self.left_out:
            return "left out"
        return "warnings" if self.warnings else "ok"

    def as_json(self) -> dict[str, Any]:
        return {
            "stage": self.name,
            "status": self.status,
            "warnings": [asdict(item) for item in self.warnings],
            "note": self.left_out or self.note,
            "error": None if self.error is None else _error_json(self.error),
            "errors": [_error_json(error) for error in self.errors],
        }


@dataclass
class _Checkup:
    """Runs all stages, each after those that it depends on.

    Attributes:
        named: Whether the command names the devices to try.
        engine: The engine that places agents on other machines, whose devices can't be checked here; empty without
            one, or if the command names devices.
        lacking: The study's devices that this machine lacks.
    """

    read: Callable[[], StudySpec]
    debug: bool
    named: bool
    said: Callable[[_Stage], None]
    stages: list[_Stage] = field(default_factory=list)
    spec: StudySpec | None = None
    slots: list[Slot] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)
    engine: str = ""
    devices: list[DevicePreflight] = field(default_factory=list)

    def run(self) -> None:
        work = {"structure": self._structure, "imports": self._imports, "meaning": self._meaning}
        going = True
        for name, examine in {**work, "preflight": self._preflight}.items():
            stage = _Stage(name)
            self.stages.append(stage)
            if name == "preflight" and self.spec is not None and (why := self._untried(self.spec)):
                stage.left_out, examine = why, list
            elif name == "preflight" and self.engine:
                stage.note = _ELSEWHERE.format(self.engine)
            if going or (name == "meaning" and self.spec is not None):  # meaning needs no imports
                going = self._examined(stage, examine) and going
            self.said(stage)

    @property
    def failed(self) -> bool:
        return any(stage.error is not None for stage in self.stages)

    def _examined(self, stage: _Stage, examine: Callable[[], list[Finding]]) -> bool:
        stage.reached = True
        try:
            with slow_steps() as say:
                say(_LONG[stage.name])
                stage.warnings = examine()
        except HpoError as error:
            if self.debug:
                traceback.print_exc()
            stage.error = self._unsaid(error)
            stage.reached = stage.error is not None
            return False
        return True

    def _unsaid(self, error: HpoError) -> HpoError | None:
        """The error without parts that an earlier stage has reported; None if nothing is left."""
        said = {each.problem for stage in self.stages for each in stage.errors if isinstance(each, InputError)}
        if not said or not isinstance(error, InputError):
            return error
        left = [each for each in each_error(error) if each.problem not in said]
        return together(left) if left else None

    def _untried(self, spec: StudySpec) -> str:
        """Why no batches are trained; empty if they are."""
        if spec.config.objective is not None:
            return _NO_PREFLIGHT
        if not self.lacking:
            return ""
        missing = f"{listed(self.lacking)} is not on this machine"
        return f"{missing}; {_ELSEWHERE.format(self.engine)}; `--device cpu` tries a few batches here"

    def _structure(self) -> list[Finding]:
        spec = self.read()
        if spec.run.on is not None:
            from hpo.execution.placing import placing_of

            address = placing_of(spec).address
            self.engine = "" if self.named or address.is_here else address.kind
        self.spec = spec
        return []

    def _imports(self) -> list[Finding]:
        from hpo.checks.checks import check_imports

        assert self.spec is not None
        return check_imports(self.spec)

    def _meaning(self) -> list[Finding]:
        from hpo.checks.checks import check_output_dir, check_search
        from hpo.checks.database_check import check_stored
        from hpo.checks.meaning import check_meaning
        from hpo.trial.resources import devices_elsewhere, study_slots

        assert self.spec is not None
        check_search(self.spec)
        if self.spec.run.on is None:  # with an engine, the folder is on its machines
            check_output_dir(self.spec)
        if self.engine:  # its machines may have devices that this one lacks
            self.lacking = devices_elsewhere(self.spec)
        if not self.lacking:
            self.slots = study_slots(self.spec)
        return [*check_meaning(self.spec), *check_stored(self.spec)]

    def _preflight(self) -> list[Finding]:
        from hpo.checks.preflight import preflight

        assert self.spec is not None
        self.devices = preflight(self.spec, self.slots)
        return [item for device in self.devices for item in device.warnings]


def check(
    study: StudyFile,
    overrides: Overrides = None,
    devices: Annotated[
        str | None,
        typer.Option(
            "--device", metavar="cuda:0,cuda:1|cpu", help="Devices to try the study on.", show_default=False
        ),
    ] = None,
    workers: Workers = None,
    json_: Json = False,
    storage: Storage = None,
    output_dir: OutputDir = None,
    debug: Debug = False,
) -> None:
    """Check a study before it runs: its structure, imports, meaning, and a few batches on each device.

    Writes nothing, neither to the output folder nor to the database. Exit code 2 if a stage finds an error. If an
    engine places the agents (run.on), devices that this machine lacks are not tried; --device names others to try.

    Example: hpo check studies/digits/study.yaml --device cpu
    """

    def read() -> StudySpec:
        options = {"devices": devices, "workers": workers, "storage": storage, "output_dir": output_dir}
        return read_spec(study, overrides, require_search_space=True, **options)

    checkup = _Checkup(read, debug, devices is not None, (lambda _: None) if json_ else _print_stage)
    # The output of the study's own code must not mix with the JSON.
    with contextlib.redirect_stdout(sys.stderr) if json_ else contextlib.nullcontext():
        checkup.run()
    if json_:
        from hpo.cli.answers import print_json

        print_json(_as_json(checkup))
    else:
        _print_costs(checkup)
    if checkup.failed:
        raise typer.Exit(2)


def _as_json(checkup: _Checkup) -> dict[str, Any]:
    from hpo.search.auto_sampler import chosen_sampler

    return {
        "study": None if checkup.spec is None else checkup.spec.study.name,
        "ok": not checkup.failed,
        "stages": [stage.as_json() for stage in checkup.stages],
        "devices": [
            {"device": item.device, "workers": item.workers, "base": asdict(item.base)}
            | {"largest": None if item.largest is None else asdict(item.largest)}
            for item in checkup.devices
        ],
        "estimated_seconds": _estimate(checkup),
        "sampler": None if checkup.spec is None else asdict(chosen_sampler(checkup.spec)),
    }


def _error_json(error: HpoError) -> dict[str, Any]:
    if not isinstance(error, InputError):
        return {"problem": str(error)}
    places = {"problem": error.problem, "path": error.path, "line": error.line, "value": error.value}
    return {**places, "file": None if error.file is None else str(error.file), "fix": error.fix}


def _estimate(checkup: _Checkup) -> float | None:
    if not checkup.devices or checkup.spec is None:
        return None
    from hpo.checks.preflight_costs import estimated_seconds

    return estimated_seconds(checkup.spec, checkup.devices)


def _print_stage(stage: _Stage) -> None:
    summary = stage.status
    if stage.status == "warnings":
        summary = count_of(len(stage.warnings), "warning")
    elif stage.status == "left out":
        summary = f"left out: {stage.left_out}"
    with read_by_others():
        print(f"{stage.name:<10} {summary}")
        if stage.note and stage.reached and not stage.left_out:
            print(_indented(f"note: {stage.note}"))
        for item in stage.warnings:
            print(_indented(f"warning: {item}"))
        for error in stage.errors:
            print(_indented(f"error: {error}"))


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _print_costs(checkup: _Checkup) -> None:
    spec = checkup.spec
    if spec is None:
        return
    with read_by_others():
        _print_search(spec, failed=checkup.failed)
        for device in checkup.devices:
            _print_device(device)
        seconds = _estimate(checkup)
        if seconds is not None:
            _print_whole_study(spec, seconds)


def _print_search(spec: StudySpec, *, failed: bool) -> None:
    from hpo.config.space import SearchSpace
    from hpo.search.auto_sampler import chosen_sampler
    from hpo.search.valid_points import check_where

    if (sampler := chosen_sampler(spec)).why:
        print(f"sampler    {sampler}")
    if (section := spec.study.scheduler) is not None:
        written = spec.is_written("study.scheduler")
        why = "" if written else " (`epochs` alone is given; with `n_trials` beside it there would be none)"
        print(f"scheduler  {section.name}{why}")
    if spec.where and not failed:
        share = check_where(spec, SearchSpace.from_spec(spec))
        print(f"where      {share:.1%} of evenly drawn points satisfy what holds between parameters")


def _print_device(device: DevicePreflight) -> None:
    print(f"\n{device.device}, {count_of(device.workers, 'worker')}")
    base = device.base
    shapes = f"{_shapes(base.inputs)} → {_shapes(base.outputs)}" if base.outputs else _shapes(base.inputs)
    print(f"  batch: {shapes}, {base.parameters:,} parameters")
    print(f"  base config: {_cost(base)}")
    if device.largest is not None:
        print(f"  largest searched: {_cost(device.largest)}")
        print("    " + ", ".join(f"{path}={value}" for path, value in device.largest.params.items()))


def _print_whole_study(spec: StudySpec, seconds: float) -> None:
    from hpo.checks.preflight_costs import trials_of_epochs

    study, by_trials = spec.study, trials_of_epochs(spec) is None
    number, unit = (study.n_trials, "trial") if by_trials else (study.epochs or 0, "epoch")
    pruning = ", if none is pruned" if by_trials else ""
    verb = "takes" if number == 1 else "take"
    print(f"\nthe whole study: {count_of(number, unit)} {verb} at most about {duration(seconds)}{pruning}")


def _shapes(shapes: list[tuple[int, ...]]) -> str:
    return ", ".join(" x ".join(map(str, shape)) or "scalar" for shape in shapes)


def _cost(cost: Measured) -> str:
    text = f"{cost.memory_bytes / _MIB:,.0f} MiB, {duration(cost.batch_s)} a batch"
    if cost.epoch_s is not None:
        text += f", {duration(cost.epoch_s)} an epoch of {cost.batches} batches"
    if cost.trial_s is None:
        return text
    return f"{text}, {duration(cost.trial_s)} a trial of {count_of(cost.epochs, 'epoch')}"
