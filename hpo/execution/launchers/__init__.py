"""Where workers run: `launcher` is the interface for supervisors, `local` starts worker processes on this machine,
and the other modules set up the fork server that Python forks them from.
"""
