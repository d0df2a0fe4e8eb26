"""The metrics table and what it shows: every name once, sums that survive restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.client import EngineState
from cluster.engine_metrics import RANK_SILENT_S, BuildInfo, EngineMetrics
from cluster.heat_series import CAUSES
from cluster.metrics import JOB_METRICS, METRICS, RESTART_REASONS, MetricType
from cluster.thermal_guard import HeatLimits, Verdict
from ops.registry import REFERENCES
from placement.errors import ErrorKind
from placement.ledger import ROWS
from placement.plan import ContextPlan, Plan
from rank_worker.device_sensors.reading import STALE_S, CardReading, ChipReading, NodeReading
from rank_worker.guard_word import Order
from rank_worker.messages import (
    CopyFigures,
    EngineRequest,
    FinishReason,
    LoadProgress,
    PrefixFigures,
    RankSnapshot,
    TokenBatch,
)
from rank_worker.prefix_cache import MISS_REASONS
from rank_worker.step_clock import StepPart
from rank_worker.step_plan import CopyKind

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
    step_parts={"experts": 1.25, "collective_wait": 0.5},
    ops={"linear": "ops.cpu.dense.linear"},
    expert_tokens=70,
    memory_bytes={"routed_experts": 600, "kv_pages": 400},
)
MODEL = "m"
MAX_SERIES_A_RANK = 110  # 20 of them are reasons of restarts, which seldom all happen
MAX_SERIES_BESIDE = 300  # of the gang: histograms, operators, reasons
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
    return EngineMetrics(MODEL, 2, BuildInfo("1.0", "abc", "cpu", "2.13", "p1", "c1"), clock)


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
    table = (*METRICS, *JOB_METRICS)
    names = [spec.name for spec in table]
    assert len(names) == len(set(names))
    for spec in table:
        assert spec.name.startswith("nrank_")
        assert spec.name.endswith("_total") == (spec.type is MetricType.COUNTER)
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
    metrics.observe_restart("collective", ranks=[1])
    metrics.observe_restart("a phase that nobody listed")
    assert read("nrank_requests_total", endpoint="/v1/completions", code="429") == 1
    assert read("nrank_gang_restarts_total", reason="collective") == 1
    assert read("nrank_gang_restarts_total", reason="other") == 1
    assert read("nrank_rank_restarts_total", rank="1", reason="collective") == 1
    assert read("nrank_build_info", version="1.0", git_sha="abc", backend="cpu") == 1
    assert read("nrank_build_info", plan_id="p1", config_hash="c1") == 1


def test_snapshots_become_rank_series(metrics: EngineMetrics, read: Read) -> None:
    metrics.update_snapshots([SNAPSHOT, replace(SNAPSHOT, rank=1, running=9, expert_tokens=30)])
    assert read("nrank_requests_running") == 2
    assert read("nrank_requests_waiting") == 1
    assert read("nrank_kv_pages_used") == 5
    assert read("nrank_kv_pages_capacity") == 20
    assert read("nrank_kv_cache_usage_ratio") == 0.25
    assert read("nrank_state_slots_used") == 2
    assert read("nrank_state_slots_capacity") == 8
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


def test_the_split_of_steps_and_the_operators(metrics: EngineMetrics, read: Read) -> None:
    metrics.update_snapshots([SNAPSHOT, replace(SNAPSHOT, rank=1, ops={})])
    metrics.update_snapshots([replace(SNAPSHOT, step=11, step_parts={"experts": 2.0})])
    metrics.update_snapshots([replace(SNAPSHOT, epoch=2, step=0, step_parts={"experts": 0.25})])
    name = "nrank_rank_step_part_seconds_total"
    assert read(name, rank="0", part="experts") == 2.25
    assert read(name, rank="1", part="collective_wait") == 0.5
    assert read(name, rank="0", part="host") is None
    assert read("nrank_op_info", op="linear", implementation="ops.cpu.dense.linear") == 1


def test_decode_steps_outside_graphs_are_summed_by_reason(
    metrics: EngineMetrics, read: Read
) -> None:
    first = {"rows": 0, "check": 2}
    metrics.update_snapshots([replace(SNAPSHOT, rank=1, eager_fallbacks=first)])
    assert read("nrank_graph_eager_fallbacks_total", rank="1", reason="rows") == 0
    later = replace(SNAPSHOT, rank=1, step=11, eager_fallbacks={"rows": 1, "check": 3})
    metrics.update_snapshots([later])
    restarted = replace(SNAPSHOT, rank=1, epoch=2, step=0, eager_fallbacks={"rows": 4, "check": 0})
    metrics.update_snapshots([restarted])
    assert read("nrank_graph_eager_fallbacks_total", rank="1", reason="rows") == 5
    assert read("nrank_graph_eager_fallbacks_total", rank="1", reason="check") == 3
    assert read("nrank_graph_eager_fallbacks_total", rank="0", reason="rows") is None


def test_a_plan_stands_beside_what_is_measured(metrics: EngineMetrics, read: Read) -> None:
    rows = {"kv_pages": 410, "workspace": 7}
    ranks = (SimpleNamespace(rows=rows),) * 2
    plan = SimpleNamespace(ranks=ranks, context=ContextPlan(4096, 2048))
    metrics.set_plan(cast(Plan, plan))
    planned = "nrank_rank_memory_planned_bytes"
    assert read(planned, rank="1", component="kv_pages") == 410
    assert read(planned, rank="0", component="workspace") == 7
    kinds = ("configured", "allocated", "certified")
    assert [read("nrank_context_tokens", kind=k) for k in kinds] == [4096, 2048, 0]


def test_whatever_may_go_wrong_is_zero_before(read: Read) -> None:
    """A counter that is born with 1 has no increase, and no alert sees it."""
    for name in ("nrank_requests_rejected_total", "nrank_requests_aborted_total"):
        assert {read(name, reason=kind) for kind in ErrorKind} == {0}
    assert {read("nrank_hold_seconds_total", cause=one) for one in CAUSES} == {0}
    assert {read("nrank_gang_restarts_total", reason=one) for one in RESTART_REASONS} == {0}


def test_readings_become_series_of_chips_and_the_unknown_is_absent(
    metrics: EngineMetrics, read: Read
) -> None:
    """Power is a card's; ranks are labels of chips that they run on, in the order of devices."""
    chips = (
        ChipReading(
            2, 0, 0, temperature_celsius=61, health="alarm", ecc_single_bit=3, error_codes=("a1",)
        ),
        ChipReading(2, 1, 1, memory_used_bytes=5, core_utilisation_ratio=0.5, ecc_enabled=True),
        ChipReading(9, 0, 2, temperature_celsius=40),
    )
    reading = NodeReading(monotonic(), 0.0, "npu-smi", chips, (CardReading(2, 51.5),))
    metrics.observe_heat(reading, Verdict(silent_ranks=(0,)), (1, 0))
    metrics.set_held(Order.HOLD, {"heat": 2.0})
    celsius = "nrank_chip_temperature_celsius"
    assert read(celsius, rank="1", card="2", chip="0") == 61
    assert read(celsius, rank="0") is None
    assert read(celsius, card="9", rank="") == 40
    assert read("nrank_chip_memory_used_bytes", rank="0", card="2", chip="1") == 5
    assert read("nrank_chip_core_utilisation_ratio", rank="0") == 0.5
    assert read("nrank_chip_bandwidth_utilisation_ratio") is None
    assert read("nrank_chip_health", rank="1", state="alarm") == 1
    assert read("nrank_chip_health", rank="1", state="ok") == 0
    assert read("nrank_chip_error_codes", rank="1") == 1
    assert read("nrank_chip_ecc_enabled", rank="0") == 1
    assert read("nrank_chip_ecc_errors_total", rank="1", kind="single_bit") == 3
    assert read("nrank_chip_ecc_errors_total", kind="double_bit") is None
    assert read("nrank_card_power_watts", card="2") == 51.5
    assert read("nrank_card_power_watts", card="9") is None
    assert read("nrank_sensor_silent_ranks") == 1
    age_s = read("nrank_sensor_age_seconds")
    assert age_s is not None
    assert 0 <= age_s < 60
    assert read("nrank_heat_order", order="hold") == 1
    assert read("nrank_heat_order", order="run") == 0
    assert read("nrank_hold_seconds_total", cause="heat") == 2.0


