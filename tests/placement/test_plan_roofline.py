"""The estimate of a step: expected busiest rank, bytes by class, collectives, inputs named."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any

import pytest

from placement.config import EngineConfig
from placement.experts import contiguous_ownership
from placement.formats import parse_format
from placement.headers import CheckpointHeaders
from placement.models.quantised import with_format
from placement.ownership import OwnershipRequest
from placement.plan import Plan, PlanOptions, make_plan
from placement.roofline import distinct_experts, expected_busiest, expected_busiest_by_counts
from placement.spec import ModelSpec

Loaded = tuple[ModelSpec, CheckpointHeaders]
BASE = EngineConfig("unused", ranks=4, device="npu", dtype="float16", context_tokens=262144)


def planned(spec: ModelSpec, options: PlanOptions | None = None, **changes: Any) -> Plan:
    return make_plan(replace(BASE, **changes), spec, None, options=options or PlanOptions())


@pytest.mark.parametrize(
    ("experts", "top_k", "ranks", "published"),
    [(512, 10, 4, 4.18), (512, 10, 6, 3.42), (256, 8, 4, 3.52), (256, 8, 6, 2.88)],
)
def test_busiest_rank_by_published_figures(
    experts: int, top_k: int, ranks: int, published: float
) -> None:
    sizes = [len(ids) for ids in contiguous_ownership(experts, ranks)]
    assert expected_busiest(sizes, top_k) == pytest.approx(published, abs=0.01)


@pytest.mark.parametrize(
    ("experts", "ranks", "top_k"), [(14, 4, 4), (9, 3, 2), (7, 2, 7), (6, 6, 3)]
)
def test_busiest_rank_against_all_choices(experts: int, ranks: int, top_k: int) -> None:
    owned = contiguous_ownership(experts, ranks)
    rank_of = {e: rank for rank, ids in enumerate(owned) for e in ids}
    found = []
    for chosen in combinations(range(experts), top_k):
        ranks_hit = [rank_of[e] for e in chosen]
        found.append(max(ranks_hit.count(rank) for rank in set(ranks_hit)))
    mean = sum(found) / len(found)
    assert expected_busiest([len(ids) for ids in owned], top_k) == pytest.approx(mean)


def test_busiest_rank_against_a_simulation() -> None:
    random = Random(7)
    draws = 4000
    total = 0
    for _ in range(draws):
        ranks_hit = [e // 128 for e in random.sample(range(512), 10)]
        total += max(ranks_hit.count(rank) for rank in range(4))
    assert expected_busiest([128] * 4, 10) == pytest.approx(total / draws, abs=0.05)


def test_even_counts_are_uniform_routing_and_hot_ones_are_not() -> None:
    owned = contiguous_ownership(64, 4)
    uniform = expected_busiest([16] * 4, 4)
    assert expected_busiest_by_counts(owned, [5.0] * 64, 4) == pytest.approx(uniform)
    assert expected_busiest_by_counts(owned, [0.0] * 64, 4) == pytest.approx(uniform)
    hot = [50.0] * 16 + [1.0] * 48
    assert expected_busiest_by_counts(owned, hot, 4) > 1.3 * uniform
    only_four = [1.0] * 4 + [0.0] * 60
    assert expected_busiest_by_counts(owned, only_four, 4) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("rows", "published"), [(1, 10), (2, 19.8), (3, 29.4), (12, 108), (32, 240)]
)
def test_distinct_experts_of_some_rows(rows: int, published: float) -> None:
    assert distinct_experts(512, 10, rows) == pytest.approx(published, rel=0.005)


def test_dense_weights_are_most_of_a_step_in_w4(real: Loaded) -> None:
    """8.62 of 9.86 GB for one token on one chip: 16-bit dense weights beside W4 experts."""
    spec = with_format(real[0], parse_format("w4g128_asym"))
    (classes,) = [planned(spec, ranks=1, usable_bytes=1 << 40).estimate.bytes_by_class]
    dense = sum(classes[name] for name in ("dense", "embedding", "shared_experts"))
    assert dense / 1e9 == pytest.approx(8.624, rel=0.01)
    assert classes["routed_experts"] / 1e9 == pytest.approx(1.235, rel=0.01)
    assert classes["recurrent_slots"] == 2 * 108 * (1 << 20)  # read and written
    assert classes["index_pages"] / 1e6 == pytest.approx(201, abs=1)  # all index keys at 256K
    assert classes["kv_pages"] / 1e6 == pytest.approx(50.4, abs=0.1)  # selected K and V


def test_parts_of_the_estimate_add_up_and_name_their_inputs(real: Loaded) -> None:
    one = planned(real[0]).estimate
    assert sum(one.bytes_by_class.values()) == one.bytes_per_step
    assert one.read_s == one.bytes_per_step / 204e9
    assert one.decode_step_s == one.read_s + one.collective_s
    assert one.collectives == 2 * 48 + 2
    assert one.busiest_experts == pytest.approx(4.18, abs=0.01)
    assert one.mean_experts == 2.5
    for word in ("262144 tokens", "204 GB/s", "98 collectives", "uniform routing", "no launches"):
        assert any(word in text for text in one.inputs), word


def test_drafts_read_more_and_reduce_more(real: Loaded) -> None:
    plain, drafting = (planned(real[0], mtp=mtp).estimate for mtp in (0, 2))
    assert drafting.collectives == 106  # counted for two drafts on the four-chip box, too
    assert drafting.bytes_by_class["embedding"] == 3 * plain.bytes_by_class["embedding"]
    assert drafting.bytes_by_class["dense"] == plain.bytes_by_class["dense"]
    assert (
        2 < drafting.bytes_by_class["routed_experts"] / plain.bytes_by_class["routed_experts"] < 3
    )


def test_one_rank_has_no_collectives(tiny: Loaded) -> None:
    one = planned(tiny[0], ranks=1, context_tokens=1024).estimate
    assert (one.collectives, one.collective_s) == (0, 0)


def test_measured_counts_change_the_busiest_rank(tiny: Loaded) -> None:
    hot = tuple(tuple(100.0 if e < 4 else 1.0 for e in range(14)) for _ in range(8))
    exact = [[list(range(4)), list(range(4, 8)), list(range(8, 11)), list(range(11, 14))]] * 8
    given, balanced = (
        planned(
            tiny[0], PlanOptions(ownership=OwnershipRequest(exact=one, counts=hot)),
            context_tokens=1024,
        ).estimate
        for one in (exact, None)
    )  # fmt: skip
    assert balanced.busiest_experts < given.busiest_experts
    assert balanced.bytes_per_step < given.bytes_per_step
