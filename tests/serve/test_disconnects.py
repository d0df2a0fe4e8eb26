"""Clients that leave, on a real server: in prefill, in the queue, in decode, in crowds.

Whoever stays gets what it would have got alone, and nothing of those who left is kept.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.serve.fault_server import FaultServer

pytestmark = [pytest.mark.ray, pytest.mark.slow]

IDLE_S = 3.0  # after the last client has left
BUSY_S = 12.0  # what a busy machine may add
LIMIT_S = 120.0
SEQUENCES, QUEUE = 4, 16
LONG_PROMPT = "The river runs to the sea. " * 600  # many steps of prefill
PROMPT = "The river"


class RawClient:
    """A request on a bare socket, which can be closed without a goodbye."""

    def __init__(self, server: Any, body: dict[str, Any]) -> None:
        url = urlsplit(server.base_url)
        data = json.dumps(body).encode()
        head = (
            f"POST {url.path}/v1/completions HTTP/1.1\r\nHost: {url.netloc}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self.socket = socket.create_connection((url.hostname, url.port), LIMIT_S)
        self.socket.sendall(head.encode() + data)

    def close(self, how: str) -> None:
        """`fin`: an orderly end of the connection; `reset`: the connection is torn down."""
        if how == "reset":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def until_idle(faults: FaultServer) -> float:
    begun_s = time.monotonic()
    faults.server.until("idleness", lambda: faults.in_use() == (0, 0, 0, 0))
    took_s = time.monotonic() - begun_s
    assert took_s < IDLE_S + BUSY_S
    return took_s


def leader(faults: FaultServer) -> dict[str, Any]:
    return dict(faults.server.status()["snapshots"][0])


@pytest.mark.parametrize("how", ["fin", "reset"])
@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize("where", ["prefill", "decode", "queue"])
def test_who_leaves_is_gone_and_who_stays_is_served(
    fault_server: FaultServer, where: str, streamed: bool, how: str
) -> None:
    server = fault_server.server
    fault_server.settle()
    text = server.complete(PROMPT, 200)
    ahead = SEQUENCES - 1 if where == "queue" else 0
    fillers = [server.stream(PROMPT, 8000).wait_events(1) for _ in range(ahead)]
    neighbour = server.stream(PROMPT, 200).wait_events(1)
    marked = f"{how} {streamed} {where} "  # no prefix that is there already
    prompt = marked + (LONG_PROMPT if where == "prefill" else PROMPT)
    wanted = 4 if where == "prefill" else 8000
    client = RawClient(server, server.body(prompt, wanted, stream=streamed))
    if where == "queue":
        server.until("a queued request", lambda: leader(fault_server)["waiting"] == 1)
    else:
        server.until("both run", lambda: leader(fault_server)["running"] == 2)
    tokens = leader(fault_server)["generation_tokens"]
    client.close(how)
    if where == "queue":
        server.until("an empty queue", lambda: leader(fault_server)["waiting"] == 0)
        assert leader(fault_server)["running"] >= ahead, "none of those ahead has ended for it"
    assert neighbour.join().ended_well
    assert neighbour.text == text
    for filler in fillers:
        filler.leave()
    took_s = until_idle(fault_server)
    made = leader(fault_server)["generation_tokens"] - tokens
    print(f"idle {took_s:.2f} s after the last client, {made} tokens made")


def test_two_hundred_who_leave_at_once(fault_server: FaultServer) -> None:
    server = fault_server.server
    before = fault_server.settle()
    text = server.complete(PROMPT, 400)
    neighbour = server.stream(PROMPT, 400).wait_events(1)
    rng = random.Random(5)
    for number in range(200):
        body = server.body(f"{number} {PROMPT}", 2000, stream=number % 2 == 0)
        client = RawClient(server, body)
        time.sleep(rng.choice((0.0, 0.0, 0.005, 0.03)))
        client.close(rng.choice(("fin", "reset")))
    assert neighbour.join().ended_well
    assert neighbour.text == text
    print(f"idle {until_idle(fault_server):.2f} s after the last of 200")
    assert server.complete(PROMPT, 400) == text
    assert server.status()["epoch"] == before["epoch"]


def test_a_crowd_is_served_or_refused_at_once(fault_server: FaultServer) -> None:
    """64 at once on 4 sequences and a queue of 16: nobody's stream breaks."""
    server = fault_server.server
    fault_server.settle()
    text = server.complete(PROMPT, 40)
    ends: list[tuple[int, float, str, str]] = []
    barrier = threading.Barrier(64)

    def ask() -> None:
        body = server.body(PROMPT, 40, stream=True)
        with httpx.Client(base_url=server.base_url, timeout=LIMIT_S) as client:
            barrier.wait(LIMIT_S)
            begun_s = time.monotonic()
            with client.stream("POST", "/v1/completions", json=body) as answer:
                head_s = time.monotonic() - begun_s
                read = answer.read().decode()
                retry = answer.headers.get("retry-after", "")
                ends.append((answer.status_code, head_s, retry, read))

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    refused = [end for end in ends if end[0] == 429]
    served = [end for end in ends if end[0] == 200]
    assert len(refused) + len(served) == 64
    assert len(served) >= SEQUENCES + QUEUE
    assert refused
    assert all(retry for _, _, retry, _ in refused)
    for _, _, _, read in served:
        lines = [line.removeprefix("data: ") for line in read.split("\n\n") if line]
        lines = [line for line in lines if not line.startswith(":")]
        assert lines.pop() == "[DONE]"
        events = [json.loads(line) for line in lines]
        assert "".join(e["choices"][0]["text"] for e in events if e.get("choices")) == text
    slowest_s = max(head_s for _, head_s, _, _ in refused)
    print(f"{len(served)} served, {len(refused)} refused, the slowest refusal {slowest_s:.2f} s")
    until_idle(fault_server)
