"""Where workers run: `launcher` is what a supervisor knows of it, `local` starts processes on this machine, and
the rest is how Python forks them.
"""
