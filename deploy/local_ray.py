"""A Ray for one `nrank serve`: started here, or one that already runs; and its end.

Owns the driver's connection, the token file's whereabouts and the check of the HTTP port. Token
authentication stays as Ray sets it: on.
"""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import AuthenticationError

from placement.errors import ConfigError, RankError

OBJECT_STORE_BYTES = 256 << 20  # only requests and token batches pass through it
TOKEN_VARIABLE = "RAY_AUTH_TOKEN_PATH"


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


def start(address: str, resources: dict[str, float]) -> str:
    """Connects to `address`, or starts a local Ray with `resources`. Returns the dashboard's URL.

    Raises ConfigError when nothing answers at `address`, RankError when a local start fails.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no report leaves this machine unasked
    quiet = logging.ERROR
    logging.getLogger("ray.serve").setLevel(quiet)  # what matters, the coordinator tells
    try:
        if address:
            context = ray.init(address=address, logging_level=quiet)
        else:
            # "local": never join a Ray of someone else that happens to run here.
            context = ray.init(
                address="local",
                resources=resources,
                include_dashboard=True,
                object_store_memory=OBJECT_STORE_BYTES,
                logging_level=quiet,
            )
    except AuthenticationError as error:
        raise ConfigError(one_line(error)) from error
    except (ConnectionError, ValueError, RuntimeError) as error:
        text = one_line(error)
        if address:
            raise ConfigError(
                f"no Ray answers at {address}: {text}; check --ray-address"
            ) from error
        raise RankError(f"a local Ray could not be started: {text}") from error
    url = context.dashboard_url
    return f"http://{url}" if url else ""


def stop(shut_serve_down: bool, app_name: str) -> None:
    """Ends the application, and the Serve and Ray that we started ourselves."""
    if not ray.is_initialized():
        return
    try:
        if shut_serve_down:
            serve.shutdown()  # type: ignore[no-untyped-call]
        else:
            serve.delete(app_name)
    finally:
        ray.shutdown()


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def token_place() -> str:
    """Where clients of this Ray (`ray job submit`) find their token, for a person to read."""
    if os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return "none: token authentication is off (RAY_AUTH_MODE)"
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "in the variable RAY_AUTH_TOKEN"
    return os.environ.get(TOKEN_VARIABLE) or str(Path.home() / ".ray" / "auth_token")
