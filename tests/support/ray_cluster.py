"""A Ray cluster of three machines for tests, in kernel namespaces of its own.

The machines are nodes of `ray.cluster_utils.Cluster`, each under a host name of its own, in one network that
reaches nothing else; one can be lost as in a power failure. The first process of the namespace of processes is the
cluster: when it ends, for whatever reason, the kernel ends all others.
"""

import contextlib
import ctypes
import fcntl
import importlib.util
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

#: Where the client server of the cluster listens, and where its page and jobs are.
ADDRESS = "ray://127.0.0.1:10001"
HOSTS = ("node-0", "node-1", "node-2")
_CORES = 4
_SET_FLAGS, _UP = 0x8914, 1  # of a network interface
_CLONE_NEWUTS = 0x04000000
#: Without the second the client server may crash at the fork for a new client.
_ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "GRPC_ENABLE_FORK_SUPPORT": "0"}
#: Seconds that a client waits at each of three times for a client server, which starts slowly on a busy machine.
_PATIENT = {"RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "60", "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "60"}
#: Ray takes a node whose processes have ended for dead in a second.
_SYSTEM = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 10000,  # of one that is busy; who is dead refuses the connection
    "health_check_failure_threshold": 2,
}


_NAMESPACES = ("unshare", "-n", "-p", "-m", "--mount-proc", "-f", "--kill-child")


class RayMissingError(Exception):
    """There can be no cluster on this machine; the text says why."""


class RayCluster:
    """A running cluster.

    Args:
        process: Starts the machines.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._hosts: dict[str, str] = {}
        for host in HOSTS:
            self.add(host)
        self._first = psutil.Process(process.pid).children()[0].pid

    def add(self, host: str) -> None:
        """Start a machine, and wait until Ray has it; nothing where it runs."""
        if self._hosts.get(host) and self.processes(host):
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{host}\n")
        self._process.stdin.flush()
        self._hosts[host] = self._process.stdout.readline().strip()
        if not self._hosts[host]:
            raise RuntimeError(f"{host} did not start")

    def command(self, *command: object) -> list[str]:
        """A command as it is to be started, so that it reaches the cluster's network."""
        return ["nsenter", f"--net=/proc/{self._first}/ns/net", *map(str, command)]

    def processes(self, host: str) -> list[int]:
        """The processes of a machine."""
        return [pid for pid in psutil.pids() if _host(pid) == self._hosts[host]]

    def lose(self, host: str) -> None:
        """End every process of a machine at once, as a power failure does."""
        while left := self.processes(host):
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            time.sleep(0.01)


def _host(pid: int) -> str:
    """The namespace of host names that a process lives in; empty for one that has ended."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/uts").readlink())
    return ""


@contextlib.contextmanager
def running_ray(**environment: str) -> Iterator[RayCluster]:
    """A cluster for the time of the block, whose machines have these variables in their environment.

    Raises:
        RayMissingError: There can be none here.
    """
    _refuse_without_ray()
    folder = tempfile.mkdtemp(prefix="hpo-ray-")  # not under pytest's own: too long for a socket
    with (Path(folder) / "log").open("wb") as log:
        process = subprocess.Popen(
            [*_NAMESPACES, sys.executable, "-m", __name__, folder],
            stdin=subprocess.PIPE,  # its end is the cluster's: also where this process is killed
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **environment, **_ENVIRONMENT, "RAY_TMPDIR": folder},
        )
    try:
        try:
            cluster = RayCluster(process)
        except RuntimeError as error:
            raise RuntimeError(f"{error}: {(Path(folder) / 'log').read_text()}") from error
        yield cluster
    finally:
        process.kill()
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def alone_in_a_network(host: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """A network without Ray, of one machine of this name: what starts a command there, and its environment.

    Raises:
        RayMissingError: There can be none here.
    """
    _refuse_without_ray()
    folder = tempfile.mkdtemp(prefix="hpo-ray-")
    process = subprocess.Popen(
        [*_NAMESPACES, "--uts", sys.executable, "-c", _ALONE, host, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        first = psutil.Process(process.pid).children()[0].pid
        within = ["nsenter", f"--target={first}", "--net", "--mount", "--uts", "--pid"]
        yield within, {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder, **_PATIENT}
    finally:
        process.kill()
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)


#: Lets a host's name be this machine's, and its network be up, until its input ends.
_ALONE = f"""
import fcntl, socket, struct, subprocess, sys
host, folder = sys.argv[1:]
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, {_SET_FLAGS}, struct.pack("16sh14x", b"lo", {_UP}))
socket.sethostname(host)
with open(folder + "/hosts", "w") as hosts:
    hosts.write("127.0.0.1 localhost " + host)
subprocess.run(["mount", "--bind", folder + "/hosts", "/etc/hosts"], check=True)
print("ready", flush=True)
sys.stdin.read()
"""


def _refuse_without_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise RayMissingError("no Ray here: pip install 'hpo-service[ray]'")
    if sys.platform != "linux" or os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter"))):
        raise RayMissingError("a Ray cluster needs namespaces: Linux, root, and util-linux")


@pytest.fixture(scope="module")
def _ray_cluster() -> Iterator[RayCluster]:
    """A cluster of this test process only; it takes a sixteenth of a core while nothing is done with it."""
    try:
        with running_ray() as cluster:
            yield cluster
    except RayMissingError as error:
        pytest.skip(str(error))


@pytest.fixture
def ray_cluster(_ray_cluster: RayCluster) -> RayCluster:
    """The cluster of the module's tests, with all its machines."""
    for host in HOSTS:
        _ray_cluster.add(host)
    return _ray_cluster


def _add_node(cluster: Any, host: str, **settings: Any) -> str:
    """Start a node under a host name of its own; the namespace of that name."""
    _take_name(host)
    name = str(Path("/proc/self/ns/uts").readlink())
    cluster.add_node(
        num_cpus=_CORES,
        node_ip_address=f"127.0.0.{1 + HOSTS.index(host)}",
        object_store_memory=80 * 2**20,
        include_log_monitor=False,
        **settings,
    )
    _take_name("cluster")  # this process is not lost with a node
    return name


def _take_name(host: str) -> None:
    """Give this process, and what it starts, a host name of their own."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWUTS):
        raise OSError(ctypes.get_errno(), "unshare")
    socket.sethostname(host)


def _main(folder: str) -> None:
    from ray.cluster_utils import Cluster

    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
    cluster = Cluster()
    serving = {"include_dashboard": True, "dashboard_port": 8265, "ray_client_server_port": 10001}
    own = Path(folder) / "ray"  # Ray's default under RAY_TMPDIR, where a first node notes its address
    own.mkdir()
    settings = {"temp_dir": str(own), "no_monitor": True, "_system_config": _SYSTEM, **serving}
    for line in sys.stdin:
        host = line.strip()
        print(_add_node(cluster, host, **(settings if cluster.head_node is None else {})), flush=True)
    os._exit(0)  # the kernel ends what is left


if __name__ == "__main__":
    _main(sys.argv[1])
