"""All metrics: the one table of names, and what turns observations into Prometheus text.

Owns metric names (nobody else writes one) and the sums that must never go backwards when a gang
restarts. Lives at the coordinator, one instance a gang, with a registry of its own. Knows nothing
of HTTP routes or Ray. A figure that isn't known has no series.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.metrics import MetricWrapperBase

from cluster.client import EngineState
from cluster.heat_series import HeatSeries
from cluster.rank_series import RankSeries
from cluster.thermal_guard import Verdict
from placement.errors import ErrorKind
from rank_worker.device_sensors.reading import NodeReading
from rank_worker.guard_word import Order
from rank_worker.messages import (
    EngineRequest,
    FinishReason,
    LoadProgress,
    RankSnapshot,
    TokenBatch,
)

RANK_SILENT_S = 10.0  # a rank that hasn't reported for so long has no series but rank_up 0


class MetricType(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"  # sum and count only


@dataclass(frozen=True)
class MetricSpec:
    """One family. A counter's name ends in `_total`."""

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()


# Upper bounds in seconds. Dense where a 310P box lives: 15-65 ms a token, up to minutes of prefill.
TTFT_BUCKETS_S = (
    *(0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10),
    *(15, 20, 30, 45, 60, 90, 120, 180, 300, 600),
)
INTER_TOKEN_BUCKETS_S = (
    *(0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.05, 0.065),
    *(0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10),
)
E2E_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15),
    *(20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)

