"""Imported first by the fork server: restores its environment for the study, and turns garbage collection off.

It stays off until `preload`, the last module, has been imported. What modules create stays anyway, and searching
it for garbage again and again takes a sixth of the time of importing.
"""

import gc

from hpo.execution.launchers import large_pages, safe_path

large_pages.forget()
safe_path.forget()
gc.disable()
