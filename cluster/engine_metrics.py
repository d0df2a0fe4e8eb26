"""What turns observations into Prometheus text: one instance a gang, at the coordinator.

Owns the sums of requests and tokens, which never go backwards when a gang restarts. The names
stand in `cluster.metrics`; ranks and sensors have collectors of their own. Knows nothing of HTTP
routes or Ray. A figure that isn't known has no series.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass

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
from cluster.metrics import METRICS, RESTART_REASONS, MetricSpec, MetricType
from cluster.rank_series import RankSeries
from cluster.thermal_guard import HeatLimits, Verdict
from placement.errors import ErrorKind
from placement.plan import Plan
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
_MODEL = ("model_name",)


@dataclass(frozen=True)
class BuildInfo:
    """Labels of nrank_build_info, in its order."""

    version: str = ""
    git_sha: str = ""
    backend: str = ""
    torch: str = ""
    plan_id: str = ""
    config_hash: str = ""


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
        self._gauge("nrank_build_info", *astuple(build or BuildInfo())).set(1)
        for kind in ErrorKind:  # 0 from the start, so that the first one is an increase
            self._counter("nrank_requests_rejected_total", kind.value)
            self._counter("nrank_requests_aborted_total", model_name, kind.value)
        for end in (FinishReason.STOP, FinishReason.LENGTH):
            self._counter("nrank_request_success_total", model_name, end.value)
        for reason in RESTART_REASONS:
            self._counter("nrank_gang_restarts_total", reason)
        self.set_state(EngineState.STARTING)

    def render(self) -> bytes:
        """Prometheus text format 0.0.4, from what was last observed: never waits for a rank."""
        return generate_latest(self._registry)

    def set_plan(self, plan: Plan) -> None:
        """What was decided before loading, to stand beside what is measured."""
        for rank, planned in enumerate(plan.ranks):
            for row, planned_bytes in planned.rows.items():
                gauge = self._gauge("nrank_rank_memory_planned_bytes", str(rank), row)
                gauge.set(planned_bytes)
        for kind in ("configured", "allocated", "certified"):
            tokens = getattr(plan.context, f"{kind}_tokens")
            self._gauge("nrank_context_tokens", kind).set(tokens)

    def update_snapshots(self, snapshots: Iterable[RankSnapshot]) -> None:
        """Take the ranks' latest figures. Counters of an older epoch stay in the sums."""
        self._ranks.update(snapshots)

    def update_load(self, epoch: int, ranks: Iterable[LoadProgress]) -> None:
        """Take how far ranks have loaded, from the same ranks that will send snapshots."""
        self._ranks.update_load(epoch, ranks)

    def end_ranks(self, epoch: int) -> None:
        """The gang of `epoch` has ended: nothing of it runs, waits or holds memory."""
        self._ranks.end(epoch)

    def observe_heat(
        self, reading: NodeReading | None, verdict: Verdict, devices: Sequence[int]
    ) -> None:
        """Once a second: `devices[rank]` is the physical chip of a rank."""
        self._heat.observe(reading, verdict, devices)

    def set_heat_limits(self, limits: HeatLimits | None) -> None:
        """What the guard holds chips to; None where it doesn't guard."""
        self._heat.limits = limits

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
        """The gang restarts; `ranks` are those whose failure caused it.

        `reason` is the phase of that failure; one that RESTART_REASONS lacks counts as "other".
        """
        reason = reason if reason in RESTART_REASONS else "other"
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
