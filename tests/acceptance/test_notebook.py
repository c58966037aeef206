"""The notebook in the documentation: what it says is what its script says, and every cell runs."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_notebook", DOCS / "make_notebook.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kept() -> Any:
    return nbformat.read(DOCS / "notebook.ipynb", as_version=4)


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", ())]


def test_the_notebook_is_that_of_its_script(maker: ModuleType, kept: Any) -> None:
    nbformat.validate(kept)
    assert [cell.source for cell in kept.cells] == [cell.source for cell in maker.fresh().cells]
    assert all(cell.execution_count for cell in kept.cells if cell.cell_type == "code")


def test_its_outputs_are_shown_without_the_network(kept: Any) -> None:
    kinds = {kind for output in outputs(kept) for kind in output.get("data", {})}
    assert kinds == {"text/plain", "image/png"}
    assert not [output for output in outputs(kept) if output.get("name") == "stderr"]
    assert (DOCS / "notebook.ipynb").stat().st_size < 200_000


def test_every_cell_runs(maker: ModuleType, tmp_path: Path) -> None:
    notebook = maker.fresh()
    with warnings.catch_warnings():
        # What the libraries that start the kernel warn of is not about our cells.
        warnings.simplefilter("ignore")
        maker.execute(notebook, tmp_path)
    assert (tmp_path / "notebook.yaml").is_file()
    texts = [output.data["text/plain"] for output in outputs(notebook) if output.output_type == "execute_result"]
    assert texts[0].startswith("<RunResult notebook: 10 of 10 trials")
    pictures = [output for output in outputs(notebook) if "image/png" in output.get("data", {})]
    assert len(pictures) == 3
