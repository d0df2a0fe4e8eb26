"""One Ray cluster and one served application for all tests here; chips are a custom resource."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.front import Front
from tests.serve.scripted_sensor import ScriptedSensor

NUM_CHIPS = 6
RANKS = 2
MAX_SEQUENCES = 3
MAX_QUEUE = 2
LIMIT_S = 120.0
READ_S = 400.0  # of a stream: whoever waits for it has a limit of his own


@pytest.fixture(scope="session")
def ray_token(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ray's token authentication stays on, with a token of this session."""
    path = tmp_path_factory.mktemp("ray") / "token"
    path.write_text(secrets.token_hex(32))
    before = os.environ.get("RAY_AUTH_TOKEN_PATH")
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    yield path
    os.environ.pop("RAY_AUTH_TOKEN_PATH")
    if before is not None:
        os.environ["RAY_AUTH_TOKEN_PATH"] = before


@pytest.fixture(scope="session")
def sensor(tmp_path_factory: pytest.TempPathFactory) -> ScriptedSensor:
    """The `npu-smi` of this session's Ray."""
    return ScriptedSensor(tmp_path_factory.mktemp("sensor"), NUM_CHIPS)


@pytest.fixture(scope="session")
def cluster(ray_token: Path, sensor: ScriptedSensor) -> Iterator[None]:
    import ray

    from deploy.local_ray import RAY_VARIABLES

    os.environ.update(RAY_VARIABLES)
    os.environ["PATH"] = f"{sensor.folder}{os.pathsep}{os.environ['PATH']}"
    logging.getLogger("ray._private.accelerators.npu").setLevel(logging.CRITICAL)
    ray.init(
        address="local",
        num_cpus=4,
        resources={"NPU": NUM_CHIPS},
        include_dashboard=False,
        object_store_memory=128 << 20,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


class Server:
    """The served application, seen as a client and as the one who breaks it."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.http = httpx.Client(base_url=base_url, timeout=LIMIT_S)
        self.model = "tiny-flash-next"

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Asks until `condition` holds; the limit is only reached by a failure."""
        deadline_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline_s, f"{what} did not come within {LIMIT_S:g} s"
            time.sleep(0.05)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def status(self) -> dict[str, Any]:
        return self.get("/status").json()

    def wait_ready(self) -> dict[str, Any]:
        self.until("readiness", lambda: self.get("/ready").status_code == 200)
        return self.status()

    def body(self, prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }

    def complete(self, prompt: str, max_tokens: int = 8) -> str:
        response = self.http.post("/v1/completions", json=self.body(prompt, max_tokens))
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    def stream(self, prompt: str, max_tokens: int) -> OpenStream:
        return OpenStream(self.base_url, self.body(prompt, max_tokens, stream=True))

    def kill_rank(self, rank: int) -> int:
        pid = next(r["pid"] for r in self.status()["ranks"] if r["rank"] == rank)
        os.kill(pid, signal.SIGKILL)
        return pid


class OpenStream:
    """A streamed completion read by a thread of its own."""

    def __init__(self, base_url: str, body: dict[str, Any]) -> None:
        self.events: list[dict[str, Any]] = []
        self.ended_well = False
        self.status_code = 0
        self.refusal: dict[str, Any] | None = None  # the body of an answer that is no stream
        self.came = threading.Condition()
        self._leave = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(base_url, body), daemon=True)
        self._thread.start()

    def _read(self, base_url: str, body: dict[str, Any]) -> None:
        with (
            httpx.Client(base_url=base_url, timeout=READ_S) as client,
            client.stream("POST", "/v1/completions", json=body) as response,
        ):
            self.status_code = response.status_code
            if response.status_code != 200:
                self.refusal = json.loads(response.read())["error"]
                return
            for line in response.iter_lines():
                if self._leave.is_set():
                    return  # closes the connection: the client is gone
                if line.startswith("data: "):
                    self._take(line.removeprefix("data: "))

    def _take(self, data: str) -> None:
        with self.came:
            if data == "[DONE]":
                self.ended_well = True
            else:
                self.events.append(json.loads(data))
            self.came.notify_all()

    def wait_events(self, count: int) -> OpenStream:
        with self.came:
            assert self.came.wait_for(lambda: len(self.events) >= count, LIMIT_S)
        return self

    def leave(self) -> None:
        self._leave.set()
        self.join()

    def join(self, limit_s: float = LIMIT_S) -> OpenStream:
        self._thread.join(limit_s)
        assert not self._thread.is_alive(), "the stream did not end"
        return self

    @property
    def text(self) -> str:
        parts = (event["choices"][0]["text"] for event in self.events if event.get("choices"))
        return "".join(parts)

    @property
    def error(self) -> dict[str, Any] | None:
        return next((event["error"] for event in self.events if "error" in event), None)


