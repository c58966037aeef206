"""A driver's connection to Ray, made when it is first needed, and again after it was lost."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Final

from hpo.errors import InputError, StudyError
from hpo.execution.engines.by_name import Address
from hpo.execution.engines.engine import EngineAwayError

#: Settings for Ray in this process, unless a person has set others: no usage reports; a connection that is lost
#: for more than 5 seconds is made again; no fork handlers of gRPC, which crash now and then.
_ENVIRONMENT: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CLIENT_RECONNECT_GRACE_PERIOD": "5",
    "GRPC_ENABLE_FORK_SUPPORT": "0",
}
#: Bytes of Ray's object store: the least that Ray allows, because nothing is kept there.
_OBJECT_STORE: Final = 80 * 2**20


class RayConnection:
    """One driver's connection to Ray. A process can have only one, so an existing connection is used.

    Args:
        address: Where Ray is: ``ray://HOST:PORT``, ``ray:auto`` or ``ray:local``.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._ray: Any = None
        self._runtime_env: Mapping[str, Any] = {}
        self._was_open = self._is_ours = False

    @contextlib.contextmanager
    def open(self, runtime_env: Mapping[str, Any] | None = None) -> Iterator[tuple[Any, bool]]:
        """Yield the module ``ray``, and whether the connection is new: then references from an old one are void.

        Args:
            runtime_env: Ray's runtime environment for everything that is placed; None: as before.

        Raises:
            InputError: Ray is not installed here, or the cluster has another version.
            StudyError: There is no Ray at this address.
            EngineAwayError: Ray no longer answers.
        """
        wanted = self._runtime_env if runtime_env is None else runtime_env
        is_new = self._ray is None or wanted != self._runtime_env
        if is_new:
            self.close()
            self._ray = self._connected(wanted)
            self._runtime_env, self._was_open = wanted, True
        try:
            yield self._ray, is_new
        except ConnectionError as error:
            self.close()
            raise EngineAwayError(f"Ray at {self._address.text}: {_first_line(error)}") from error

    def close(self) -> None:
        """Disconnect; this ends a Ray that was started for `ray:local`."""
        if self._ray is not None:
            ray, self._ray = self._ray, None
            if self._is_ours:
                with _kept_handler():
                    ray.shutdown()

    def _connected(self, runtime_env: Mapping[str, Any]) -> Any:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if self._address.place == "local":
            _have_a_token()
        try:
            import ray
        except ImportError as error:
            raise self._address.error("Ray is not installed here", "pip install 'hpo-service[ray]'") from error
        self._is_ours = bool(runtime_env) or not ray.is_initialized()
        if not self._is_ours:
            return ray
        try:
            with warnings.catch_warnings(), _kept_handler():
                warnings.simplefilter("ignore")
                ray.init(**self._settings(runtime_env))
        except (ConnectionError, TimeoutError) as error:
            raise self._away(error) from error
        except ValueError as error:
            raise self._refused(error, shipping=bool(runtime_env)) from error
        except RuntimeError as error:
            if "ersion mismatch" in str(error):
                raise self._other_version(ray.__version__, error) from error
            raise self._away(error) from error
        return ray

    def _settings(self, runtime_env: Mapping[str, Any]) -> dict[str, Any]:
        place = self._address.place
        settings: dict[str, Any] = {
            "address": place,
            "log_to_driver": False,
            "logging_level": "ERROR",
        }
        if place == "local":
            settings |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE}
        return settings | ({"runtime_env": dict(runtime_env)} if runtime_env else {})

    def _away(self, error: Exception) -> StudyError:
        problem = f"Ray at {self._address.text} does not answer: {_first_line(error)}"
        if self._was_open:
            return EngineAwayError(problem)
        fixes = {
            "auto": "`ray status` says whether this machine belongs to a cluster; `ray start` makes it one's",
            "local": "see the files of the newest session in /tmp/ray",
        }
        other = "give the head's name and the port of its client server, 10001 by default: `ray://HOST:10001`"
        return StudyError(f"{problem}\n  fix: {fixes.get(self._address.place, other)}")

    def _refused(self, error: Exception, *, shipping: bool) -> InputError:
        if shipping:
            fix = "leave it out where nodes have the study's folder, or where Ray's own job brings it"
            return self._address.error(f"Ray does not send it: {_first_line(error)}", fix, key="ship")
        return self._address.error(f"Ray refuses this: {_first_line(error)}", "write `ray://HOST:10001`")

    def _other_version(self, ours: str, error: Exception) -> InputError:
        said = " ".join(str(error).split())
        return self._address.error(said, f"have one Python and one Ray everywhere; here is Ray {ours}")


def _have_a_token() -> None:
    """Put an authentication token for a Ray that we start into the environment.

    Otherwise Ray writes one into the home folder, and every cluster that is started there later asks for it.
    """
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@contextlib.contextmanager
def _kept_handler() -> Iterator[None]:
    """Restore the driver's handler for SIGTERM after the block, because Ray sets its own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, kept)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
