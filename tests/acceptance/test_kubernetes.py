"""The page on Kubernetes, and a study whose agents are taken away: real kubectl, a stand-in for the cluster."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpo.config.spec import load_spec
from hpo.execution.engines.engine import AgentOrder, Change, Ended, NodeGone, Preempted
from hpo.execution.engines.kubectl import Kubectl
from hpo.execution.engines.kubernetes import KubernetesEngine
from hpo.execution.engines.kubernetes_settings import Settings
from hpo.study.open_study import start_study
from tests.support.commands import STUDY, epochs_trained, hpo, ledger_of, make_study, values, wait_until
from tests.support.docs_session import ROOT, blocks_of
from tests.support.kubernetes_cluster import cluster_in

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed"),
]


def agents_at_work(study: Path) -> int:
    """How many agents hold a trial now: on a busy machine one may have trained all that the other was to."""
    return len({each.agent for each in ledger_of(study) if each.ended_at is None})


def test_a_study_survives_preemption_and_the_loss_of_a_node(tmp_path: Path) -> None:
    """Preemption costs no retry: Kubernetes starts the agent again, which also resumes the other one's trial."""
    study = make_study(tmp_path / "study", STUDY.replace("n_trials: 6", "n_trials: 3") + "run: {max_retries: 1}\n")
    slow = ("model.delay=0.05", "trainer.max_epochs=20")
    start_study(load_spec(study, slow)).storage.close()
    arguments = (*slow, "--leave-when-idle=1s")
    order = AgentOrder(study, "tiny", study.parent / "runs" / "tiny" / "logs", arguments, 1)
    with cluster_in(tmp_path, {"hpo": {}}) as cluster:
        engine = KubernetesEngine(Settings("i", "c"), Kubectl("default", [str(cluster.kubectl)]))
        jobs = [each.id.split("/")[1] for each in engine.place(order, 2)]
        wait_until(lambda: agents_at_work(study) == 2 and sum(map(bool, epochs_trained(study))) >= 2)
        cluster.preempt(jobs[0])
        cluster.lose_node(jobs[1])
        changes: list[Change] = []
        wait_until(
            lambda: changes.extend(engine.changes()) or any(isinstance(each, Ended) for each in changes), 120
        )
    assert [each.in_order for each in changes if isinstance(each, Ended)] == [True]
    assert [each.placement.id.split("/")[1] for each in changes if isinstance(each, NodeGone)] == [jobs[1]]
    assert [each.requeued for each in changes if isinstance(each, Preempted)] == [True]
    ends = [each.outcome for each in ledger_of(study)]
    assert sorted(end for end in ends if end != "complete") == ["lost", "requeued"]
    assert ends.count("complete") == 3
    place = (
        "--storage",
        f"sqlite:///{tmp_path}/alone.db",
        "--output-dir",
        tmp_path / "alone",
        *slow,
        "model.delay=0",
    )
    hpo("run", study, *place)
    assert values(study, *slow) == values(study, *place)


def test_the_commands_of_the_page_place_agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of kubectl's, in the order of the page, with the manifests that its other commands print."""
    folder = tmp_path / "page"
    hpo("init", folder)
    agent = "import os; print('at', os.environ['HPO_STORAGE'], flush=True); os.read(os.pipe()[0], 1)"
    said: dict[str, str] = {}
    with cluster_in(tmp_path, {}, [sys.executable, "-IS", "-c", agent]) as cluster, contextlib.chdir(folder):
        for block in blocks_of((ROOT / "docs" / "how-to" / "kubernetes.md").read_text()):
            if block.title:
                Path(block.title).write_text(block.text)
            for command, _ in block.commands() if block.kind == "bash" else ():
                program, *words = command.split()
                if program.startswith("HPO_STORAGE="):
                    monkeypatch.setenv(*program.split("=", 1))
                    target = words.index(">")
                    Path(words[target + 1]).write_text(hpo(*words[1:target]).stdout)
                elif program == "kubectl":
                    wait_until(lambda: all(cluster.output(job).count("at ") == 4 for job in cluster.jobs))
                    done = subprocess.run([cluster.kubectl, *words], capture_output=True, text=True, check=False)
                    assert done.returncode == 0, f"{command}\n{done.stderr}"
                    said[words[0]] = done.stdout
    assert list(cluster.objects["persistentvolumeclaims"]) == ["studies"]
    [job] = cluster.jobs.values()
    assert (job["spec"]["completions"], job["spec"]["completionMode"]) == (4, "Indexed")
    assert said["logs"].count("at postgresql+psycopg://hpo:PASSWORD@db.example/hpo") == 4
    assert "PASSWORD" not in str(job) + Path(folder, "driver.yaml").read_text()
