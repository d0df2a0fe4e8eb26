"""Series made from rank snapshots: latest gauges, and sums over all epochs of the gang.

Owns what a restart does to counters: a rank's figures start at zero in each epoch, the exported
sums don't. `cluster.metrics` has the table these families belong to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from rank_worker.messages import LoadProgress, RankSnapshot

LOADING = -1  # the step of a rank that has made none yet, not even a warm-up
_SUMMED = (
    "step_seconds",
    "collective_seconds",
    "busy_steps",
    "weights_read_bytes",
    "expert_tokens",
    "preemptions",
    "nonfinite_rows",
    "draft_rounds",
    "draft_tokens",
    "accepted_tokens",
)
_BY_POSITION = "nrank_spec_decode_accepted_tokens_per_pos_total"
_LEADER_GAUGES = {
    "nrank_requests_running": "running",
    "nrank_requests_waiting": "waiting",
    "nrank_kv_pages_used": "pages_used",
    "nrank_kv_pages_total": "pages_total",
    "nrank_state_slots_used": "slots_used",
    "nrank_state_slots_total": "slots_total",
}
_LEADER_COUNTERS = {
    "nrank_preemptions_total": "preemptions",
    "nrank_nonfinite_rows_total": "nonfinite_rows",
    "nrank_spec_decode_drafts_total": "draft_rounds",
    "nrank_spec_decode_draft_tokens_total": "draft_tokens",
    "nrank_spec_decode_accepted_tokens_total": "accepted_tokens",
}
_RANK_COUNTERS = {
    "nrank_expert_tokens_total": "expert_tokens",
    "nrank_weights_loaded_bytes_total": "weights_read_bytes",
}
_RANK_GAUGES = {
    "nrank_weights_planned_bytes": "weights_planned_bytes",
    "nrank_weights_load_seconds": "load_seconds",
}
_RANK_SUMMARIES = {
    "nrank_rank_step_seconds": "step_seconds",
    "nrank_collective_seconds": "collective_seconds",
}


class RankSeries(Collector):
    """A collector over the last snapshot of each rank; rank 0, which schedules, speaks for all."""

    NAMES = frozenset(
        {
            *_LEADER_GAUGES,
            *_LEADER_COUNTERS,
            *_RANK_COUNTERS,
            *_RANK_GAUGES,
            *_RANK_SUMMARIES,
            _BY_POSITION,
            "nrank_kv_cache_usage_ratio",
            "nrank_rank_up",
            "nrank_rank_heartbeat_age_seconds",
            "nrank_rank_memory_component_bytes",
        }
    )

    def __init__(
        self,
        model_name: str,
        world_size: int,
        silent_s: float,
        clock: Callable[[], float],
        help_of: Callable[[str], str],
    ) -> None:
        self._model = model_name
        self._world_size = world_size
        self._silent_s = silent_s
        self._clock = clock
        self._help_of = help_of
        self._last: dict[int, RankSnapshot] = {}
        self._sums: defaultdict[tuple[int, str], float] = defaultdict(float)
        self._accepted: list[float] = []  # by position of the draft, over all epochs

    def update(self, snapshots: Iterable[RankSnapshot]) -> None:
        """Later snapshots replace earlier ones; one of an older epoch or step is ignored."""
        for snapshot in snapshots:
            last = self._last.get(snapshot.rank)
            if last is not None and (snapshot.epoch, snapshot.step) < (last.epoch, last.step):
                continue
            for field in _SUMMED:
                self._add(snapshot, last, field)
            if snapshot.rank == 0:
                self._add_accepted(snapshot, last)
            self._last[snapshot.rank] = snapshot

    def update_load(self, epoch: int, ranks: Iterable[LoadProgress]) -> None:
        """Figures of ranks that load: a snapshot before any step, without pools and requests."""
        self.update(
            RankSnapshot(
                one.rank, epoch, self._clock(), LOADING, load_seconds=one.seconds,
                weights_planned_bytes=one.planned_bytes, weights_read_bytes=one.read_bytes,
            )
            for one in ranks
        )  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        now_s = self._clock()
        live = {
            rank: snapshot
            for rank, snapshot in self._last.items()
            if now_s - snapshot.time_s <= self._silent_s
        }
        leader = live.get(0)
        yield from self._leader(leader if leader and leader.step > LOADING else None)
        yield from self._counters()
        yield from self._load(live)
        yield from self._health(live, now_s)
        yield self._memory(live)

    def _add(self, snapshot: RankSnapshot, last: RankSnapshot | None, field: str) -> None:
        value = float(getattr(snapshot, field))
        same_epoch = last is not None and last.epoch == snapshot.epoch
        before = float(getattr(last, field)) if same_epoch else 0.0
        self._sums[snapshot.rank, field] += max(0.0, value - before)

    def _add_accepted(self, snapshot: RankSnapshot, last: RankSnapshot | None) -> None:
        now = snapshot.accepted_by_position
        same_epoch = last is not None and last.epoch == snapshot.epoch
        before = last.accepted_by_position if last is not None and same_epoch else ()
        self._accepted += [0.0] * (len(now) - len(self._accepted))
        for position, value in enumerate(now):
            old = before[position] if position < len(before) else 0
            self._accepted[position] += max(0, value - old)

    def _leader(self, leader: RankSnapshot | None) -> Iterator[Metric]:
        """Without a live leader nothing runs and nothing waits; pools have no series."""
        for name, field in _LEADER_GAUGES.items():
            family = self._gauge(name, "model_name")
            if leader is not None:
                family.add_metric([self._model], getattr(leader, field))
            elif field in ("running", "waiting"):
                family.add_metric([self._model], 0)
            yield family
        ratio = self._gauge("nrank_kv_cache_usage_ratio", "model_name")
        if leader is not None and leader.pages_total:
            ratio.add_metric([self._model], leader.pages_used / leader.pages_total)
        yield ratio

    def _counters(self) -> Iterator[Metric]:
        for name, field in _LEADER_COUNTERS.items():
            family = CounterMetricFamily(name, self._help_of(name), labels=["model_name"])
            family.add_metric([self._model], self._sums[0, field])
            yield family
        labels = ["model_name", "position"]
        family = CounterMetricFamily(_BY_POSITION, self._help_of(_BY_POSITION), labels=labels)
        for position, accepted in enumerate(self._accepted):
            family.add_metric([self._model, str(position)], accepted)
        yield family
        for name, field in _RANK_COUNTERS.items():
            family = CounterMetricFamily(name, self._help_of(name), labels=["rank"])
            for rank in sorted(self._last):
                family.add_metric([str(rank)], self._sums[rank, field])
            yield family
        for name, field in _RANK_SUMMARIES.items():
            summary = SummaryMetricFamily(name, self._help_of(name), labels=["rank"])
            for rank in sorted(self._last):
                steps = int(self._sums[rank, "busy_steps"])
                summary.add_metric([str(rank)], steps, self._sums[rank, field])
            yield summary

    def _load(self, live: dict[int, RankSnapshot]) -> Iterator[Metric]:
        """Nothing of a rank that has not planned yet."""
        for name, field in _RANK_GAUGES.items():
            family = self._gauge(name, "rank")
            for rank, snapshot in sorted(live.items()):
                if snapshot.weights_planned_bytes:
                    family.add_metric([str(rank)], getattr(snapshot, field))
            yield family

    def _health(self, live: dict[int, RankSnapshot], now_s: float) -> Iterator[Metric]:
        up = self._gauge("nrank_rank_up", "rank")
        age = self._gauge("nrank_rank_heartbeat_age_seconds", "rank")
        for rank in range(self._world_size):
            up.add_metric([str(rank)], rank in live)
            if rank in self._last:
                age.add_metric([str(rank)], max(0.0, now_s - self._last[rank].time_s))
        yield up
        yield age

    def _memory(self, live: dict[int, RankSnapshot]) -> Metric:
        family = self._gauge("nrank_rank_memory_component_bytes", "rank", "component")
        for rank, snapshot in sorted(live.items()):
            for component, used_bytes in sorted(snapshot.memory_bytes.items()):
                family.add_metric([str(rank), component], used_bytes)
        return family

    def _gauge(self, name: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, self._help_of(name), labels=labels)
