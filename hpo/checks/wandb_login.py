"""Checks whether W&B would get a study's runs, from W&B's settings and without importing it."""

from __future__ import annotations

import configparser
import netrc
import os
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from hpo.checks.findings import Finding, finding
from hpo.config.spec import StudySpec

FIX: Final = "`wandb login`, or WANDB_MODE=offline to send the runs later"
_SENDS: Final = ("online", "shared")
_KEYS: Final = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


def wandb_mode() -> tuple[str, str]:
    """W&B's mode, such as ``offline``, and where it is set."""
    if given := os.environ.get("WANDB_MODE"):
        return given, "WANDB_MODE"
    home = Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser()
    for file in (Path("wandb", "settings"), home / "settings"):  # `wandb offline` writes the first one
        settings = configparser.ConfigParser(interpolation=None)
        try:
            settings.read(file, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):  # W&B ignores such a file, too
            continue
        if mode := settings.get("default", "mode", fallback=""):
            return mode, str(file)
    return "online", ""


def is_logged_in() -> bool:
    """Whether there is a key where W&B looks for one; the key itself is not read."""
    if any(os.environ.get(name) for name in _KEYS):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    file = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def uses_wandb(spec: StudySpec) -> bool:
    """Whether the study file has W&B among its callbacks."""
    return spec.config.callbacks.get("wandb") not in (None, False)


def check_wandb(spec: StudySpec) -> list[Finding]:
    """Warn if the study uses W&B, and this machine has no login."""
    if not uses_wandb(spec) or wandb_mode()[0] not in _SENDS or is_logged_in():
        return []
    problem = "there is no login to W&B on this machine, so it will show no run"
    return [finding(spec, problem, path="callbacks.wandb", fix=FIX)]
