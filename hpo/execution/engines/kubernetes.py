"""Agents in Kubernetes: a driver places each as an Indexed Job with one pod; `--dry-run` prints one Job for all.

Each agent has its own Job so that it can be drained alone: a pod of a larger Job can't be ended without being
replaced. Kubernetes restarts an agent whose pod it has taken away. It does not restart one that has failed; the
driver replaces that.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from hpo.errors import StudyError
from hpo.execution.engines.by_name import Address
from hpo.execution.engines.engine import (
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
from hpo.execution.engines.kubectl import Kubectl
from hpo.execution.engines.kubernetes_files import files_object
from hpo.execution.engines.kubernetes_manifest import (
    JOB_LABEL,
    ROLE_LABEL,
    STUDY_LABEL,
    Object,
    agents_job,
    as_yaml,
    driver_job,
    job_name,
    placement_id,
    with_files,
)
from hpo.execution.engines.kubernetes_pods import AgentState, Pod, states
from hpo.execution.engines.kubernetes_settings import KEYS, Settings, settings_of

__all__ = ["KEYS", "KubernetesEngine", "make"]

_INTERVAL: Final = 3.0  # seconds between two looks at the cluster
_OVERDUE: Final = 30.0  # seconds after a pod's grace in which its node must confirm that it has ended
_RETRIES: Final = 3  # of an agent without a driver that would replace it


def make(address: Address) -> KubernetesEngine:
    """The engine of an address.

    Raises:
        InputError: A key is missing, or a value does not fit.
    """
    return KubernetesEngine(settings_of(address))


@dataclass
class _Known:
    """What has been reported about an agent.

    Attributes:
        ran: Pods that were reported as running.
        taken: Pods that were reported as taken away.
        asked: When each pod was first seen being deleted, on the engine's clock.
        waiting: Why its latest pod waits.
    """

    ran: set[str] = field(default_factory=set)
    taken: set[str] = field(default_factory=set)
    asked: dict[str, float] = field(default_factory=dict)
    waiting: Waiting = field(default_factory=Waiting)


class KubernetesEngine:
    """Places agents as Jobs, with kubectl.

    Args:
        settings: Where, and with which image, volume and so on.
        kubectl: Talks to the cluster; None: runs the program kubectl.
        clock: The current time in seconds, from any start.

    Attributes:
        agents: One.
    """

    agents: Final = 1

    def __init__(
        self, settings: Settings, kubectl: Kubectl | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._kubectl = kubectl or Kubectl(settings.namespace)
        self._clock = clock
        self._known: dict[Placement, _Known] = {}
        self._keys: set[str] = set()
        self._given_up: list[str] = []  # Jobs to delete
        self._next_look = 0.0

    def place(self, order: AgentOrder, count: int) -> list[Placement]:
        """Make a Job for each agent; Jobs without room wait in the cluster."""
        names = [job_name(order, secrets.token_hex(3)) for _ in range(count)]
        jobs = [agents_job(order, self._settings, name, count=1, role="agent", retries=0) for name in names]
        self._kubectl.apply(self._with_files(order, jobs))
        placed = [self._placement(name) for name in names]
        self._take_in(order, placed)
        return placed

    def changes(self) -> Iterator[Change]:
        """The changes that Jobs and pods show; looks at most every three seconds."""
        if not (self._known or self._given_up) or self._clock() < self._next_look:
            return
        self._delete_given_up()
        selector = f"{STUDY_LABEL} in ({','.join(sorted(self._keys))}),{ROLE_LABEL}=agent"
        found = states(self._kubectl.look("jobs,pods", selector))
        self._next_look = self._clock() + _INTERVAL
        for placement in list(self._known):
            yield from self._changes_of(placement, found.get(_job_of(placement)))

    def find(self, order: AgentOrder) -> list[Placement]:
        """The agents whose Jobs have neither ended nor been deleted."""
        found = states(self._kubectl.look("jobs", f"{STUDY_LABEL}={order.key},{ROLE_LABEL}=agent"))
        living = [name for name, each in found.items() if not (each.leaving or each.succeeded or each.failed)]
        placements = [self._placement(name) for name in living if name not in self._given_up]
        self._take_in(order, placements)
        return placements

    def drain(self, placements: Sequence[Placement]) -> None:
        """Delete their Jobs: the pods get SIGTERM and their grace period."""
        if placements:  # foreground: a Job stays visible until its last pod has ended
            self._kubectl.delete("jobs", *map(_job_of, placements), "--cascade=foreground")

    def kill(self, placements: Sequence[Placement]) -> None:
        """Delete their Jobs, and their pods with one second of grace."""
        self.drain(placements)
        if placements:
            selector = f"{JOB_LABEL} in ({','.join(map(_job_of, placements))})"
            self._kubectl.delete("pods", f"--selector={selector}", "--now")

    def logs(self, placement: Placement) -> str:
        """The command that shows an agent's output."""
        return f"kubectl logs --namespace={self._settings.namespace} job/{_job_of(placement)}"

    def script(self, order: AgentOrder, count: int) -> str:
        """One Indexed Job for all agents, with comments on what it needs."""
        name = job_name(order)
        job = agents_job(order, self._settings, name, count=count, role="script", retries=_RETRIES)
        what = f"{count} agents of the study {order.name}; Kubernetes replaces them, and no driver is needed."
        lines = [
            what,
            "The study must have been started by `hpo run`: they join it.",
            *self._needs(order),
            "Then:   kubectl apply --server-side -f THIS-FILE",
            f"Output: kubectl logs --namespace={self._settings.namespace} --selector={JOB_LABEL}={name} --prefix",
            f"End:    hpo stop {shlex.quote(str(order.study))}, then kubectl delete job {name}",
        ]
        return _commented(lines) + as_yaml(self._with_files(order, [job]))

    def submit(self, command: Sequence[str], order: AgentOrder) -> str:
        """Make the driver's Job, with the rights that it needs."""
        made = self._kubectl.apply(self._driver(command, order, secrets.token_hex(3)))
        return made[-1].rpartition("/")[2]

    def driver_script(self, command: Sequence[str], order: AgentOrder) -> str:
        """The driver's Job and the rights that it needs, with comments on what must exist before."""
        lines = [
            f"The driver of the study {order.name}, which places its agents.",
            "Its image needs kubectl: docker build --build-arg KUBECTL_VERSION=v1.33.0",
            *self._needs(order),
            "Then:   kubectl apply --server-side -f THIS-FILE",
        ]
        return _commented(lines) + as_yaml(self._driver(command, order))

    def close(self) -> None:
        """Delete Jobs that have been given up since the last look; nothing else needs closing."""
        with contextlib.suppress(StudyError):
            self._delete_given_up()

    def _delete_given_up(self) -> None:
        if self._given_up:
            self._kubectl.delete("jobs", *self._given_up, "--cascade=background")
            self._given_up = []

    def _needs(self, order: AgentOrder) -> list[str]:
        settings = self._settings
        names = order.environment or ("HPO_STORAGE",)
        files = {"claim": f" with {order.study.parent} on it", "image": "; the image has the study's folder"}
        return [
            f"Before: the claim {settings.claim!r} (ReadWriteMany){files.get(settings.files, '')}, and",
            f"  kubectl -n {settings.namespace} create secret generic {settings.secret} --from-env-file=FILE",
            f"  where FILE, which others can't read, has lines NAME=value: {', '.join(names)}.",
        ]

    def _driver(self, command: Sequence[str], order: AgentOrder, suffix: str = "") -> list[Object]:
        name = job_name(order, f"driver-{suffix}" if suffix else "driver")
        return self._with_files(order, driver_job(order, self._settings, name, command))

    def _with_files(self, order: AgentOrder, objects: Sequence[Object]) -> list[Object]:
        """The objects; if the study's files are shipped, after the ConfigMap that holds them."""
        if self._settings.files != "configmap":
            return list(objects)
        config_map, items = files_object(order, self._settings)
        name = config_map["metadata"]["name"]
        return [
            config_map,
            *(with_files(each, name, items) if each["kind"] == "Job" else each for each in objects),
        ]

    def _placement(self, job: str) -> Placement:
        return Placement(placement_id(self._settings, job))

    def _take_in(self, order: AgentOrder, placements: Sequence[Placement]) -> None:
        self._keys.add(order.key)
        for placement in placements:
            self._known.setdefault(placement, _Known())

    def _changes_of(self, placement: Placement, state: AgentState | None) -> Iterator[Change]:
        if state is None:
            yield self._end(placement, "its Job was deleted", asked=True)
            return
        for pod in state.pods:
            if (gone := self._gone(placement, pod)) is not None:
                self._give_up(placement)
                yield gone
                return
            yield from self._pod_changes(placement, state, pod)
        if state.succeeded:
            yield self._end(placement, "it has left", in_order=True)
        elif state.failed:
            causes = [cause for pod in reversed(state.pods) if (cause := pod.ended or pod.refused)]
            yield self._end(placement, (causes or [state.failed])[0])
        elif not state.leaving and state.pods and state.pods[-1].stuck:
            self._give_up(placement)
            yield Ended(placement, state.pods[-1].stuck, in_order=False)
        else:
            cause = self._wait_of(placement, state)
            if self._known[placement].waiting.is_news(cause, self._clock()):
                yield Waits(placement, cause)

    def _wait_of(self, placement: Placement, state: AgentState) -> str:
        """Why an agent waits; empty if it does not. Only a Job's events say why it gets no pod."""
        if state.pods or state.leaving:
            return state.pods[-1].unscheduled if state.pods else ""
        shown = f"kubectl describe --namespace={self._settings.namespace} job/{_job_of(placement)}"
        return f"its Job gets no pod, as where a quota is used up; `{shown}` says why"

    def _pod_changes(self, placement: Placement, state: AgentState, pod: Pod) -> Iterator[Change]:
        known = self._known[placement]
        if pod.started and pod.leaving is None and pod.uid not in known.ran:
            known.ran.add(pod.uid)
            yield Running(placement, pod.host)
        if pod.disrupted and not state.leaving and pod.uid not in known.taken:
            known.taken.add(pod.uid)
            yield Preempted(placement, requeued=True)

    def _gone(self, placement: Placement, pod: Pod) -> NodeGone | None:
        """The loss of a pod whose node the cluster has given up, or does not confirm the pod's end in time."""
        if not pod.host or pod.ended:
            return None
        if pod.disrupted == "DeletionByPodGC":
            return NodeGone(placement, pod.host)
        if pod.leaving is None:
            return None
        asked = self._known[placement].asked.setdefault(pod.uid, self._clock())
        return NodeGone(placement, pod.host) if self._clock() > asked + pod.leaving + _OVERDUE else None

    def _give_up(self, placement: Placement) -> None:
        """Forget an agent and delete its Job, so that Kubernetes does not restart it.

        The Job is deleted at the next look or at `close`, where an error loses no change.
        """
        del self._known[placement]
        self._given_up.append(_job_of(placement))

    def _end(self, placement: Placement, cause: str, *, in_order: bool = False, asked: bool = False) -> Ended:
        del self._known[placement]
        return Ended(placement, cause, in_order, asked)


def _job_of(placement: Placement) -> str:
    return placement.id.rpartition("/")[0].rpartition("/")[2]


def _commented(lines: Sequence[str]) -> str:
    return "".join(f"# {line}\n" for line in lines)
