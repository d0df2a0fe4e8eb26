"""Physical bytes: tiles, allocation units, formats, buffers, and where the n-gram table lies."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import pytest

from placement.config import EngineConfig, RankShare
from placement.errors import ConfigError
from placement.formats import FORMATS, W4G128, WeightFormat, parse_format
from placement.headers import CheckpointHeaders
from placement.ledger import LedgerOptions, TablePlace
from placement.ledger_weights import weight_rows
from placement.models.quantised import with_format
from placement.partition import local_shape
from placement.physical import TensorBytes, tensor_bytes
from placement.plan import Plan, PlanOptions, make_plan
from placement.spec import (
    Axis,
    Component,
    DTypeRule,
    ModelSpec,
    Piece,
    Segment,
    Split,
    TensorSpec,
)
from placement.topology import PROFILES, ChipProfile

Loaded = tuple[ModelSpec, CheckpointHeaders]
BASE = EngineConfig(
    model_dir="unused", ranks=2, device="npu", dtype="float16", context_tokens=1024, max_sequences=4
)
NPU, CPU = PROFILES["310p3"], PROFILES["cpu"]
MIB = 1 << 20


def matrix(shape: tuple[int, ...], **changes: Any) -> TensorSpec:
    piece = Piece("w", shape, (0,) * len(shape))
    return replace(
        TensorSpec("layers.0.mixer.q", shape, Split(), Component.DENSE, (piece,)), **changes
    )


def planned(spec: ModelSpec, options: PlanOptions | None = None, **changes: Any) -> Plan:
    return make_plan(replace(BASE, **changes), spec, None, options=options or PlanOptions())


def size(tensor: TensorSpec, item: int = 2, profile: Any = NPU) -> TensorBytes:
    return tensor_bytes(tensor, tensor.shape, item, profile)


def test_fp16_matrices_lie_in_tiles_on_the_chip() -> None:
    """torch_npu allocates 46,592 bytes for 100 x 200 in FRACTAL_NZ: 112 x 208 values."""
    assert size(matrix((100, 200))).payload == 46592
    assert size(matrix((112, 208))).payload == 46592
    assert size(matrix((100, 200)), profile=CPU).payload == 100 * 200 * 2


def test_int8_rows_go_to_32_values() -> None:
    int8 = WeightFormat("int8", 8, scale_bytes=4)
    found = size(matrix((100, 200), format=int8))
    assert found == TensorBytes(112 * 224, 400)
    assert size(matrix((100, 200), format=int8), profile=CPU) == TensorBytes(20000, 400)


@pytest.mark.parametrize(
    "tensor",
    [
        matrix((100, 200), role="embed"),
        matrix((100, 200), role="layers.1.ngram.table", component=Component.NGRAM_TABLE),
        matrix((1, 200)),
        matrix((200,)),
        matrix((100, 1, 4)),
        matrix((100, 200), dtype=DTypeRule.FLOAT32),
    ],
    ids=["embedding", "table", "one row", "vector", "convolution", "float32"],
)
def test_what_is_no_fp16_matrix_product_keeps_its_shape(tensor: TensorSpec) -> None:
    width = 4 if tensor.dtype is DTypeRule.FLOAT32 else 2
    assert size(tensor).payload == prod(tensor.shape) * width


def test_expert_banks_are_padded_expert_by_expert() -> None:
    split = Split(0, (Segment(Axis.EXPERTS, 1, 3),))
    assert size(matrix((3, 100, 200), split=split)).payload == 3 * 46592


def test_float32_runs_have_no_tiles() -> None:
    assert size(matrix((100, 200)), item=4).payload == 100 * 200 * 4


def rows_of(*tensors: TensorSpec, profile: ChipProfile = NPU) -> dict[str, int]:
    return weight_rows(tensors, RankShare(0, 1, {}, ()), 2, profile)


def test_matrices_that_lie_in_one_are_padded_once() -> None:
    """100 and 1 rows of 200 go to 112 of 208; alone they took 112 and 1."""
    router, gate = (
        matrix((rows, 200), role=f"layers.0.channel.{name}")
        for name, rows in (("router", 100), ("shared_gate", 1))
    )
    one = rows_of(router, gate)
    assert one == rows_of(gate, router)  # wherever they stand in a checkpoint
    assert one["dense"] == 101 * 200 * 2
    assert sum(one.values()) == 46592 + 512  # 112 x 208 and the 32 bytes of the allocator
    apart = rows_of(router, replace(gate, role="layers.1.channel.shared_gate"))
    assert sum(apart.values()) == 46592 + 512 + 512


def test_each_tensor_takes_whole_units_of_the_allocator() -> None:
    vector = matrix((240,), dtype=DTypeRule.FLOAT32)  # 960 bytes, and 32 more
    assert rows_of(vector)["padding"] == 1024 - 960
    assert rows_of(replace(vector, shape=(248,)))["padding"] == 1024 - 992
    assert rows_of(replace(vector, shape=(249,)))["padding"] == 1536 - 996
    assert rows_of(vector, profile=CPU)["padding"] == 0


def test_codes_scales_and_zero_points_are_a_tensor_each() -> None:
    form = FORMATS["w4g32_asym"]  # 100 rows of 8 blocks: 2 bytes of scale, 1 of zero point
    found = rows_of(matrix((100, 256), format=form))
    assert (found["dense"], found["scales"]) == (100 * 128, 800 * 3)
    assert found["padding"] == 13312 - 12800 + (2048 - 1600) + (1024 - 800)
    joined = [matrix((100, 256), format=form, role=f"layers.0.mixer.{name}") for name in "qk"]
    assert rows_of(*joined)["padding"] == 26112 - 25600 + (3584 - 3200) + (2048 - 1600)


@pytest.mark.parametrize("pages", [1, 2, 4])
def test_the_pool_leaves_room_for_its_own_padding(tiny: Loaded, pages: int) -> None:
    """A chip with room for so many pages, to the byte, gets at most one less."""
    whole = planned(tiny[0], ranks=1, page_tokens=16, kv_pool_tokens=16 * pages, context_tokens=16)
    plan = planned(
        tiny[0], ranks=1, page_tokens=16, context_tokens=16, max_sequences=4,
        usable_bytes=whole.ranks[0].planned_bytes,
    )  # fmt: skip
    assert plan.ranks[0].planned_bytes <= whole.ranks[0].planned_bytes
    assert plan.fits
    assert max(1, pages - 1) <= plan.num_pages <= pages


def test_an_empty_part_takes_nothing() -> None:
    for form in (None, W4G128):
        assert tensor_bytes(matrix((8, 256), format=form), (0, 256), 2, NPU) == TensorBytes(0, 0)


def test_a_plain_format_is_held_in_the_dtype_of_the_run() -> None:
    plain = matrix((64, 64), format=FORMATS["bf16"])
    assert size(plain, item=4, profile=CPU) == TensorBytes(64 * 64 * 4, 0)


@pytest.mark.parametrize("name", ["w4g128", "w4g32_asym", "w8", "fp8", "nvfp4", "w2"])
def test_payload_and_scales_have_rows_of_their_own(real: Loaded, name: str) -> None:
    spec = with_format(real[0], parse_format(name))
    form = FORMATS[name]
    (rank, _) = planned(spec, device="cpu", usable_bytes=1 << 40).ranks
    banks = [t for t in spec.tensors if t.component is Component.ROUTED_EXPERTS]
    shapes = [local_shape(t, rank.share) for t in banks]
    assert rank.rows["routed_experts"] == sum(form.payload_bytes(shape) for shape in shapes)
    scales = [form.scale_bytes_of(s, t.stacked) for t, s in zip(banks, shapes, strict=True)]
    assert rank.rows["scales"] == sum(scales) > 0


def test_each_chip_of_a_card_has_its_own_total(tiny: Loaded) -> None:
    """npu-smi prints 44278 MB for chip 0 and 43693 MB for chip 1 of a card."""
    plan = planned(tiny[0], ranks=4)
    totals = [rank.usable_bytes // MIB for rank in plan.ranks]
    assert totals == [44278, 43693, 44278, 43693]


def test_the_communicator_takes_twice_its_buffer(tiny: Loaded) -> None:
    assert {rank.rows["collective"] for rank in planned(tiny[0]).ranks} == {2 * 200 * MIB}
    assert planned(tiny[0], ranks=1).ranks[0].rows["collective"] == 0


@pytest.mark.parametrize(("mtp", "gib"), [(1, 0.30), (2, 0.38), (4, 0.50)])
def test_graph_row_is_near_the_reported_sizes(tiny: Loaded, mtp: int, gib: float) -> None:
    """0.30, 0.38 and 0.50 GiB were reported for 1, 2 and 4 drafts on a 310P3."""
    rows = planned(tiny[0], mtp=mtp).ranks[0].rows
    assert rows["graph"] / 2**30 == pytest.approx(gib, abs=0.015)
    assert planned(tiny[0], device="cpu", mtp=mtp).ranks[0].rows["graph"] == 0


def test_drafts_need_one_state_a_sequence_and_inputs_to_replay(real: Loaded) -> None:
    """A state after each of two drafts would take 2 * 3 MiB a layer, their inputs take 0.1 MiB."""
    changes = {"max_sequences": 1, "ranks": 1, "usable_bytes": 1 << 40}
    plain, drafting = (planned(real[0], mtp=mtp, **changes).ranks[0].rows for mtp in (0, 2))
    assert drafting["recurrent_slots"] == plain["recurrent_slots"] == 36 * 48 * 128 * 128 * 4
    assert drafting["conv_state"] == plain["conv_state"]
    more = drafting["workspace"] - plain["workspace"] - 2 * 2 * real[0].vocab * 4
    channels = 2 * 16 * 128 + 48 * 128
    assert more == 3 * 4 * (36 * 2 * (channels + 48 * 128) + 10240)
    assert more < 2 * plain["recurrent_slots"] / 10
    assert planned(real[0], mtp=2).assumptions != planned(real[0]).assumptions


def test_the_draft_head_has_rows_of_its_own(tiny: Loaded) -> None:
    plain, drafting = (planned(tiny[0], mtp=mtp).ranks[0].rows for mtp in (0, 2))
    assert plain["mtp_weights"] == plain["mtp_state"] == 0
    assert drafting["mtp_weights"] > 0
    assert drafting["mtp_state"] > 0


def test_states_of_the_prefix_cache_are_counted(tiny: Loaded) -> None:
    plain = planned(tiny[0]).ranks[0].rows
    plan = planned(tiny[0], prefix_cache=True)
    more = plan.ranks[0].rows
    assert more["recurrent_slots"] == 3 * plain["recurrent_slots"]  # 4 sequences and 8 states
    assert more["conv_state"] == 3 * plain["conv_state"]
    assert more["index_pages"] == plain["index_pages"]
    assert (plan.prefix.device, plan.prefix.host) == (8, 32)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_byte_budgets_hold_as_many_states_as_fit_on_the_fullest_rank(
    tiny: Loaded, ranks: int
) -> None:
    size = planned(tiny[0], ranks=ranks, prefix_cache=True).prefix.state_bytes
    budgets = {"prefix_bytes": 3 * size + size - 1, "prefix_host_bytes": 2 * size - 1}
    plan = planned(tiny[0], ranks=ranks, prefix_cache=True, **budgets)
    assert (plan.prefix.device, plan.prefix.host) == (3, 1)
    plain = planned(tiny[0], ranks=ranks)
    added = [
        sum(rows.rows[row] - bare.rows[row] for row in ("recurrent_slots", "conv_state"))
        for rows, bare in zip(plan.ranks, plain.ranks, strict=True)
    ]
    assert max(added) == 3 * size
    assert plan.plan_id != plain.plan_id


def test_settings_of_the_prefix_cache_that_cannot_be(tiny: Loaded) -> None:
    with pytest.raises(ConfigError, match="prefix_interval_tokens = 0"):
        planned(tiny[0], prefix_interval_tokens=0)
    with pytest.raises(ConfigError, match="prefix_bytes = 5, but one state takes"):
        planned(tiny[0], prefix_cache=True, prefix_bytes=5)
    assert planned(tiny[0], prefix_cache=True, prefix_bytes=0).prefix.device == 0
    with pytest.raises(ConfigError, match="decode_share = 1"):
        planned(tiny[0], decode_share=1.0)


@pytest.mark.parametrize("place", [TablePlace.HOST, TablePlace.MMAP])
def test_a_table_on_the_host_leaves_the_chip(real: Loaded, place: TablePlace) -> None:
    spec = real[0]
    options = PlanOptions(ledger=LedgerOptions(place))
    on_device, elsewhere = planned(spec), planned(spec, options)
    assert on_device.host_table_bytes == 0
    assert sum(rank.rows["ngram_table"] for rank in on_device.ranks) / 2**30 == pytest.approx(
        95.4, abs=0.05
    )
    assert all(rank.rows["ngram_table"] == 0 for rank in elsewhere.ranks)
    assert elsewhere.host_table_bytes == 320001536 * 160 * 2  # one copy for both ranks
    staged = elsewhere.ranks[0].rows["workspace"] - on_device.ranks[0].rows["workspace"]
    assert staged == 512 * 2560 * 2  # rows of the 512 tokens of a step
    assert any("n-gram table" in text for text in elsewhere.assumptions)
    assert on_device.plan_id != elsewhere.plan_id


def test_error_correction_needs_a_measured_total(tiny: Loaded) -> None:
    with pytest.raises(ConfigError, match=r"ecc = on.*npu-smi"):
        planned(tiny[0], PlanOptions(ecc=True))
    plan = planned(tiny[0], PlanOptions(ecc=True), usable_bytes=40 << 30)
    assert plan.ranks[0].usable_bytes == 40 << 30


def test_logit_rows_grow_with_sequences_and_drafts(tiny: Loaded) -> None:
    one, eight, drafts = (
        planned(tiny[0], **changes).ranks[0].rows["workspace"]
        for changes in ({"max_sequences": 1}, {"max_sequences": 8}, {"max_sequences": 1, "mtp": 2})
    )
    row = 2 * tiny[0].vocab * 4
    assert eight - one == 7 * row
    assert drafts - one > 2 * row


@pytest.mark.parametrize(
    ("device", "dtype", "mib"), [("npu", "float16", 128), ("cpu", "float32", 0)]
)
def test_weights_that_a_chip_widens_have_their_place(
    tiny: Loaded, device: str, dtype: str, mib: int
) -> None:
    plain, packed = (
        planned(spec, device=device, dtype=dtype).ranks[0].rows["workspace"]
        for spec in (tiny[0], with_format(tiny[0], parse_format("w4g32")))
    )
    assert packed - plain == mib * MIB


@pytest.mark.parametrize(("dtype", "is_told"), [("bfloat16", True), ("float16", False)])
def test_a_type_that_the_chip_lacks_is_told(tiny: Loaded, dtype: str, is_told: bool) -> None:
    told = planned(tiny[0], dtype=dtype).assumptions
    assert any("310p3 has no bfloat16" in text for text in told) == is_told
