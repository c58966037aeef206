"""Machines and containers that look alike are never taken for each other."""

import json
import subprocess
import sys

import pytest

from hpo.storage.ledger import Owner
from hpo.storage.machine import is_alive
from tests.support.commands import PATIENCE

_WHO = """
import json, sys
from hpo.storage.ledger import Owner
from hpo.storage.machine import is_alive
seen = json.loads(sys.argv[1])
me = Owner.current()
print(json.dumps([me.host, me.boot_id, me.pid, me.start_time]))
print(json.dumps([is_alive(*seen), is_alive(me.host, me.boot_id, me.pid, me.start_time)]))
"""


@pytest.mark.parametrize(
    ("namespaces", "sees_itself"),
    [(["--pid", "--fork", "--mount-proc"], True), (["--pid", "--fork"], None), (["--uts"], True)],
    ids=["a container", "a container that shows its host's processes", "a machine of another name"],
)
def test_a_process_is_looked_up_only_where_it_can_be_seen(namespaces: list[str], sees_itself: bool | None) -> None:
    rename = ["sh", "-c", 'hostname other && exec "$@"', "sh"] if "--uts" in namespaces else []
    me = Owner.current()
    said = json.dumps([me.host, me.boot_id, me.pid, me.start_time])
    command = ["unshare", *namespaces, *rename, sys.executable, "-c", _WHO, said]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    if done.returncode and "Operation not permitted" in done.stderr:
        pytest.skip("this user may make no namespaces")
    assert done.returncode == 0, done.stderr
    there, alive = map(json.loads, done.stdout.splitlines())
    assert alive == [None, sees_itself]
    assert there[1] == me.boot_id
    assert is_alive(*there) is None, "its process has ended, which is not known here"
    assert is_alive(me.host, me.boot_id, me.pid, me.start_time) is True
