"""The metrics table and what it shows: every name once, sums that survive restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.client import EngineState
from cluster.metrics import METRICS, RANK_SILENT_S, BuildInfo, EngineMetrics, MetricType
from placement.errors import ErrorKind
from rank_worker.messages import (
    EngineRequest,
    FinishReason,
    LoadProgress,
    RankSnapshot,
    TokenBatch,
)

SNAPSHOT = RankSnapshot(
    rank=0,
    epoch=1,
    time_s=100.0,
    step=10,
    running=2,
    waiting=1,
    preemptions=1,
    pages_used=5,
    pages_total=20,
    slots_used=2,
    slots_total=8,
    step_seconds=3.0,
    collective_seconds=1.5,
    busy_steps=9,
    weights_planned_bytes=1000,
    weights_read_bytes=1000,
    load_seconds=2.5,
    expert_tokens=70,
    memory_bytes={"routed_experts": 600, "kv_pages": 400},
)
MODEL = "m"
Read = Callable[..., float | None]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics(clock: Clock) -> EngineMetrics:
    return EngineMetrics(MODEL, 2, BuildInfo("1.0", "abc", "cpu", "2.13"), clock)


@pytest.fixture
def read(metrics: EngineMetrics) -> Read:
    """Value of one sample in the rendered text, None when there is no such series."""

    def get(name: str, **labels: str) -> float | None:
        for family in text_string_to_metric_families(metrics.render().decode()):
            for sample in family.samples:
                wanted = {key.rstrip("_"): value for key, value in labels.items()}
                if sample.name == name and wanted.items() <= sample.labels.items():
                    return sample.value
        return None

    return get


def request(request_id: str = "r", prompt: int = 4) -> EngineRequest:
    return EngineRequest(request_id, (1,) * prompt, 10, arrival_s=98.0)


def test_exactly_the_table_is_rendered(metrics: EngineMetrics) -> None:
    metrics.update_snapshots([SNAPSHOT])
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    rendered = {
        f"{name}_total" if family.type == "counter" else name: family
        for name, family in families.items()
    }
    assert set(rendered) == {spec.name for spec in METRICS}
    for spec in METRICS:
        assert rendered[spec.name].type == spec.type.value
        assert rendered[spec.name].documentation == spec.help
    assert b"_created" not in metrics.render()


def test_the_tables_names_follow_prometheus() -> None:
    names = [spec.name for spec in METRICS]
    assert len(names) == len(set(names))
    for spec in METRICS:
        assert spec.name.startswith("nrank_")
        if spec.type is MetricType.COUNTER:
            assert spec.name.endswith("_total")
        if spec.unit:
            assert spec.unit in spec.name
        assert list(spec.buckets) == sorted(set(spec.buckets))
        assert bool(spec.buckets) == (spec.type is MetricType.HISTOGRAM)


def test_instances_share_nothing(metrics: EngineMetrics, clock: Clock, read: Read) -> None:
    other = EngineMetrics("other", 1, clock=clock)
    other.observe_http("/v1/models", 200)
    assert read("nrank_requests_total", endpoint="/v1/models") is None
    assert b'model_name="m"' not in other.render()


def test_a_request_fills_the_latency_histograms(
    metrics: EngineMetrics, clock: Clock, read: Read
) -> None:
    metrics.observe_started(request())
    metrics.observe_batch(TokenBatch("r", (5,), time_s=99.5, prompt_tokens=4, cached_tokens=3))
    clock.now_s = 101.0  # two steps come in one message
    metrics.observe_batch(TokenBatch("r", (6, 7), time_s=100.0))
    metrics.observe_batch(TokenBatch("r", (8,), FinishReason.LENGTH, time_s=100.5))
    assert read("nrank_time_to_first_token_seconds_sum") == 2.0
    assert read("nrank_time_to_first_token_seconds_bucket", le="2.0") == 1
    assert read("nrank_inter_token_latency_seconds_count") == 3
    assert read("nrank_inter_token_latency_seconds_sum") == 1.0
    assert read("nrank_inter_token_latency_seconds_bucket", le="0.25") == 2
    assert read("nrank_e2e_request_latency_seconds_sum") == 3.0
    assert read("nrank_prompt_tokens_total", model_name=MODEL) == 4
    assert read("nrank_generation_tokens_total") == 4
    assert read("nrank_request_success_total", finish_reason="length") == 1


def test_every_end_is_counted_once(metrics: EngineMetrics, read: Read) -> None:
    for name in ("stop", "left", "failed"):
        metrics.observe_started(request(name))
    metrics.observe_stopped("stop")
    metrics.observe_aborted("left", ErrorKind.CANCELLED)
    metrics.observe_batch(TokenBatch("failed", (), FinishReason.ERROR, error_kind="non_finite"))
    for name in ("stop", "left", "failed", "never"):
        metrics.observe_stopped(name)
        metrics.observe_aborted(name, ErrorKind.CANCELLED)
        metrics.observe_batch(TokenBatch(name, (1,), FinishReason.STOP))
    metrics.observe_rejected(ErrorKind.QUEUE_FULL)
    assert read("nrank_request_success_total", finish_reason="stop") == 1
    assert read("nrank_requests_aborted_total", reason="cancelled") == 1
    assert read("nrank_requests_aborted_total", reason="non_finite") == 1
    assert read("nrank_requests_rejected_total", reason="queue_full") == 1
    assert read("nrank_generation_tokens_total") == 0


def test_the_state_is_one_hot(metrics: EngineMetrics, read: Read) -> None:
    for state in EngineState:
        metrics.set_state(state)
        values = {name: read("nrank_engine_state", state=name) for name in EngineState}
        assert values == {name: float(name is state) for name in EngineState}


def test_http_outcomes_restarts_and_build(metrics: EngineMetrics, read: Read) -> None:
    metrics.observe_http("/v1/completions", 429)
    metrics.observe_restart("silent", ranks=[1])
    assert read("nrank_requests_total", endpoint="/v1/completions", code="429") == 1
    assert read("nrank_gang_restarts_total", reason="silent") == 1
    assert read("nrank_rank_restarts_total", rank="1", reason="silent") == 1
    assert read("nrank_build_info", version="1.0", git_sha="abc", backend="cpu") == 1


def test_snapshots_become_rank_series(metrics: EngineMetrics, read: Read) -> None:
    metrics.update_snapshots([SNAPSHOT, replace(SNAPSHOT, rank=1, running=9, expert_tokens=30)])
    assert read("nrank_requests_running") == 2
    assert read("nrank_requests_waiting") == 1
    assert read("nrank_kv_pages_used") == 5
    assert read("nrank_kv_pages_total") == 20
    assert read("nrank_kv_cache_usage_ratio") == 0.25
    assert read("nrank_state_slots_used") == 2
    assert read("nrank_state_slots_total") == 8
    assert read("nrank_expert_tokens_total", rank="0") == 70
    assert read("nrank_expert_tokens_total", rank="1") == 30
    assert read("nrank_rank_step_seconds_sum", rank="1") == 3.0
    assert read("nrank_rank_step_seconds_count", rank="1") == 9
    assert read("nrank_collective_seconds_sum", rank="0") == 1.5
    assert read("nrank_weights_loaded_bytes_total", rank="0") == 1000
    assert read("nrank_weights_planned_bytes", rank="1") == 1000
    assert read("nrank_weights_load_seconds", rank="1") == 2.5
    component = {"rank": "1", "component": "kv_pages"}
    assert read("nrank_rank_memory_component_bytes", **component) == 400
    assert read("nrank_rank_up", rank="1") == 1


def test_a_load_in_progress_shows_weights_and_no_pools(
    metrics: EngineMetrics, clock: Clock, read: Read
) -> None:
    """The slow rank is the one whose bytes grow slowest; after the load, with most seconds."""
    slow = LoadProgress(1, "loading", 250, 1000, 2.0)
    metrics.update_load(1, [LoadProgress(0, "starting"), slow])
    assert read("nrank_weights_planned_bytes", rank="0") is None
    assert read("nrank_weights_planned_bytes", rank="1") == 1000
    assert read("nrank_weights_loaded_bytes_total", rank="1") == 250
    assert read("nrank_weights_load_seconds", rank="1") == 2.0
    assert read("nrank_rank_up", rank="0") == 1
    assert read("nrank_kv_pages_total") is None
    metrics.update_load(1, [replace(slow, read_bytes=900, seconds=8.0)])
    assert read("nrank_weights_loaded_bytes_total", rank="1") == 900
    metrics.update_snapshots([SNAPSHOT, replace(SNAPSHOT, rank=1, step=0, load_seconds=9.0)])
    assert read("nrank_weights_loaded_bytes_total", rank="1") == 1000
    assert read("nrank_weights_load_seconds", rank="1") == 9.0
    assert read("nrank_kv_pages_total") == 20
    clock.now_s += RANK_SILENT_S + 1
    assert read("nrank_weights_load_seconds", rank="1") is None


def test_counters_never_go_back_over_a_restart(metrics: EngineMetrics, read: Read) -> None:
    def total() -> float | None:
        return read("nrank_expert_tokens_total", rank="0")

    metrics.update_snapshots([SNAPSHOT])
    metrics.update_snapshots([SNAPSHOT])
    assert total() == 70
    metrics.update_snapshots([replace(SNAPSHOT, step=11, expert_tokens=75)])
    assert total() == 75
    restarted = replace(SNAPSHOT, epoch=2, step=1, expert_tokens=4)
    metrics.update_snapshots([restarted])
    assert total() == 79
    metrics.update_snapshots([replace(SNAPSHOT, step=99, expert_tokens=500)])  # a late old one
    assert total() == 79
    metrics.update_snapshots([replace(restarted, step=2, expert_tokens=90)])
    assert total() == 165
    assert read("nrank_preemptions_total") == 2


def test_a_silent_rank_is_down_and_its_gauges_go(
    metrics: EngineMetrics, clock: Clock, read: Read
) -> None:
    assert read("nrank_rank_up", rank="0") == 0
    assert read("nrank_rank_heartbeat_age_seconds", rank="0") is None
    metrics.update_snapshots([SNAPSHOT])
    clock.now_s = 100.0 + RANK_SILENT_S
    assert read("nrank_rank_up", rank="0") == 1
    clock.now_s += 1
    assert read("nrank_rank_up", rank="0") == 0
    assert read("nrank_rank_up", rank="1") == 0
    assert read("nrank_rank_heartbeat_age_seconds", rank="0") == RANK_SILENT_S + 1
    assert read("nrank_kv_pages_total") is None
    assert read("nrank_rank_memory_component_bytes", rank="0") is None
    assert read("nrank_requests_running") == 0
    assert read("nrank_expert_tokens_total", rank="0") == 70
