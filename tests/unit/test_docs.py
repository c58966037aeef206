"""What the documents list is what there is, their code runs, and the site is built without a warning."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset
from typer.main import get_command

import hpo
import trainer
from hpo.cli.app import app
from hpo.config.schema import StudyFile, TrainerSection
from hpo.config.schema_loader import LoaderSection
from hpo.config.schema_study import StudySection
from hpo.search.pruners import PRUNERS
from hpo.search.samplers import SAMPLERS
from hpo.search.schedulers.by_name import SCHEDULERS
from hpo.trial.callbacks import CALLBACKS
from trainer import (
    BatchOptions,
    Callback,
    CallbackRunner,
    FunctionCallback,
    Trainer,
    callbacks,
    register_global_callback,
)
from trainer.callbacks import Checkpoint, default_callbacks
from trainer.events import EVENTS
from trainer.foreign import FOREIGN
from trainer.state import SKIPPABLE

ROOT = Path(__file__).parents[2]
make_reference = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "make_reference.py")))
DOCUMENTS = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
TEXT = (ROOT / "docs" / "callbacks.md").read_text()
SEEDS = (ROOT / "docs" / "reference" / "seeds.md").read_text()
ROWS = dict(re.findall(r"^\| \d+ \| `(\w+)`[^|]*\| (?:`(\w+)`|—|always)", TEXT, re.MULTILINE))


def test_every_event_is_in_the_diagram_and_in_the_table_of_names() -> None:
    diagram = TEXT.partition("## When everything fires")[2].partition("## Order")[0]
    names = TEXT.partition("## Names in other systems")[2]
    for event in EVENTS:
        assert event in diagram, event
        assert f"`{event}`" in names, event


def test_names_in_other_systems_mean_the_event_that_a_refusal_names() -> None:
    table = re.findall(r"^\| (`on_.*|`setup`.*|`teardown`.*) \|$", TEXT, re.MULTILINE)
    meant: dict[str, set[str]] = {}
    for row in table:
        ours, *theirs = row.split(" | ")
        for name in _names(" ".join(theirs)):
            meant.setdefault(name, set()).update(_names(ours))
    assert len(meant.keys() & FOREIGN.keys()) > 30
    assert not {name: FOREIGN[name] for name in meant.keys() & FOREIGN.keys() if FOREIGN[name] not in meant[name]}
    assert not {name for name in meant if name.startswith("on_")} - FOREIGN.keys() - EVENTS.keys()


def _names(cells: str) -> list[str]:
    """The names in a row, ``on_{a,b}_c`` written out."""
    found = []
    for name in re.findall(r"`([\w{},]+)`", cells):
        before, _, rest = name.partition("{")
        inner, _, after = rest.partition("}")
        found += [f"{before}{part}{after}" for part in inner.split(",")]
    return found


def test_every_shipped_callback_is_listed_with_its_priority_and_name() -> None:
    shipped = {name: getattr(callbacks, name) for name in callbacks.__all__ if name[0].isupper()}
    missing = sorted(shipped.keys() - ROWS.keys())
    assert not missing, f"docs/callbacks.md has no line for {missing}: add one to its table"
    assert ROWS.keys() == shipped.keys() | {"PrunerCallback"}
    offered = {row.kind.__name__: name for name, row in CALLBACKS.items()}
    for name, kind in shipped.items():
        assert ROWS[name] == offered.get(name, ""), name
        assert re.search(rf"^\| {kind.priority} \| `{name}`", TEXT, re.MULTILINE), name
        ticked = re.search(rf"`{name}` \| `\w+` ✓", TEXT) is not None
        assert ticked == (name in offered and CALLBACKS[offered[name]].default), name


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
        "CallbackRunner": CallbackRunner,
        "FunctionCallback": FunctionCallback,
        "NaNDetection": callbacks.NaNDetection,
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
        for document in DOCUMENTS
        for path in re.findall(r"\b(?:tests|benchmarks|hpo|trainer|docs)/[\w/-]+\.\w+", document.read_text())
    }
    assert named
    assert not {(document, path) for document, path in named if not (ROOT / path).is_file()}


def test_each_feature_of_the_five_systems_names_tests_that_are_there_or_why_it_has_no_place() -> None:
    lines = re.findall(r"^\| (.+?) \|(.*?)\|(.*?)\|$", SEEDS, re.MULTILINE)
    rows = [tuple(map(str.strip, line)) for line in lines if line[0] not in ("feature", "---")]
    assert len(rows) == 116
    unsaid = [feature for feature, here, held in rows if not here or not held]
    assert not unsaid, f"docs/reference/seeds.md says nothing of {unsaid}"
    for feature, here, held in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::([\w:]+)`", held)
        assert named or (held == "—" and here.startswith("No place here: ")), feature
        missing = [f"{path}::{name}" for path, name in named if not _is_test(ROOT / path, name.split("::"))]
        assert not missing, f"{feature}: {missing}"


def _is_test(path: Path, names: list[str]) -> bool:
    """Whether a file has a test function or class of this name; a class before a function in it."""
    body: list[ast.stmt] = ast.parse(path.read_text()).body if path.is_file() else []
    for name in names:
        found = [each for each in body if isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == name]
        if not found:
            return False
        body = found[0].body
    return names[-1].lower().startswith("test")


def test_the_reference_is_that_of_the_code() -> None:
    stale = [page.name for page, text in make_reference.pages().items() if page.read_text() != text]
    assert not stale, (
        f"docs/reference/: {', '.join(stale)}: out of date; run `make reference` and commit the pages"
    )


def test_the_reference_has_every_command_key_and_name() -> None:
    commands, file, samplers, arguments, python = (
        (ROOT / "docs" / "reference" / f"{name}.md").read_text()
        for name in ("commands", "study-file", "samplers", "callbacks", "python")
    )
    group: Any = get_command(app)
    for name, command in group.commands.items():
        assert f"\n## hpo {name}\n" in commands, name
        shown = [each for each in command.params if not getattr(each, "hidden", False)]  # arguments are never
        assert all(option in commands for each in shown for option in each.opts if option[0] == "-"), name
    assert all(
        re.search(rf"^## {section}( \(required( without objective)?\))?$", file, re.MULTILINE)
        for section in StudyFile.model_fields
    )
    for section in (StudySection, LoaderSection, TrainerSection):
        assert all(re.search(rf"\| `{key}[.`]", file) for key in section.model_fields), section
    assert all(f"| `{name}` |" in samplers for name in (*SAMPLERS, *PRUNERS))
    assert all(f"\n### {name}\n" in samplers for name in SCHEDULERS)
    assert all(f"\n### {name}\n" in arguments for name in CALLBACKS)
    for module in (hpo, trainer):
        assert all(f"\n### {module.__name__}.{name}\n" in python for name in module.__all__), module


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings as a code host makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere_on_a_code_host(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(document.read_text())):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (document.parent / path).resolve() if path else document
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors: dead links and anchors, pages that are in no menu."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert pages
    for page in pages:
        text = page.read_text()
        assert not re.findall(r'<(?:script|img|iframe)[^>]* src="(?:https?:)?//[^"]*"', text), page
        assert not re.findall(
            r'<link[^>]* rel="(?:stylesheet|preload|preconnect)"[^>]* href="(?:https?:)?//', text
        ), page


def test_the_readme_counts_the_default_callbacks() -> None:
    on = sum(row.default for row in CALLBACKS.values())
    assert on == 8
    assert "Eight of them watch each trial by default" in (ROOT / "README.md").read_text()
