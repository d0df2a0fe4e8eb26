"""What a dead process does: of a rank, of the coordinator. Streams end, the gang comes back."""

from __future__ import annotations

import os
import signal

import pytest

pytestmark = pytest.mark.ray


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_streams_with_an_error_and_the_gang_comes_back(healthy, rank):
    before = healthy.status()
    text = healthy.complete("The river", 12)
    stream = healthy.stream("The river", 8000).wait_events(3)
    pids = [r["pid"] for r in before["ranks"]]
    healthy.kill_rank(rank)
    stream.join()
    assert stream.error["code"] == "rank_failure"
    assert stream.error["message"] == f"rank {rank} failed (phase run); retry later"
    assert not stream.ended_well
    assert healthy.get("/health").status_code == 200
    after = healthy.wait_ready()
    assert after["epoch"] == before["epoch"] + 1
    assert f"rank {rank} (pid {pids[rank]}" in after["last_failure"]["message"]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert healthy.complete("The river", 12) == text
    restarts = f'nrank_rank_restarts_total{{rank="{rank}"'
    assert restarts in healthy.get("/metrics").text


def test_a_killed_coordinator_takes_its_ranks_along_and_is_replaced(healthy):
    import ray

    pids = [r["pid"] for r in healthy.status()["ranks"]]
    stream = healthy.stream("The river", 8000).wait_events(3)
    os.kill(coordinator_pid(), signal.SIGKILL)
    stream.join()
    assert stream.error["code"] == "rank_failure"
    healthy.until(
        "the end of its ranks", lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    )
    after = healthy.wait_ready()
    assert {r["pid"] for r in after["ranks"]}.isdisjoint(pids)
    assert healthy.complete("The river", 8)
    free = ray.available_resources().get("NPU", 0)
    assert free == 4, "the group of the dead coordinator was given back"


def coordinator_pid() -> int:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline", "rb") as file:
                title = file.read(200)
            with open(f"/proc/{name}/environ", "rb") as file:
                environment = file.read()
        except OSError:
            continue
        # Only the one of this session: other clusters may run on this machine.
        ours = os.environ["RAY_AUTH_TOKEN_PATH"].encode() in environment
        if title.startswith(b"ray::ServeReplica:nrank:Coordinator") and ours:
            return int(name)
    raise AssertionError("no coordinator process found")
