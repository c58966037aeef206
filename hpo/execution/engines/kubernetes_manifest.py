"""Builds the Kubernetes objects for agents and drivers, as plain values and as YAML.

Jobs need Kubernetes 1.29 or later: with ``podFailurePolicy`` a preempted pod costs no retry, and with
``backoffLimitPerIndex`` an agent that fails does not end the others.
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
#: Label of a pod; its value is the name of its Job.
JOB_LABEL: Final = "hpo/job"
#: Label: ``agent`` (placed by a driver), ``script`` (agents applied by a person), ``driver`` or ``files``.
ROLE_LABEL: Final = "hpo/role"

_INDEX_ENV: Final = "HPO_INDEX"
_INDEX: Final = "batch.kubernetes.io/job-completion-index"
_GONE_AFTER: Final = 30  # seconds after which a pod on a node that does not answer is given up
_KEPT: Final = 24 * 3600  # seconds for which a Job that has ended is kept
_CONTAINER: Final = "hpo"
_FILES_VOLUME: Final = "files"


def job_name(order: AgentOrder, suffix: str = "") -> str:
    """A Job's name, short enough that with a pod's index it has at most 63 characters."""
    slug = re.sub(r"[^a-z0-9]+", "-", order.name.lower())[:24].strip("-")
    return "-".join(filter(None, ["hpo", slug, order.key, suffix]))


def placement_id(settings: Settings, job: str, index: int | str = 0) -> str:
    """The placement id of a Job's agent at an index."""
    return f"k8s:{settings.namespace}/{job}/{index}"


def agents_job(order: AgentOrder, settings: Settings, name: str, *, count: int, role: str, retries: int) -> Object:
    """An Indexed Job with an agent at each index.

    Args:
        order: What the agents do.
        settings: Where they run.
        name: The Job's name.
        count: How many agents.
        role: Value of its role label.
        retries: How many pods of an index may fail before the index fails. Pods that the cluster takes away, and
            agents that were asked to leave, do not count.

    Raises:
        InputError: The study's folder or the output folder is not on the claim.
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
    """The driver's Job, preceded by a service account with the rights that it needs, unless one is given.

    Its agents work on when its pod is moved, and its next pod finds them again.
    """
    pod = _pod(order, settings, command)
    account = settings.account or "hpo-driver"
    pod["serviceAccountName"] = account
    job = _job(order, settings, name, "driver", {"backoffLimit": 6}, pod)
    return [*([] if settings.account else _rights(settings, account)), job]


def resources_of(resources: Resources, settings: Settings) -> Object:
    """Requests and limits of a container; Kubernetes has whole GPUs only, so fractions are rounded up."""
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
        InputError: The output folder, or the study's folder if it must be there, is not on the claim; or the claim
            would hide the study's folder.
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
    """A pod with one process of hpo, which has the study's folder, the claim and the Secret."""
    folder, mount = str(order.study.parent), str(mount_of(order, settings))
    mounts = [{"name": "claim", "mountPath": mount}, {"name": "shm", "mountPath": "/dev/shm"}]
    volumes: list[Object] = [
        {"name": "claim", "persistentVolumeClaim": {"claimName": settings.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},  # for data loaders; counts as the container's memory
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
        "shareProcessNamespace": True,  # the pod's first process reaps what a killed process leaves
        "enableServiceLinks": False,  # else a service named hpo would set variables that begin with HPO_
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
    """An init container that copies the study's files: a ConfigMap's files are links, and read-only."""
    return {
        "name": "copy-files",
        "image": settings.image,
        "command": ["sh", "-c", f'cp -RL /{_FILES_VOLUME}/* "$0"', _literal(study["mountPath"])],
        "volumeMounts": [dict(study), {"name": _FILES_VOLUME, "mountPath": f"/{_FILES_VOLUME}", "readOnly": True}],
        "securityContext": _narrow(),
    }


def with_files(job: Object, config_map: str, items: Mapping[str, str]) -> Object:
    """Add the ConfigMap's volume to a Job, whose pod copies it; ``items``: the path for each of its keys."""
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
    """A toleration: the pod is given up `_GONE_AFTER` seconds after its node stops answering, not five minutes."""
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
    """Escape an argument: Kubernetes replaces ``$(NAME)`` by a variable's value, and ``$$`` by ``$``."""
    return word.replace("$", "$$")


class Quoted(str):
    """Text that is always quoted in YAML, whatever it looks like."""

    __slots__ = ()


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - an object that occurs twice is written twice
        return True


_Dumper.add_representer(
    Quoted, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


def as_yaml(objects: Iterable[Object]) -> str:
    """The objects as one YAML text that `kubectl apply -f` reads."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