def test_limits_of_the_guard_are_those_of_each_chip(metrics: EngineMetrics, read: Read) -> None:
    """A card that tells where it ends lowers them, and a guard that is off has none."""
    chips = (ChipReading(2, 0, 0), ChipReading(2, 1, 1, shutdown_celsius=80))
    metrics.observe_heat(
        NodeReading(monotonic(), 0.0, "npu-smi", chips, ()), Verdict(silent_ranks=(0, 1)), (0, 1)
    )
    assert read("nrank_chip_limit_celsius") is None
    limits = HeatLimits(hold_celsius=80, resume_celsius=70, cut_celsius=90)
    metrics.set_heat_limits(limits)
    for kind, celsius in (("hold", 80), ("resume", 70), ("cut", 90)):
        assert read("nrank_chip_limit_celsius", rank="0", kind=kind) == celsius
    lowered = read("nrank_chip_limit_celsius", rank="1", kind="hold")
    assert lowered == limits.of(chips[1]).hold_celsius < 80


def test_a_stale_reading_tells_its_age_and_no_values(metrics: EngineMetrics, read: Read) -> None:
    old_s = monotonic() - STALE_S - 100
    chip = ChipReading(2, 0, 0, temperature_celsius=61)
    reading = NodeReading(old_s, 0.0, "npu-smi", (chip,), (CardReading(2, 50.0),))
    metrics.observe_heat(reading, Verdict(silent_ranks=(0, 1)), (0, 1))
    assert read("nrank_chip_temperature_celsius") is None
    assert read("nrank_card_power_watts") is None
    age_s = read("nrank_sensor_age_seconds")
    assert age_s is not None
    assert age_s > STALE_S + 99
    assert read("nrank_sensor_silent_ranks") == 2


