"""Which modules make a study's code, and what counts as a change of them."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpo.config.code import code_identity
from hpo.config.spec import load_spec
from hpo.config.study_modules import forget_modules, open_folder
from tests.support.commands import STUDY, make_study


def files(folder: Path, *overrides: str) -> dict[str, str]:
    """The study's modules by hash, read anew."""
    forget_modules(folder)
    return dict(code_identity(load_spec(folder / "study.yaml", overrides)).files)


def write(folder: Path, modules: Mapping[str, str] | None = None, **named: str) -> None:
    """Write modules: ``pack.one`` is ``pack/one.py``."""
    for name, text in {**(modules or {}), **named}.items():
        file = folder / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))


def loads(folder: Path, names: Sequence[str]) -> set[str]:
    """The files that importing modules of a study's folder loads, as Python itself imports them."""
    root = open_folder(folder)
    forget_modules(folder)
    for name in names:
        importlib.import_module(f"{root}.{name}")
    modules = (module for name, module in sys.modules.items() if name.startswith(f"{root}."))
    return {str(Path(module.__file__).relative_to(folder.resolve())) for module in modules if module.__file__}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_study(tmp_path)
    return tmp_path


def test_the_targets_modules_count_and_no_others(folder: Path) -> None:
    write(folder, unrelated="x = 1")
    (folder / "notes.ipynb").write_text("{}")
    assert list(files(folder)) == ["parts.py"]


def test_every_import_is_followed(folder: Path) -> None:
    other = "from layers import attention\nfrom .relative import x\nimport torch\n\ndef net(): import late\n"
    layers = {
        "layers.__init__": "from .norm import *\n",
        "layers.attention": "from ..helpers import scale\n",
        "layers.norm": "",
        "layers.unused": "",
    }
    relative = "from . import further\nx = 1\n"
    write(folder, layers, other=other, relative=relative, further="", late="", helpers="scale = 1\n")
    found = files(folder, "model._target_=other.net", "search_space={loss.nan: {type: int, low: 0, high: 1}}")
    inside = ["layers/__init__.py", "layers/attention.py", "layers/norm.py"]
    assert list(found) == ["further.py", "helpers.py", "late.py", *inside, "other.py", "parts.py", "relative.py"]


def test_targets_that_are_searched_and_nested_ones_count(folder: Path) -> None:
    write(folder, one="def net(): ...", two="def net(): ...", act="def act(): ...")
    space = "search_space={model._target_: {type: categorical, choices: [one.net, two.net]}}"
    nested = "metrics={m: {_target_: parts.mae, inner: [{_target_: act.act}]}}"
    assert list(files(folder, space, nested)) == ["act.py", "one.py", "parts.py", "two.py"]


def test_the_same_code_has_the_same_hash_in_another_folder(folder: Path, tmp_path: Path) -> None:
    """As on another machine, where the path is another."""
    other = tmp_path / "elsewhere"
    make_study(other)
    assert files(other) == files(folder)
    write(other, parts="x = 1\n")
    assert files(other) != files(folder)


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("x = 1\n", "# a comment\n\nx   =  1\n", True),
        ("f('a')\n", 'f("a")\n', True),
        ("x = 1\n", "x = 1\nif __name__ == '__main__':\n    import run_me\n    run_me.now(7)\n", True),
        ("x = 1\n", "x = 2\n", False),
        ("x = 1\n", "x = 1.0\n", False),
        ("x = 1\n", "x = True\n", False),
        ("def f(): return\n", "def f(): return None\n", False),
        ("x = a - b\n", "x = b - a\n", False),
        ("x = 1\n", "x = = 1\n", False),
        ("x = = 1\n", "x = = 1 # a comment\n", False),
    ],
)
def test_what_counts_as_a_change(folder: Path, before: str, after: str, same: bool) -> None:
    write(folder, extra=before)
    first = files(folder, "metrics={m: {_target_: extra.m}}")
    write(folder, extra=after)
    assert (files(folder, "metrics={m: {_target_: extra.m}}") == first) is same
    assert list(first) == ["extra.py", "parts.py"]


def test_a_thousand_terms_are_hashed(folder: Path) -> None:
    text = "x = " + " + ".join("1" for _ in range(3000))
    write(folder, extra=text)
    first = files(folder, "metrics={m: {_target_: extra.m}}")
    assert "extra.py" in first
    write(folder, extra=f"{text} + 2")
    assert files(folder, "metrics={m: {_target_: extra.m}}") != first


