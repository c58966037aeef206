"""Agents placed by Ray: each is an actor that outlives its driver, with `hpo worker` as its child process.

A driver finds its agents again by their actors' names, and reports what Ray knows about nodes and actors. Ray's
own retries are off, because the driver replaces agents.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hpo.config.spec import STORAGE_ENV
from hpo.errors import InputError
from hpo.execution.engines import ray_process
from hpo.execution.engines.by_name import Address
from hpo.execution.engines.engine import (
    LEFT_EARLY,
    PLACEMENT_ENV,
    AgentOrder,
    Change,
    Ended,
    NodeGone,
    Placement,
    Preempted,
    Running,
    Waiting,
    Waits,
)
from hpo.execution.engines.ray_connection import RayConnection
from hpo.execution.engines.ray_jobs import (
    agents_script,
    arguments_there,
    by_node,
    driver_script,
    ray_resources,
    runtime_env,
)
from hpo.execution.limits import agent_end, oom_kills

#: Ray's namespace for our actors, whose names can't clash with those of other programs on the same cluster.
_NAMESPACE: Final = "hpo"
_NODE_DIGITS: Final = 12  # of its node's id, in an agent's name
_ANY_NODE: Final = "any"
_NOT_STARTED: Final = "Ray has no room for it yet, or prepares its environment; `ray status` shows what is free"

#: The keys of `--on ray:…`, after the place.
KEYS: Final = ("per", "ship")


def make(address: Address) -> RayEngine:
    """The engine of an address.

    Raises:
        InputError: A value does not fit.
    """
    url = address.place.removeprefix("ray://")
    if url in ("", address.place) and address.place not in ("auto", "local"):
        raise address.error(
            f"there is no place {address.place!r} of Ray",
            "write `ray://HOST:10001`, `ray:auto` (the cluster that this machine belongs to) or `ray:local`",
        )
    for key, value in (("per", "node"), ("ship", "study")):
        if address.options.get(key, value) != value:
            raise address.error(f"is {address.options[key]!r}", f"write `{key}={value}`, or leave it out", key=key)
    return RayEngine(address)


@dataclass
class _Agent:
    """An agent as this driver knows it.

    Attributes:
        order: What it does.
        actor: Its actor; None if it ended while Ray did not answer.
        starting: Reference to the result of `HpoProcess.start`, until that is there.
        ending: Reference to the result of `HpoProcess.ended`, once the agent runs.
        host: Its machine.
        node: Ray's id of its node.
        taken_back: This driver has ended its actor before it ran.
        asked: This driver has asked it to leave, or has killed it.
        waiting: Why it waits before it runs.
    """

    order: AgentOrder
    actor: Any
    starting: Any = None
    ending: Any = None
    host: str = ""
    node: str = ""
    taken_back: bool = False
    asked: bool = False
    waiting: Waiting = field(default_factory=Waiting)


class RayEngine:
    """Places agents as detached actors.

    Without resources in the study file, or with ``per=node``, an agent gets a whole node. Otherwise Ray places it
    wherever there is room.

    Args:
        address: Where Ray is, and how to place agents.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection = RayConnection(address)
        self._agents: dict[Placement, _Agent] = {}
        self._logs: dict[Placement, Path] = {}
        self._over: set[Placement] = set()

    @property
    def agents(self) -> int:
        """One on each living node."""
        with self._connection.open() as (ray, _):
            return max(1, len(_nodes(ray)))

    def place(self, order: AgentOrder, count: int) -> list[Placement]:
        """Make this many actors; fewer if each gets a whole node and fewer nodes are free."""
        with self._connected(order) as ray:
            places = self._places(ray, order)
            return [self._placed(ray, order, node, options) for node, options in itertools.islice(places, count)]

    def changes(self) -> Iterator[Change]:
        """The changes that follow from the actors' results, and from the errors of those that can't answer."""
        if not self._agents:
            return
        with self._connected(next(iter(self._agents.values())).order) as ray:
            waiting = [ref for each in self._agents.values() for ref in (each.starting, each.ending) if ref]
            ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0) if waiting else ([], [])
            for placement, agent in list(self._agents.items()):
                change = self._change(ray, placement, agent, ready)
                if change is not None:
                    yield change
                if change is not None and not isinstance(change, Running | Waits):
                    self._forget(ray, placement)

    def find(self, order: AgentOrder) -> list[Placement]:
        """The agents of this study whose actors have not ended."""
        with self._connected(order) as ray:
            found = [each for each in _named(ray) if each.id.startswith(_prefix(order)) and each not in self._over]
            for placement in found:
                if placement not in self._agents:
                    with contextlib.suppress(ValueError):  # it has ended meanwhile
                        self._take_in(order, placement, ray.get_actor(placement.id, _NAMESPACE))
        return [placement for placement in found if placement in self._agents]

    def drain(self, placements: Sequence[Placement]) -> None:
        """Have each actor send its agent SIGTERM; end the actors that wait for room."""
        if agents := self._known(placements):
            with self._connected(agents[0].order) as ray:
                for agent in agents:
                    agent.asked = True
                    if agent.ending is not None:
                        agent.actor.drain.remote()
                    elif agent.actor is not None:
                        agent.taken_back = True
                        ray.kill(agent.actor)

    def kill(self, placements: Sequence[Placement]) -> None:
        """End the actors; each takes its agent with it."""
        if agents := self._known(placements):
            with self._connected(agents[0].order) as ray:
                for agent in agents:
                    agent.asked = True
                    if agent.actor is not None:
                        ray.kill(agent.actor)

    def logs(self, placement: Placement) -> str:
        """The file with what an agent has printed."""
        return str(self._logs[placement])

    def script(self, order: AgentOrder, count: int) -> str:
        """A Python script that submits each agent as a job of Ray's."""
        return agents_script(self._address, order, count)

    def submit(self, command: Sequence[str], order: AgentOrder) -> str:
        """Start the driver as an actor that reserves no processor of Ray's; returns the actor's name."""
        if self._address.place == "local":
            raise self._address.error(
                "this Ray ends with the command that starts it", "`ray start --head`, and submit to `ray:auto`"
            )
        name = f"ray-driver:{order.key}-{secrets.token_hex(4)}"
        with self._connected(order) as ray:
            log = order.logs / f"driver-{name.rpartition('-')[2]}.log"
            arguments = arguments_there(self._address, order, command)
            actor = _actor(ray, name, arguments, {}, log, {"num_cpus": 0})
            ray.get(actor.start.remote(_secrets(order)))
        return name

    def driver_script(self, command: Sequence[str], order: AgentOrder) -> str:
        """A Python script that submits the driver as a job of Ray's."""
        return driver_script(self._address, order, command)

    def close(self) -> None:
        """Disconnect from Ray; a Ray that was started for `ray:local` ends, and its agents leave."""
        self._connection.close()

    # ---- placing

    def _places(self, ray: Any, order: AgentOrder) -> Iterator[tuple[str, dict[str, Any]]]:
        """For each next agent, its node's id (empty: any node) and the actor options that place it there."""
        if not by_node(self._address, order.resources):
            gpu = order.resources.gpu or 0
            if gpu > 1 and gpu != int(gpu):
                fix = "give an agent a part of one GPU, or whole ones: other `run.resources.gpu` or `--workers`"
                raise InputError("Ray can't place this", path="run.resources.gpu", value=str(gpu), fix=fix)
            while True:
                yield "", ray_resources(order.resources) | {"scheduling_strategy": "SPREAD"}
        taken = {_node_of(placement) for placement in self._agents}
        for node in _nodes(ray):
            name, total = node["NodeID"], node["Resources"]
            if name[:_NODE_DIGITS] not in taken:
                affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(name, soft=False)
                whole = {"num_cpus": total["CPU"], "num_gpus": total.get("GPU", 0)}
                yield name, whole | {"scheduling_strategy": affinity}

    def _placed(self, ray: Any, order: AgentOrder, node: str, options: Mapping[str, Any]) -> Placement:
        placement = Placement(f"{_prefix(order)}{node[:_NODE_DIGITS] or _ANY_NODE}-{secrets.token_hex(4)}")
        arguments = arguments_there(self._address, order, order.command("hpo")[1:])
        log = order.log(placement)
        self._take_in(
            order, placement, _actor(ray, placement.id, arguments, {PLACEMENT_ENV: placement.id}, log, options)
        )
        return placement

    def _take_in(self, order: AgentOrder, placement: Placement, actor: Any) -> None:
        self._agents[placement] = _Agent(order, actor, actor.start.remote(_secrets(order)))
        self._logs[placement] = order.log(placement)

    # ---- what becomes of agents

    def _change(self, ray: Any, placement: Placement, agent: _Agent, ready: Sequence[Any]) -> Change | None:
        if agent.actor is None:
            return Ended(placement, "it ended while Ray did not answer", in_order=False)
        answer = agent.starting or agent.ending
        if answer not in ready:
            waits = not agent.host and agent.waiting.is_news(_NOT_STARTED, time.monotonic())
            return Waits(placement, _NOT_STARTED) if waits else None
        try:
            said = ray.get(answer)
        except ray.exceptions.ActorUnavailableError:  # temporary
            agent.starting, agent.ending = agent.actor.start.remote(_secrets(agent.order)), None
            return None
        except ray.exceptions.RayError as error:
            return self._death(ray, placement, agent, error)
        if agent.starting is None:
            if said == LEFT_EARLY and not agent.asked:
                return Preempted(placement, requeued=False)
            return Ended(placement, _cause(said), in_order=said == 0)
        runs_already = bool(agent.host)
        agent.host, agent.node = said
        agent.starting, agent.ending = None, agent.actor.ended.remote()
        return None if runs_already else Running(placement, agent.host)

    def _death(self, ray: Any, placement: Placement, agent: _Agent, error: Any) -> Change:
        if agent.taken_back:
            return Ended(placement, "it was taken back before it ran", in_order=True)
        if agent.host and agent.node not in {node["NodeID"] for node in _nodes(ray)}:
            return NodeGone(placement, agent.host)
        if getattr(error, "preempted", False):
            return Preempted(placement, requeued=False)
        if agent.asked:
            return Ended(placement, "it was killed", in_order=False)
        # Ray's own text, without its indented lines of names and numbers.
        cause = " ".join(line for line in str(error).splitlines() if not line.startswith("\t"))
        return Ended(placement, cause, in_order=False)

    def _forget(self, ray: Any, placement: Placement) -> None:
        """Forget an agent, and end its actor, which frees what Ray had reserved for it."""
        agent = self._agents.pop(placement)
        self._over.add(placement)
        if agent.actor is not None:
            ray.kill(agent.actor)

    # ---- the connection

    @contextlib.contextmanager
    def _connected(self, order: AgentOrder) -> Iterator[Any]:
        with self._connection.open(runtime_env(self._address, order)) as (ray, is_new):
            if is_new:
                self._renew(ray)
            yield ray

    def _renew(self, ray: Any) -> None:
        """Find the actors of known agents on a new connection."""
        for placement, agent in self._agents.items():
            agent.starting = agent.ending = None
            try:
                agent.actor = ray.get_actor(placement.id, _NAMESPACE)
            except ValueError:  # there is no longer an actor of this name
                agent.actor = None
            else:
                agent.starting = agent.actor.start.remote(_secrets(agent.order))

    def _known(self, placements: Sequence[Placement]) -> list[_Agent]:
        return [self._agents[placement] for placement in placements if placement in self._agents]


