"""The objects that agents are in Kubernetes, as plain values and as YAML.

Jobs need Kubernetes 1.29 or later: ``podFailurePolicy`` lets a preempted pod cost no retry, and
``backoffLimitPerIndex`` keeps one agent that fails from ending the others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from hpo.errors import InputError
from hpo.execution.engines.engine import LEFT_EARLY, PLACEMENT_ENV, AgentOrder, Resources
from hpo.execution.engines.kubernetes_settings import Settings

Object = dict[str, Any]

#: Label of everything that belongs to a study; its value is the order's key.
STUDY_LABEL: Final = "hpo/study"
#: Label of a pod: the Job that it is of.
JOB_LABEL: Final = "hpo/job"
#: Label: ``agent`` is what a driver has placed, ``script`` what a person has applied; ``driver``, ``files``.
ROLE_LABEL: Final = "hpo/role"

_INDEX_ENV: Final = "HPO_INDEX"
_INDEX: Final = "batch.kubernetes.io/job-completion-index"
_GONE_AFTER: Final = 30  # seconds that a pod stays on a node which does not answer, before it is given up
_KEPT: Final = 24 * 3600  # seconds that a Job which has ended can be looked at
_CONTAINER: Final = "hpo"
_FILES_VOLUME: Final = "files"


def job_name(order: AgentOrder, suffix: str = "") -> str:
    """A Job's name: at most 63 characters with its pod's index."""
    slug = re.sub(r"[^a-z0-9]+", "-", order.name.lower())[:24].strip("-")
    return "-".join(filter(None, ["hpo", slug, order.key, suffix]))


def placement_id(settings: Settings, job: str, index: int | str = 0) -> str:
    """The id of the agent that a Job has at an index."""
    return f"k8s:{settings.namespace}/{job}/{index}"


def agents_job(order: AgentOrder, settings: Settings, name: str, *, count: int, role: str, retries: int) -> Object:
    """An Indexed Job with an agent at each index.

    Args:
        order: What the agents are to do.
        settings: Where.
        name: The Job's name.
        count: How many agents.
        role: Value of its role label.
        retries: Pods of an index that may fail before the index does. Pods that the cluster takes away, and agents
            that were asked to leave, cost none.

    Raises:
        StudyError: The study's folder or the output folder is not on the claim.
    """
    pod = _pod(order, settings, order.command("hpo")[1:])
    pod["automountServiceAccountToken"] = False
    pod["containers"][0]["resources"] = resources_of(order.resources, settings)
    pod["containers"][0]["env"] = [
        {"name": _INDEX_ENV, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}}},
        {"name": PLACEMENT_ENV, "value": Quoted(placement_id(settings, name, f"$({_INDEX_ENV})"))},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimitPerIndex": retries,
    }
    return _job(order, settings, name, role, spec, pod)


def driver_job(order: AgentOrder, settings: Settings, name: str, command: Sequence[str]) -> list[Object]:
    """The driver as a Job, behind the service account with the rights that it needs unless one is given.

    Its agents work on when its pod is moved, and its next pod finds them again.
    """
    pod = _pod(order, settings, command)
    account = settings.account or "hpo-driver"
    pod["serviceAccountName"] = account
    job = _job(order, settings, name, "driver", {"backoffLimit": 6}, pod)
    return [*([] if settings.account else _rights(settings, account)), job]


def resources_of(resources: Resources, settings: Settings) -> Object:
    """Requests and limits of a container; GPUs are whole ones in Kubernetes, so a part counts as one."""
    amounts: dict[str, str] = {}
    if resources.cpu is not None:
        amounts["cpu"] = f"{math.ceil(resources.cpu * 1000)}m"
    if resources.memory is not None:
        amounts["memory"] = str(resources.memory)
    if resources.gpu:
        amounts[settings.gpu] = str(math.ceil(resources.gpu))
    return {"requests": dict(amounts), "limits": dict(amounts)} if amounts else {}


def mount_of(order: AgentOrder, settings: Settings) -> Path:
    """Where the claim is mounted.

    Raises:
        InputError: The output folder, or the study's folder where it has to be, is not on it.
    """
    output = order.logs.parent
    on_claim = settings.files == "claim"
    mount = settings.mount or (order.study.parent if on_claim else output.parent)
    for what, path in (("output folder", output), *([("study's folder", order.study.parent)] if on_claim else [])):
        if not path.is_relative_to(mount):
            raise InputError(
                f"the {what} {path} is not on the claim {settings.claim!r}, which is mounted at {mount}",
                path="--on k8s: mount",
                fix=f"mount the claim at a folder above it: mount={Path(*path.parts[:2])}",
            )
    if not on_claim and order.study.is_relative_to(mount):
        fix = f"give an output folder inside the study's, or leave files={settings.files} out"
        raise InputError(
            f"the claim would hide the study's folder {order.study.parent}", path="--on k8s: mount", fix=fix
        )
    return mount


def _pod(order: AgentOrder, settings: Settings, arguments: Sequence[str]) -> Object:
    """The pod of one process of hpo that has the study's folder, the claim and the Secret."""
    folder, mount = str(order.study.parent), str(mount_of(order, settings))
    mounts = [{"name": "claim", "mountPath": mount}, {"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[Object] = [
        {"name": "claim", "persistentVolumeClaim": {"claimName": settings.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # of data loaders; it counts as the container's memory
    ]
    container = {
        "name": _CONTAINER,
        "image": settings.image,
        "command": ["hpo"],
        "args": [Quoted(_literal(word)) for word in arguments],
        "workingDir": folder,
        "envFrom": [{"secretRef": {"name": settings.secret}}],
        "volumeMounts": mounts,
        "securityContext": _narrow(),
    }
    pod: Object = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.grace,
        "shareProcessNamespace": True,  # the pod's first process buries what a killed one leaves
        "enableServiceLinks": False,  # or a service named hpo would set variables that begin with HPO_
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": settings.user,
            "runAsGroup": settings.user,
            "fsGroup": settings.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [_given_up("unreachable"), _given_up("not-ready")],
        "containers": [container],
        "volumes": volumes,
    }
    if settings.priority:
        pod["priorityClassName"] = settings.priority
    if settings.files == "configmap":
        study = {"name": "study", "mountPath": folder}
        mounts.insert(0, study)
        volumes.append({"name": "study", "emptyDir": {}})
        pod["initContainers"] = [_copying(settings, study)]
    return pod


def _copying(settings: Settings, study: Object) -> Object:
    """Copies the study's files: a ConfigMap's are links, and read-only."""
    return {
        "name": "copy-files",
        "image": settings.image,
        "command": ["sh", "-c", f'cp -RL /{_FILES_VOLUME}/* "$0"', _literal(study["mountPath"])],
        "volumeMounts": [dict(study), {"name": _FILES_VOLUME, "mountPath": f"/{_FILES_VOLUME}", "readOnly": True}],
        "securityContext": _narrow(),
    }


def with_files(job: Object, config_map: str, items: Mapping[str, str]) -> Object:
    """The Job with the volume of the ConfigMap that its pod copies; ``items`` are its keys' paths."""
    volume = {
        "name": _FILES_VOLUME,
        "configMap": {
            "name": config_map,
            "items": [{"key": key, "path": Quoted(path)} for key, path in items.items()],
        },
    }
    job["spec"]["template"]["spec"]["volumes"].append(volume)
    return job


def _job(order: AgentOrder, settings: Settings, name: str, role: str, spec: Object, pod: Object) -> Object:
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(order, settings, name, role),
        "spec": {
            **spec,
            "ttlSecondsAfterFinished": _KEPT,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "Ignore",
                        "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [LEFT_EARLY]},
                    },
                ]
            },
            "template": {"metadata": {"labels": {**_labels(order, role), JOB_LABEL: name}}, "spec": pod},
        },
    }


