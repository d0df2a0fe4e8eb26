"""A Ray that stands by itself, started as the unit and the pods start it, on ports of its own."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.serve.front import session_processes

ROOT = Path(__file__).parents[3]
BIN = Path(sys.executable).parent
LIMIT_S = 180.0


def free_ports(count: int) -> list[int]:
    """Different ones, free a moment ago."""
    with_sockets = [socket.socket() for _ in range(count)]
    try:
        for one in with_sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in with_sockets]
    finally:
        for one in with_sockets:
            one.close()


def unit_environment() -> dict[str, str]:
    """What deploy/systemd/ray.env sets, as systemd and a shell read it."""
    lines = (ROOT / "deploy/systemd/ray.env").read_text().splitlines()
    pairs = (line.partition("=") for line in lines if line and not line.startswith("#"))
    return {name: "".join(shlex.split(value)) for name, _, value in pairs}


class StandingRay:
    """`serve` and HTTP against it. `chips` of NPU are a custom resource: no device is there."""

    def __init__(self, folder: Path, chips: int) -> None:
        gcs, dashboard, agent, client, metrics, self.http_port = free_ports(6)
        self.token = token = folder / "token"
        token.write_text(secrets.token_hex(32))
        token.chmod(0o600)
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("RAY_")},
            **unit_environment(),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}",
            "RAY_raylet_start_wait_time_s": "120",  # on a busy machine
            "PYTHONPATH": str(ROOT),
        }
        self.log = folder / "ray.log"
        command = [
            BIN / "ray", "start", "--head", "--block", "--node-ip-address", "127.0.0.1",
            "--port", gcs, "--dashboard-host", "127.0.0.1", "--dashboard-port", dashboard,
            "--dashboard-agent-listen-port", agent, "--ray-client-server-port", client,
            "--metrics-export-port", metrics, "--object-store-memory", 128 << 20,
            "--num-cpus", 2, "--resources", json.dumps({"NPU": chips}), "--temp-dir", folder / "r",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [str(part) for part in command],
            env=self.environment,
            cwd=folder,
            stdout=self.log.open("w"),
            stderr=subprocess.STDOUT,
        )

    def serve(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """The `serve` command."""
        return subprocess.run(
            [str(BIN / "serve"), *map(str, words)],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )

    def stop_serve(self) -> None:
        """As the unit's stop does."""
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        command = str(ROOT / "deploy/systemd/serve-stop")
        subprocess.run(
            [command], env={**self.environment, "PATH": path}, timeout=LIMIT_S, check=True
        )

    def deploy(self, config: Path) -> None:
        """Again until the dashboard answers, as the unit does; not while Ray still starts."""
        self.until("Ray", lambda: "Ray runtime started" in self.log.read_text(), 1.0)
        self.until("serve deploy", lambda: self.serve("deploy", config).returncode == 0, 1.0)

    def get(self, path: str) -> httpx.Response | None:
        """None while nothing answers there."""
        try:
            return httpx.get(f"http://127.0.0.1:{self.http_port}{path}", timeout=20.0)
        except httpx.TransportError:
            return None

    def status(self) -> dict[str, Any]:
        answer = self.get("/status")
        return answer.json() if answer is not None and answer.status_code == 200 else {}

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        url = f"http://127.0.0.1:{self.http_port}{path}"
        return httpx.post(url, json=body, timeout=LIMIT_S)

    def is_ready(self) -> bool:
        answer = self.get("/ready")
        return answer is not None and answer.status_code == 200

    def until(self, what: str, condition: Any, pause_s: float = 0.2) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, self.log.read_text() + self.raylet_log()
            assert time.monotonic() < deadline_s, f"{what} did not come; {self.log.read_text()}"
            time.sleep(pause_s)

    def raylet_log(self) -> str:
        """The end of it, for a start that failed."""
        logs = (self.token.parent / "r/session_latest/logs").glob("raylet.*")
        return "".join(log.read_text()[-2000:] for log in logs)

    def left_after(self, limit_s: float) -> list[str]:
        """Processes of this Ray, known by its token, that still live then."""
        deadline_s = time.monotonic() + limit_s
        while (found := session_processes(self.token, (b"",))) and time.monotonic() < deadline_s:
            time.sleep(0.5)
        return found

    def end(self) -> None:
        """SIGTERM, as `systemctl stop` and a pod's end send it; Ray answers with exit code 1."""
        self.process.terminate()
        try:
            self.process.wait(60)
        finally:
            if self.process.poll() is None:
                self.process.kill()


@contextmanager
def standing_ray(chips: int) -> Iterator[StandingRay]:
    """In a folder with a short name: the paths of sockets are bounded."""
    folder = Path(tempfile.mkdtemp(prefix="nr-", dir="/tmp"))
    ray = StandingRay(folder, chips)
    try:
        yield ray
    finally:
        ray.end()
        shutil.rmtree(folder, ignore_errors=True)
