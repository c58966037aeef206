"""The commands of a page, as they stand there, in a real shell, for pages whose programs a test starts first."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import yaml

from hpo.config.spec import STORAGE_ENV
from tests.support.commands import hpo
from tests.support.docs_session import ROOT, blocks_of, shrink

#: The URL that pages show.
_URL: Final = "postgresql+psycopg://hpo:PASSWORD@db.example/hpo"


class Page:
    """A page's commands, and the study that they are about.

    Args:
        name: The page, under ``docs/how-to``.
        folder: For the study, and for what machines share.
        url: A database whose server takes any password.
        within: What starts a program where the page's programs are.
        environment: Variables of all commands.

    Attributes:
        commands: All commands of the page, in their order.
        study: The study file.
        shared: What stands for ``/shared``.
        home: The home folder.
    """

    def __init__(
        self, name: str, folder: Path, url: str, environment: Mapping[str, str], within: Sequence[str] = ()
    ) -> None:
        blocks = blocks_of((ROOT / "docs" / "how-to" / name).read_text())
        self.commands = [line for block in blocks if block.kind == "bash" for line, _ in block.commands()]
        self.study = folder / "spirals" / "study.yaml"
        self.shared = folder / "shared"
        self._within = list(within)
        self._url = url.replace("postgres@", "postgres:PASSWORD@")
        programs = folder / "bin"
        programs.mkdir()
        (programs / "hpo").write_text(f'#!/bin/sh\nexec {sys.executable} -m hpo "$@"\n')
        (programs / "hpo").chmod(0o755)
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {**os.environ, **environment, "PATH": path, "PYTHONPATH": str(ROOT)}
        self.home = folder / "home"
        self.home.mkdir()
        self.environment["HOME"] = str(self.home)
        hpo("init", self.study.parent)
        shrink(self.study)

    def allow(self, n_trials: int) -> None:
        """Let the study have so many trials."""
        study = yaml.safe_load(self.study.read_text())
        study["study"]["n_trials"] = n_trials
        self.study.write_text(yaml.safe_dump(study, sort_keys=False))

    def take(self, pattern: str) -> str:
        """Take the first command of the page that matches."""
        command = next(each for each in self.commands if re.match(pattern, each))
        self.commands.remove(command)
        return command

    def do(self, pattern: str, *, before: Sequence[str] = ()) -> str:
        """Do the first command of the page that matches, and was not done yet; what it prints.

        Args:
            pattern: What it begins with.
            before: What starts it, behind what starts all.
        """
        return self.call(self.take(pattern), before=before)

    def call(self, command: str, *, before: Sequence[str] = ()) -> str:
        """As `do`, for a command of a test's own."""
        text = command.replace(_URL, f"'{self._url}'").replace("/shared/", f"{self.shared}/")
        done = subprocess.run(
            [*self._within, *before, "bash", "-c", f"cd {self.study.parent} && {text}"],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def export(self) -> None:
        """Put the database's URL into the environment."""
        self.environment[STORAGE_ENV] = self._url
