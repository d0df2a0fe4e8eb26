"""The end of a server with work in it: by signal, by Serve, by force; and nothing left behind."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.fault_server import FaultServer, replica_pid
from tests.serve.faulty_rank import Order
from tests.serve.front import session_processes

pytestmark = [pytest.mark.ray, pytest.mark.slow]

LIMIT_S = 60.0
ENDLESS = 20_000
OURS = (b"ray::RankWorker", b"ray::ServeReplica", b"ray::ServeController", b"ray::ProxyActor")
BODY = {"model": "tiny-flash-next", "prompt": "The river", "max_tokens": 4}


@pytest.fixture
def with_config(tmp_path: Path) -> Callable[[str], tuple[str, ...]]:
    """Flags of `nrank serve` for a port of its own and the given lines of a config file."""

    def flags(lines: str) -> tuple[str, ...]:
        path = tmp_path / "config.yaml"
        path.write_text(lines)
        return ("--config", str(path), "--port", "0")

    return flags


def base_of(front: Any) -> str:
    return str(front.read_to("ready: ").partition("ready: ")[2].removesuffix("/v1"))


def test_a_drain_finishes_what_runs_and_refuses_what_comes(front, own_token, open_stream):
    one = front("--port", "0")
    base_url = base_of(one)
    stream = open_stream(base_url, 400).wait_events(2)
    one.process.send_signal(signal.SIGTERM)
    one.read_to("draining")
    with httpx.Client(base_url=base_url, timeout=LIMIT_S) as client:
        deadline_s = time.monotonic() + LIMIT_S
        while client.get("/ready").status_code == 200:
            assert time.monotonic() < deadline_s
        refused = client.post("/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert refused.headers["retry-after"]
        assert client.get("/health").status_code == 200
    assert stream.join().ended_well
    assert len([event for event in stream.events if event.get("choices")]) > 2
    assert one.finish() == 0
    assert "nrank: drained" in one.lines
    assert session_processes(own_token, OURS) == []


def test_a_drain_past_its_time_ends_streams_with_an_error(
    front, own_token, open_stream, with_config
):
    one = front(*with_config("drain_timeout_s: 1.0\n"))
    stream = open_stream(base_of(one), ENDLESS).wait_events(2)
    one.process.send_signal(signal.SIGTERM)
    assert stream.join().error["code"] == "draining"
    assert "drain_timeout_s=1" in stream.error["message"]
    assert one.finish() == 0
    assert "nrank: drain timeout: open requests were ended with an error" in one.lines
    assert session_processes(own_token, OURS) == []


def test_a_killed_command_leaves_no_process(front, own_token, open_stream):
    one = front("--port", "0")
    stream = open_stream(base_of(one), ENDLESS).wait_events(2)
    one.process.kill()
    one.process.wait(LIMIT_S)
    wait_gone(own_token, OURS, 30.0)
    wait_gone(own_token, (b"ray::",), 120.0)  # agents of Ray miss their raylet after a minute
    stream.join()
    assert not stream.ended_well


def wait_gone(own_token, titles: tuple[bytes, ...], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while left := session_processes(own_token, titles):
        assert time.monotonic() < deadline_s, left
        time.sleep(0.1)


def test_serve_that_ends_an_application_drains_it(
    serve_port: int, tmp_path: Path, serve_app: Callable[..., FaultServer]
) -> None:
    """Within `drain_timeout_s`, though Serve itself would wait longer and then cut."""
    import ray
    from ray import serve

    faults = serve_app("drained", tmp_path / "order", drain_timeout_s=4.0)
    before = faults.trace()
    short = faults.server.stream("The river", 40).wait_events(2)
    long = faults.server.stream("The river", ENDLESS).wait_events(2)
    serve.delete("drained")
    assert short.join().ended_well
    assert long.join().error["code"] == "draining"
    assert "drain_timeout_s=4" in long.error["message"]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in before.rank_pids)
    assert not os.path.exists(f"/proc/{before.coordinator}")
    free = ray.available_resources().get("NPU", 0.0)
    assert free == before.free_chips + len(before.rank_pids)


def test_a_killed_ingress_leaves_no_request_running(fault_server: FaultServer) -> None:
    """The gang stays; its requests are taken back; the next ingress serves."""
    before = fault_server.settle()
    text = fault_server.server.complete("The river", 12)
    stream = fault_server.server.stream("The river", ENDLESS).wait_events(2)
    os.kill(replica_pid(fault_server.app, "Ingress"), signal.SIGKILL)
    stream.join()
    assert not stream.ended_well
    after = fault_server.settle()
    assert after["epoch"] == before["epoch"]
    assert [r["pid"] for r in after["ranks"]] == [r["pid"] for r in before["ranks"]]
    assert fault_server.server.complete("The river", 12) == text


def test_a_fault_of_one_gang_does_not_touch_the_other(
    fault_server: FaultServer, healthy: Any
) -> None:
    before = healthy.status()
    fault_server.settle()
    text = healthy.complete("The river", 200)
    stream = healthy.stream("The river", 200).wait_events(2)
    fault_server.order(Order("kill", "idle", 1))
    fault_server.wait_obeyed()
    assert stream.join().ended_well
    assert stream.text == text
    fault_server.settle()
    assert healthy.status()["epoch"] == before["epoch"]
    assert healthy.status()["restarts"] == before["restarts"]


def test_restarts_past_the_cap_are_told_and_final(
    serve_app: Callable[..., FaultServer], tmp_path: Path
) -> None:
    from ray import serve

    faults = serve_app("capped", tmp_path / "order", restart_limit=0)
    server = faults.server
    faults.order(Order("raise", "idle", 1))
    server.until("failure", lambda: server.get("/health").status_code == 500)
    assert server.get("/ready").status_code == 503
    status = server.status()
    assert status["state"] == "failed"
    assert "rank 1" in status["reason"]
    assert "on purpose" in status["reason"]
    refused = server.http.post("/v1/completions", json=server.body("The river", 4))
    assert refused.status_code == 503
    serve.delete("capped")
