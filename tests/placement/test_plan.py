"""The memory plan: bytes by row, the number of pages, what doesn't fit, stable identity."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from typing import Any

import pytest

from placement.config import EngineConfig
from placement.errors import ConfigError, PlanError
from placement.explain import explain
from placement.headers import CheckpointHeaders
from placement.ledger import ROWS
from placement.partition import local_shape
from placement.plan import Plan, make_plan, require_fits
from placement.reads import plan_reads
from placement.sizing import CHARGE_ORDER
from placement.spec import DTypeRule, ModelSpec
from placement.topology import PROFILES, Chip, Topology

Loaded = tuple[ModelSpec, CheckpointHeaders]
BASE = EngineConfig(model_dir="unused", ranks=2, context_tokens=1024, max_sequences=4)
MIB = 1 << 20


def planned(tiny: Loaded, **changes: Any) -> Plan:
    return make_plan(replace(BASE, **changes), *tiny)


def test_all_rows_are_there_and_add_up(tiny: Loaded) -> None:
    plan = planned(tiny)
    assert set(CHARGE_ORDER) == set(ROWS)
    for rank in plan.ranks:
        assert tuple(rank.rows) == ROWS
        assert rank.planned_bytes == sum(rank.rows.values()) <= rank.usable_bytes
        assert rank.rows["mtp_weights"] == rank.rows["mtp_state"] == rank.rows["graph"] == 0
    assert plan.fits
    require_fits(plan)


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("float16", 2), ("bfloat16", 2)])
def test_weight_rows_are_the_bytes_of_the_local_tensors(
    tiny: Loaded, dtype: str, item: int
) -> None:
    spec, _ = tiny
    plan = planned(tiny, dtype=dtype, ranks=3)
    sizes = {DTypeRule.WEIGHT: item, DTypeRule.FLOAT32: 4, DTypeRule.INT64: 8}
    for rank in plan.ranks:
        for row in ("routed_experts", "shared_experts", "dense", "embedding", "ngram_table"):
            local = [t for t in spec.tensors if t.component.value == row]
            wanted = sum(prod(local_shape(t, rank.share)) * sizes[t.dtype] for t in local)
            assert rank.rows[row] == wanted > 0


def test_weight_rows_equal_the_bytes_read_for_a_half_precision_run(tiny: Loaded) -> None:
    spec, headers = tiny
    (rank,) = planned(tiny, dtype="bfloat16", ranks=1).ranks
    reads = plan_reads(spec.tensors, rank.share, headers)
    widened = sum(r.nbytes for r in reads if r.dtype_rule is DTypeRule.FLOAT32)
    weights = sum(rank.rows[row] for row in ROWS[:5])
    assert weights == sum(r.nbytes for r in reads) + widened


def test_pool_and_slot_bytes(tiny: Loaded) -> None:
    """One rank of two: 6 of 12 value heads, 2 of 4 key heads, 1 of 2 KV heads; fp32."""
    rows = planned(tiny, context_tokens=640, kv_pool_tokens=640, page_tokens=16).ranks[0].rows
    pages, slots = 40, 4
    assert rows["kv_pages"] == 2 * pages * 16 * 1 * 32 * 2 * 4
    assert rows["index_pages"] == 2 * (pages * 4 * 32 * 4 + slots * 8 * 32 * 4)
    assert rows["recurrent_slots"] == 6 * slots * 6 * 32 * 32 * 4
    channels = 2 * 2 * 32 + 6 * 32
    assert rows["conv_state"] == slots * (6 * 3 * channels * 4 + 9 * 768 * 4 + 2 * 8)


def test_recurrent_state_stays_float32(tiny: Loaded) -> None:
    half, full = (planned(tiny, dtype=d).ranks[0].rows for d in ("float16", "float32"))
    assert half["recurrent_slots"] == full["recurrent_slots"]
    assert half["kv_pages"] * 2 == full["kv_pages"]


def test_draft_head_rows(tiny: Loaded) -> None:
    spec, _ = tiny
    plan = planned(tiny, mtp=2, context_tokens=640, kv_pool_tokens=640, page_tokens=16)
    rows = plan.ranks[0].rows
    local = [prod(local_shape(t, plan.shares[0])) for t in spec.draft_tensors]
    assert rows["mtp_weights"] == 4 * sum(local)
    attention = rows["kv_pages"] + rows["index_pages"]  # of two layers; the head has one
    assert rows["mtp_state"] == attention // 2
    without = replace(spec, draft_tensors=(), draft_layers=())
    with pytest.raises(ConfigError, match="mtp = 2, but tiny-flash-next has no draft head"):
        make_plan(replace(BASE, mtp=2), without, None)


def test_pages_default_to_a_full_context_a_sequence(tiny: Loaded) -> None:
    plan = planned(tiny, context_tokens=1000)
    assert plan.num_pages == 4 * 16
    assert plan.context.configured_tokens == 1000
    assert plan.context.allocated_tokens == 1024
    assert plan.context.certified_tokens == 0
    assert planned(tiny, context_tokens=0).context.configured_tokens == 32768


def test_pool_size_asked_for_is_rounded_up_to_pages(tiny: Loaded) -> None:
    plan = planned(tiny, kv_pool_tokens=2049)
    assert plan.num_pages == 33
    assert plan.context.allocated_tokens == 33 * 64 // 4


def test_pages_shrink_to_what_fits_but_not_below_one_context(tiny: Loaded) -> None:
    full = planned(tiny)
    page_bytes = sum(full.ranks[0].rows[row] for row in ("kv_pages",)) // full.num_pages
    tight = full.ranks[0].planned_bytes - 20 * page_bytes
    plan = planned(tiny, usable_bytes=tight)
    assert plan.fits
    assert 16 <= plan.num_pages < full.num_pages
    more = planned(tiny, usable_bytes=tight, kv_pool_tokens=(plan.num_pages + 1) * 64)
    assert not more.fits
    small = planned(tiny, usable_bytes=1 * MIB)
    assert small.num_pages == 16
    assert not small.fits


def test_the_fullest_rank_decides(tiny: Loaded) -> None:
    full = planned(tiny)
    room = full.ranks[0].planned_bytes
    chips = (Chip(0, 0, room), Chip(1, 0, room - 9 * MIB))
    plan = make_plan(
        replace(BASE, kv_pool_tokens=4096), *tiny, topology=Topology(PROFILES["cpu"], chips)
    )
    assert plan.shortfall is not None
    assert plan.shortfall.rank == 1
    over = plan.ranks[1].planned_bytes - plan.ranks[1].usable_bytes
    assert plan.shortfall.bytes == over


@pytest.mark.parametrize(
    ("free_bytes", "row", "remedy"),
    [
        (-1, "kv_pages", "lower context_tokens"),
        (-250 * MIB, "dense", "use more ranks"),
        (-700 * MIB, "reserve", "more memory"),
    ],
)
def test_shortfall_names_rank_row_bytes_and_remedy(
    tiny: Loaded, free_bytes: int, row: str, remedy: str
) -> None:
    config = {"kv_pool_tokens": 262144, "ranks": 1, "step_tokens": 16}
    needed = planned(tiny, **config).ranks[0].planned_bytes
    reserve_and_dense = 256 * MIB + 1
    usable = {
        "kv_pages": needed + free_bytes,
        "dense": reserve_and_dense,
        "reserve": 100 * MIB,
    }[row]
    plan = planned(tiny, usable_bytes=usable, **config)
    assert plan.shortfall is not None
    assert (plan.shortfall.rank, plan.shortfall.row) == (0, row)
    assert plan.shortfall.bytes == needed - usable
    with pytest.raises(PlanError) as caught:
        require_fits(plan)
    error = caught.value
    assert (error.rank, error.row, error.missing_bytes) == (0, row, needed - usable)
    for word in (f"rank 0 does not fit: {row}", str(needed - usable), remedy):
        assert word in str(error)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"context_tokens": 32769}, ["context_tokens = 32769", "32768"]),
        ({"page_tokens": 30}, ["page_tokens = 30", "multiple of 4"]),
        ({"page_tokens": 0}, ["page_tokens = 0"]),
        ({"max_sequences": 0}, ["max_sequences = 0"]),
        ({"step_tokens": 0}, ["step_tokens = 0"]),
        ({"context_tokens": -1}, ["context_tokens = -1"]),
        ({"dtype": "int8"}, ["dtype = 'int8'", "float32, bfloat16, float16"]),
        ({"ranks": 15}, ["ranks = 15", "14 experts"]),
        ({"ranks": 0}, ["ranks = 0"]),
        ({"ranks": 4, "chips": 2}, ["ranks = 4", "2 chips"]),
        ({"device": "tpu"}, ["device = 'tpu'"]),
        ({"chip_profile": "x"}, ["chip profile 'x'"]),
    ],
)
def test_impossible_configuration(tiny: Loaded, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(tiny, **changes)
    for word in words:
        assert word in str(caught.value)


def test_plan_id_is_stable_and_covers_the_decisions(tiny: Loaded) -> None:
    plan = planned(tiny)
    assert planned(tiny, model_dir="/elsewhere", master_address="10.0.0.1").plan_id == plan.plan_id
    others = [
        planned(tiny, **changes).plan_id
        for changes in (
            {"ranks": 3}, {"dtype": "float16"}, {"max_sequences": 5}, {"context_tokens": 2048},
            {"page_tokens": 32}, {"kv_pool_tokens": 1088}, {"mtp": 1}, {"step_tokens": 64},
        )
    ]  # fmt: skip
    odd_even = [[list(range(0, 14, 2)), list(range(1, 14, 2))]]
    others.append(make_plan(BASE, *tiny, ownership=odd_even).plan_id)
    assert len({plan.plan_id, *others}) == 1 + len(others)


def test_json_has_the_published_keys(tiny: Loaded) -> None:
    plan = planned(tiny)
    told = json.loads(json.dumps(plan.to_json()))
    assert {
        "plan_id", "fits", "world_size", "ranks", "context", "max_sequences", "shortfall",
        "assumptions",
    } <= set(told)  # fmt: skip
    assert told["shortfall"] is None
    assert told["context"] == {
        "configured_tokens": 1024, "allocated_tokens": 1024, "certified_tokens": 0,
    }  # fmt: skip
    rank = told["ranks"][1]
    assert {"rank", "usable_bytes", "planned_bytes", "rows", "experts"} <= set(rank)
    assert rank["experts"] == [[[7, 13]]] * 8
    assert list(rank["rows"]) == list(ROWS)
    short = planned(tiny, usable_bytes=1).to_json()
    assert short["fits"] is False
    assert set(short["shortfall"]) == {"rank", "row", "bytes"}


def test_real_geometry_on_six_chips_says_that_bf16_does_not_fit(real: Loaded) -> None:
    config = replace(BASE, ranks=6, device="npu", dtype="float16", context_tokens=0)
    plan = make_plan(config, *real)
    assert [len(rank.share.experts[0]) for rank in plan.ranks] == [86, 86, 85, 85, 85, 85]
    assert plan.shortfall is not None
    experts = [rank.rows["routed_experts"] / 2**30 for rank in plan.ranks]
    assert sum(experts) == pytest.approx(225.0, abs=0.01)  # published: 120,795.96 M parameters
    table = sum(rank.rows["ngram_table"] for rank in plan.ranks) / 2**30
    assert table == pytest.approx(95.4, abs=0.05)
    with pytest.raises(PlanError, match=r"rank [0-5] does not fit"):
        require_fits(plan)
    roomy = make_plan(replace(config, usable_bytes=80 << 30), *real)
    assert roomy.fits
    assert roomy.context.configured_tokens == 262144


def test_state_bytes_in_the_real_geometry(real: Loaded) -> None:
    """Published: 108 MiB of recurrent state; 24,576 B of K and V and 768 B of index a token."""
    config = replace(BASE, ranks=1, dtype="float16", max_sequences=1, kv_pool_tokens=65536)
    rows = make_plan(config, *real).ranks[0].rows
    assert rows["recurrent_slots"] == 108 * MIB
    assert rows["kv_pages"] == 65536 * 24576
    assert rows["index_pages"] == 65536 * 768 + 12 * 8 * 256
    assert round(rows["conv_state"] / MIB, 1) == round(2.1 + 0.18, 1)


def test_explanation_for_people(tiny: Loaded) -> None:
    text = explain(planned(tiny))
    for word in ("fits", "routed_experts", "rank 1: 7-13", "1024 configured", "0 certified"):
        assert word in text
    assert "mtp_weights" not in text  # rows that are 0 everywhere are left out
    short = explain(planned(tiny, usable_bytes=1))
    assert "does not fit: rank" in short
    assert "reserve" in short


def test_estimate_counts_one_token(tiny: Loaded) -> None:
    one, two = (planned(tiny, ranks=n).estimate for n in (1, 2))
    spec, _ = tiny
    experts = sum(prod(t.shape) for t in spec.tensors if t.component.value == "routed_experts")
    assert one.bytes_per_step > 4 * experts * 4 // 14
    assert two.bytes_per_step < one.bytes_per_step
    assert one.decode_step_s == one.bytes_per_step / PROFILES["cpu"].bandwidth_bytes_per_s


def test_a_page_pool_below_one_context_is_refused(tiny: Loaded) -> None:
    with pytest.raises(ConfigError, match=r"kv_pool_tokens = 1023.*1024"):
        planned(tiny, kv_pool_tokens=1023)
