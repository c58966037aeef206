"""Where the console and the progress bar write: a stream that takes nothing costs no run."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.trainer.support import At, make_trainer, regression
from trainer.callbacks import ConsoleLogging, ProgressBar


class NoStream:
    """As code may have put in place of a standard stream."""


def closed() -> Any:
    stream = io.StringIO()
    stream.close()
    return stream


def cut_pipe() -> Any:
    reader, writer = os.pipe()
    os.close(reader)
    return unbuffered(writer)


def full_disk() -> Any:
    return unbuffered("/dev/full")


def unbuffered(file: str | int) -> Any:
    """With nothing left to be written as it is closed."""
    return io.TextIOWrapper(io.FileIO(file, "w"), encoding="utf-8", write_through=True)


@pytest.mark.parametrize("stream", [closed, cut_pipe, full_disk, NoStream, lambda: None])
@pytest.mark.parametrize(("build", "name"), [(lambda: ConsoleLogging(1), "stdout"), (ProgressBar, "stderr")])
def test_a_stream_that_takes_nothing_is_said_once_and_training_continues(
    build: Callable[[], Any],
    name: str,
    stream: Callable[[], Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = stream()
    with caplog.at_level(logging.WARNING, logger="trainer"), monkeypatch.context() as patch:
        patch.setattr(sys, name, broken)
        state = make_trainer([build()], max_epochs=3).fit(regression(), regression())
    assert (state.epoch, state.stop_reason) == (3, None)
    said = [record.message for record in caplog.records if record.name.startswith("trainer.")]
    assert [message.split(" can't")[0] for message in said] == ([] if broken is None else [name])
    if isinstance(broken, io.TextIOBase):
        broken.close()


def test_what_an_encoding_lacks_is_escaped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written = io.BytesIO()
    odd = At("on_epoch_end", lambda trainer: trainer.state.metrics.update({"µ": 2.0}))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
        make_trainer([ConsoleLogging(1), odd], max_epochs=1).fit(regression(), regression())
        assert rb"\xb5 2" in written.getvalue()
    assert caplog.records == []
