"""The page on Ray: each of its commands, on a cluster of two machines that the page's own commands start."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import wait_until
from tests.support.page_commands import Page
from tests.support.ray_cluster import RayMissingError, alone_in_a_network
from tests.support.servers import PostgresServer

#: Makes a second machine of this one: its name and Ray's files are its own.
ANOTHER = 'hostname other && mount -t tmpfs none "$RAY_TMPDIR" && exec "$@"'


@pytest.fixture
def page(postgres_server: PostgresServer, tmp_path: Path) -> Iterator[Page]:
    """The page, whose commands are done where its machines are: no other test needs a Ray there."""
    with contextlib.ExitStack() as stack:
        try:
            within, environment = stack.enter_context(alone_in_a_network("head"))
        except RayMissingError as error:
            pytest.skip(str(error))
        yield Page("ray.md", tmp_path, postgres_server.new_database(ready=True), environment, within)


def test_a_ray_of_its_own_trains_a_study_in_a_file_of_this_machine(page: Page) -> None:
    assert "4 of 4 trials finished" in page.do("hpo run .*ray:local")
    assert not (page.home / ".ray").exists(), "clusters that are started here later ask for no token"


def test_the_commands_of_the_page_start_a_cluster_and_train_on_it(page: Page) -> None:
    logs = page.shared / "spirals" / "agents"
    assert "postgres" in page.take("pip install")
    page.take("hpo run .*ray:local")
    page.export()  # jobs have the environment of their node
    page.do("GRPC_ENABLE_FORK_SUPPORT=0 ray start --head")
    page.do("ray start --address", before=["unshare", "--uts", "--mount", "sh", "-c", ANOTHER, "sh"])

    assert "4 of 4 trials finished" in page.do("HPO_STORAGE=.* hpo run")
    assert len(list(logs.glob("agent-*.log"))) == 2

    page.allow(6)
    said = page.do("ray job submit")
    assert "/_ray_pkg_" in said, "the study was sent"
    assert "6 of 6 trials finished" in said
    assert len(list(logs.glob("agent-*.log"))) > 2

    page.allow(8)
    name = page.do("hpo submit").strip()
    log = logs / f"driver-{name.rpartition('-')[2]}.log"
    wait_until(lambda: log.exists() and "8 of 8 trials finished" in log.read_text())
    assert "8 of 8" in page.do("hpo status")
    page.do("hpo stop")

    page.do("hpo run .*--dry-run > agents.py")
    jobs = [word for word in page.do("python agents.py").split() if word.startswith("raysubmit_")]
    assert len(jobs) == 2, "one for each machine"
    for job in jobs:  # their agents have joined, found nothing left to do, and left in order
        wait_until(lambda job=job: "succeeded" in page.call(f"ray job status {job}"))

    assert not page.commands
