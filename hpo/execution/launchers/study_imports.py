"""Imported by the fork server, to import the modules that `imported_once` names for the study.

A module that can't be imported is skipped: a process that needs it imports it again and reports the error.
"""

import importlib
import os

from hpo.execution.launchers.imported_once import NAMES_VARIABLE

for _name in os.environ.pop(NAMES_VARIABLE, "").split():
    try:
        importlib.import_module(_name)
    except Exception:  # noqa: BLE001 - a library may raise anything where it is broken
        continue
