"""Reads and checks the settings that a person writes after `--on k8s:`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic_core import PydanticCustomError

from hpo.config.schema_types import in_seconds
from hpo.errors import InputError
from hpo.execution.engines.by_name import Address

#: The keys of `--on k8s:…`.
KEYS: Final = (
    "image",
    "volume-claim",
    "mount",
    "files",
    "secret",
    "namespace",
    "grace",
    "user",
    "priority-class",
    "service-account",
    "gpu",
)
_FILES: Final = ("claim", "configmap", "image")
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_GPU: Final = re.compile(r"[a-zA-Z0-9.-]+/[a-zA-Z0-9._-]+")


@dataclass(frozen=True)
class Settings:
    """Where agents are placed in a cluster.

    Attributes:
        image: Container image that has hpo and what the study's code imports.
        claim: Volume claim (ReadWriteMany) that every agent mounts, for results.
        mount: Where the claim is mounted. None: at the study's folder; if ``files`` is not ``claim``, at the
            parent of the output folder.
        files: Where an agent gets the study's folder from: the ``claim``, a ``configmap`` or the ``image``.
        secret: Secret whose keys become environment variables of an agent.
        namespace: Namespace of all objects.
        grace: Seconds between SIGTERM and SIGKILL, for checkpoints.
        user: User and group id of the containers, and the group of the claim's files.
        priority: Priority class, by which the cluster preempts; empty for the cluster's default.
        account: Service account of a driver in the cluster; empty: one is made with the rights that it needs.
        gpu: Name of the resource that counts GPUs.
    """

    image: str
    claim: str
    mount: Path | None = None
    files: str = "claim"
    secret: str = "hpo"
    namespace: str = "default"
    grace: int = 120
    user: int = 1000
    priority: str = ""
    account: str = ""
    gpu: str = "nvidia.com/gpu"


def settings_of(address: Address) -> Settings:
    """The settings of an address.

    Raises:
        InputError: A key is missing, or Kubernetes does not accept a value.
    """
    if address.place:
        fix = "the cluster is kubectl's current context; write k8s:image=…,volume-claim=…"
        raise address.error("a cluster is not named here", fix)
    given = dict(address.options)
    for key, fix in _REQUIRED.items():
        if key not in given:
            raise address.error(f"`{key}` is missing", fix)
    values: dict[str, Any] = {"image": given["image"], "claim": _name(address, "volume-claim")}
    names = {
        "secret": "secret",
        "namespace": "namespace",
        "priority-class": "priority",
        "service-account": "account",
    }
    values |= {field: _name(address, key) for key, field in names.items() if key in given}
    readers = {"mount": _mount, "files": _files, "grace": _grace, "user": _user, "gpu": _gpu}
    values |= {key: read(address, given[key]) for key, read in readers.items() if key in given}
    return Settings(**values)


_REQUIRED: Final = {
    "image": "add image=REGISTRY/NAME:TAG, an image with hpo and what the study imports; the Dockerfile makes one",
    "volume-claim": "add volume-claim=NAME, a claim with ReadWriteMany: checkpoints must be there for every agent",
}


def _name(address: Address, key: str) -> str:
    value = address.options[key]
    if not _NAME.fullmatch(value):
        fix = "use small letters, digits, `-` and `.`"
        raise _error(address, key, f"{value!r} can't be the name of an object in Kubernetes", fix)
    return value


def _mount(address: Address, value: str) -> Path:
    path = Path(value)
    if not path.is_absolute() or ".." in path.parts:
        raise _error(address, "mount", f"{value!r} is not an absolute path", "write one, such as mount=/shared")
    return path


def _files(address: Address, value: str) -> str:
    if value not in _FILES:
        raise _error(address, "files", f"{value!r} is none of its values", f"write one of {', '.join(_FILES)}")
    return value


def _grace(address: Address, value: str) -> int:
    number: float | str = float(value) if value.isdecimal() else value
    try:
        return max(1, round(in_seconds(number)))
    except PydanticCustomError:
        raise _error(address, "grace", f"{value!r} is not a duration", "write grace=120s, or grace=5m") from None


def _user(address: Address, value: str) -> int:
    if not value.isdecimal() or not 0 < int(value) < 2**31:
        raise _error(address, "user", f"{value!r} is not a user id of an ordinary user", "write a number above 0")
    return int(value)


def _gpu(address: Address, value: str) -> str:
    if not _GPU.fullmatch(value):
        raise _error(address, "gpu", f"{value!r} is no resource's name", "write one such as gpu=amd.com/gpu")
    return value


def _error(address: Address, key: str, problem: str, fix: str) -> InputError:
    return address.error(problem, fix, key=key)
