"""A page of the documentation, done as a reader would: its commands, files and Python, in order, in one folder."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import sys
import tomllib
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import torch
import yaml

import hpo as package
from hpo.checks.checks import check_imports
from hpo.cli.app import app
from hpo.config.spec import load_spec
from hpo.config.yaml_source import parse_value
from tests.support.commands import PATIENCE, Result, hpo, start_hpo
from tests.support.forked_program import ForkedProgram

ROOT: Final = Path(__file__).parents[2]
_BLOCK: Final = re.compile(
    r'^(?:<!-- test: (?P<how>[^>]+) -->\n)?```(?P<kind>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
_MADE: Final = re.compile(r"^<!-- made by `make reference`: .*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
_URL: Final = re.compile(r"(?P<kind>postgresql|mysql)(\+\w+)?://user:password@host/db")
#: Programs that a page may name and a test does not run.
_OTHERS: Final = frozenset({".", "cd", "docker", "git", "kubectl", "ray", "sbatch", "ssh", "tensorboard"})
#: What a section of a study file takes the place of.
_INSTEAD: Final = {
    ("study", "objectives"): ("metric", "direction"),
    ("study", "metric"): ("objectives",),
    ("step",): ("loss", "metrics"),
}


@dataclass(frozen=True)
class Block:
    """A block of code on a page.

    Attributes:
        kind: Its language.
        how: What a comment before it says of how it is tested.
        title: The file that it is, or is a part of.
        text: Its lines.
    """

    kind: str
    how: str
    title: str
    text: str

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """Each command with the output that is shown of it."""
        lines = self.text.splitlines()
        if self.kind == "bash":
            yield from ((line, []) for line in lines if line.strip() and not line.startswith("#"))
            return
        for at, line in enumerate(lines):
            if line.startswith("$ "):
                shown = lines[at + 1 :]
                end = next((index for index, each in enumerate(shown) if each.startswith("$ ")), len(shown))
                yield line[2:], shown[:end]


def blocks_of(text: str) -> list[Block]:
    """The blocks of a page, in their order, without those that `make reference` writes."""
    return [
        Block(*((match[name] or "") for name in ("kind", "how", "title", "text")))
        for match in _BLOCK.finditer(_MADE.sub("", text))
    ]


@dataclass
class Session:
    """A reader who works through a page.

    Attributes:
        folder: Where the reader is.
        database: Gives the URL of a new database of a kind.
        names: What the page's Python knows.
    """

    folder: Path
    database: Callable[[str], str]
    names: dict[str, Any] = field(default_factory=dict)
    shared: Path = field(init=False)
    _urls: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shared = self.folder / "shared"

    def do(self, block: Block) -> None:
        """Do what a block says; AssertionError where that can't be done."""
        if block.kind in ("bash", "console"):
            for command, shown in block.commands():
                self._command(command, block.how, shown)
        elif block.kind == "yaml":
            self._yaml(block)
        elif block.kind == "python" and block.title:
            (self.folder / block.title).write_text(block.text)
        elif block.kind == "python" and block.how == "parse":
            compile(block.text, "a block of Python", "exec")
            assert all(hasattr(package, name) for name in re.findall(r"\bhpo\.(\w+)", block.text)), block.text
        elif block.kind == "python":
            # That a study is small is warned of, and meant.
            with self._inside(), warnings.catch_warnings(action="ignore", category=UserWarning):
                exec(compile(block.text, "a block of Python", "exec"), self.names)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """Python started in the folder: its modules can be imported, and are forgotten afterwards."""
        before = set(sys.modules)
        sys.path.insert(0, str(self.folder))
        try:
            with contextlib.chdir(self.folder):
                yield
        finally:
            sys.path.remove(str(self.folder))
            for name in set(sys.modules) - before:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(f"{self.folder}{os.sep}"):
                    del sys.modules[name]

    # ---- commands

    def _command(self, line: str, how: str, shown: list[str]) -> None:
        words = shlex.split(line if how == "parse" else self._with_real_places(line), comments=True)
        given: dict[str, str] = {}
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            given[name] = value
        program, *rest = words
        doing = {
            "hpo": self._hpo,
            "cp": self._copy,
            "pip": self._install,
            "make": self._make,
            "python": self._python,
            "torchrun": self._torchrun,
        }
        if program == "cd" and rest[0] != "…":
            self.folder /= rest[0]
            assert self.folder.is_dir(), line
        elif program in doing:
            with contextlib.chdir(self.folder), _environment(given):
                doing[program](rest, how, shown)
        else:
            assert program in _OTHERS, f"a test knows nothing of {line}"

    def _hpo(self, words: list[str], how: str, shown: list[str]) -> None:
        if how.endswith("without a GPU") and torch.cuda.is_available():
            return
        words, target = _redirected(words)
        if how == "parse":
            parse(words)
        elif how == "serve":
            serve(words)
        else:
            code = int(found[1]) if (found := re.match(r"exit (\d+)", how)) else 0
            result = hpo(*words, code=code)
            if target:
                Path(target).write_text(result.stdout)
            _compare(result, shown)
            if words[0] == "init" and "--from" not in words:
                shrink(self.folder / words[1] / "study.yaml")

    def _copy(self, words: list[str], how: str, shown: list[str]) -> None:
        source, target = words
        shutil.copy(source if Path(source).exists() else ROOT / source, target)

    def _install(self, words: list[str], how: str, shown: list[str]) -> None:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for extra in re.findall(r"[\w]+", " ".join(re.findall(r"\[(.*?)\]", " ".join(words)))):
            assert extra in extras, f"no such extra: {extra}"

    def _make(self, words: list[str], how: str, shown: list[str]) -> None:
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no target {words[0]}"

    def _torchrun(self, words: list[str], how: str, shown: list[str]) -> None:
        self._python(["-m", "torch.distributed.run", *words], how, shown)

    def _python(self, words: list[str], how: str, shown: list[str]) -> None:
        if words[:2] == ["-m", "torch.distributed.run"] or (words[0] != "-m" and how != "parse"):
            process = ForkedProgram(words)
            _, errors = process.communicate()
            assert process.returncode == 0, errors

    def _with_real_places(self, text: str) -> str:
        """The text with a database and a shared folder that are there."""

        def url(match: re.Match[str]) -> str:
            kind = match["kind"]
            if kind not in self._urls:
                self._urls[kind] = self.database(kind)
            return shlex.quote(self._urls[kind])

        return _URL.sub(url, text).replace("/shared/", f"{self.shared}/")

    # ---- study files

    def _yaml(self, block: Block) -> None:
        target, _, source = block.title.partition(" from ")
        part = parse_value(block.text)  # as hpo reads it: `on` is a key
        if "apiVersion" in part:  # an object in Kubernetes
            (self.folder / target).write_text(block.text)
            return
        base = self.folder / (source or target or "study.yaml")
        if ("study" in part and "model" in part) or not base.exists():
            text = block.text
        else:
            text = yaml.safe_dump(merged(parse_value(base.read_text()), part), sort_keys=False)
        path = self.folder / (target or "fragment.yaml")
        path.write_text(text)
        spec = load_spec(path)
        if block.how != "parse":
            check_imports(spec)