_C, _G, _H, _S = MetricType.COUNTER, MetricType.GAUGE, MetricType.HISTOGRAM, MetricType.SUMMARY
_MODEL = ("model_name",)
_RANK = ("rank",)
_CHIP = ("rank", "card", "chip")  # rank is empty for a chip that no rank runs on

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("nrank_build_info", _G, "1; what runs", ("version", "git_sha", "backend", "torch")),
    MetricSpec("nrank_engine_state", _G, "1 for the state the gang is in", ("state",)),
    MetricSpec("nrank_requests_total", _C, "HTTP requests", (*_MODEL, "endpoint", "code")),
    MetricSpec("nrank_request_success_total", _C, "Answers", (*_MODEL, "finish_reason")),
    MetricSpec("nrank_requests_aborted_total", _C, "Ended early", (*_MODEL, "reason")),
    MetricSpec("nrank_requests_rejected_total", _C, "Refused at admission", ("reason",)),
    MetricSpec("nrank_requests_running", _G, "Sequences in the batch", _MODEL),
    MetricSpec("nrank_requests_waiting", _G, "Sequences queued", _MODEL),
    MetricSpec(
        "nrank_time_to_first_token_seconds",
        _H,
        "Arrival at the ingress to the first token",
        _MODEL,
        "seconds",
        TTFT_BUCKETS_S,
    ),
    MetricSpec(
        "nrank_inter_token_latency_seconds",
        _H,
        "Time a token after the first on rank 0; k tokens of a step count k times its k-th part",
        _MODEL,
        "seconds",
        INTER_TOKEN_BUCKETS_S,
    ),
    MetricSpec(
        "nrank_e2e_request_latency_seconds",
        _H,
        "Arrival at the ingress to the last token of a complete answer",
        _MODEL,
        "seconds",
        E2E_BUCKETS_S,
    ),
    MetricSpec("nrank_prompt_tokens_total", _C, "Prompt tokens of served requests", _MODEL),
    MetricSpec("nrank_generation_tokens_total", _C, "Tokens generated", _MODEL),
    MetricSpec(
        "nrank_prefix_cache_queries_total",
        _C,
        "Tokens looked up when a sequence starts or resumes: hits and misses",
        _MODEL,
    ),
    MetricSpec("nrank_prefix_cache_hits_total", _C, "Tokens found", _MODEL),
    MetricSpec(
        "nrank_prefix_cache_misses_total",
        _C,
        "Tokens not found: state_dropped and evicted made room for others, no_state was never "
        "kept, open_page is behind the last full page, scored has its log-probabilities asked "
        "for, new was never seen",
        (*_MODEL, "reason"),
    ),
    MetricSpec("nrank_prefix_cache_evicted_pages_total", _C, "Pages that made room", _MODEL),
    MetricSpec("nrank_prefix_cache_pages", _G, "Pages that a later prompt can find", _MODEL),
    MetricSpec(
        "nrank_prefix_cache_states", _G, "Recurrent states that are kept", (*_MODEL, "tier")
    ),
    MetricSpec(
        "nrank_prefix_cache_state_capacity",
        _G,
        "Recurrent states that have room",
        (*_MODEL, "tier"),
    ),
    MetricSpec(
        "nrank_prefix_cache_state_bytes",
        _G,
        "Memory set aside for kept states; on the device part of the ledger's rows",
        ("rank", "tier"),
        "bytes",
    ),
    MetricSpec(
        "nrank_prefix_cache_state_events_total",
        _C,
        "States saved, spilled to the host, restored from the device, fetched from the host, "
        "dropped to make room",
        (*_MODEL, "event"),
    ),
    MetricSpec(
        "nrank_state_copy_bytes_total", _C, "Bytes of copied states", ("rank", "kind"), "bytes"
    ),
    MetricSpec(
        "nrank_state_copy_seconds",
        _S,
        "Time of copies of states on the device; the latest may be missing in the sum",
        ("rank", "kind"),
        "seconds",
    ),
    MetricSpec("nrank_spec_decode_drafts_total", _C, "Rows that checked drafts", _MODEL),
    MetricSpec("nrank_spec_decode_draft_tokens_total", _C, "Draft tokens checked", _MODEL),
    MetricSpec("nrank_spec_decode_accepted_tokens_total", _C, "Draft tokens accepted", _MODEL),
    MetricSpec(
        "nrank_spec_decode_accepted_tokens_per_pos_total",
        _C,
        "Rows that accepted the draft at this position, from 0",
        (*_MODEL, "position"),
    ),
    MetricSpec(
        "nrank_spec_decode_estimated_speedup_ratio",
        _G,
        "Rate of decoding over that without drafts, from acceptance and times of steps",
        _MODEL,
        "ratio",
    ),
    MetricSpec(
        "nrank_prefill_owed_seconds",
        _G,
        "Time that running answers get before prefill goes on",
        _MODEL,
        "seconds",
    ),
    MetricSpec(
        "nrank_integrity_checks_total",
        _C,
        "Checks of pages, slots and kept states that passed; a failed one restarts the gang",
        _MODEL,
    ),
    MetricSpec("nrank_preemptions_total", _C, "Sequences preempted", _MODEL),
    MetricSpec("nrank_nonfinite_rows_total", _C, "Logit rows that weren't finite", _MODEL),
    MetricSpec("nrank_kv_pages_used", _G, "KV pages in use", _MODEL),
    MetricSpec("nrank_kv_pages_total", _G, "KV pages there are", _MODEL),
    MetricSpec("nrank_kv_cache_usage_ratio", _G, "KV pages in use, 0..1", _MODEL, "ratio"),
    MetricSpec("nrank_state_slots_used", _G, "Recurrent slots in use", _MODEL),
    MetricSpec("nrank_state_slots_total", _G, "Recurrent slots there are", _MODEL),
    MetricSpec("nrank_gang_restarts_total", _C, "Restarts of the whole gang", ("reason",)),
    MetricSpec("nrank_rank_restarts_total", _C, "Restarts a rank caused", ("rank", "reason")),
    MetricSpec("nrank_rank_up", _G, "1: alive and reporting", _RANK),
    MetricSpec("nrank_rank_heartbeat_age_seconds", _G, "Since its last report", _RANK, "seconds"),
    MetricSpec(
        "nrank_rank_memory_component_bytes",
        _G,
        "Measured bytes by ledger row",
        ("rank", "component"),
        "bytes",
    ),
    MetricSpec("nrank_rank_step_seconds", _S, "Time of steps with work", _RANK, "seconds"),
    MetricSpec(
        "nrank_collective_seconds", _S, "Time in collectives a step with work", _RANK, "seconds"
    ),
    MetricSpec("nrank_expert_tokens_total", _C, "Token-expert pairs computed", _RANK),
    MetricSpec("nrank_weights_planned_bytes", _G, "Bytes to read at load", _RANK, "bytes"),
    MetricSpec("nrank_weights_loaded_bytes_total", _C, "Bytes read at load", _RANK, "bytes"),
    MetricSpec(
        "nrank_weights_load_seconds",
        _G,
        "First read of weights to the last, or to now while loading",
        _RANK,
        "seconds",
    ),
    MetricSpec("nrank_heat_order", _G, "1 for what ranks may do: run, pace, hold, cut", ("order",)),
    MetricSpec("nrank_hold_seconds_total", _C, "Time at rest, by what held", ("cause",), "seconds"),
    MetricSpec("nrank_sensor_silent_ranks", _G, "Ranks whose chip tells no temperature"),
    MetricSpec("nrank_sensor_age_seconds", _G, "Of the last reading", unit="seconds"),
    MetricSpec("nrank_chip_temperature_celsius", _G, "Of the chip", _CHIP, "celsius"),
    MetricSpec("nrank_chip_shutdown_celsius", _G, "Where the card ends it", _CHIP, "celsius"),
    MetricSpec("nrank_chip_memory_used_bytes", _G, "By all processes", _CHIP, "bytes"),
    MetricSpec("nrank_chip_memory_total_bytes", _G, "As the driver tells", _CHIP, "bytes"),
    MetricSpec("nrank_chip_core_utilisation_ratio", _G, "0..1", _CHIP, "ratio"),
    MetricSpec("nrank_chip_bandwidth_utilisation_ratio", _G, "0..1", _CHIP, "ratio"),
    MetricSpec("nrank_chip_health", _G, "1 for the driver's word", (*_CHIP, "state")),
    MetricSpec("nrank_chip_error_codes", _G, "Error codes that the driver shows", _CHIP),
    MetricSpec("nrank_chip_ecc_enabled", _G, "1: memory is checked", _CHIP),
    MetricSpec("nrank_chip_ecc_errors_total", _C, "Since the driver started", (*_CHIP, "kind")),
    MetricSpec("nrank_card_power_watts", _G, "Of the whole card", ("card",), "watts"),
)