def _actor(
    ray: Any,
    name: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    options: Mapping[str, Any],
) -> Any:
    """A detached actor for a process of hpo, which it has not started yet."""
    ray.cloudpickle.register_pickle_by_value(ray_process)
    kept = {"name": name, "namespace": _NAMESPACE, "lifetime": "detached", "max_restarts": 0}
    actors = ray.remote(ray_process.HpoProcess).options(**kept, **options)
    return actors.remote(list(arguments), dict(environment), log)


def _named(ray: Any) -> list[Placement]:
    """All our actors that have not ended, of any study; drivers too."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return [Placement(each["name"]) for each in named if each["namespace"] == _NAMESPACE]


def _nodes(ray: Any) -> list[dict[str, Any]]:
    """The living nodes that have processors for Ray."""
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]


def _cause(code: int) -> str:
    """How an agent has ended, from its exit code; this machine's kernel knows nothing about the agent's memory."""
    return agent_end(code, oom_kills())


def _prefix(order: AgentOrder) -> str:
    return f"ray:{order.key}-"


def _node_of(placement: Placement) -> str:
    return placement.id.split("-")[1]


def _secrets(order: AgentOrder) -> dict[str, str]:
    """The environment variables that must reach an agent and that the driver has; a node may have the others."""
    names = {STORAGE_ENV, *order.environment}
    return {name: os.environ[name] for name in names if name in os.environ}
