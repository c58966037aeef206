"""A real Slurm of two nodes on this machine, from Debian's packages, which a test starts, breaks and ends.

Each node is a `slurmd` with a host name and process ids of its own (UTS and PID namespaces). To kill a node's
first process does what a power cut does to a machine: nothing on it lives on. The end of the test's own process
does the same to all of them. Jobs of the partition `high` preempt those of `low`, which is the default.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.support.commands import PATIENCE

NODES: Final = ("node1", "node2")
_STOP_SECONDS: Final = 10
_PROGRAMS: Final = (
    "slurmctld",
    "slurmd",
    "slurmstepd",
    "sbatch",
    "squeue",
    "scontrol",
    "scancel",
    "srun",
    "unshare",
)
_CONF = """\
ClusterName=hpo
SlurmctldHost={controller}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=5
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=1,sched_min_interval=0
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=30
PartitionName=gpu Nodes=ALL PriorityTier=1 GraceTime=30
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""
_NODE = "NodeName={node} NodeAddr=127.0.0.1 NodeHostname={node} Port={port} CPUs=4 RealMemory=8000 Gres=gpu:1"


class ClusterMissingError(Exception):
    """Slurm's programs are not on this machine, or may not run here; the text says what is needed."""


class SlurmCluster:
    """A running cluster.

    Attributes:
        folder: Holds its configuration, state and logs.
        environment: What its commands need in their environment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment: Mapping[str, str] = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the controller and its nodes, and wait until jobs can run."""
        controller, *ports = _free_ports(1 + len(NODES))
        nodes = "\n".join(_NODE.format(node=node, port=port) for node, port in zip(NODES, ports, strict=True))
        host = socket.gethostname().partition(".")[0]
        conf = _CONF.format(controller=host, port=controller, folder=self.folder, nodes=nodes)
        (self.folder / "slurm.conf").write_text(conf)
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        (self.folder / "state").mkdir()
        self._start("controller", ["slurmctld", "-D"])
        for node in NODES:
            (self.folder / f"spool.{node}").mkdir()
            self.start_node(node)
        self._wait_for_nodes()

    def start_node(self, node: str) -> None:
        """Switch a node on."""
        daemon = shlex.join(["slurmd", "-D", "-N", node, "-d", _path_of("slurmstepd")])
        own = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        # The first process of the namespace reaps what the daemon leaves behind.
        self._start(node, [*own, "sh", "-c", f"hostname {node}; {daemon} & wait"])

    def lose_node(self, node: str) -> None:
        """Cut a node's power; what watches over the machines reports it to Slurm at once."""
        self._kill(node)
        self.call("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost")

    def stop(self) -> None:
        """Kill everything, with the jobs."""
        for name in reversed(list(self._processes)):  # the nodes first
            self._kill(name)

    def clear(self) -> None:
        """Cancel all jobs, switch nodes on that were lost, and wait until all are free."""
        self.call("scancel", "--user=root")
        for node in NODES:
            if node not in self._processes:
                self.start_node(node)
        self._wait_for_nodes()

    def preempt(self, node: str) -> str:
        """Queue a short job that takes a node from agents; its id."""
        job = ("--partition=high", f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
        return self.call("sbatch", "--parsable", *job)

    def limit_time(self, placement: str) -> None:
        """Let the time of a running job end within two minutes; Slurm looks for such jobs every 30 s."""
        job = placement.removeprefix("slurm:")
        minutes = int(self.call("squeue", "--noheader", f"--jobs={job}", "--Format=TimeUsed").split(":")[-2])
        self.call("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}")

    def lift_time_limit(self, placement: str) -> None:
        """Let a job take as long as it likes."""
        self.call("scontrol", "update", f"JobId={placement.removeprefix('slurm:')}", "TimeLimit=UNLIMITED")

    def state(self, job: str) -> str:
        """The state of a job that is no array."""
        return self.call("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T")

    def restarts(self, placement: str) -> int:
        """How often a job was requeued."""
        job = placement.removeprefix("slurm:")
        return int(self.call("squeue", "--noheader", "--states=all", f"--jobs={job}", "--Format=RestartCnt"))

    def call(self, *command: str) -> str:
        """Run one of Slurm's commands; what it prints.

        Raises:
            RuntimeError: It fails.
        """
        done = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}: {done.stderr}")
        return done.stdout.strip()

    def states(self, job: str = "") -> dict[str, str]:
        """The states of jobs, by ``JOB_TASK``; of all jobs where none is named."""
        only = ["--jobs", job] if job else []
        lines = self.call("squeue", "--noheader", "--states=all", "--array", *only, "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def _start(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env={**os.environ, **self.environment, "PATH": _search_path()},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
            )

    def _kill(self, name: str) -> None:
        process = self._processes.pop(name)
        if name == "controller":  # it ends its own helper
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
        process.kill()
        process.wait()

    def _wait_for_nodes(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                states = self.call("sinfo", "--noheader", "--Node", "--partition=low", "--format=%T").split()
                if states == ["idle"] * len(NODES):
                    return
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
            for name, process in self._processes.items():
                if process.poll() is not None or time.monotonic() > deadline:
                    logs = [path.read_text(errors="replace") for path in sorted(self.folder.glob("*.out"))]
                    raise RuntimeError(f"{name} does not run: {' '.join(logs)}")
            time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def _search_path() -> str:
    """Where Debian keeps daemons, outside of a user's path."""
    return f"{os.environ.get('PATH', '')}:/usr/sbin"


def _path_of(program: str) -> str:
    path = shutil.which(program, path=_search_path())
    if path is None:
        raise ClusterMissingError(f"no Slurm ({program}) here: apt-get install slurmctld slurmd slurm-client")
    return path


@contextmanager
def running_slurm() -> Iterator[SlurmCluster]:
    """A cluster for the time of the block; ClusterMissingError where it can't be."""
    for program in _PROGRAMS:
        _path_of(program)
    if os.geteuid() != 0:
        raise ClusterMissingError("Slurm's daemons and their namespaces need root here")
    folder = Path(tempfile.mkdtemp(prefix="hpo-slurm-"))
    cluster = SlurmCluster(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """A cluster of this test process only."""
    try:
        with running_slurm() as cluster:
            yield cluster
    except ClusterMissingError as error:
        pytest.skip(str(error))
