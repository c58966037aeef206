"""A SQLite study where this user may only read: on a read-only disk, as of an archive, or in another's folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support.owners import NAME, make_study, opened

pytestmark = pytest.mark.full

#: Mounts the folder anew, read-only, for the command behind it alone.
MOUNTED = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
OPENED = (
    "import sys; from hpo.storage.opening import open_storage\n"
    "storage = open_storage(sys.argv[1], create=False); (study,) = storage.get_all_studies()\n"
)
READ = f"{OPENED}print(study.study_name, study.user_attrs.get('written'))"
#: Waits for a line before it opens the file.
LATE = f"import sys, hpo.storage.study_storage; print('imported', flush=True); sys.stdin.readline()\n{READ}"
WRITE = f"{OPENED}storage.set_study_user_attr(study._study_id, 'written', 2)"


#: Reads once more for each line that it is given.
READ_ON = (
    f"{OPENED}written = lambda: storage.get_study_user_attrs(study._study_id).get('written')\n"
    "print(written(), flush=True)\nfor _ in sys.stdin: print(written(), flush=True)"
)


def on_a_read_only_disk(code: str, file: Path) -> subprocess.CompletedProcess[str]:
    return alone(file, sys.executable, "-c", code, f"sqlite:///{file}")


def alone(file: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command that sees the file's folder as a read-only disk."""
    return subprocess.run(as_alone(file, *command), capture_output=True, text=True, check=False)


def as_alone(file: Path, *command: str) -> list[str]:
    """A command line that sees the file's folder as a read-only disk."""
    space = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNTED, str(file.parent)]
    return [*space, *command]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A study in a folder with an odd name; no process has it open."""
    file = tmp_path / "100% odd #1" / "study.db"
    file.parent.mkdir()
    make_study(f"sqlite:///{file}", 1)
    if not shutil.which("unshare") or alone(file, "true").returncode:
        pytest.skip("this machine lets no user mount a file system")
    return file


def test_it_is_read_and_nothing_is_laid_beside_it(file: Path) -> None:
    before = file.read_bytes()
    found = on_a_read_only_disk(READ, file)
    assert (found.stdout, found.stderr) == (f"{NAME} None\n", "")
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    assert file.read_bytes() == before


def test_what_another_process_has_written_into_the_log_is_read(file: Path) -> None:
    with opened(f"sqlite:///{file}") as storage:
        storage.set_study_user_attr(1, "written", 1)
        assert file.with_name("study.db-wal").stat().st_size
        found = on_a_read_only_disk(READ, file)
    assert (found.stdout, found.stderr) == (f"{NAME} 1\n", "")


@pytest.mark.parametrize("stays", [True, False])
def test_what_another_process_writes_later_is_read(file: Path, *, stays: bool) -> None:
    command = as_alone(file, sys.executable, "-c", READ_ON, f"sqlite:///{file}")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert reader.stdout.readline() == "None\n"
        with opened(f"sqlite:///{file}") as storage:
            storage.set_study_user_attr(1, "written", 1)
            if not stays:
                storage.close()
                assert not file.with_name("study.db-wal").exists()
            reader.stdin.write("\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == "1\n"
        reader.stdin.close()
    assert reader.returncode == 0


def test_a_log_that_another_process_is_about_to_give_an_index_is_read(file: Path) -> None:
    with opened(f"sqlite:///{file}") as storage:
        storage.set_study_user_attr(1, "written", 1)
        index = file.with_name("study.db-shm")
        index.rename(aside := file.with_name("aside"))
        back = threading.Timer(0.5, aside.rename, [index])
        command = as_alone(file, sys.executable, "-c", LATE, f"sqlite:///{file}")
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdin is not None
            assert reader.stdout is not None
            assert reader.stdout.readline() == "imported\n"
            back.start()
            found, _ = reader.communicate("\n")
        back.join()
    assert found == f"{NAME} 1\n"


def test_a_log_without_an_index_is_refused_with_what_helps(file: Path) -> None:
    copy = file.with_name("copy") / file.name
    copy.parent.mkdir()
    with opened(f"sqlite:///{file}") as storage:
        storage.set_study_user_attr(1, "written", 1)
        for each in (file, file.with_name("study.db-wal")):
            shutil.copy(each, copy.parent)
    found = on_a_read_only_disk(READ, copy)
    assert (
        "the latest of it lies in study.db-wal, which can't be read where nothing may be written" in found.stderr
    )
    assert "fix: copy both files to a folder that you may write to" in found.stderr


def test_a_write_is_refused_with_what_to_do(file: Path) -> None:
    found = on_a_read_only_disk(WRITE, file)
    assert found.returncode
    assert "the file can't be written to\n  fix: see its permissions and its folder's" in found.stderr


def test_tables_of_an_earlier_version_are_refused_with_what_helps(file: Path) -> None:
    with opened(f"sqlite:///{file}") as storage, storage.engine.begin() as conn:
        conn.exec_driver_sql("ALTER TABLE hpo_agents DROP COLUMN lost_after")
    found = on_a_read_only_disk(READ, file)
    assert "its tables are of an earlier version of hpo, and can't be changed here" in found.stderr
    assert "fix: run `hpo status` once as a user who may change them" in found.stderr
    with opened(f"sqlite:///{file}"):
        pass
    assert on_a_read_only_disk(READ, file).stdout == f"{NAME} None\n"
