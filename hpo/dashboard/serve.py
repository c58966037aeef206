"""Serves optuna-dashboard on a study's storage, behind a gate."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, Final

import bottle
import optuna_dashboard
import waitress
from optuna.artifacts import FileSystemArtifactStore
from optuna.artifacts.exceptions import ArtifactNotFound

from hpo.dashboard.front import within_bounds
from hpo.dashboard.gate import Gate, allowed_hosts, host_name, is_loopback, link_host
from hpo.dashboard.login import SHORTEST_TOKEN, Login
from hpo.dashboard.sampled import SampledStorage, sampling
from hpo.dashboard.shown import ShownStorage, fitted
from hpo.errors import InputError, StudyError
from hpo.study.open_study import OpenStudy
from hpo.trial.artifacts import artifact_folder

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

HOST = "127.0.0.1"
#: The largest request in bytes; people upload pictures and notes.
_LARGEST_REQUEST: Final = 16 * 2**20


@dataclass(frozen=True)
class Access:
    """The access rules of a dashboard, and the names under which it can be reached.

    Attributes:
        token: The token that visitors need; None: no token on the loopback interface, else a generated one.
        read_only: Refuse every write.
        allow_hosts: Names that the Host header may have beside the interface's own.
    """

    token: str | None = None
    read_only: bool = False
    allow_hosts: Sequence[str] = ()


def serve(opened: OpenStudy, port: int, host: str = HOST, access: Access | None = None) -> None:
    """Serve the dashboard until interrupted; prints its address first.

    Args:
        opened: The study; the dashboard shows every study in its storage.
        port: TCP port; 0 picks a free one.
        host: Interface to listen on.
        access: The access rules; None for the defaults.

    Raises:
        InputError: The token is too short, or a name is not a host's name.
        StudyError: The server can't listen on the port and interface.
    """
    access = _checked(access or Access())
    token = access.token or (None if is_loopback(host) else secrets.token_urlsafe(24))
    listening = _listen(host, port)
    home = f"/dashboard/studies/{opened.study_id}"
    gate = Gate(
        fitted(dashboard(opened)),
        hosts=allowed_hosts(host, access.allow_hosts),
        proxied=frozenset(name.lower() for name in access.allow_hosts),
        login=None if token is None else Login(token),
        read_only=access.read_only,
        home=home,
    )
    logging.getLogger("waitress").setLevel(logging.ERROR)  # it warns about every request that has to wait
    # A proxy's X-Forwarded-Proto only makes cookies secure.
    server = waitress.create_server(
        gate,
        sockets=[listening],
        ident=None,
        max_request_body_size=_LARGEST_REQUEST,
        clear_untrusted_proxy_headers=False,
    )
    address = f"http://{link_host(host, access.allow_hosts)}:{listening.getsockname()[1]}"
    made_up = token is not None and access.token is None
    link = f"{address}/?token={token}" if made_up else f"{address}{home}"
    print(f"dashboard of {opened.spec.study.name}: {link}", flush=True)
    if token is not None:
        asks = "the link holds the token; keep it to yourself" if made_up else "it asks for the token"
        print(f"{asks}; log out at {address}/logout", flush=True)
    print("Ctrl-C ends it", flush=True)
    try:
        server.run()
    finally:
        server.close()


def dashboard(opened: OpenStudy) -> WSGIApplication:
    """optuna-dashboard on a study's storage, with sampled trials, readable attributes and the right front."""
    storage, artifacts = opened.storage, _Artifacts(artifact_folder(opened.spec))
    sampled = sampling(
        optuna_dashboard.wsgi(ShownStorage(storage), artifacts),
        lambda numbers: optuna_dashboard.wsgi(SampledStorage(storage, numbers), artifacts),
    )
    return within_bounds(sampled, storage)


def _checked(access: Access) -> Access:
    if access.token is not None and len(access.token) < SHORTEST_TOKEN:
        problem = f"is too easy to guess: fewer than {SHORTEST_TOKEN} characters"
        raise InputError(problem, path="--token", fix="leave it out, and one is made; or give a longer one")
    for name in access.allow_hosts:
        if not name or host_name(name) != name.lower():
            fix = "give the name or address alone, without http:// and port"
            raise InputError("is no host's name", path="--allow-host", value=name, fix=fix)
    return access


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise StudyError(
            f"can't listen on {host}:{port}: {error.strerror}\n  fix: give another `--port`, or `--host`"
        ) from error


class _Artifacts(FileSystemArtifactStore):
    """Optuna's artifact store, without errors for missing files: the trial may have run on another machine."""

    def open_reader(self, artifact_id: str) -> BinaryIO:
        try:
            return super().open_reader(artifact_id)
        except ArtifactNotFound:
            raise bottle.HTTPResponse(
                f"This artifact's file isn't on this machine: {self._get_filepath(artifact_id)}\n",
                status=404,
                headers={"Content-Type": "text/plain; charset=utf-8"},
            ) from None

    def remove(self, artifact_id: str) -> None:
        with contextlib.suppress(ArtifactNotFound):  # so that a study with files elsewhere can be deleted
            super().remove(artifact_id)
