"""Reuse of prefixes as operators see it: reasons that add up, sums over restarts, few labels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from cluster.engine_metrics import RANK_SILENT_S, EngineMetrics
from cluster.metrics import METRICS
from rank_worker.messages import CopyFigures, DraftFigures, PrefixFigures, RankSnapshot
from rank_worker.prefix_cache import MISS_REASONS

Samples = dict[tuple[str, str], float]  # name without its prefix, value of the one label -> value


def figures(
    scale: int, tiers: tuple[int, int] = (3, 1), copies: int | None = None
) -> PrefixFigures:
    misses = {reason: scale * (at + 1) for at, reason in enumerate(MISS_REASONS)}
    hits = 10 * scale
    copies = scale if copies is None else copies
    return PrefixFigures(
        queries=hits + sum(misses.values()),
        hits=hits,
        misses=misses,
        evicted_pages=scale,
        cached_pages=7,
        events={"saved": 5 * scale, "spilled": scale, "dropped": 0},
        states=dict(zip(("device", "host"), tiers, strict=True)),
        cells={"device": 4, "host": 16},
        cell_bytes={"device": 400, "host": 1600},
        copies={"save": CopyFigures(copies, 100 * copies, 0.5 * copies)},
    )


def snapshot(prefix: PrefixFigures, rank: int = 0, epoch: int = 1, **more: Any) -> RankSnapshot:
    return RankSnapshot(rank, epoch, 1e6, 5, prefix_cache=prefix, **more)


def samples(
    metrics: EngineMetrics, family: str, label: str = "model_name", **labels: str
) -> Samples:
    """Values of families by the label that is asked for, of samples without other ones."""
    return {
        (sample.name.removeprefix("nrank_"), sample.labels[label]): sample.value
        for one in text_string_to_metric_families(metrics.render().decode())
        for sample in one.samples
        if sample.name.startswith(f"nrank_{family}")
        and label in sample.labels
        and sample.labels.keys() - {"model_name", *labels} <= {label}
        and labels.items() <= sample.labels.items()
    }


def metrics_of(*snapshots: RankSnapshot, now_s: float = 1e6) -> EngineMetrics:
    metrics = EngineMetrics("m", 2, clock=lambda: now_s)
    for one in snapshots:
        metrics.update_snapshots([one])
    return metrics


def test_hits_and_misses_add_up_over_restarts_and_are_rank_zeros() -> None:
    first = snapshot(figures(2))
    later = replace(first, step=6, prefix_cache=figures(3))
    again = snapshot(figures(1), epoch=2)
    metrics = metrics_of(first, replace(first, rank=1), later, again)
    told = samples(metrics, "prefix_cache", "model_name")
    queries = told["prefix_cache_queries_total", "m"]
    hits = told["prefix_cache_hits_total", "m"]
    missed = samples(metrics, "prefix_cache_misses_total", "reason")
    assert hits == 10 * 4
    assert missed == {
        ("prefix_cache_misses_total", reason): 4.0 * (at + 1)
        for at, reason in enumerate(MISS_REASONS)
    }
    assert queries == hits + sum(missed.values())
    assert told["prefix_cache_evicted_pages_total", "m"] == 4
    assert told["prefix_cache_pages", "m"] == 7
    events = samples(metrics, "prefix_cache_state_events_total", "event")
    assert {event: value for (_, event), value in events.items()} == {
        "saved": 20, "spilled": 4, "dropped": 0,
    }  # fmt: skip


def test_every_reason_is_explained_where_it_is_read() -> None:
    (spec,) = (one for one in METRICS if one.name == "nrank_prefix_cache_misses_total")
    assert [reason for reason in MISS_REASONS if reason not in spec.help] == []


def test_tiers_are_gauges_of_what_is_there_now() -> None:
    metrics = metrics_of(snapshot(figures(2)), snapshot(figures(3, tiers=(0, 2)), epoch=2))
    states = samples(metrics, "prefix_cache_states", "tier")
    assert {tier: value for (_, tier), value in states.items()} == {"device": 0, "host": 2}
    room = samples(metrics, "prefix_cache_state_capacity", "tier")
    assert {tier: value for (_, tier), value in room.items()} == {"device": 4, "host": 16}


def test_bytes_and_copies_are_each_ranks_own() -> None:
    one = snapshot(figures(2))
    other = replace(one, rank=1, prefix_cache=figures(2, copies=5))
    metrics = metrics_of(one, other, replace(other, epoch=2, prefix_cache=figures(1, copies=1)))
    for rank, copies in (("0", 2), ("1", 6)):
        sizes = samples(metrics, "prefix_cache_state_bytes", "tier", rank=rank)
        assert {tier: value for (_, tier), value in sizes.items()} == {"device": 400, "host": 1600}
        copied = samples(metrics, "state_copy", "kind", rank=rank)
        assert copied == {
            ("state_copy_bytes_total", "save"): 100 * copies,
            ("state_copy_seconds_count", "save"): copies,
            ("state_copy_seconds_sum", "save"): 0.5 * copies,
        }


def test_a_gang_without_reuse_and_a_silent_one_show_no_tiers() -> None:
    metrics = metrics_of(RankSnapshot(0, 1, 1e6, 5))
    assert samples(metrics, "prefix_cache_states", "tier") == {}
    assert samples(metrics, "prefix_cache_hits_total") == {("prefix_cache_hits_total", "m"): 0}
    silent = metrics_of(snapshot(figures(2)), now_s=1e6 + RANK_SILENT_S + 1)
    assert samples(silent, "prefix_cache_states", "tier") == {}
    assert samples(silent, "prefix_cache_hits_total") == {("prefix_cache_hits_total", "m"): 20}


def test_speedup_pacing_and_checks() -> None:
    name = "spec_decode_estimated_speedup_ratio"
    told = metrics_of(snapshot(figures(1), prefill_owed_seconds=0.25, integrity_checks=3))
    assert samples(told, name) == {}, "an unknown figure has no series"
    assert samples(told, "prefill_owed_seconds") == {("prefill_owed_seconds", "m"): 0.25}
    assert samples(told, "integrity_checks_total") == {("integrity_checks_total", "m"): 3}
    drafts = DraftFigures(2, (0.5, 0.25), 1.75, 1.3)
    known = metrics_of(snapshot(figures(1), drafts=drafts))
    assert samples(known, name) == {(name, "m"): 1.3}


def test_labels_are_few_whatever_is_served() -> None:
    """No label holds a request, a prompt, a page or a cell."""
    metrics = metrics_of(snapshot(figures(9)), snapshot(figures(9), rank=1))
    series = [
        sample
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if "prefix_cache" in sample.name or "state_copy" in sample.name
    ]
    assert len(series) == 4 + len(MISS_REASONS) + 3 + 2 + 2 + 2 * (2 + 3)
