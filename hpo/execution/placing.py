"""Runs a study with agents that an engine places: what `hpo run --on` and `hpo submit` share."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from hpo.config.spec import STORAGE_ENV, StudySpec, load_spec
from hpo.config.variables import in_environment, without_token
from hpo.errors import InputError
from hpo.execution.engines.by_name import Address, address_of, engine_of
from hpo.execution.engines.engine import PLACEMENT_ENV, AgentOrder, Engine, Resources
from hpo.storage.engines import has_password, normalize_url, sqlite_file

if TYPE_CHECKING:
    from hpo.checks.findings import Finding
    from hpo.execution.run import Listener
    from hpo.execution.supervisor import Ending
    from hpo.study.open_study import OpenStudy

#: Prefixes of the environment variables that agents need: for databases, trackers and stores.
_FOR_AGENTS: Final = ("HPO_", "PG", "MYSQL_", "WANDB_", "MLFLOW_", "COMET_", "HF_", "AWS_", "GOOGLE_", "AZURE_")


_SHOWN: Final = "has a password, which no agent's command line may show"
_LEAVE_OUT: Final = (
    f"leave `run.storage` out of the study file, and give the URL in the environment as {STORAGE_ENV}"
)


@dataclass(frozen=True)
class Placing:
    """Where a study's agents work, and what each of them does.

    Attributes:
        spec: The study, with the options of the command.
        address: The engine.
        order: What each agent does.
        variables: Environment variables to add while the engine is used: the URL of the database, if an option
            gives it with a password.
    """

    spec: StudySpec
    address: Address
    order: AgentOrder
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)

    def agents(self, engine: Engine) -> tuple[int, int]:
        """The fewest and the most agents."""
        return self.spec.run.agents or (1, engine.agents)

    def script(self) -> str:
        """A script or manifest that places the agents without a driver."""
        with contextlib.closing(engine_of(self.address)) as engine:
            return engine.script(self.order, self.agents(engine)[1])


def placing_of(
    spec: StudySpec,
    overrides: Sequence[str] = (),
    read: Callable[[Sequence[str]], StudySpec] | None = None,
) -> Placing:
    """Check and work out how a study is placed.

    Args:
        spec: The study, with the options of the command; it names an engine.
        overrides: The overrides of the command line, which agents get unchanged.
        read: Reads the study with the given overrides and without options; None: from its file.

    Raises:
        InputError: The text names no engine, or a value in it does not fit; or other machines can't reach the
            study's database, or agents could get its URL only in a way that shows the password.
    """
    assert spec.run.on is not None
    try:
        address = address_of(spec.run.on)
        engine_of(address)  # before anything is stored
    except InputError as error:
        key = f"{error.path.rpartition(' ')[2]}: " if ": " in error.path else ""
        raise spec.error(key + error.problem, path="run.on", value=error.value, fix=error.fix) from error
    if not address.is_here and sqlite_file(normalize_url(spec.storage_url)) is not None:
        raise spec.error(
            f"a SQLite file can't be shared by the machines of `{address.kind}`",
            path="run.storage",
            value=spec.run.storage or "",
            fix=f"give the URL of a PostgreSQL or MariaDB server, there or in the environment as {STORAGE_ENV}",
        )
    read = read or partial(load_spec, spec.path)
    if _sends_the_file(address) and _shows_password(read(()).run.storage):
        raise spec.error(
            "has a password, which would be sent to all machines with the study file",
            path="run.storage",
            fix=_LEAVE_OUT,
        )
    return Placing(spec, address, *_order(spec, overrides, read))


def run_on(
    placing: Placing,
    listen: Callable[[OpenStudy], Listener],
    warn: Callable[[Finding], None],
    *,
    accept_code_change: bool = False,
    widen: bool = False,
    detach: bool = False,
    submission: str | None = None,
) -> Ending:
    """Run a study to its end with agents that an engine places.

    Args:
        placing: The study, and where its agents work.
        listen: See `hpo.execution.run.run_study`, as for the next three.
        warn: See there.
        accept_code_change: See there.
        widen: See there.
        detach: Leave as soon as agents are placed.
        submission: See `hpo.execution.driver.Driver`.

    Returns:
        Why it ended.

    Raises:
        InputError: As `run_study` raises it.
        StudyError: As `run_study` raises it; or agents can't be placed, or keep dying.
    """
    from hpo.execution.run import listened_to, prepared, quiet_optuna

    spec, address = placing.spec, placing.address
    if detach and address.is_here and address.kind != "local":
        fix = "leave `--detach` out, or `ray start --head`, and run on `ray:auto`"
        raise address.error("this Ray ends with the command, and takes its agents with it", fix)
    prepared(spec, warn, here=False)
    from hpo.execution.driver import Driver
    from hpo.execution.messages import Placed
    from hpo.study.folders import make_output_folder
    from hpo.study.open_study import start_study

    with (
        quiet_optuna(),
        start_study(spec, accept_code_change=accept_code_change, widen=widen) as opened,
    ):
        make_output_folder(spec)
        with in_environment(placing.variables), contextlib.closing(engine_of(address)) as engine:
            agents = placing.agents(engine)
            listener = listen(opened)
            heard = listener.heard
            driver = Driver(opened, engine, placing.order, agents, heard, detach=detach, submission=submission)
            placed = Placed(address.text, *agents)
            return listened_to(opened, listener, lambda: listener.begin({}, placed), driver.run)


def submit(placing: Placing, *, dry_run: bool) -> str:
    """Start the driver as a job of the engine; returns the job's id, or with ``dry_run`` the script for it."""
    spec, order = placing.spec, placing.order
    with in_environment(placing.variables), contextlib.closing(engine_of(placing.address)) as engine:
        fewest, most = placing.agents(engine)
        workers = () if order.workers is None else ("--workers", str(order.workers))
        command = ["run", str(order.study), *order.arguments, *workers]
        command += ["--on", placing.address.text, "--agents", f"{fewest}..{most}"]
        if spec.run.timeout is not None:
            command += ["--timeout", f"{spec.run.timeout:.0f}"]
            if not dry_run:  # a printed script may be run again later, each time with the whole time limit
                command.append(f"--submission={uuid.uuid4().hex}")
        return engine.driver_script(command, order) if dry_run else engine.submit(command, order)


