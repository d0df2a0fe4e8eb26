"""Bounds of temporaries, and decode operators that never read device data on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.lowbit.pack import quantise
from ops.lowbit.packed import Packed
from ops.reference.tiles import TILE_ELEMENTS, tile_shape
from ops.registry import OpSet
from placement import formats

Probe = Callable[[], Any]


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("queries", [1, 7, 4096])
@pytest.mark.parametrize("per_query", [1, 1000, 1 << 20])
def test_a_tile_fits_and_is_never_empty(batch: int, queries: int, per_query: int) -> None:
    rows, columns = tile_shape(batch, queries, 1 << 12, per_query)
    assert 1 <= rows <= batch
    assert 1 <= columns <= queries
    assert rows * columns * per_query <= TILE_ELEMENTS
    if rows * columns < batch * queries:  # not needlessly small
        assert 2 * rows * (columns * per_query + (1 << 12)) > TILE_ELEMENTS // 2


def test_selection_never_holds_queries_times_blocks(bare_ops: OpSet, largest_tensor: Probe) -> None:
    pages, queries = 1024, 4096
    pool, table = torch.randn(pages, 4, 8), torch.arange(pages)[None]
    positions = torch.arange(16 * pages - queries, 16 * pages)[None]
    query = torch.randn(1, queries, 2, 8)
    with largest_tensor() as probe:
        ids = bare_ops.select_blocks(query, pool, table, positions, 4, 8)
    assert ids.shape == (1, queries, 8)
    assert probe.elements <= TILE_ELEMENTS
    assert probe.elements < queries * pages * 4


def test_dense_attention_never_holds_queries_times_context(
    bare_ops: OpSet, largest_tensor: Probe
) -> None:
    pages, queries = 256, 1024
    pool, table = torch.randn(pages, 64, 1, 8), torch.arange(pages)[None]
    positions = torch.arange(64 * pages - queries, 64 * pages)[None]
    with largest_tensor() as probe:
        out = bare_ops.paged_attention(
            torch.randn(1, queries, 2, 8), pool, pool, table, positions, None, 4, (2,), 0.3
        )
    assert out.isfinite().all()
    assert probe.elements <= TILE_ELEMENTS
    assert probe.elements < queries * 64 * pages


def test_sparse_attention_gathers_tile_by_tile(bare_ops: OpSet, largest_tensor: Probe) -> None:
    pool, table = torch.randn(4, 64, 2, 64), torch.arange(4)[None]
    queries, blocks = 512, torch.arange(32)
    positions = torch.full((1, queries), 200)
    with largest_tensor() as probe:
        bare_ops.paged_attention(
            torch.randn(1, queries, 4, 64), pool, pool, table, positions,
            blocks.expand(1, queries, 32), 4, (2, 2), 0.125,
        )  # fmt: skip
    assert probe.elements <= TILE_ELEMENTS // 2
    assert probe.elements < queries * 131 * 2 * 64


def _decode_calls() -> dict[str, tuple[Any, ...]]:
    """Arguments of what a decode step calls: 3 rows, a few heads and experts."""
    index, half = torch.zeros(3, dtype=torch.int64), torch.rand(3)
    scale = torch.ones(4, 8)
    pool, table = torch.zeros(5, 4, 2, 8), torch.zeros(3, 2, dtype=torch.int64)
    positions = torch.zeros(3, 1, dtype=torch.int64)
    ids = torch.zeros(3, 2, dtype=torch.int64)
    blocks = torch.zeros(3, 1, 2, dtype=torch.int64)
    attend = (torch.zeros(3, 1, 3, 8), pool, pool, table, positions)
    qk = torch.zeros(3, 2, 8)
    heads = (torch.zeros(3, 4, 8), torch.zeros(3, 4), torch.zeros(3, 4))
    gates = (torch.zeros(3, 4), torch.zeros(3, 4), torch.zeros(4), torch.zeros(4))
    key_head = torch.zeros(4, dtype=torch.int64)
    rows = (torch.zeros(3, 2, 2, 8), torch.zeros(3, 2, 4, 8), *torch.zeros(2, 3, 2, 4))
    return {
        "unit_offset": (scale,),
        "rms_norm": (torch.zeros(3, 8), scale[0], 1e-6),
        "grouped_rms_norm": (torch.zeros(3, 4, 8), scale, 1e-6),
        "gated_rms_norm": (torch.zeros(3, 8), scale[0], torch.zeros(3, 8), 1e-6, "silu"),
        "rope_tables": (index, 4, 1e7, torch.float32),
        "apply_rope": (qk, torch.zeros(3, 4), torch.zeros(3, 4)),
        "causal_conv_step": (
            torch.zeros(3, 8), torch.zeros(8, 4), torch.zeros(5, 9, 8), index, 3
        ),
        "delta_gates": gates,
        "gated_delta_step": (qk, qk, *heads, torch.zeros(4, dtype=torch.int64),
                             torch.zeros(5, 4, 8, 8), index),
        "causal_conv_verify": (
            torch.zeros(3, 2, 8), torch.zeros(8, 4), torch.zeros(5, 9, 8), index, 3
        ),
        "window_commit_": (torch.zeros(3, 2, 8), torch.zeros(5, 9, 8), index, index),
        "gated_delta_verify": (rows[0], *rows, key_head, torch.zeros(5, 4, 8, 8), index),
        "gated_delta_commit_": (*rows, key_head, torch.zeros(5, 4, 8, 8), index, index),
        "hyper_mix": (torch.zeros(3, 4, 8), scale, torch.zeros(6, 32), torch.zeros(32, 2), 1e-6, 2),
        "hyper_inject_": (torch.zeros(3, 4, 8), torch.zeros(3, 4), torch.zeros(3, 8)),
        "index_keys": (torch.zeros(3, 4, 8), scale[0], 1e-6, index, 4, 1e7),
        "select_blocks": (torch.zeros(3, 1, 2, 8), torch.zeros(5, 4, 8), table, positions, 4, 3),
        "write_kv_": (pool, pool, index, qk, qk),
        "paged_attention": (*attend, blocks, 4, (2, 1), 0.3),
        "route": (torch.zeros(3, 6), 2, True),
        "moe_experts": (torch.zeros(3, 8), torch.zeros(3, 2), ids, torch.zeros(4, 10, 8),
                        torch.zeros(4, 8, 5)),
        "packed_experts": (torch.zeros(3, 32), torch.zeros(3, 2), ids,
                           *(quantise(torch.zeros(4, n, 32), form) for n, form in
                             ((64, formats.NVFP4), (32, formats.W4G32_ASYM))), True),
        "packed_linear": (torch.zeros(3, 32), quantise(torch.zeros(5, 32), formats.W2), False),
        "packed_table_rows": (torch.zeros(9, 2, dtype=torch.uint8), half[:1], ids, 4,
                              torch.float16),
        "linear": (torch.zeros(3, 8), torch.zeros(5, 8)),
        "gated_swiglu": (torch.zeros(3, 10), torch.zeros(3, 1)),
        "swiglu_mlp": (torch.zeros(3, 8), torch.zeros(10, 8), torch.zeros(8, 5)),
        "ngram_ids": (torch.zeros(3, 3, dtype=torch.int64), 7, index, torch.ones_like(ids[0]),
                      ids[0]),
        "ngram_gate": (torch.zeros(3, 6), torch.zeros(3, 4, 8), torch.zeros(32, 6),
                       torch.zeros(8, 6), scale, scale, scale, 1e-6),
        "table_rows": (torch.zeros(9, 2), ids, 4),
        "gumbel": (index, index, index, index),
        "sample": (torch.zeros(3, 9), half, index, half, half, index, index, index),
        "sample_local": (torch.zeros(3, 9), half, index, index, index, 4),
        "greedy": (torch.zeros(3, 9),),
        "nonfinite_rows": (torch.zeros(3, 9),),
    }  # fmt: skip


@pytest.mark.parametrize("op", _decode_calls())
def test_decode_reads_no_device_data_on_the_host(bare_ops: OpSet, op: str) -> None:
    """Meta tensors have no data: an operator that needs a value to go on raises."""
    moved = (Tensor, Packed)
    args = [a.to("meta") if isinstance(a, moved) else a for a in _decode_calls()[op]]
    getattr(bare_ops, op)(*args)


def test_dense_decode_reads_no_device_data_on_the_host(bare_ops: OpSet) -> None:
    args = list(_decode_calls()["paged_attention"])
    args[5] = None
    bare_ops.paged_attention(*(a.to("meta") if isinstance(a, Tensor) else a for a in args))


def test_decode_covers_every_operator_but_the_prefill_ones(bare_ops: OpSet) -> None:
    known = {info.op for info in bare_ops.op_info()}
    assert known - set(_decode_calls()) == {"causal_conv_chunk", "gated_delta_chunk"}