@pytest.fixture(scope="session")
def serve_port(cluster: None) -> Iterator[int]:
    """Serve and its proxy, which all applications here share."""
    from ray import serve
    from ray.serve.config import HTTPOptions, ProxyLocation

    from deploy.local_ray import check_port

    port = check_port("127.0.0.1", 0)
    http = HTTPOptions(host="127.0.0.1", port=port, request_timeout_s=None)
    serve.start(ProxyLocation.HeadOnly, http, logging_config=quiet())
    yield port
    serve.shutdown()


def quiet() -> Any:
    from ray.serve.schema import LoggingConfig

    return LoggingConfig(log_level="ERROR", enable_access_log=False)


@pytest.fixture(scope="session")
def server(serve_port: int) -> Server:
    """The embedded model on two ranks, each on an emulated chip."""
    from ray import serve

    from deploy.config import load_config
    from deploy.serve import application

    config = load_config(
        overrides={
            "resource_name": "NPU",
            "port": serve_port,
            "max_sequences": MAX_SEQUENCES,
            "max_queue_requests": MAX_QUEUE,
            "restart_backoff_s": 0.1,
            "restart_limit": 20,
            "step_timeout_s": 60.0,
            "check_interval_steps": 1,
        }
    )
    serve.run(application(config), name="nrank", route_prefix="/", logging_config=quiet())
    found = Server(f"http://127.0.0.1:{serve_port}")
    found.wait_ready()
    return found


@pytest.fixture
def healthy(server: Server) -> Server:
    """The server, ready and idle: whatever the test before did is over."""
    server.wait_ready()
    server.until("idleness", lambda: server.status()["snapshots"][0]["running"] == 0)
    return server


@pytest.fixture
def open_stream() -> Callable[[str, int], OpenStream]:
    """Opens a stream of so many tokens at any server of the embedded model."""

    def start(base_url: str, max_tokens: int) -> OpenStream:
        return OpenStream(base_url, Server(base_url).body("The river", max_tokens, stream=True))

    return start


@pytest.fixture(scope="session")
def serve_app(serve_port: int) -> Callable[..., Any]:
    """Serves one more gang, of ranks that fail when they are told to, beside any other."""
    from ray import serve

    from tests.serve.fault_server import FaultServer, faulty_application

    def start(name: str, orders: Path, **overrides: Any) -> FaultServer:
        app = faulty_application(orders, port=serve_port, **overrides)
        serve.run(app, name=name, route_prefix=f"/{name}", logging_config=quiet())
        found = FaultServer(Server(f"http://127.0.0.1:{serve_port}/{name}"), orders, name)
        found.settle()
        return found

    return start


@pytest.fixture(scope="module")
def fault_server(
    serve_app: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Its chips are free again for the modules after."""
    from ray import serve

    yield serve_app("faults", tmp_path_factory.mktemp("orders") / "order")
    serve.delete("faults")


@pytest.fixture
def own_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A token file of this test alone: it also marks the processes of its Ray."""
    path = tmp_path / "own-token"
    path.write_text("7" * 64)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    return path


@pytest.fixture
def front(own_token: Path) -> Iterator[Callable[..., Front]]:
    started: list[Front] = []

    def start(*flags: str) -> Front:
        started.append(Front(*flags))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait(30)
