"""Imported by the fork server: it ignores the requests to leave, which its supervisor answers.

They are blocked when it is started, so that none comes before this.
"""

import signal

from hpo.execution.messages import REQUESTS

for _number in REQUESTS:
    signal.signal(_number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