def metadata(order: AgentOrder, settings: Settings, name: str, role: str) -> Object:
    """The metadata of one of the study's objects."""
    return {
        "name": name,
        "namespace": settings.namespace,
        "labels": _labels(order, role),
        "annotations": {"hpo/study-name": Quoted(order.name), "hpo/study-file": Quoted(order.study)},
    }


def _labels(order: AgentOrder, role: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "hpo", STUDY_LABEL: Quoted(order.key), ROLE_LABEL: role}


def _narrow() -> Object:
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def _given_up(what: str) -> Object:
    """A pod leaves its node so soon after the cluster has missed it, instead of after five minutes."""
    key = f"node.kubernetes.io/{what}"
    return {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": _GONE_AFTER}


def _rights(settings: Settings, account: str) -> list[Object]:
    """A service account that may place and end agents in its namespace, and nothing else."""

    def named() -> Object:
        return {"name": account, "namespace": settings.namespace}

    verbs = ["get", "list", "create", "patch", "delete"]
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": named()},
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "Role",
            "metadata": named(),
            "rules": [
                {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": verbs},
                {"apiGroups": [""], "resources": ["configmaps"], "verbs": verbs[:4]},
                {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "delete"]},
                {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
            ],
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "RoleBinding",
            "metadata": named(),
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": account},
            "subjects": [{"kind": "ServiceAccount", **named()}],
        },
    ]


def _literal(word: str) -> str:
    """An argument as it is: Kubernetes would put a variable's value for ``$(NAME)``, and ``$`` for ``$$``."""
    return word.replace("$", "$$")


class Quoted(str):
    """Text that stands in quotes in YAML, whatever it looks like."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - what stands twice is written twice
        return True


_Dumper.add_representer(
    Quoted, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


def as_yaml(objects: Iterable[Object]) -> str:
    """The objects as one YAML text that `kubectl apply -f` reads."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