def test_labels_stay_few_on_a_large_machine(clock: Clock) -> None:
    """64 ranks on 32 cards, every figure known: at most MAX_SERIES, whatever the traffic."""
    ranks = range(64)
    metrics = EngineMetrics(MODEL, len(ranks), clock=clock)
    rows = dict.fromkeys(ROWS, 1)
    planned = (SimpleNamespace(rows=rows),) * len(ranks)
    plan = SimpleNamespace(ranks=planned, context=ContextPlan(1, 1))
    metrics.set_plan(cast(Plan, plan))
    tiers = {"device": 1, "host": 1}
    copies = {kind.name.lower(): CopyFigures(1, 1, 1.0) for kind in CopyKind}
    full = replace(
        SNAPSHOT,
        memory_bytes=rows,
        step_parts=dict.fromkeys(StepPart, 1.0),
        ops={op: f"ops.cpu.{op}" for op in REFERENCES},
        accepted_by_position=(4, 3, 2, 1),
        prefix_cache=PrefixFigures(
            misses=dict.fromkeys(MISS_REASONS, 1), states=tiers, cells=tiers, cell_bytes=tiers,
            copies=copies, events=dict.fromkeys(("saved", "spilled", "restored"), 1),
        ),
    )  # fmt: skip
    metrics.update_snapshots([replace(full, rank=rank) for rank in ranks])
    for rank in ranks:
        for reason in RESTART_REASONS:
            metrics.observe_restart(reason, (rank,))
    for number in range(1000):
        metrics.observe_started(request(f"r{number}"))
        metrics.observe_batch(TokenBatch(f"r{number}", (5,), FinishReason.STOP))
    chips = tuple(
        ChipReading(
            rank // 2, rank % 2, rank, "", 50.0, 1, 1, 0.5, 0.5, "ok", (), True, 0, 0, 105.0
        )
        for rank in ranks
    )
    cards = tuple(CardReading(card, 50.0) for card in range(32))
    reading = NodeReading(monotonic(), 0.0, "dcmi", chips, cards)
    metrics.observe_heat(reading, Verdict(), tuple(ranks))
    metrics.set_heat_limits(HeatLimits())
    families = text_string_to_metric_families(metrics.render().decode())
    series = [sample for family in families for sample in family.samples]
    per_rank = sum("rank" in sample.labels for sample in series) / len(ranks)
    assert 60 < per_rank <= MAX_SERIES_A_RANK
    assert len(series) - per_rank * len(ranks) <= MAX_SERIES_BESIDE


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
    assert read("nrank_kv_pages_capacity") is None
    metrics.update_load(1, [replace(slow, read_bytes=900, seconds=8.0)])
    assert read("nrank_weights_loaded_bytes_total", rank="1") == 900
    metrics.update_snapshots([SNAPSHOT, replace(SNAPSHOT, rank=1, step=0, load_seconds=9.0)])
    assert read("nrank_weights_loaded_bytes_total", rank="1") == 1000
    assert read("nrank_weights_load_seconds", rank="1") == 9.0
    assert read("nrank_kv_pages_capacity") == 20
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
    assert read("nrank_kv_pages_capacity") is None
    assert read("nrank_rank_memory_component_bytes", rank="0") is None
    assert read("nrank_requests_running") == 0
    assert read("nrank_expert_tokens_total", rank="0") == 70


def test_ranks_of_a_gang_that_has_ended_are_down_at_once(
    metrics: EngineMetrics, read: Read
) -> None:
    metrics.update_snapshots([SNAPSHOT, replace(SNAPSHOT, rank=1)])
    metrics.end_ranks(SNAPSHOT.epoch)
    assert read("nrank_requests_running") == 0
    assert read("nrank_kv_pages_used") is None
    assert read("nrank_rank_up", rank="1") == 0
    assert read("nrank_rank_memory_component_bytes", rank="0") is None
    assert read("nrank_expert_tokens_total", rank="0") == 70
    metrics.update_snapshots([replace(SNAPSHOT, epoch=2, step=0, expert_tokens=3)])
    assert read("nrank_rank_up", rank="0") == 1
    assert read("nrank_kv_pages_used") == 5
    assert read("nrank_expert_tokens_total", rank="0") == 73