def merged(base: Any, part: Any, path: tuple[str, ...] = ()) -> Any:
    """A study file with a part of it written anew, as a reader writes it."""
    if not isinstance(base, Mapping) or not isinstance(part, Mapping) or "_target_" in part:
        return part
    gone = {name for key in part for name in _INSTEAD.get((*path, key), ())}
    kept = {key: value for key, value in base.items() if key not in gone}
    return {**kept, **{key: merged(kept.get(key), value, (*path, key)) for key, value in part.items()}}


def shrink(study: Path) -> None:
    """Let the study of `hpo init` do the same with less work, so that a test can wait for it."""
    text = study.read_text()
    for large, small in (
        ("n_trials: 16", "n_trials: 4"),
        ("max_epochs: 20", "max_epochs: 3"),
        ("patience: 8", "patience: 2"),
    ):
        assert large in text, f"the template has no {large} any more"
        text = text.replace(large, small)
    study.write_text(text)


# ---- the command


def parse(words: list[str]) -> None:
    """Let the command line read a command without doing it; overrides must fit the study file."""
    from typer.main import get_command

    group: Any = get_command(app)
    name, *rest = words
    assert name in group.commands, f"no command {name}"
    params = group.commands[name].make_context(name, rest).params
    load_spec(params["study"], params["overrides"] or ())


def serve(words: list[str]) -> None:
    """Start the dashboard on a free port, look at it, and end it."""
    process = start_hpo(*words, "--port", "0")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        link = urlsplit(line.rpartition(" ")[2].strip())
        assert link.port, line + (process.stderr.read() if process.stderr and not link.port else "")
        query = f"?{link.query}" if link.query else ""
        with urllib.request.urlopen(f"http://127.0.0.1:{link.port}{link.path}{query}", timeout=PATIENCE) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode in (0, 130)


def _redirected(words: list[str]) -> tuple[list[str], str]:
    if ">" not in words:
        return words, ""
    at = words.index(">")
    return words[:at], words[at + 1]


def _compare(result: Result, shown: list[str]) -> None:
    printed = [line.rstrip() for line in (result.stdout + result.stderr).splitlines()]
    for line in shown:
        assert line.rstrip() in printed, f"{line!r} is not printed, but\n" + "\n".join(printed)


@contextlib.contextmanager
def _environment(given: Mapping[str, str]) -> Iterator[None]:
    kept = dict(os.environ)
    os.environ.update(given)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
