"""What `nrank serve` tells while a gang starts, and what a running server tells of its start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.client import EngineState, EngineStatus, RankStatus
from deploy.config import load_config
from deploy.foreground import Foreground
from rank_worker.start_report import RankBytes, StartReport

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


def loading(rank: int, read_mib: int) -> RankStatus:
    return RankStatus(
        rank,
        "loading",
        weights_read_bytes=read_mib * MIB,
        weights_planned_bytes=64 * MIB,
        load_seconds=2.0,
    )


def test_a_start_is_told_from_loading_to_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    foreground = Foreground(load_config())
    starting = EngineStatus(EngineState.STARTING, ready=False, reason="loading", epoch=1)
    foreground._tell(starting)
    for read in (16, 17, 18):  # at once: within the time of one line
        ranks = (loading(0, 64), loading(1, read))
        foreground._tell(
            EngineStatus(
                EngineState.STARTING, False, "loading", epoch=1, slowest_rank=1, ranks=ranks
            )
        )
    report = StartReport(0.001, 0.004, 1, (RankBytes(0, MIB, MIB), RankBytes(1, MIB, 2 * MIB)))
    for _ in range(2):
        foreground._tell(
            EngineStatus(
                EngineState.SERVING, True, epoch=1, start=report, configured_tokens=4096,
                allocated_tokens=3072, certified_tokens=2048,
            )
        )  # fmt: skip
    assert capsys.readouterr().out.splitlines() == [
        "nrank: gang 1: starting (loading)",
        "nrank: loading: 80.0 MiB of 128.0 MiB read; slowest is rank 1: 16.0 MiB of 64.0 MiB "
        "(25%), 8.4 MB/s, 6 s left",
        "nrank: gang 1: serving",
        "nrank: decode step: at least 1 ms estimated, 4 ms measured (one sequence, short context, "
        "slowest rank 1); weights and caches planned and measured: rank 0 1.0 MiB and 1.0 MiB, "
        "rank 1 1.0 MiB and 2.0 MiB",
        "nrank: context: 4096 tokens configured, 3072 allocated, 2048 certified",
    ]


@pytest.mark.ray
def test_a_server_tells_planned_beside_measured(healthy: Any) -> None:
    status = healthy.status()
    start = status["start"]
    assert start["estimated_step_s"] > 0
    assert start["measured_step_s"] > 0
    assert [rank["rank"] for rank in start["ranks"]] == [0, 1]
    for rank in start["ranks"]:
        assert rank["measured_bytes"] == rank["planned_bytes"] > 0
    for rank in status["ranks"]:
        assert rank["weights_read_bytes"] == rank["weights_planned_bytes"] > 0
        assert rank["load_seconds"] > 0
    families = {f.name: f for f in text_string_to_metric_families(healthy.get("/metrics").text)}
    planned = {s.labels["rank"]: s.value for s in families["nrank_weights_planned_bytes"].samples}
    assert planned == {str(r["rank"]): r["weights_planned_bytes"] for r in status["ranks"]}
    loaded = families["nrank_weights_loaded_bytes"].samples
    assert all(s.value >= planned[s.labels["rank"]] for s in loaded), "each start reads them again"


@pytest.mark.ray
def test_a_server_tells_its_routing_counts_and_a_plan_takes_them(healthy: Any) -> None:
    before = healthy.get("/status/experts").json()["layers"]
    healthy.complete("The river", max_tokens=8)
    after = healthy.get("/status/experts").json()["layers"]
    *grown, drafted = (sum(new) - sum(old) for new, old in zip(after, before, strict=True))
    assert len(set(grown)) == 1
    assert grown[0] >= 8
    assert drafted > 0, "the draft head's experts are the last layer"
    command = [sys.executable, "-m", "deploy.cli", "plan", "--ranks", "2", "--json"]
    done = subprocess.run(
        [*command, "--counts", f"{healthy.base_url}/v1"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "count" in json.loads(done.stdout)["ownership"]["reason"]
