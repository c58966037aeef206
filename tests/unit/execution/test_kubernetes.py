"""Agents in Kubernetes: the manifests fit the API, and what Jobs and pods say becomes an agent's changes."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from hpo.errors import InputError, StudyError
from hpo.execution.engines.by_name import address_of, engine_of
from hpo.execution.engines.engine import (
    AgentOrder,
    Ended,
    EngineAwayError,
    NodeGone,
    Placement,
    Preempted,
    Resources,
    Running,
    Waits,
)
from hpo.execution.engines.kubectl import Kubectl
from hpo.execution.engines.kubernetes import KubernetesEngine
from hpo.execution.engines.kubernetes_settings import KEYS, Settings, settings_of

pytestmark = pytest.mark.full

SCHEMA = json.loads((Path(__file__).parents[2] / "support" / "kubernetes_schema.json").read_text())
SETTINGS = Settings("registry/hpo:1", "studies")
ORDER = AgentOrder(
    Path("/shared/Spirals 2/study.yaml"),
    "Spirals & more",
    Path("/shared/Spirals 2/runs/spirals/logs"),
    ("model.act=$(HOME)", "model.text=a$$b$$(HOME)", "--output-dir", "/shared/Spirals 2/runs/spirals"),
    2,
    Resources(0.5, 4, 16 * 2**30),
    ("HPO_STORAGE", "WANDB_API_KEY"),
)


class Answers(Kubectl):
    """kubectl that keeps what it is to do, and answers with given objects."""

    def __init__(self) -> None:
        super().__init__("default")
        self.commands: list[tuple[str, ...]] = []
        self.applied: list[dict[str, Any]] = []
        self.objects: list[dict[str, Any]] = []

    def apply(self, objects: Any) -> list[str]:
        self.applied += objects
        return [f"{each['kind'].lower()}/{each['metadata']['name']}" for each in objects]

    def look(self, kinds: str, selector: str) -> list[dict[str, Any]]:
        return self.objects

    def delete(self, kind: str, *options: str) -> None:
        self.commands.append((kind, *options))


def documents(text: str) -> list[dict[str, Any]]:
    """The objects of a manifest, each checked against the API."""
    found = list(yaml.safe_load_all(text))
    for each in found:
        jsonschema.validate(each, SCHEMA)
    return found


def engine(**changed: Any) -> KubernetesEngine:
    return KubernetesEngine(dataclasses.replace(SETTINGS, **changed), Answers())


def test_the_schema_catches_a_field_that_the_api_does_not_have() -> None:
    [job] = documents(engine().script(ORDER, 1))
    job["spec"]["template"]["spec"]["containers"][0]["enviroment"] = []
    with pytest.raises(jsonschema.ValidationError, match="'enviroment' was unexpected"):
        jsonschema.validate(job, SCHEMA)


# ---- what a person writes


def test_every_key_is_read() -> None:
    text = (
        "k8s:image=r:5000/hpo@sha256:0,volume-claim=c,mount=/m,files=image,secret=s,namespace=n,grace=2m,user=7,"
        "priority-class=low,service-account=a,gpu=amd.com/gpu"
    )
    wanted = Settings("r:5000/hpo@sha256:0", "c", Path("/m"), "image", "s", "n", 120, 7, "low", "a", "amd.com/gpu")
    assert settings_of(address_of(text)) == wanted
    assert isinstance(engine_of(address_of("k8s:image=i,volume-claim=c")), KubernetesEngine)


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("image=i", "`volume-claim` is missing"),
        ("volume-claim=c", "`image` is missing"),
        ("cluster,image=i,volume-claim=c", "kubectl's current context"),
        ("image=i,volume-claim=C!", "can't be the name"),
        ("image=i,volume-claim=c,mount=runs", "not an absolute path"),
        ("image=i,volume-claim=c,files=git", "claim, configmap, image"),
        ("image=i,volume-claim=c,grace=soon", "grace=120s"),
        ("image=i,volume-claim=c,user=0", "ordinary user"),
        ("image=i,volume-claim=c,gpu=2", "gpu=amd.com/gpu"),
        ("image=i,volume-claim=c,pvc=c", "has no key 'pvc'"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_fix(rest: str, said: str) -> None:
    with pytest.raises(InputError, match="fix: ") as error:
        engine_of(address_of(f"k8s:{rest}"))
    assert said in str(error.value)


def test_the_page_has_every_key() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "kubernetes.md").read_text()
    assert set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)) == set(KEYS)


# ---- manifests


def test_the_script_is_one_indexed_job_of_all_agents() -> None:
    text = engine(grace=300, priority="low").script(ORDER, 3)
    [job] = documents(text)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 3, 3)
    assert spec["backoffLimitPerIndex"] > 0
    # Neither the end of a preempted pod nor that of an agent that was asked to leave costs a retry.
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["Ignore", "Ignore"]
    assert (pod["terminationGracePeriodSeconds"], pod["priorityClassName"]) == (300, "low")
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "4000m", "memory": str(16 * 2**30), "nvidia.com/gpu": "1"}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["command"] + container["args"][:2] == ["hpo", "worker", str(ORDER.study)]
    assert "model.act=$$(HOME)" in container["args"], "Kubernetes would put a variable there"
    assert "model.text=a$$$$b$$$$(HOME)" in container["args"], "a pair would be one"
    claim = [mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "claim"]
    assert claim == ["/shared/Spirals 2"]
    # What a person does first is said, by names alone.
    assert "create secret generic hpo --from-env-file=FILE" in text
    assert "HPO_STORAGE, WANDB_API_KEY" in text


def test_a_pod_is_one_that_the_restricted_standard_admits() -> None:
    [job] = documents(engine(user=7).script(ORDER, 1))
    pod = job["spec"]["template"]["spec"]
    shared = pod["securityContext"]
    assert (shared["runAsNonRoot"], shared["runAsUser"], shared["fsGroup"]) == (True, 7, 7)
    assert shared["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        narrow = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        assert container["securityContext"] == narrow


def test_secrets_come_by_the_name_of_their_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPO_STORAGE", "postgresql://hpo:hunter2@db/hpo")
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    for text in (engine().script(ORDER, 2), engine().driver_script(["run", "study.yaml"], ORDER)):
        assert "hunter2" not in text
        job = documents(text)[-1]
        assert job["spec"]["template"]["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "hpo"}}]


def test_text_that_looks_like_a_number_stays_text() -> None:
    order = dataclasses.replace(ORDER, arguments=("1e3", "yes"), name="on")
    text = engine().script(order, 1)
    assert documents(text)[0]["spec"]["template"]["spec"]["containers"][0]["args"][-2:] == ["1e3", "yes"]
    assert '"1e3"' in text  # YAML 1.2, which has a number there, is not what PyYAML reads


def test_a_placed_agent_is_a_job_of_one_with_the_id_in_its_environment() -> None:
    kubectl = Answers()
    placed = KubernetesEngine(SETTINGS, kubectl).place(ORDER, 2)
    assert len(set(placed)) == 2
    for placement, job in zip(placed, kubectl.applied, strict=True):
        jsonschema.validate(job, SCHEMA)
        assert len(job["metadata"]["name"]) < 60
        assert job["spec"]["completions"] == 1
        index, named = job["spec"]["template"]["spec"]["containers"][0]["env"]
        assert named["value"].replace(f"$({index['name']})", "0") == placement.id


def test_the_driver_is_a_job_with_rights_in_its_namespace_only() -> None:
    command = ["run", "/shared/Spirals 2/study.yaml", "--on", "k8s:…"]
    account, role, binding, job = documents(engine(namespace="ml").driver_script(command, ORDER))
    pod = job["spec"]["template"]["spec"]
    assert pod["containers"][0]["args"] == command
    assert pod["serviceAccountName"] == account["metadata"]["name"] == binding["subjects"][0]["name"]
    assert role["kind"] == "Role"
    assert {each["metadata"]["namespace"] for each in (account, role, binding, job)} == {"ml"}
    [alone] = documents(engine(account="mine").driver_script(command, ORDER))
    assert alone["spec"]["template"]["spec"]["serviceAccountName"] == "mine"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mount": Path("/data")}, "the output folder /shared/Spirals 2/runs/spirals is not on the claim"),
        ({"mount": Path("/shared"), "files": "image"}, "would hide the study's folder"),
    ],
)
def test_a_mount_that_does_not_fit_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        engine(**changed).script(ORDER, 1)


# ---- the study's folder as a ConfigMap


@pytest.fixture
def shipped(tmp_path: Path) -> AgentOrder:
    folder = tmp_path / "study"
    for name in ("study.yaml", "parts/model.py", ".env", "__pycache__/x.pyc", "runs/s/study.db"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return AgentOrder(folder / "study.yaml", "s", folder / "runs" / "s" / "logs")


def test_the_folder_is_shipped_without_what_is_hidden_or_a_result(shipped: AgentOrder) -> None:
    config_map, job = documents(engine(files="configmap").script(shipped, 1))
    pod = job["spec"]["template"]["spec"]
    [volume] = [each["configMap"] for each in pod["volumes"] if "configMap" in each]
    assert volume["name"] == config_map["metadata"]["name"]
    content = {
        each["path"]: base64.b64decode(config_map["binaryData"][each["key"]]).decode() for each in volume["items"]
    }
    assert content == {name: name for name in ("study.yaml", "parts/model.py")}
    mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    folder = str(shipped.study.parent)
    assert (mounts["study"], mounts["claim"]) == (folder, f"{folder}/runs")


def test_the_init_containers_command_copies_what_a_config_map_shows(shipped: AgentOrder, tmp_path: Path) -> None:
    """A ConfigMap's volume has links into a hidden folder, as the kubelet makes it."""
    _, job = documents(engine(files="configmap").script(shipped, 1))
    [init] = job["spec"]["template"]["spec"]["initContainers"]
    files, target = tmp_path / "files", tmp_path / "target"
    (files / "..data" / "parts").mkdir(parents=True)
    target.mkdir()
    for name in ("study.yaml", "parts/model.py"):
        (files / "..data" / name).write_text(name)
    (files / "study.yaml").symlink_to("..data/study.yaml")
    (files / "parts").symlink_to("..data/parts")
    command = [word.replace("/files", str(files)) for word in init["command"][:-1]]
    subprocess.run([*command, str(target)], check=True)
    found = {str(path.relative_to(target)): path for path in target.rglob("*") if path.is_file()}
    assert set(found) == {"study.yaml", "parts/model.py"}
    assert not any(path.is_symlink() for path in found.values())


