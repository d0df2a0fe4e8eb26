"""A Ray for one `nrank serve`: started here, or one that already runs; and its end.

Owns the driver's connection, the token file's whereabouts and the check of the HTTP port. Token
authentication stays as Ray sets it: on.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray._private import ray_constants
from ray.dashboard.consts import DASHBOARD_AGENT_ADDR_NODE_ID_PREFIX
from ray.exceptions import AuthenticationError
from ray.experimental.internal_kv import _internal_kv_get
from ray.serve.exceptions import RayServeException

from placement.errors import ConfigError, RankError

OBJECT_STORE_BYTES = 256 << 20  # only requests and token batches pass through it
OPEN_S = 180.0
PROBE_S = 5.0
JOIN_S = 30.0  # a Ray that runs already answers in seconds; Ray itself would ask for minutes
TICK_S = 0.2
MESSAGE_CHARACTERS = 500
AGENT_PORT = ray_constants.DEFAULT_DASHBOARD_AGENT_LISTEN_PORT
TOKEN_VARIABLE = "RAY_AUTH_TOKEN_PATH"
# For a Ray started here. Its processes are as urgent as the one that starts it; by default they
# give way to all else on the machine (nice 15), a rank in the middle of a step too. For Serve: a
# replica that misses three health checks is killed. Serve's default is to ask it to drain first,
# which takes minutes and comes to nothing. Requests and tokens go between its processes by gRPC, a
# third cheaper than Ray's calls and as little bounded in size; an empty `grpc_proxy` keeps it from
# the proxy that `http_proxy` may name. torch_npu is loaded by ranks alone, and not by torch in each
# process that imports it: that takes seconds, and fails where CANN is missing.
RAY_VARIABLES = {
    "RAY_worker_niceness": "0",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str((2 << 30) - 1),
    "grpc_proxy": "",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}


def check_port(host: str, port: int) -> int:
    """The port to use: a free one for 0. ConfigError when it can't be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} can't be used: {error.strerror}; "
                "end the server that has it or choose another with --port"
            ) from error
        return int(probe.getsockname()[1])


def search_path() -> str:
    """PATH for a Ray started here: `python` in a job is then the one that has nrank's packages."""
    home = str(Path(sys.executable).parent)  # not resolved: a venv's python is a link
    old = os.environ.get("PATH", os.defpath)
    return old if old.split(os.pathsep)[0] == home else os.pathsep.join([home, old])


def takes_jobs() -> bool:
    """Whether the agent that runs submitted jobs has told its address to the job API."""
    key = DASHBOARD_AGENT_ADDR_NODE_ID_PREFIX + ray.get_runtime_context().get_node_id()
    return bool(_internal_kv_get(key, namespace=ray_constants.KV_NAMESPACE_DASHBOARD))


def agent_port_free() -> bool:
    """The agent's port is fixed, `ray.init` can't change it: one Ray of a machine gets it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", AGENT_PORT))
        except OSError:
            return False
    return True


def check_address(address: str) -> None:
    """ConfigError when nothing listens there; Ray itself would try for minutes, deaf to signals."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise ConfigError(
            f"--ray-address {address!r} is no address; write host:port, ray://host:port or auto"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), PROBE_S).close()
    except OSError as error:
        raise _no_ray(address, error.strerror or str(error)) from error


def _no_ray(address: str, reason: str) -> ConfigError:
    return ConfigError(f"no Ray answers at {address}: {reason}; check --ray-address")


class RayConnection:
    """The driver's connection: to `address`, or to a Ray started here with `resources`."""

    def __init__(self, address: str, resources: dict[str, float]) -> None:
        self._address = address
        self._resources = resources
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._dashboard = ""
        # A thread of its own, because ray.init takes SIGTERM over in the main thread, and half a
        # start can't be undone: a signal waits until it is whole. The thread never ends, because
        # the kernel kills Ray's processes when the thread that started them ends.
        self._thread = threading.Thread(target=self._open, name="ray-connection", daemon=True)

    def open(self, check: Callable[[], None]) -> str:
        """Returns the dashboard's URL, "" without one. `check` is called while it waits.

        Raises ConfigError when nothing answers at the address, RankError when a start fails.
        """
        if self._address:
            check_address(self._address)
        self._thread.start()
        self._wait(check)
        if self._error is not None:
            raise self._failure(self._error)
        return self._dashboard

    def _wait(self, check: Callable[[], None] = lambda: None) -> None:
        limit_s = JOIN_S if self._address else OPEN_S
        for _ in range(int(limit_s / TICK_S)):
            check()
            if self._done.wait(TICK_S):
                return
        if self._address:
            raise _no_ray(self._address, f"it took no driver within {limit_s:g} s")
        raise RankError(f"Ray did not start within {OPEN_S:g} s; see the logs in /tmp/ray")

    def _open(self) -> None:
        try:
            url = self._init().dashboard_url
            self._dashboard = f"http://{url}" if url else ""
        except Exception as error:  # raised again in open()
            self._error = error
        self._done.set()
        threading.Event().wait()

    def _init(self) -> Any:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no report leaves unasked
        if not self._address:
            os.environ["PATH"] = search_path()
            for name, value in RAY_VARIABLES.items():
                os.environ.setdefault(name, value)
        for name in ("ray._private.worker", "ray.serve"):  # what matters, the coordinator tells
            logging.getLogger(name).setLevel(logging.ERROR)
        if self._address:
            return ray.init(address=self._address, logging_level=logging.ERROR)
        return ray.init(
            address="local",  # never join a Ray of someone else that happens to run here
            resources=self._resources,
            include_dashboard=True,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.ERROR,
        )

    def _failure(self, error: BaseException) -> ConfigError | RankError:
        text = " ".join(str(error).split())
        if isinstance(error, AuthenticationError):
            return ConfigError(text)
        if self._address:
            return _no_ray(self._address, text)
        if len(text) > MESSAGE_CHARACTERS:  # Ray may quote whole logs; how it ended stands last
            text = f"... {text[-MESSAGE_CHARACTERS:]}"
        return RankError(f"a local Ray could not be started: {text}")

    def end(self, app_name: str) -> None:
        """Ends the application, and a Serve that was started here; waits until both have ended."""
        if not self._is_open():
            return
        try:
            if self._address:
                serve.delete(app_name)
            else:
                serve.shutdown()  # type: ignore[no-untyped-call]
        except RayServeException:
            pass  # no Serve was started yet

    def close(self, app_name: str) -> None:
        """Leaves Ray; ends one that was started here. An application still there has to end."""
        if not self._is_open():
            return
        try:
            if self._address:
                serve.delete(app_name, _blocking=False)
        except RayServeException:
            pass
        finally:
            ray.shutdown()

    def _is_open(self) -> bool:
        """Waits for a start under way: half of one can't be undone."""
        if not self._thread.is_alive() or (self._address and not self._done.is_set()):
            return False  # nothing was started, and a Ray of others needs no end
        self._wait()
        return bool(ray.is_initialized())


def token_place() -> str:
    """Where clients of this Ray (`ray job submit`) find their token, for a person to read."""
    if os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return "none: token authentication is off (RAY_AUTH_MODE)"
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "in the variable RAY_AUTH_TOKEN"
    return os.environ.get(TOKEN_VARIABLE) or str(Path.home() / ".ray" / "auth_token")
