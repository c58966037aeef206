"""Imported by the fork server, to ignore signals that ask an agent to leave: the supervisor handles those.

The signals are blocked when the fork server starts, so none arrives before this module has run.
"""

import signal

from hpo.execution.messages import REQUESTS

for _number in REQUESTS:
    signal.signal(_number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