@dataclass(frozen=True)
class BuildInfo:
    version: str = ""
    git_sha: str = ""
    backend: str = ""
    torch: str = ""


@dataclass
class _Clock:
    """Times of one running request: when it came, when its last tokens were made."""

    arrival_s: float
    made_s: float = 0.0  # by the clock of rank 0: batches of several steps come together
    started: bool = False


class EngineMetrics:
    """Observations of one coordinator. Not thread-safe: call it from the event loop's thread."""

    def __init__(
        self,
        model_name: str,
        world_size: int,
        build: BuildInfo | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # process-wide, idempotent
        self._clock = clock
        self._model = model_name
        self._running: dict[str, _Clock] = {}
        self._registry = CollectorRegistry()
        collected = RankSeries.NAMES | HeatSeries.NAMES
        self._families = {
            spec.name: self._make(spec) for spec in METRICS if spec.name not in collected
        }
        help_of = {spec.name: spec.help for spec in METRICS}
        self._ranks = RankSeries(model_name, world_size, RANK_SILENT_S, clock, help_of.__getitem__)
        self._registry.register(self._ranks)
        self._heat = HeatSeries(time.monotonic, help_of.__getitem__)
        self._registry.register(self._heat)
        build = build or BuildInfo()
        info = (build.version, build.git_sha, build.backend, build.torch)
        self._gauge("nrank_build_info", *info).set(1)
        self.set_state(EngineState.STARTING)

    def render(self) -> bytes:
        """Prometheus text format 0.0.4, from what was last observed: never waits for a rank."""
        return generate_latest(self._registry)

    def update_snapshots(self, snapshots: Iterable[RankSnapshot]) -> None:
        """Take the ranks' latest figures. Counters of an older epoch stay in the sums."""
        self._ranks.update(snapshots)

    def update_load(self, epoch: int, ranks: Iterable[LoadProgress]) -> None:
        """Take how far ranks have loaded, from the same ranks that will send snapshots."""
        self._ranks.update_load(epoch, ranks)

    def observe_heat(
        self, reading: NodeReading | None, verdict: Verdict, devices: Sequence[int]
    ) -> None:
        """Once a second: `devices[rank]` is the physical chip of a rank."""
        self._heat.observe(reading, verdict, devices)

    def set_held(self, order: Order, seconds: Mapping[str, float]) -> None:
        """What ranks may do now, and seconds at rest so far by cause."""
        self._heat.order, self._heat.held_s = order, dict(seconds)

    def set_state(self, state: EngineState) -> None:
        for name in EngineState:
            self._gauge("nrank_engine_state", name.value).set(name is state)

    def observe_started(self, request: EngineRequest) -> None:
        """An admitted request; its arrival is the ingress' clock, the start of all its times."""
        arrival_s = request.arrival_s or self._clock()
        self._running[request.request_id] = _Clock(arrival_s)
        self._count("nrank_prompt_tokens_total", len(request.prompt_ids))

    def observe_batch(self, batch: TokenBatch) -> None:
        """A batch on its way to the client. One of an unknown (ended) request changes nothing."""
        request = self._running.get(batch.request_id)
        if request is None:
            return
        now_s = self._clock()
        self._observe_tokens(request, batch, now_s)
        if batch.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._finish(batch.request_id, batch.finish_reason)
        elif batch.finish_reason is not None:
            self.observe_aborted(batch.request_id, batch.error_kind or ErrorKind.CANCELLED.value)

    def observe_stopped(self, request_id: str) -> None:
        """The ingress saw a stop string: a complete answer."""
        if request_id in self._running:
            self._finish(request_id, FinishReason.STOP)

    def observe_aborted(self, request_id: str, reason: str) -> None:
        """Ended early: reason is an ErrorKind value ("cancelled": the client left)."""
        if self._running.pop(request_id, None) is not None:
            self._counter("nrank_requests_aborted_total", self._model, reason).inc()

    def observe_rejected(self, kind: ErrorKind) -> None:
        self._counter("nrank_requests_rejected_total", kind.value).inc()

    def observe_http(self, endpoint: str, code: int) -> None:
        self._counter("nrank_requests_total", self._model, endpoint, str(code)).inc()

    def observe_restart(self, reason: str, ranks: Sequence[int] = ()) -> None:
        """The gang restarts; `ranks` are those whose failure caused it."""
        self._counter("nrank_gang_restarts_total", reason).inc()
        for rank in ranks:
            self._counter("nrank_rank_restarts_total", str(rank), reason).inc()

    def _observe_tokens(self, request: _Clock, batch: TokenBatch, now_s: float) -> None:
        new = len(batch.token_ids)
        if new == 0:
            return
        self._count("nrank_generation_tokens_total", new)
        if not request.started:
            request.started = True
            self._observe("nrank_time_to_first_token_seconds", now_s - request.arrival_s)
        else:
            token_s = (batch.time_s - request.made_s) / new
            for _ in range(new):
                self._observe("nrank_inter_token_latency_seconds", token_s)
        request.made_s = batch.time_s

    def _finish(self, request_id: str, reason: FinishReason) -> None:
        request = self._running.pop(request_id)
        self._counter("nrank_request_success_total", self._model, reason.value).inc()
        self._observe("nrank_e2e_request_latency_seconds", self._clock() - request.arrival_s)

    def _make(self, spec: MetricSpec) -> MetricWrapperBase:
        name, text, labels = spec.name, spec.help, spec.labels
        family: MetricWrapperBase
        if spec.type is MetricType.COUNTER:
            family = Counter(name, text, labels, registry=self._registry)
        elif spec.type is MetricType.GAUGE:
            family = Gauge(name, text, labels, registry=self._registry)
        else:
            family = Histogram(name, text, labels, registry=self._registry, buckets=spec.buckets)
        if labels == _MODEL:
            family.labels(self._model)  # 0 from the start, so that rates have a first point
        return family

    def _counter(self, name: str, *labels: str) -> Counter:
        family = self._families[name]
        assert isinstance(family, Counter)
        return family.labels(*labels)

    def _gauge(self, name: str, *labels: str) -> Gauge:
        family = self._families[name]
        assert isinstance(family, Gauge)
        return family.labels(*labels)

    def _count(self, name: str, amount: int) -> None:
        self._counter(name, self._model).inc(amount)

    def _observe(self, name: str, seconds: float) -> None:
        family = self._families[name]
        assert isinstance(family, Histogram)
        family.labels(self._model).observe(max(0.0, seconds))
