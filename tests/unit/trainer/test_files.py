"""Files that are put in their place whole."""

from __future__ import annotations

import threading
from pathlib import Path

from trainer.files import replacing


def test_two_threads_that_write_one_file_at_a_time_write_each_a_whole_one(tmp_path: Path) -> None:
    """As two runs do of one study that is made in Python."""
    path = tmp_path / "study.yaml"

    def write() -> None:
        with replacing(path) as file:
            file.write("the other's")

    other = threading.Thread(target=write)
    with replacing(path) as file:
        file.write("the one's ")
        other.start()
        other.join()
        assert path.read_text() == "the other's"
        file.write("whole text")
    assert path.read_text() == "the one's whole text"
    assert list(tmp_path.iterdir()) == [path]
