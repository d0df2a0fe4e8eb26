"""How `nrank serve` ends: what is ended, in which order, and the exit code. No Ray is started."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from cluster.client import EngineState, EngineStatus
from deploy import foreground
from deploy.config import load_config
from deploy.foreground import Foreground
from placement.errors import RankError

SERVING = EngineStatus(EngineState.SERVING, ready=True, epoch=1)


class Answer:
    """Of a call to the coordinator. Without a value it never comes."""

    def __init__(self, value: object = None) -> None:
        self.value = value

    def result(self, timeout_s: float) -> object:
        if self.value is None:
            raise TimeoutError
        return self.value


class Method:
    def __init__(self, call: Callable[[], Answer]) -> None:
        self.remote = call


class World:
    """Ray, the coordinator and the terminal. `log` has what happened, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.signals: dict[str, signal.Signals] = {}  # by the happening that they come with
        self.drain_ends = True
        self.status = Method(lambda: Answer(SERVING))
        self.drain = Method(self._drain)
        self.close = Method(lambda: self.note("gang closed") or Answer(True))

    def note(self, what: str) -> None:
        self.log.append(what)
        if what in self.signals:
            signal.raise_signal(self.signals[what])

    def say(self, text: str) -> None:
        self.note(text.partition(":")[0].partition(",")[0])

    def _drain(self) -> Answer:
        self.note("drain asked")
        return Answer(self.drain_ends or None)

    def connection(self, address: str, resources: dict[str, float]) -> Any:
        world = self

        class Connection:
            def open(self, check: Callable[[], None]) -> str:
                world.note("opened")
                check()
                return ""

            def end(self, app: str) -> None:
                world.note("application ended")

            def close(self, app: str) -> None:
                world.note("Ray ended")

        return Connection()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(foreground.local_ray, "RayConnection", made.connection)
    monkeypatch.setattr(foreground.local_ray, "takes_jobs", lambda: True)
    monkeypatch.setattr(foreground, "check_resources", lambda resource, ranks: None)
    monkeypatch.setattr(foreground, "answers", lambda url: True)
    monkeypatch.setattr(foreground, "say", made.say)
    monkeypatch.setattr(Foreground, "_deploy", lambda self: made)
    return made


def run() -> int:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    code = Foreground(load_config(overrides={"port": 0})).run()
    after = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    signal.signal(signal.SIGHUP, before[2])
    assert after[:2] == before[:2]
    assert after[2] in (before[2], signal.SIG_IGN)  # a hangup may be told again, at the very end
    return code


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_drains_then_ends_the_application_then_ray(
    world: World, first: signal.Signals
) -> None:
    world.signals = {"ready": first}
    assert run() == 0
    assert world.log[world.log.index("ready") :] == [
        "ready", "draining", "drain asked", "gang closed", "drained",
        "application ended", "Ray ended",
    ]  # fmt: skip


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_ray_without_waiting_for_anything(
    world: World, second: signal.Signals
) -> None:
    world.drain_ends = False
    world.signals = {"ready": signal.SIGTERM, "drain asked": second}
    assert run() == 130
    assert world.log[world.log.index("drain asked") :] == [
        "drain asked", f"{second.name} again", "Ray ended",
    ]  # fmt: skip


@pytest.mark.parametrize(("early", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_before_it_is_ready_drains_nothing(
    world: World, early: signal.Signals, code: int
) -> None:
    world.signals = {"opened": early}
    assert run() == code
    assert world.log[world.log.index("opened") :] == [
        "opened", f"{early.name} before it was ready", "application ended", "Ray ended",
    ]  # fmt: skip


def test_a_gang_that_is_not_started_again_ends_the_server_with_its_cause(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreground, "WATCH_S", 0.01)
    statuses = iter([SERVING])
    failed = EngineStatus(EngineState.FAILED, ready=False, epoch=4, reason="rank 1 died")
    world.status = Method(lambda: Answer(next(statuses, failed)))
    with pytest.raises(RankError, match="rank 1 died"):
        run()
    assert world.log[-2:] == ["application ended", "Ray ended"]


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


def test_its_own_server_is_not_asked_through_a_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.delenv("no_proxy", raising=False)
    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        thread = threading.Thread(target=server.handle_request, daemon=True)
        thread.start()
        assert foreground.answers(f"http://127.0.0.1:{server.server_port}/ready")
        thread.join()
