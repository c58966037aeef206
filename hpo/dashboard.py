"""The optuna-dashboard on a study's storage."""

from __future__ import annotations

import socket

import optuna_dashboard
import waitress

from hpo.errors import StudyError
from hpo.study import OpenStudy

HOST = "127.0.0.1"


def serve(opened: OpenStudy, port: int, host: str = HOST) -> None:
    """Serve the dashboard until interrupted; prints its address first.

    The dashboard has no authentication, so it listens on the loopback interface unless told otherwise.

    Args:
        opened: The study; the dashboard shows every study in its storage.
        port: TCP port; 0 picks a free one.
        host: Interface to listen on.

    Raises:
        StudyError: The port is taken, or the interface is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise StudyError(
            f"can't listen on {host}:{port}: {error.strerror}\n  fix: give another `--port`, or `--host`"
        ) from error
    server = waitress.create_server(optuna_dashboard.wsgi(opened.storage), sockets=[listening])
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{listening.getsockname()[1]}"
    print(f"dashboard of {opened.spec.study.name}: {address}/dashboard/studies/{opened.study_id}", flush=True)
    print("Ctrl-C ends it", flush=True)
    try:
        server.run()
    finally:
        server.close()
