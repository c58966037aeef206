"""A stand-in for a Kubernetes cluster, for the real kubectl.

Its API server knows Jobs, pods and ConfigMaps; its Job controller follows ``podFailurePolicy`` and
``backoffLimitPerIndex``, and its nodes run a pod's command as a process of this machine, with the volumes' paths
as they are here. What the real one does beside that (rights, quotas, scheduling, images) it does not.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema
import psutil

from hpo.config.variables import without_token
from hpo.execution.engines.engine import HPO

Object = dict[str, Any]

SCHEMA = json.loads((Path(__file__).parent / "kubernetes_schema.json").read_text())
_KINDS = {
    "jobs": ("Job", "batch/v1"),
    "pods": ("Pod", "v1"),
    "configmaps": ("ConfigMap", "v1"),
    "secrets": ("Secret", "v1"),
    "persistentvolumeclaims": ("PersistentVolumeClaim", "v1"),
}
#: It has no OpenAPI document, which kubectl would ask about fields; `SCHEMA` knows them.
_WRAPPER = """#!/bin/sh
case " $* " in *" apply "*) set -- "$@" --validate=false;; esac
exec {kubectl} --kubeconfig=/dev/null --cache-dir={folder}/cache --server={url} "$@"
"""


class Pod:
    """A pod of a Job, and the process that its container is."""

    def __init__(
        self,
        job: Object,
        index: int,
        serial: int,
        environment: Mapping[str, str],
        output: Path,
        image: Sequence[str],
    ) -> None:
        template = job["spec"]["template"]
        self.job, self.index = job["metadata"]["name"], index
        self.name, self.node = f"{self.job}-{index}-{serial}", f"node-{serial % 3}"
        self.namespace = job["metadata"]["namespace"]
        self.labels, self.spec = template["metadata"]["labels"], template["spec"]
        self.conditions: list[Object] = []
        self.grace: float | None = None
        self.kill_at = float("inf")
        self.output = output
        self._serial = serial
        container = self.spec["containers"][0]
        values = dict(environment)
        for each in container.get("env", []):
            values[each["name"]] = str(index) if "valueFrom" in each else _expanded(each["value"], values)
        assert container["command"] == ["hpo"]
        with output.open("ab") as out:
            self.process = subprocess.Popen(
                [*image, *(_expanded(word, values) for word in container["args"])],
                cwd=container["workingDir"],
                env={**without_token(os.environ), **values},  # a node has none of the driver's secrets
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        """The container's exit code; None while it runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def ask(self, grace: float) -> None:
        """SIGTERM, and SIGKILL after the grace."""
        if self.grace is None or grace < self.grace:
            self.grace, self.kill_at = grace, time.monotonic() + grace
        if self.code is None:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End all of its processes at once."""
        with contextlib.suppress(psutil.NoSuchProcess):
            main = psutil.Process(self.process.pid)
            main.suspend()
            for each in [main, *main.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        self.process.wait()

    def shown(self) -> Object:
        """The pod as the API shows it."""
        code = self.code
        state = {"running": {}} if code is None else {"terminated": {"exitCode": code}}
        phase = "Running" if code is None else "Failed" if code else "Succeeded"
        statuses = [{"name": self.spec["containers"][0]["name"], "state": state}]
        leaving = (
            {"deletionTimestamp": _time(0), "deletionGracePeriodSeconds": round(self.grace)} if self.grace else {}
        )
        metadata = {
            "name": self.name,
            "namespace": self.namespace,
            "uid": self.name,
            "labels": self.labels,
            **leaving,
        }
        status = {"phase": phase, "conditions": self.conditions, "containerStatuses": statuses}
        return {
            "kind": "Pod",
            "apiVersion": "v1",
            "metadata": metadata | {"creationTimestamp": _time(self._serial)},
            "spec": {"nodeName": self.node, "containers": self.spec["containers"]},
        } | {"status": status}


class Cluster:
    """The cluster; `kubectl` is the program to speak to it.

    Args:
        folder: For its files; pods' output goes there.
        secrets: The Secrets, by name.
        image: What its container image has as the command `hpo`.
    """

    def __init__(self, folder: Path, secrets: Mapping[str, Mapping[str, str]], image: Sequence[str] = HPO) -> None:
        self.folder = folder
        self.jobs: dict[str, Object] = {}
        self.pods: list[Pod] = []
        self.objects: dict[str, dict[str, Object]] = {"jobs": self.jobs}
        self._secrets = {name: dict(values) for name, values in secrets.items()}
        self._image = image
        self._failures: dict[tuple[str, int], int] = {}
        self._made = 0
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.kubectl = folder / "kubectl"
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.kubectl.write_text(_WRAPPER.format(folder=folder, url=url, kubectl=shutil.which("kubectl")))
        self.kubectl.chmod(0o755)
        self._threads = [threading.Thread(target=each) for each in (self._server.serve_forever, self._control)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End everything."""
        self._closing.set()
        self._server.shutdown()
        for thread in self._threads:
            thread.join()
        self._server.server_close()
        for pod in self.pods:
            pod.kill()

    def output(self, job: str) -> str:
        """What a Job's pods have printed."""
        return "".join(path.read_text() for path in sorted(self.folder.glob(f"{job}.*.log")))

    def preempt(self, job: str) -> None:
        """Take a Job's pod away for another one."""
        with self._lock:
            for pod in self._living(job):
                pod.conditions.append(_disruption("PreemptionByScheduler"))
                pod.ask(pod.spec["terminationGracePeriodSeconds"])

    def lose_node(self, job: str) -> None:
        """Let the node of a Job's pod be gone, with all that runs there."""
        with self._lock:
            for pod in self._living(job):
                # What is gone has no exit code: it is frozen until the test is over.
                pod.kill()
                pod.conditions.append(_disruption("DeletionByPodGC"))
                pod.shown = lambda pod=pod: _unanswered(pod)  # type: ignore[method-assign, misc]

    # ---- the Job controller

    def _control(self) -> None:
        while not self._closing.wait(0.05):
            with self._lock:
                for name in list(self.jobs):
                    self._look_after(name)
                for pod in self.pods:
                    if time.monotonic() > pod.kill_at and pod.code is None:
                        pod.kill()
                gone = [pod for pod in self.pods if pod.job not in self.jobs and pod.code is not None]
                self.pods = [pod for pod in self.pods if pod not in gone]

    def _look_after(self, name: str) -> None:
        job = self.jobs[name]
        if "deletionTimestamp" in job["metadata"]:
            if not self._living(name):
                del self.jobs[name]
            return
        if job["status"].get("conditions"):
            return
        ends = [self._end_of(job, index) for index in range(job["spec"].get("completions", 1))]
        if all(ends):
            kind = "Failed" if "failed" in ends else "Complete"
            job["status"]["conditions"] = [{"type": kind, "status": "True", "message": "failed indexes"}]

    def _end_of(self, job: Object, index: int) -> str:
        """How an index has ended; empty where it has not, and has a pod."""
        name = job["metadata"]["name"]
        pods = [pod for pod in self.pods if (pod.job, pod.index) == (name, index)]
        code = pods[-1].code if pods else -1
        if code is None or code == 0:
            return "" if code is None else "complete"
        if pods and not _is_ignored(job, pods[-1], code):
            self._failures[name, index] = self._failures.get((name, index), 0) + 1
            spec = job["spec"]
            if self._failures[name, index] > spec.get("backoffLimitPerIndex", spec.get("backoffLimit", 6)):
                return "failed"
        self._start(job, index)
        return ""

    def _start(self, job: Object, index: int) -> None:
        environment: dict[str, str] = {}
        for each in job["spec"]["template"]["spec"]["containers"][0]["envFrom"]:
            environment.update(self._secrets[each["secretRef"]["name"]])
        self._made += 1
        name = f"{job['metadata']['name']}.{index}"
        output = self.folder / f"{name}.{len(list(self.folder.glob(f'{name}.*')))}.log"
        self.pods.append(Pod(job, index, self._made, environment, output, self._image))

    def _living(self, job: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.job == job and pod.code is None]

    # ---- the API

    def answer(self, method: str, path: str, query: Mapping[str, list[str]], body: Object) -> Object | str | None:
        """The answer to a request; None where there is no such thing."""
        with self._lock:
            if path in _DISCOVERY:
                return _DISCOVERY[path]
            match = re.fullmatch(r"/(?:api/v1|apis/batch/v1)/namespaces/[\w-]+/(\w+)(?:/([\w.-]+))?(/log)?", path)
            if match is None:
                return None
            kind, name, log = match.groups()
            if method == "GET" and log:
                return next(pod.output.read_text() for pod in self.pods if pod.name == name)
            if method == "GET" and name is None:
                return self._list(kind, query.get("labelSelector", [""])[0])
            if method in ("PATCH", "POST"):
                return self._make(kind, name or body["metadata"]["name"], body)
            return self._delete(kind, name, body) if method == "DELETE" else self._stored(kind).get(name)

    def _stored(self, kind: str) -> dict[str, Object]:
        return self.objects.setdefault(kind, {})

    def _list(self, kind: str, selector: str) -> Object:
        items = [pod.shown() for pod in self.pods] if kind == "pods" else list(self._stored(kind).values())
        found = [
            # Lists of the API have the kind once, and not at each item.
            {key: value for key, value in item.items() if key not in ("kind", "apiVersion")}
            for item in items
            if _selects(selector, item["metadata"].get("labels", {}))
        ]
        name, version = _KINDS[kind]
        return {"kind": f"{name}List", "apiVersion": version, "metadata": {}, "items": found}

    def _make(self, kind: str, name: str, body: Object) -> Object:
        if kind == "secrets":
            self._secrets[name] = {key: base64.b64decode(value).decode() for key, value in body["data"].items()}
            return body
        jsonschema.validate(body, SCHEMA)
        return self._stored(kind).setdefault(name, {**body, "status": {}} if kind == "jobs" else body)

    def _delete(self, kind: str, name: str, body: Object) -> Object | None:
        if kind == "pods":
            found = [pod for pod in self.pods if pod.name == name]
            for pod in found:
                pod.ask(body.get("gracePeriodSeconds", pod.spec["terminationGracePeriodSeconds"]))
            return found[0].shown() if found else None
        if name not in self.jobs:
            return None
        for pod in self._living(name):
            pod.ask(pod.spec["terminationGracePeriodSeconds"])
        if body.get("propagationPolicy") == "Foreground":
            self.jobs[name]["metadata"]["deletionTimestamp"] = _time(0)
            return self.jobs[name]
        return self.jobs.pop(name)


