"""Imported first by the fork server: no garbage is collected until `preload`, the last, has been imported.

Modules are made to stay: looking through them for garbage, again and again, takes a sixth of the time of importing
them.
"""

import gc

gc.disable()