def test_a_package_in_development_counts_and_an_installed_one_does_not(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path_factory.mktemp("work")
    package = {"__init__": "", "net": "from ownproject import sub", "sub": "", "unused": ""}
    write(work / "src", {f"ownproject.{name}": text for name, text in package.items()})
    write(work / "lib" / "site-packages", thirdparty="")
    monkeypatch.syspath_prepend(str(work / "src"))
    monkeypatch.syspath_prepend(str(work / "lib" / "site-packages"))
    write(folder, own="import thirdparty, torch, hpo, json\nfrom ownproject.net import x")
    found = list(files(folder, "metrics={m: {_target_: own.m}}"))
    assert found == ["own.py", "ownproject", "ownproject.net", "ownproject.sub", "parts.py"]
    assert "ownproject" not in sys.modules


def test_it_takes_neither_torch_nor_an_import_of_the_study(folder: Path) -> None:
    write(folder, parts="raise RuntimeError('imported')\n")
    script = (
        "import sys; from pathlib import Path; from hpo.config.spec import load_spec;"
        "from hpo.config.code import code_identity;"
        "print(*code_identity(load_spec(Path('study.yaml'))).files, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["parts.py", "False"]


def test_what_has_been_hashed_is_what_is_imported(folder: Path) -> None:
    """Also where the file is written between the two, in the same second and with the same length."""
    write(folder, extra="x = 1\n")
    assert "extra.py" in files(folder, "metrics={m: {_target_: extra.m}}")
    write(folder, extra="x = 2\n")
    root = open_folder(folder)
    assert importlib.import_module(f"{root}.extra").x == 1
    forget_modules(folder)
    assert importlib.import_module(f"{root}.extra").x == 2


def test_no_bytecode_is_believed(folder: Path) -> None:
    import os
    import py_compile

    write(folder, extra="x = 1\n")
    stat = (folder / "extra.py").stat()
    py_compile.compile(str(folder / "extra.py"), doraise=True)
    write(folder, extra="x = 2\n")
    os.utime(folder / "extra.py", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert importlib.import_module(f"{open_folder(folder)}.extra").x == 2


NAMES = ("alpha", "beta", "gamma", "pack.__init__", "pack.one", "pack.two", "pack.deep.__init__", "pack.deep.leaf")


@st.composite
def modules(draw: st.DrawFn) -> dict[str, str]:
    """Modules that import each other, in every form, without a circle: each only those after it."""
    texts = {}
    for at, name in enumerate(NAMES):
        later = [each for each in NAMES[at + 1 :] if not each.startswith("pack") or not name.startswith("pack")]
        wanted = draw(st.lists(st.sampled_from(later), max_size=2, unique=True)) if later else []
        if name == "pack.__init__":
            wanted += draw(st.lists(st.sampled_from(["pack.one", "pack.deep.leaf"]), max_size=2, unique=True))
        if name == "pack.one":
            wanted += draw(st.lists(st.sampled_from(["pack.two", "pack.deep.leaf"]), max_size=2, unique=True))
        texts[name] = "\n".join(draw(st.sampled_from(list(_imports(name, each)))) for each in wanted) + "\n"
    return texts


def _imports(importer: str, target: str) -> Iterator[str]:
    """Ways in which one module may import another."""
    dotted = target.removesuffix(".__init__")
    above, _, last = dotted.rpartition(".")
    yield f"import {dotted}"
    yield f"import {dotted} as it"
    yield f"from {dotted} import __name__ as it"
    yield f"from {dotted} import *"
    yield f"try:\n    import {dotted}\nexcept ImportError:\n    pass"
    if above:
        yield f"from {above} import {last}"
        yield f"import {above}\nfrom {above} import {last} as it"
    dots = "." * (importer.count(".") + 1)
    yield f"from {dots}{above} import {last}"
    yield f"from {dots}{dotted} import __name__ as it"


def test_what_a_star_loads_is_found(folder: Path) -> None:
    write(folder, {"pack.__init__": "__all__ = ['one']", "pack.one": "", "pack.two": ""}, own="from pack import *")
    assert "pack/one.py" in loads(folder, ["own"]) <= set(files(folder, "metrics={m: {_target_: own.f}}"))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=modules(), targets=st.lists(st.sampled_from(NAMES[:3] + NAMES[4:6]), min_size=1, max_size=2))
def test_all_that_python_loads_is_found(
    tmp_path_factory: pytest.TempPathFactory, texts: dict[str, str], targets: list[str]
) -> None:
    folder = tmp_path_factory.mktemp("study")
    make_study(folder, STUDY)
    write(folder, texts)
    metrics = ", ".join(f"m{at}: {{_target_: {target}.f}}" for at, target in enumerate(targets))
    found = set(files(folder, f"metrics={{{metrics}}}"))
    loaded = loads(folder, targets)
    assert loaded <= found
    # `from pack import *` may load any of its modules, as its `__all__` says; of the others none is found in vain.
    assert {name for name in found - loaded if not name.startswith("pack/")} == {"parts.py"}
