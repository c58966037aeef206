"""Finding out before anything runs what would fail: imports, meaning, a try on each device, the machine."""
