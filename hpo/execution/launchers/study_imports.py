"""Imported by the fork server: it imports the modules that `imported_once` names for the study.

One that can't be imported is passed over: a process that needs it imports it again, and says why it fails.
"""

import importlib
import os

from hpo.execution.launchers.imported_once import NAMES_VARIABLE

for _name in os.environ.pop(NAMES_VARIABLE, "").split():
    try:
        importlib.import_module(_name)
    except Exception:  # noqa: BLE001 - a library may raise anything where it is broken
        continue
