"""Reads the state of agents from their Jobs and pods."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from hpo.execution.engines.kubernetes_manifest import JOB_LABEL, Object

#: Reasons why a container can't start until a person changes something; a failed pull has been retried by then.
_STUCK: Final = frozenset({"ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError"})


@dataclass(frozen=True)
class Pod:
    """One of an agent's pods, of which there is one after the other.

    Attributes:
        uid: Its unique id.
        host: Its node; empty while it waits for one.
        started: Its container runs, or has run.
        leaving: Its grace period in seconds, if it is being deleted; else None.
        disrupted: Why the cluster takes it away, such as ``PreemptionByScheduler``; empty if it does not.
        stuck: Why it can't start until a person changes something; empty if it can.
        unscheduled: Why no node takes it for now; empty if one has, or if that is not known yet.
        ended: How its container has failed, for people; empty if it has not.
        refused: Why it has failed, in its node's words; empty if it has not, or the node gives no reason.
    """

    uid: str
    host: str = ""
    started: bool = False
    leaving: float | None = None
    disrupted: str = ""
    stuck: str = ""
    unscheduled: str = ""
    ended: str = ""
    refused: str = ""


@dataclass(frozen=True)
class AgentState:
    """What is known of an agent.

    Attributes:
        leaving: Its Job is being deleted.
        succeeded: It left by itself, with exit code 0.
        failed: Why its Job has failed; empty if it has not.
        pods: Its pods, oldest first.
    """

    leaving: bool = False
    succeeded: bool = False
    failed: str = ""
    pods: list[Pod] = field(default_factory=list)


def states(objects: Iterable[Object]) -> dict[str, AgentState]:
    """The state of each agent, read from Jobs and pods, by the name of its Job."""
    items = list(objects)
    found = {item["metadata"]["name"]: _state(item) for item in items if item["kind"] == "Job"}
    pods = [item for item in items if item["kind"] == "Pod"]
    for item in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp"))):
        name = item["metadata"].get("labels", {}).get(JOB_LABEL)
        if name in found:
            found[name].pods.append(_pod(item))
    return found


def _state(job: Object) -> AgentState:
    conditions = _conditions(job)
    failed = conditions.get("Failed", {})
    return AgentState(
        leaving="deletionTimestamp" in job["metadata"],
        succeeded="Complete" in conditions,
        failed=str(failed.get("message") or failed.get("reason") or "its Job has failed") if failed else "",
    )


def _pod(pod: Object) -> Pod:
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    containers = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    conditions = _conditions(pod)
    disruption = conditions.get("DisruptionTarget", {})
    leaving = metadata.get("deletionGracePeriodSeconds", 0) if "deletionTimestamp" in metadata else None
    return Pod(
        uid=metadata["uid"],
        host=spec.get("nodeName", ""),
        started=status.get("phase") == "Running" or _has_run(status.get("containerStatuses", [])),
        leaving=leaving,
        disrupted=str(disruption.get("reason", "the cluster took it away")) if disruption else "",
        stuck=_stuck(containers) or _unbound(pod),
        unscheduled=_unscheduled(pod),
        ended=_ended(containers),
        refused=_refused(status),
    )


def _conditions(item: Object) -> dict[str, dict[str, Any]]:
    return {
        each["type"]: each for each in item.get("status", {}).get("conditions", []) if each["status"] == "True"
    }


def _stuck(containers: Iterable[Object]) -> str:
    for container in containers:
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _STUCK:
            return f"it can't start: {waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    return ""


def _unbound(pod: Object) -> str:
    """Why the pod would wait for ever for a claim that does not exist; empty if it does not."""
    for condition in pod.get("status", {}).get("conditions", []):
        message = str(condition.get("message", ""))
        if condition["type"] == "PodScheduled" and "persistentvolumeclaim" in message and "not found" in message:
            return f"it can't start: {message}"
    return ""


def _unscheduled(pod: Object) -> str:
    for condition in pod.get("status", {}).get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason") or "")
    return ""


def _has_run(containers: Iterable[Object]) -> bool:
    return any(container.get("state", {}).get("terminated") for container in containers)


def _ended(containers: Iterable[Object]) -> str:
    for container in containers:
        end = container.get("state", {}).get("terminated") or {}
        if end.get("exitCode"):
            reason, message = end.get("reason"), end.get("message")
            said = f"{reason}: {message}" if message else reason  # a container that could not start has no log
            why = f" ({said})" if reason and reason != "Error" else ""
            return f"{container['name']} ended with exit code {end['exitCode']}{why}"
    return ""


def _refused(status: Object) -> str:
    """Why a node has failed a pod; its containers may say nothing, because the node has not let them start."""
    said = [str(status[key]) for key in ("reason", "message") if status.get(key)]
    return ": ".join(["its pod has failed", *said]) if said and status.get("phase") == "Failed" else ""
