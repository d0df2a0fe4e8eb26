"""A served gang whose chips get hot: real streams over HTTP, a real `npu-smi` process a second."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.scripted_sensor import ScriptedSensor

pytestmark = [pytest.mark.ray]

NUM_TOKENS = 500
PROMPTS = ("The river", "A cache keeps", "To read a file", "Count from 3")
SILENCE_S = 2.0


class HeatServer:
    """The server, its sensor, and which chip its rank 1 runs on."""

    def __init__(self, server: Any, sensor: ScriptedSensor) -> None:
        self.server, self.sensor = server, sensor

    def heat(self, celsius: float) -> None:
        self.sensor.heat(self.server.status()["ranks"][1]["physical_chip"], celsius)

    def order(self) -> dict[str, Any]:
        return dict(self.server.status()["heat"])

    def wait_order(self, order: str) -> dict[str, Any]:
        self.server.until(order, lambda: self.order()["order"] == order)
        return self.order()

    def streams(self) -> list[Any]:
        made = [self.server.stream(prompt, NUM_TOKENS) for prompt in PROMPTS]
        return [stream.wait_events(2) for stream in made]

    def step(self) -> int:
        return int(self.server.status()["snapshots"][0]["step"])

    def held_s(self, cause: str) -> float:
        text = self.server.get("/metrics").text
        found = re.search(rf'^nrank_hold_seconds_total{{cause="{cause}"}} (\S+)$', text, re.M)
        return float(found[1]) if found else 0.0


@pytest.fixture(scope="module")
def heat_server(serve_port: int, sensor: ScriptedSensor) -> Iterator[HeatServer]:
    from ray import serve

    from deploy.config import load_config
    from deploy.serve import application
    from tests.serve.conftest import Server, quiet

    config = load_config(
        overrides={
            "ranks": 2, "resource_name": "NPU", "port": serve_port, "sensors": "on",
            "silence_s": SILENCE_S, "max_sequences": 4, "step_timeout_s": 20.0,
            "sse_comment_interval_s": 1.0,
        }
    )  # fmt: skip
    serve.run(application(config), name="heat", route_prefix="/heat", logging_config=quiet())
    server = Server(f"http://127.0.0.1:{serve_port}/heat")
    server.wait_ready()
    yield HeatServer(server, sensor)
    serve.delete("heat")


@pytest.fixture
def warm(heat_server: HeatServer) -> Iterator[HeatServer]:
    heat_server.sensor.heal()
    heat_server.heat(70)
    heat_server.wait_order("run")
    heat_server.server.wait_ready()
    yield heat_server
    heat_server.sensor.heal()


def test_streams_pause_at_95_and_go_on_at_84_with_the_same_tokens(warm: HeatServer) -> None:
    server = warm.server
    unheld = [server.complete(prompt, NUM_TOKENS) for prompt in PROMPTS]
    before_s, pids = warm.held_s("heat"), [r["pid"] for r in server.status()["ranks"]]
    streams = warm.streams()
    warm.heat(88)
    warm.wait_order("pace")
    warm.heat(95)
    told = warm.wait_order("hold")
    began_s = time.monotonic()
    assert told["cause"] == "heat"
    assert "reached 95 °C, hold_celsius=94" in told["reason"]
    ready = server.get("/ready")
    assert ready.status_code == 503
    assert "95 °C" in ready.text
    assert server.get("/health").status_code == 200
    server.until("rest", lambda: warm.step() == (time.sleep(1.5), warm.step())[1])
    step = warm.step()
    queued = server.stream("Once more", 5)
    with httpx.Client(base_url=server.base_url, timeout=60) as client:
        body = server.body("Quiet", 3, stream=True)
        with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            assert next(response.iter_lines()).startswith(":"), "a comment keeps the client"
    assert warm.step() == step
    assert not any(stream.ended_well for stream in streams)
    warm.heat(84)
    warm.wait_order("run")
    paused_s = time.monotonic() - began_s
    assert [stream.join().text for stream in streams] == unheld
    assert all(stream.ended_well for stream in (*streams, queued.join()))
    assert warm.held_s("heat") - before_s == pytest.approx(paused_s, abs=2.5)
    assert [r["pid"] for r in server.status()["ranks"]] == pids
    assert server.status()["restarts"] == 0


def test_a_cut_at_97_ends_streams_with_an_error_and_ranks_stay(warm: HeatServer) -> None:
    server = warm.server
    pids = [r["pid"] for r in server.status()["ranks"]]
    answer = server.complete("The river", 8)
    streams = warm.streams()
    for celsius, order in ((95, "hold"), (97, "cut")):
        warm.heat(celsius)
        warm.wait_order(order)
    for stream in streams:
        error = stream.join().error
        assert error is not None
        assert error["code"] == "held"
        assert "97 °C" in error["message"]
        assert not stream.ended_well
    refused = server.http.post("/v1/completions", json=server.body("The river", 8))
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "held"
    assert refused.headers["retry-after"]
    warm.heat(84)
    warm.wait_order("run")
    server.wait_ready()
    assert server.complete("The river", 8) == answer
    assert [r["pid"] for r in server.status()["ranks"]] == pids


@pytest.mark.parametrize("how", [pytest.param("stuck", marks=pytest.mark.slow), "broken"])
def test_sensors_that_fail_raise_the_alarm_and_then_hold(warm: HeatServer, how: str) -> None:
    server = warm.server
    (stream,) = [server.stream("The river", 60).wait_events(1)]
    warm.sensor.fail(how)
    told = warm.wait_order("hold")
    assert told["cause"] == "silence"
    assert told["silent_ranks"] == [0, 1]
    assert "nrank_sensor_silent_ranks 2.0" in server.get("/metrics").text
    queued = server.stream("The sea", 5)
    warm.sensor.heal()
    warm.wait_order("run")
    assert stream.join().ended_well
    assert queued.join().ended_well
    assert warm.held_s("silence") > 0
