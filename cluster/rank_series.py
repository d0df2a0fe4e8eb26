"""Series made from rank snapshots: latest gauges, and sums over all epochs of the gang.

Owns what a restart does to counters: a rank's figures start at zero in each epoch, the exported
sums don't. `cluster.metrics` has the table these families belong to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from rank_worker.messages import LoadProgress, RankSnapshot

LOADING = -1  # the step of a rank that has made none yet, not even a warm-up


@dataclass(frozen=True)
class _Split:
    """A figure that has a value for each of a few words, which become a label."""

    label: str
    of: Callable[[RankSnapshot], Mapping[str, float]]


def _accepted(snapshot: RankSnapshot) -> Mapping[str, float]:
    return {str(place): count for place, count in enumerate(snapshot.accepted_by_position)}


def _copy_bytes(snapshot: RankSnapshot) -> Mapping[str, float]:
    return {kind: one.bytes for kind, one in snapshot.prefix_cache.copies.items()}


def _copy_seconds(snapshot: RankSnapshot) -> Mapping[str, float]:
    return {kind: one.seconds for kind, one in snapshot.prefix_cache.copies.items()}


def _copy_counts(snapshot: RankSnapshot) -> Mapping[str, float]:
    return {kind: one.count for kind, one in snapshot.prefix_cache.copies.items()}


# Fields of a snapshot by the name of their family. A figure of the leader is the gang's.
_LEADER_GAUGES = {
    "nrank_requests_running": "running",
    "nrank_requests_waiting": "waiting",
    "nrank_kv_pages_used": "pages_used",
    "nrank_kv_pages_capacity": "pages_total",
    "nrank_state_slots_used": "slots_used",
    "nrank_state_slots_capacity": "slots_total",
    "nrank_prefix_cache_pages": "prefix_cache.cached_pages",
    "nrank_prefill_owed_seconds": "prefill_owed_seconds",
    "nrank_spec_decode_estimated_speedup_ratio": "drafts.estimated_speedup",
}
_LEADER_COUNTERS = {
    "nrank_preemptions_total": "preemptions",
    "nrank_nonfinite_rows_total": "nonfinite_rows",
    "nrank_integrity_checks_total": "integrity_checks",
    "nrank_spec_decode_drafts_total": "draft_rounds",
    "nrank_spec_decode_draft_tokens_total": "draft_tokens",
    "nrank_spec_decode_accepted_tokens_total": "accepted_tokens",
    "nrank_prefix_cache_queries_total": "prefix_cache.queries",
    "nrank_prefix_cache_hits_total": "prefix_cache.hits",
    "nrank_prefix_cache_evicted_pages_total": "prefix_cache.evicted_pages",
}
_LEADER_GAUGE_SPLITS = {
    "nrank_prefix_cache_states": _Split("tier", lambda one: one.prefix_cache.states),
    "nrank_prefix_cache_state_capacity": _Split("tier", lambda one: one.prefix_cache.cells),
}
_LEADER_COUNTER_SPLITS = {
    "nrank_spec_decode_accepted_tokens_per_pos_total": _Split("position", _accepted),
    "nrank_prefix_cache_misses_total": _Split("reason", lambda one: one.prefix_cache.misses),
    "nrank_prefix_cache_state_events_total": _Split("event", lambda one: one.prefix_cache.events),
}
_RANK_COUNTERS = {
    "nrank_expert_tokens_total": "expert_tokens",
    "nrank_weights_loaded_bytes_total": "weights_read_bytes",
}
_RANK_GAUGES = {
    "nrank_weights_planned_bytes": "weights_planned_bytes",
    "nrank_weights_load_seconds": "load_seconds",
}
_RANK_GAUGE_SPLITS = {
    "nrank_rank_memory_component_bytes": _Split("component", lambda one: one.memory_bytes),
    "nrank_prefix_cache_state_bytes": _Split("tier", lambda one: one.prefix_cache.cell_bytes),
}
_RANK_COUNTER_SPLITS = {
    "nrank_state_copy_bytes_total": _Split("kind", _copy_bytes),
    "nrank_rank_step_part_seconds_total": _Split("part", lambda one: one.step_parts),
    "nrank_graph_eager_fallbacks_total": _Split("reason", lambda one: one.eager_fallbacks),
}
_RANK_SUMMARIES = {
    "nrank_rank_step_seconds": "step_seconds",
    "nrank_collective_seconds": "collective_seconds",
}
_SUMMARY_COUNT = "busy_steps"
_COPY_SECONDS = "nrank_state_copy_seconds"
_COPY_SPLITS = {"count": _Split("kind", _copy_counts), "sum": _Split("kind", _copy_seconds)}

_SUMMED = (
    *_LEADER_COUNTERS.values(),
    *_RANK_COUNTERS.values(),
    *_RANK_SUMMARIES.values(),
    _SUMMARY_COUNT,
)
_SPLIT_SUMMED = {**_LEADER_COUNTER_SPLITS, **_RANK_COUNTER_SPLITS, **_COPY_SPLITS}


class RankSeries(Collector):
    """A collector over the last snapshot of each rank; rank 0, which schedules, speaks for all."""

    NAMES = frozenset(
        {
            *_LEADER_GAUGES,
            *_LEADER_COUNTERS,
            *_LEADER_GAUGE_SPLITS,
            *_LEADER_COUNTER_SPLITS,
            *_RANK_COUNTERS,
            *_RANK_GAUGES,
            *_RANK_GAUGE_SPLITS,
            *_RANK_COUNTER_SPLITS,
            *_RANK_SUMMARIES,
            _COPY_SECONDS,
            "nrank_kv_cache_usage_ratio",
            "nrank_op_info",
            "nrank_rank_up",
            "nrank_rank_heartbeat_age_seconds",
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
        self._ended_epoch = -1  # ranks of it and of earlier ones are gone
        self._last: dict[int, RankSnapshot] = {}
        self._sums: defaultdict[tuple[int, str], float] = defaultdict(float)
        self._splits: defaultdict[tuple[int, str], dict[str, float]] = defaultdict(dict)

    def update(self, snapshots: Iterable[RankSnapshot]) -> None:
        """Later snapshots replace earlier ones; one of an older epoch or step is ignored."""
        for snapshot in snapshots:
            last = self._last.get(snapshot.rank)
            if last is not None and (snapshot.epoch, snapshot.step) < (last.epoch, last.step):
                continue
            before = last if last is not None and last.epoch == snapshot.epoch else None
            for field in _SUMMED:
                self._add(snapshot, before, field)
            for name, split in _SPLIT_SUMMED.items():
                self._add_split(snapshot, before, name, split)
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

    def end(self, epoch: int) -> None:
        """The ranks of `epoch` are gone: what they told last holds no more, their sums stay."""
        self._ended_epoch = epoch

    def collect(self) -> Iterator[Metric]:
        now_s = self._clock()
        live = {
            rank: snapshot
            for rank, snapshot in self._last.items()
            if snapshot.epoch > self._ended_epoch and now_s - snapshot.time_s <= self._silent_s
        }
        leader = live.get(0)
        yield from self._leader(leader if leader and leader.step > LOADING else None)
        yield from self._leader_counters()
        yield from self._rank_counters()
        yield from self._rank_gauges(live)
        yield from self._health(live, now_s)

    def _add(self, snapshot: RankSnapshot, before: RankSnapshot | None, field: str) -> None:
        get = attrgetter(field)
        old = get(before) if before is not None else 0
        self._sums[snapshot.rank, field] += max(0.0, get(snapshot) - old)

    def _add_split(
        self, snapshot: RankSnapshot, before: RankSnapshot | None, name: str, split: _Split
    ) -> None:
        old = split.of(before) if before is not None else {}
        sums = self._splits[snapshot.rank, name]
        for word, value in split.of(snapshot).items():
            sums[word] = sums.get(word, 0.0) + max(0.0, value - old.get(word, 0))

    def _leader(self, leader: RankSnapshot | None) -> Iterator[Metric]:
        """Without a live leader nothing runs and nothing waits; pools have no series."""
        for name, field in _LEADER_GAUGES.items():
            family = self._gauge(name, "model_name")
            value = attrgetter(field)(leader) if leader is not None else None
            if value is not None:
                family.add_metric([self._model], value)
            elif field in ("running", "waiting"):
                family.add_metric([self._model], 0)
            yield family
        ratio = self._gauge("nrank_kv_cache_usage_ratio", "model_name")
        if leader is not None and leader.pages_total:
            ratio.add_metric([self._model], leader.pages_used / leader.pages_total)
        yield ratio
        ops = self._gauge("nrank_op_info", "op", "implementation")
        for op, implementation in leader.ops.items() if leader is not None else ():
            ops.add_metric([op, implementation], 1)
        yield ops
        for name, split in _LEADER_GAUGE_SPLITS.items():
            family = self._gauge(name, "model_name", split.label)
            for word, value in split.of(leader).items() if leader is not None else ():
                family.add_metric([self._model, word], value)
            yield family

    def _leader_counters(self) -> Iterator[Metric]:
        for name, field in _LEADER_COUNTERS.items():
            family = self._counter(name, "model_name")
            family.add_metric([self._model], self._sums[0, field])
            yield family
        for name, split in _LEADER_COUNTER_SPLITS.items():
            family = self._counter(name, "model_name", split.label)
            for word, value in self._splits[0, name].items():
                family.add_metric([self._model, word], value)
            yield family

    def _rank_counters(self) -> Iterator[Metric]:
        ranks = sorted(self._last)
        for name, field in _RANK_COUNTERS.items():
            family = self._counter(name, "rank")
            for rank in ranks:
                family.add_metric([str(rank)], self._sums[rank, field])
            yield family
        for name, split in _RANK_COUNTER_SPLITS.items():
            family = self._counter(name, "rank", split.label)
            for rank in ranks:
                for word, value in self._splits[rank, name].items():
                    family.add_metric([str(rank), word], value)
            yield family
        yield from self._summaries(ranks)

    def _summaries(self, ranks: Iterable[int]) -> Iterator[Metric]:
        for name, field in _RANK_SUMMARIES.items():
            summary = SummaryMetricFamily(name, self._help_of(name), labels=["rank"])
            for rank in ranks:
                steps = int(self._sums[rank, _SUMMARY_COUNT])
                summary.add_metric([str(rank)], steps, self._sums[rank, field])
            yield summary
        copies = SummaryMetricFamily(
            _COPY_SECONDS, self._help_of(_COPY_SECONDS), labels=["rank", "kind"]
        )
        for rank in ranks:
            seconds = self._splits[rank, "sum"]
            for kind, count in self._splits[rank, "count"].items():
                copies.add_metric([str(rank), kind], int(count), seconds[kind])
        yield copies

    def _rank_gauges(self, live: dict[int, RankSnapshot]) -> Iterator[Metric]:
        """No weights of a rank that has not planned yet."""
        for name, field in _RANK_GAUGES.items():
            family = self._gauge(name, "rank")
            for rank, snapshot in sorted(live.items()):
                if snapshot.weights_planned_bytes:
                    family.add_metric([str(rank)], getattr(snapshot, field))
            yield family
        for name, split in _RANK_GAUGE_SPLITS.items():
            family = self._gauge(name, "rank", split.label)
            for rank, snapshot in sorted(live.items()):
                for word, value in sorted(split.of(snapshot).items()):
                    family.add_metric([str(rank), word], value)
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

    def _gauge(self, name: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, self._help_of(name), labels=labels)

    def _counter(self, name: str, *labels: str) -> CounterMetricFamily:
        return CounterMetricFamily(name, self._help_of(name), labels=labels)
