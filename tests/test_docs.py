"""What the documents list is what there is, and their code runs."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from hpo.build import CALLBACKS, DEFAULTS
from trainer import BatchOptions, Callback, Trainer, callbacks, register_global_callback
from trainer.callbacks import Checkpoint, default_callbacks
from trainer.events import EVENTS
from trainer.state import SKIPPABLE

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "callbacks.md").read_text()
ROWS = dict(re.findall(r"^\| \d+ \| `(\w+)`[^|]*\| (?:`(\w+)`|—|always)", TEXT, re.MULTILINE))


def test_every_event_is_in_the_diagram_and_in_the_table_of_names() -> None:
    diagram = TEXT.partition("## When everything fires")[2].partition("## Order")[0]
    names = TEXT.partition("## Names in other systems")[2]
    for event in EVENTS:
        assert event in diagram, event
        assert f"`{event}`" in names, event


def test_every_shipped_callback_is_listed_with_its_priority_and_name() -> None:
    shipped = {name: getattr(callbacks, name) for name in callbacks.__all__ if name[0].isupper()}
    assert ROWS.keys() == shipped.keys() | {"PrunerCallback"}
    offered = {kind.__name__: name for name, kind in CALLBACKS.items()}
    for name, kind in shipped.items():
        assert ROWS[name] == offered.get(name, ""), name
        assert re.search(rf"^\| {kind.priority} \| `{name}`", TEXT, re.MULTILINE), name
        ticked = re.search(rf"`{name}` \| `\w+` ✓", TEXT) is not None
        assert ticked == (offered.get(name) in DEFAULTS), name


def test_all_that_can_be_skipped_is_listed() -> None:
    for action in SKIPPABLE:
        assert f'"{action}"' in TEXT


def blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def test_the_examples_run_as_they_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Linear(4, 1)
    data = TensorDataset(torch.randn(12, 4), torch.randn(12, 1))
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.nn.functional.mse_loss,
        max_epochs=1,
        batching=BatchOptions(batch_size=4),
    )
    names = {
        "BatchOptions": BatchOptions,
        "Callback": Callback,
        "Checkpoint": Checkpoint,
        "TensorDataset": TensorDataset,
        "Trainer": Trainer,
        "default_callbacks": default_callbacks,
        "function": lambda trainer: None,
        "register_global_callback": register_global_callback,
        "torch": torch,
        "trainer": trainer,
    }
    for block in blocks():
        exec(block, names)
    names["test_it_counts"](tmp_path)  # type: ignore[operator]
    trainer.callbacks.add(names["ScaleLoss"]())  # type: ignore[operator]
    assert trainer.fit(data, data).metrics["best_val_loss"] > 0
    assert "LogDispatch" in capsys.readouterr().out


def test_the_tests_and_files_that_documents_name_are_there() -> None:
    named = {
        (document.name, path)
        for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
        for path in re.findall(r"\b(?:tests|benchmarks|hpo|trainer|docs)/[\w/]+\.\w+", document.read_text())
    }
    assert named
    assert not {(document, path) for document, path in named if not (ROOT / path).is_file()}