def _order(
    spec: StudySpec, overrides: Sequence[str], read: Callable[[Sequence[str]], StudySpec]
) -> tuple[AgentOrder, dict[str, str]]:
    """What each agent does, and the variables of `Placing`."""
    asked, workers = spec.run.resources, spec.run.workers
    if workers is None and any(each is not None for each in (asked.gpu, asked.cpu, asked.memory)):
        workers = 1  # an agent's resources are those of all its workers, so their number must be known
    each = workers or 1
    # The URL of the database may have a password, so it reaches agents in another way (`_arguments`).
    overrides = [text for text in overrides if text.partition("=")[0].strip() != "run.storage"]
    plain = read(overrides)
    # An override of a whole section, say, may still set the URL.
    if _shows_password(plain.run.storage) and plain.run.storage != read(()).run.storage:
        fix = f"give the URL as `run.storage=…`, or in the environment as {STORAGE_ENV}"
        raise InputError(_SHOWN, path="run.storage", fix=fix)
    resources = Resources(
        gpu=None if asked.gpu is None else asked.gpu * each,
        cpu=None if asked.cpu is None else asked.cpu * each,
        memory=None if asked.memory is None else asked.memory * each,
    )
    arguments, variables = _arguments(spec, plain)
    order = AgentOrder(
        study=spec.path,
        name=spec.study.name,
        logs=spec.output_dir / "agents",
        arguments=(*overrides, *arguments),
        workers=workers,
        resources=resources,
        environment=_names(variables),
    )
    return order, variables


def _arguments(spec: StudySpec, plain: StudySpec) -> tuple[list[str], dict[str, str]]:
    """The options of the command in the form that agents need: arguments, and the variables of `Placing`."""
    given: list[str] = []
    if spec.study.n_trials != plain.study.n_trials:
        given.append(f"study.n_trials={spec.study.n_trials}")
    if spec.run.devices != plain.run.devices:
        given += ["--devices", ",".join(spec.run.devices or ["auto"])]
    if spec.output_dir != plain.output_dir:
        given += ["--output-dir", str(spec.output_dir)]
    if spec.storage_url == plain.storage_url or spec.run.storage is None:
        return given, {}
    if not has_password(spec.run.storage):
        return [*given, "--storage", spec.run.storage], {}
    if plain.run.storage is not None:
        raise InputError(_SHOWN, path="--storage", fix=_LEAVE_OUT)
    return given, {STORAGE_ENV: spec.run.storage}


def _shows_password(url: str | None) -> bool:
    return url is not None and has_password(url)


def _sends_the_file(address: Address) -> bool:
    """Whether the engine stores the study's folder and sends it to the machines."""
    return "ship" in address.options or address.options.get("files") == "configmap"


def _names(variables: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the environment variables that agents need, among ``variables`` and this process's own."""
    there = without_token({**os.environ, **variables})
    return tuple(sorted(name for name in there if name.startswith(_FOR_AGENTS) and name != PLACEMENT_ENV))
