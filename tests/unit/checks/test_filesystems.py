"""SQLite on network file systems, found in tables of mounts as the kernel writes them."""

from pathlib import Path

import pytest

from hpo.checks.filesystems import file_system_type, network_file_system

MOUNTS = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /home rw,relatime shared:12 - nfs4 server:/home rw,vers=4.2
31 30 0:27 / /home/ann/My\040Disk rw - fuse.sshfs ann@host: rw
32 30 0:28 / /home/scratch rw,noatime shared:3 master:1 - xfs /dev/sdb rw
33 22 0:29 / /mnt rw - ext4 /dev/sdc rw
34 33 0:30 / /mnt rw - cifs //server/share rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/study.db", "ext4"),
        ("/home/ann/study.db", "nfs4"),
        ("/homes/study.db", "ext4"),
        ("/home/ann/My Disk/runs/study.db", "fuse.sshfs"),
        ("/home/scratch/study.db", "xfs"),
        ("/mnt/study.db", "cifs"),
    ],
)
def test_the_innermost_and_last_mount_counts(path: str, kind: str) -> None:
    assert file_system_type(Path(path), MOUNTS) == kind


def test_only_a_file_on_a_network_counts() -> None:
    assert network_file_system("sqlite:////home/ann/study.db", MOUNTS) == "nfs4"
    assert network_file_system("sqlite:////home/scratch/study.db", MOUNTS) is None
    assert network_file_system("postgresql://user@host/home", MOUNTS) is None
    assert network_file_system("sqlite:////home/ann/study.db", "") is None
