"""Every command, file, option, key and line of Python in the documents does what it says."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from hpo.cli.app import app
from hpo.config.schema import TrainerSection
from hpo.config.schema_loader import LoaderSection
from hpo.config.schema_run import RunSection
from hpo.config.schema_study import StudySection
from tests.support.commands import hpo
from tests.support.databases import server_of
from tests.support.docs_session import ROOT, Session, blocks_of, shrink

DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(ROOT)): path for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]}
#: Their Python is run by tests/unit/test_docs.py.
ELSEWHERE = frozenset({"docs/callbacks.md"})
#: A key of a study file in the text, perhaps with its value; not `trainer.fit`, and not `study.yaml`.
KEY = re.compile(r"(study|run|loader|trainer(?=\.\w+=))\.(?!yaml|db|schema)([a-z_]+)(?:[=:.].*)?")
BEGINS = re.compile(r"^<!-- test: begins with (.+) -->$", re.MULTILINE)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small study that has been run."""
    folder = tmp_path_factory.mktemp("finished") / "spirals"
    hpo("init", folder)
    shrink(folder / "study.yaml")
    hpo("run", folder / "study.yaml")
    return folder


@pytest.fixture
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Session:
    kinds = {"postgresql": "postgresql", "mysql": "mariadb"}
    return Session(tmp_path, lambda kind: server_of(kinds[kind], request).new_database())


def begin(text: str, folder: Path, request: pytest.FixtureRequest) -> None:
    """Put into the folder what the page takes for granted."""
    match = BEGINS.search(text)
    what = match[1] if match else "an empty folder"
    if what == "a finished study":
        shutil.copytree(request.getfixturevalue("finished"), folder, dirs_exist_ok=True)
    elif what == "a new study":
        hpo("init", folder)
        shrink(folder / "study.yaml")
    elif what.startswith("studies/"):
        shutil.copytree(ROOT / what, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs"))
    else:
        assert what == "an empty folder"


def python_names(page: str) -> dict[str, Any]:
    """What the page's Python takes for granted."""
    data = TensorDataset(torch.randn(12, 4), torch.randn(12, 1))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = torch.nn.functional.mse_loss
    return {
        "README.md": {"model": model, "optimizer": optimizer, "loss": loss, "train_data": data, "val_data": data},
        "docs/pruning.md": {"train": lambda rate: (abs(rate - 0.01) + 1 / epoch for epoch in range(1, 51))},
    }.get(page, {})


# Of Lightning: with torch 2.13, and of small data.
@pytest.mark.filterwarnings("ignore:The `srun` command is available")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.parametrize("page", [page for page, path in PAGES.items() if blocks_of(path.read_text())])
def test_a_page_can_be_followed(page: str, session: Session, request: pytest.FixtureRequest) -> None:
    text = PAGES[page].read_text()
    begin(text, session.folder, request)
    session.names.update(python_names(page))
    for block in blocks_of(text):
        if not (block.kind == "python" and page in ELSEWHERE):
            session.do(block)


def test_every_section_of_the_report_is_explained(finished: Path, tmp_path: Path) -> None:
    hpo("report", finished / "study.yaml", "-o", tmp_path / "report.html")
    titles = re.findall(r'<h2 id="[a-z]+-title">(.*?)</h2>', (tmp_path / "report.html").read_text())
    explained = PAGES["docs/how-to/report.md"].read_text()
    assert len(titles) > 5
    assert not [title for title in titles if f"| {title}" not in explained and f", {title} |" not in explained]


@pytest.mark.parametrize("page", PAGES)
def test_commands_options_and_keys_in_the_text_are_there(page: str) -> None:
    from typer.main import get_command

    group: Any = get_command(app)
    options = {
        name: {option for each in command.params for option in each.opts} | {"--help"}
        for name, command in group.commands.items()
    }
    sections = {"study": StudySection, "run": RunSection, "trainer": TrainerSection, "loader": LoaderSection}
    for code in re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", PAGES[page].read_text(), flags=re.M | re.S)
    ):
        if match := re.match(r"hpo ([a-z]+)(.*)", code):
            assert match[1] in options, code
            for option in re.findall(r"(?<!\S)\[?(--[\w-]+)", match[2]):
                assert option in options[match[1]], code
        if match := KEY.fullmatch(code):
            assert match[2] in sections[match[1]].model_fields, code