def test_a_folder_that_is_too_large_is_refused(shipped: AgentOrder) -> None:
    (shipped.study.parent / "data.bin").write_bytes(bytes(800_000))
    with pytest.raises(StudyError, match="too large for a ConfigMap"):
        engine(files="configmap").script(shipped, 1)


# ---- what Jobs and pods say


class Cluster:
    """One placed agent, its Job and its pod, with a clock that is set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.kubectl = Answers()
        self.engine = KubernetesEngine(SETTINGS, self.kubectl, lambda: self.now)
        [self.placement] = self.engine.place(ORDER, 1)
        name = self.kubectl.applied[-1]["metadata"]["name"]
        self.job: dict[str, Any] = {"kind": "Job", "metadata": {"name": name}, "status": {}}
        self.pod: dict[str, Any] = {
            "kind": "Pod",
            "metadata": {"uid": "1", "labels": {"hpo/job": name}},
            "spec": {"nodeName": "node-a"},
            "status": {"phase": "Running"},
        }
        self.kubectl.objects = [self.job, self.pod]

    def changes(self) -> list[Any]:
        self.now += 5
        return list(self.engine.changes())

    def condition(self, item: dict[str, Any], kind: str, reason: str = "", message: str = "") -> None:
        said = {"type": kind, "status": "True", "reason": reason, "message": message}
        item["status"].setdefault("conditions", []).append(said)


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_an_agent_runs_and_leaves(cluster: Cluster) -> None:
    cluster.pod["status"]["phase"] = "Pending"
    assert cluster.changes() == []
    cluster.pod["status"]["phase"] = "Running"
    assert cluster.changes() == [Running(cluster.placement, "node-a")]
    assert cluster.changes() == []
    cluster.condition(cluster.job, "Complete")
    assert cluster.changes() == [Ended(cluster.placement, "it has left", in_order=True)]
    assert cluster.changes() == []


def test_why_no_node_takes_an_agent_for_long_is_said_once(cluster: Cluster) -> None:
    unbound = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "no GPU",
    }
    cluster.pod["status"] = {"phase": "Pending", "conditions": [unbound]}
    assert cluster.changes() == []
    cluster.now += 20
    assert cluster.changes() == []
    cluster.now += 10
    assert cluster.changes() == [Waits(cluster.placement, "no GPU")]
    cluster.now += 60
    assert cluster.changes() == []
    unbound |= {"message": "0/3 nodes: too little memory"}
    assert cluster.changes() == []
    cluster.now += 30
    assert cluster.changes() == [Waits(cluster.placement, "0/3 nodes: too little memory")]
    cluster.pod["status"] = {"phase": "Running"}
    assert cluster.changes() == [Running(cluster.placement, "node-a")]


def test_an_agent_whose_job_gets_no_pod_for_long_is_said_to_wait(cluster: Cluster) -> None:
    cluster.kubectl.objects = [cluster.job]
    assert cluster.changes() == []
    cluster.now += 30
    [waits] = cluster.changes()
    assert isinstance(waits, Waits)
    name = cluster.job["metadata"]["name"]
    assert f"`kubectl describe --namespace=default job/{name}` says why" in waits.cause
    cluster.kubectl.objects = [cluster.job, cluster.pod]
    assert cluster.changes() == [Running(cluster.placement, "node-a")]


def test_a_preempted_agent_is_placed_again_by_the_cluster(cluster: Cluster) -> None:
    cluster.changes()
    cluster.condition(cluster.pod, "DisruptionTarget", "PreemptionByScheduler")
    assert cluster.changes() == [Preempted(cluster.placement, requeued=True)]
    assert cluster.changes() == []
    cluster.kubectl.objects.append(
        cluster.pod | {"metadata": cluster.pod["metadata"] | {"uid": "2"}, "status": {}}
    )
    cluster.kubectl.objects[-1]["status"] = {"phase": "Running"}
    assert cluster.changes() == [Running(cluster.placement, "node-a")]


@pytest.mark.parametrize("how", ["its node is out of the cluster", "its node does not answer"])
def test_a_node_that_is_gone_takes_its_agent_with_it(cluster: Cluster, how: str) -> None:
    cluster.changes()
    cluster.pod["metadata"] |= {"deletionTimestamp": "…", "deletionGracePeriodSeconds": 120}
    reason = "DeletionByPodGC" if "out of" in how else "DeletionByTaintManager"
    cluster.condition(cluster.pod, "DisruptionTarget", reason)
    found = cluster.changes()
    if "answer" in how:
        assert found == [Preempted(cluster.placement, requeued=True)]
        cluster.now += 140  # its grace is over, and it has not ended
        assert cluster.changes() == []
        cluster.now += 10
        found = cluster.changes()
    assert found == [NodeGone(cluster.placement, "node-a")]
    assert cluster.engine.find(ORDER) == [], "it would be taken for one that runs"
    # The driver places another one: Kubernetes is not to do so, too.
    cluster.changes()
    assert cluster.kubectl.commands == [("jobs", cluster.job["metadata"]["name"], "--cascade=background")]


def test_an_agent_that_fails_ends_with_its_cause(cluster: Cluster) -> None:
    status = {"name": "hpo", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    cluster.pod["status"] = {"phase": "Failed", "containerStatuses": [status]}
    cluster.condition(cluster.job, "Failed", "FailedIndexes", "Job has failed indexes")
    cause = "hpo ended with exit code 137 (OOMKilled)"
    # It started and ended between two looks.
    assert cluster.changes() == [
        Running(cluster.placement, "node-a"),
        Ended(cluster.placement, cause, in_order=False),
    ]


def test_why_a_container_could_not_be_started_is_said(cluster: Cluster) -> None:
    message = 'exec: "hpo": executable file not found in $PATH'
    end = {"exitCode": 128, "reason": "StartError", "message": message}
    cluster.pod["status"] = {
        "phase": "Failed",
        "containerStatuses": [{"name": "hpo", "state": {"terminated": end}}],
    }
    cluster.condition(cluster.job, "Failed", "FailedIndexes", "Job has failed indexes")
    cause = f"hpo ended with exit code 128 (StartError: {message})"
    assert cluster.changes()[-1] == Ended(cluster.placement, cause, in_order=False)


def test_an_agent_that_its_node_refuses_ends_with_the_nodes_reason(cluster: Cluster) -> None:
    message = "Pod was rejected: Allocate failed due to requested number of devices unavailable for nvidia.com/gpu"
    cluster.pod["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": message}
    cluster.condition(cluster.job, "Failed", "FailedIndexes", "Job has failed indexes")
    cause = f"its pod has failed: UnexpectedAdmissionError: {message}"
    assert cluster.changes() == [Ended(cluster.placement, cause, in_order=False)]


@pytest.mark.parametrize("what", ["image", "claim"])
def test_an_agent_that_can_never_start_ends_with_its_cause(cluster: Cluster, what: str) -> None:
    cluster.pod["status"] = {"phase": "Pending"}
    if what == "image":
        waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
        cluster.pod["status"]["containerStatuses"] = [{"name": "hpo", "state": {"waiting": waiting}}]
    else:
        message = '0/3 nodes are available: persistentvolumeclaim "studies" not found.'
        said = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        cluster.pod["status"]["conditions"] = [said]
    [ended] = cluster.changes()
    assert isinstance(ended, Ended)
    assert ("no such image" if what == "image" else '"studies" not found') in ended.cause
    cluster.changes()
    assert cluster.kubectl.commands, "its Job would wait for ever"


@pytest.mark.parametrize("is_away", [False, True])
def test_a_job_that_is_given_up_at_the_last_look_is_deleted_at_the_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_away: bool
) -> None:
    """The driver ends with the error that too many agents have died: no other look comes."""
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    cluster.pod["status"] = {
        "phase": "Pending",
        "containerStatuses": [{"name": "hpo", "state": {"waiting": waiting}}],
    }
    [_] = cluster.changes()
    assert cluster.kubectl.commands == []
    if is_away:
        monkeypatch.setattr(Answers, "delete", away)
    cluster.engine.close()
    assert bool(cluster.kubectl.commands) is not is_away


def away(*_: object) -> None:
    raise EngineAwayError("no route to host")


def test_a_drained_agent_has_ended_when_its_job_is_gone(cluster: Cluster) -> None:
    cluster.changes()
    cluster.engine.drain([cluster.placement])
    assert cluster.kubectl.commands == [("jobs", cluster.job["metadata"]["name"], "--cascade=foreground")]
    cluster.job["metadata"]["deletionTimestamp"] = "…"
    cluster.pod["metadata"] |= {"deletionTimestamp": "…", "deletionGracePeriodSeconds": 120}
    cluster.condition(cluster.pod, "DisruptionTarget", "DeletionByTaintManager")
    assert cluster.changes() == []
    cluster.kubectl.objects = []
    [ended] = cluster.changes()
    assert ended == Ended(cluster.placement, "its Job was deleted", in_order=False, asked=True)


def test_another_driver_finds_what_still_has_to_run(cluster: Cluster) -> None:
    other = KubernetesEngine(SETTINGS, cluster.kubectl)
    assert other.find(ORDER) == [cluster.placement]
    cluster.job["metadata"]["deletionTimestamp"] = "…"
    assert other.find(ORDER) == []


# ---- kubectl


def test_a_machine_without_kubectl_is_answered_with_the_dry_run() -> None:
    with pytest.raises(StudyError, match="fix: install it, or add `--dry-run`"):
        KubernetesEngine(SETTINGS, Kubectl("default", ["kubectl-is-not-here"])).place(ORDER, 1)


@pytest.mark.parametrize(
    ("stderr", "kind"),
    [
        (
            "The connection to the server 10.0.0.1:6443 was refused - did you specify the right host?",
            EngineAwayError,
        ),
        ("Error from server (Timeout): the server was unable to return a response in time", EngineAwayError),
        ("error: http2: client connection lost", EngineAwayError),
        ("Unable to connect to the server: EOF", EngineAwayError),
        ("Unable to connect to the server: x509: certificate has expired or is not yet valid", StudyError),
        ('Error from server (Forbidden): jobs.batch is forbidden: User "me" cannot list', StudyError),
    ],
)
def test_a_server_that_is_away_is_another_error_than_one_that_refuses(stderr: str, kind: type[StudyError]) -> None:
    kubectl = Kubectl("default", ["sh", "-c", 'echo "$0" >&2; exit 1', stderr])
    with pytest.raises(StudyError, match="kubectl get: ") as error:
        KubernetesEngine(SETTINGS, kubectl).find(ORDER)
    assert type(error.value) is kind


@pytest.mark.parametrize(
    "then",
    [
        "echo 'Unable to connect to the server: dial tcp: lookup api: server misbehaving' >&2; exit 1",
        "kill -9 $$",
        "echo login has expired",
    ],
)
def test_a_server_that_has_answered_is_asked_again_whatever_fails(tmp_path: Path, then: str) -> None:
    program = f'[ -e "$0" ] || {{ touch "$0"; echo "{{\\"items\\": []}}"; exit 0; }}; {then}'
    kubectl = Kubectl("default", ["sh", "-c", program, str(tmp_path / "asked")])
    assert kubectl.look("jobs", "a=b") == []
    with pytest.raises(EngineAwayError, match="kubectl get: "):
        kubectl.look("jobs", "a=b")


def test_the_logs_are_a_command() -> None:
    assert engine().logs(Placement("k8s:default/hpo-x/0")) == "kubectl logs --namespace=default job/hpo-x"