@contextlib.contextmanager
def cluster_in(
    folder: Path, secrets: Mapping[str, Mapping[str, str]], image: Sequence[str] = HPO
) -> Iterator[Cluster]:
    """A cluster that runs meanwhile."""
    cluster = Cluster(folder, secrets, image)
    try:
        yield cluster
    finally:
        cluster.close()


def _is_ignored(job: Object, pod: Pod, code: int) -> bool:
    """Whether the end of a pod costs no retry, by the Job's rules."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        assert rule["action"] == "Ignore"
        if code in rule.get("onExitCodes", {}).get("values", []):
            return True
        wanted = {each["type"] for each in rule.get("onPodConditions", [])}
        if wanted & {each["type"] for each in pod.conditions}:
            return True
    return False


def _time(serial: int) -> str:
    return f"2026-01-01T00:{serial // 60:02}:{serial % 60:02}Z"


def _disruption(reason: str) -> Object:
    return {"type": "DisruptionTarget", "status": "True", "reason": reason}


def _unanswered(pod: Pod) -> Object:
    shown = Pod.shown(pod)
    shown["status"] |= {"phase": "Failed", "containerStatuses": []}
    return shown


def _expanded(text: str, values: Mapping[str, str]) -> str:
    """The text with variables, as the kubelet puts them in."""
    return re.sub(
        r"\$\$|\$\((\w+)\)", lambda match: "$" if match[0] == "$$" else values.get(match[1], match[0]), text
    )


def _selects(selector: str, labels: Mapping[str, str]) -> bool:
    for key, operator, value in re.findall(r"([\w./-]+)\s*(=| in )\s*(\([^)]*\)|[^,]*)", selector):
        allowed = value.strip("()").split(",") if operator == " in " else [value]
        if labels.get(key) not in allowed:
            return False
    return True


def _resource(plural: str) -> Object:
    verbs = ["get", "list", "create", "patch", "delete"]
    return {"name": plural, "singularName": "", "namespaced": True, "kind": _KINDS[plural][0], "verbs": verbs}


_BATCH = {"groupVersion": "batch/v1", "version": "v1"}
_DISCOVERY: dict[str, Object] = {
    "/version": {"major": "1", "minor": "29", "gitVersion": "v1.29.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": [{"name": "batch", "versions": [_BATCH], "preferredVersion": _BATCH}],
    },
    "/api/v1": {
        "kind": "APIResourceList",
        "groupVersion": "v1",
        "resources": [_resource(plural) for plural, (_, version) in _KINDS.items() if version == "v1"],
    },
    "/apis/batch/v1": {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": "batch/v1",
        "resources": [_resource("jobs")],
    },
}


def _handler(cluster: Cluster) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _go(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = urlsplit(self.path)
            given = json.loads(body) if body else {}
            answer = cluster.answer(self.command, parts.path, parse_qs(parts.query), given)
            missing = {
                "kind": "Status",
                "apiVersion": "v1",
                "status": "Failure",
                "reason": "NotFound",
                "code": 404,
            }
            text = answer if isinstance(answer, str) else json.dumps(missing if answer is None else answer)
            data = text.encode()
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Type", "text/plain" if isinstance(answer, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PATCH = do_DELETE = do_POST = _go  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    return Handler
