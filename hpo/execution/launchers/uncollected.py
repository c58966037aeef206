"""Imported first by the fork server, whose environment then is a study's again.

No garbage is collected until `preload`, the last, has been imported.

Modules are made to stay: looking through them for garbage, again and again, takes a sixth of the time of importing
them.
"""

import gc

from hpo.execution.launchers import large_pages, safe_path

large_pages.forget()
safe_path.forget()
gc.disable()
