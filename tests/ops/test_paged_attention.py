"""Paged attention: dense and sparse, garbage in pages, tails, uneven groups, tiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.qwen4_exp import modeling_qwen4_exp as oracle
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

from ops.reference import tiles
from ops.registry import OpSet

Spread = Callable[[Tensor, int, int], tuple[Tensor, Tensor]]


def _head_of(groups: tuple[int, ...]) -> list[int]:
    return [kv for kv, size in enumerate(groups) for _ in range(size)]


def _slow(
    query: Tensor, keys: Tensor, values: Tensor, tokens: list[int], groups: tuple[int, ...]
) -> Tensor:
    """One query [nq, d] over the listed tokens of keys, values [n, nkv, d]; float64."""
    rows = []
    for head, kv in enumerate(_head_of(groups)):
        k, v = keys[tokens, kv].double(), values[tokens, kv].double()
        weights = torch.softmax(k @ query[head].double() * query.shape[1] ** -0.5, dim=0)
        rows.append(weights @ v)
    return torch.stack(rows)


def _seen(position: int, blocks: list[int], ratio: int) -> list[int]:
    chosen = [b * ratio + i for b in blocks if b >= 0 for i in range(ratio)]
    return chosen + list(range((position + 1) // ratio * ratio, position + 1))


@pytest.mark.parametrize("groups", [(3, 3), (1, 4, 2), (5,)])
def test_dense_sees_all_up_to_its_position(
    ops: OpSet, paged: Spread, groups: tuple[int, ...]
) -> None:
    keys, values = torch.randn(2, 2, 19, len(groups), 8)
    k_pool, table = paged(keys, 4, 1)
    v_pool = torch.full_like(k_pool, float("nan"))
    for row in range(2):
        for t in range(19):
            v_pool[table[row, t // 4], t % 4] = values[row, t]
    query = torch.randn(2, 3, sum(groups), 8)
    positions = torch.tensor([[0, 7, 18], [12, 13, -1]])
    out = ops.paged_attention(query, k_pool, v_pool, table, positions, None, 4, groups, 8**-0.5)
    for row in range(2):
        for q, position in enumerate(positions[row].tolist()):
            if position < 0:
                assert not out[row, q].any()
                continue
            tokens = list(range(position + 1))
            want = _slow(query[row, q], keys[row], values[row], tokens, groups)
            torch.testing.assert_close(out[row, q].double(), want, rtol=1e-5, atol=1e-6)


def _sparse_case(
    paged: Spread, length: int, groups: tuple[int, ...], dim: int, page: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """keys, values [1, n, nkv, d], and the pools and table that hold them."""
    both = torch.randn(1, length, len(groups), 2 * dim)
    pool, table = paged(both, page, 2)
    keys, values = both.split(dim, dim=-1)
    k_pool, v_pool = (x.contiguous() for x in pool.split(dim, dim=-1))
    return keys, values, k_pool, v_pool, table


@pytest.mark.parametrize("groups", [(12, 12), (12, 4)])
def test_production_geometry_around_the_budget(
    ops: OpSet, paged: Spread, groups: tuple[int, ...]
) -> None:
    """Positions 2047..2055: the first queries that leave blocks out, each tail length twice."""
    keys, values, k_pool, v_pool, table = _sparse_case(paged, 2056, groups, 256, 64)
    positions = torch.arange(2047, 2056)[None]
    query = torch.randn(1, 9, sum(groups), 256)
    blocks = torch.full((1, 9, 512), -1)
    for q, position in enumerate(positions[0].tolist()):
        complete = (position + 1) // 4
        picked = torch.randperm(complete)[:512]
        blocks[0, q, : len(picked)] = picked
    out = ops.paged_attention(query, k_pool, v_pool, table, positions, blocks, 4, groups, 256**-0.5)
    for q, position in enumerate(positions[0].tolist()):
        tokens = _seen(position, blocks[0, q].tolist(), 4)
        assert len(tokens) <= 2051
        want = _slow(query[0, q], keys[0], values[0], tokens, groups)
        torch.testing.assert_close(out[0, q].double(), want, rtol=1e-4, atol=1e-5)


def test_all_blocks_chosen_is_dense(ops: OpSet, paged: Spread) -> None:
    _, _, k_pool, v_pool, table = _sparse_case(paged, 50, (2, 3), 16, 8)
    query, positions = torch.randn(1, 50, 5, 16), torch.arange(50)[None]
    blocks = torch.arange(12).expand(1, 50, 12)
    blocks = torch.where(blocks < ((positions + 1) // 4)[..., None], blocks, -1)
    args = (query, k_pool, v_pool, table, positions)
    sparse = ops.paged_attention(*args, blocks, 4, (2, 3), 0.25)
    dense = ops.paged_attention(*args, None, 4, (2, 3), 0.25)
    torch.testing.assert_close(sparse, dense, rtol=1e-5, atol=1e-6)


def test_no_tail_when_the_last_block_is_complete(ops: OpSet, paged: Spread) -> None:
    """A query that completes a block sees it only if it was chosen, itself included."""
    keys, values, k_pool, v_pool, table = _sparse_case(paged, 12, (1,), 8, 4)
    query = torch.randn(1, 1, 1, 8)
    out = ops.paged_attention(
        query, k_pool, v_pool, table, torch.tensor([[11]]), torch.tensor([[[0, -1]]]), 4, (1,),
        8**-0.5,
    )  # fmt: skip
    want = _slow(query[0, 0], keys[0], values[0], [0, 1, 2, 3], (1,))
    torch.testing.assert_close(out[0, 0].double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sparse", [True, False])
def test_padding_rows_give_zeros_among_garbage(ops: OpSet, sparse: bool) -> None:
    pool = torch.full((3, 4, 1, 8), float("nan"))
    blocks = torch.full((2, 2, 3), -1) if sparse else None
    out = ops.paged_attention(
        torch.randn(2, 2, 2, 8), pool, pool, torch.full((2, 2), -1), torch.full((2, 2), -1),
        blocks, 4, (2,), 1.0,
    )  # fmt: skip
    assert torch.equal(out, torch.zeros(2, 2, 2, 8))


@pytest.mark.parametrize("sparse", [True, False])
def test_tiles_do_not_change_the_result(
    ops: OpSet, paged: Spread, monkeypatch: pytest.MonkeyPatch, sparse: bool
) -> None:
    both = torch.randn(3, 40, 2, 32)
    pool, table = paged(both, 8, 2)
    k_pool, v_pool = (x.contiguous() for x in pool.split(16, dim=-1))
    query, positions = torch.randn(3, 11, 6, 16), torch.randint(3, 40, (3, 11))
    blocks = torch.zeros(3, 11, 1, dtype=torch.int64) if sparse else None
    args = (query, k_pool, v_pool, table, positions, blocks, 4, (2, 4), 0.25)
    whole = ops.paged_attention(*args)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 3000)
    torch.testing.assert_close(ops.paged_attention(*args), whole, rtol=1e-5, atol=1e-6)
    assert whole.isfinite().all()


def test_a_rank_without_heads_computes_nothing(ops: OpSet) -> None:
    pool, table = torch.zeros(2, 4, 0, 8), torch.zeros(1, 2, dtype=torch.int64)
    ops.write_kv_(pool, pool, torch.tensor([1, 5]), torch.zeros(2, 0, 8), torch.zeros(2, 0, 8))
    out = ops.paged_attention(
        torch.zeros(1, 3, 0, 8), pool, pool, table, torch.tensor([[0, 1, 2]]), None, 4, (), 1.0
    )
    assert out.shape == (1, 3, 0, 8)


def test_write_goes_to_flat_slots_only(ops: OpSet) -> None:
    k_pool, v_pool = torch.zeros(3, 4, 2, 5), torch.zeros(3, 4, 2, 5)
    k, v = torch.randn(2, 2, 2, 5)
    ops.write_kv_(k_pool, v_pool, torch.tensor([9, 2]), k, v)
    for pool, rows in ((k_pool, k), (v_pool, v)):
        assert torch.equal(pool[2, 1], rows[0])
        assert torch.equal(pool[0, 2], rows[1])
        assert pool.flatten(0, 1).flatten(1).any(dim=1).sum() == 2


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_half_caches_accumulate_in_fp32(
    ops: OpSet, paged: Spread, dtype: torch.dtype, tolerance: float
) -> None:
    both = torch.randn(1, 33, 2, 128).to(dtype)
    pool, table = paged(both, 8, 1)
    k_pool, v_pool = (x.contiguous() for x in pool.split(64, dim=-1))
    query = torch.randn(1, 1, 4, 64).to(dtype)
    out = ops.paged_attention(
        query, k_pool, v_pool, table, torch.tensor([[32]]), None, 4, (2, 2), 0.125
    )
    assert out.dtype == dtype
    want = _slow(query[0, 0], both[0, :, :, :64], both[0, :, :, 64:], list(range(33)), (2, 2))
    torch.testing.assert_close(out[0, 0].double(), want, rtol=tolerance, atol=tolerance)


def test_fp16_scores_do_not_overflow(ops: OpSet) -> None:
    pool = torch.full((1, 4, 1, 256), 30.0, dtype=torch.float16)
    query = torch.full((1, 1, 1, 256), 30.0, dtype=torch.float16)
    table = torch.zeros(1, 1, dtype=torch.int64)
    out = ops.paged_attention(query, pool, pool, table, torch.tensor([[3]]), None, 4, (1,), 1 / 16)
    assert torch.equal(out, query)


def test_a_sparse_layer_matches_transformers(ops: OpSet, paged: Spread) -> None:
    """Selection, attention, gate and output projection of one layer, past its budget."""
    config = Qwen4ExpTextConfig(
        hidden_size=48, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
        indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=32,
        indexer_compress_ratio=4, attn_implementation="eager",
        rope_parameters={
            "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25
        },
    )  # fmt: skip
    layer = oracle.Qwen4ExpTextAttention(config, 3).requires_grad_(False).eval()
    for name, weight in layer.named_parameters():
        if "norm" in name:
            weight.data.normal_(0, 0.2)
    length, x, indexer = 75, torch.randn(75, 48), layer.indexer
    positions = torch.arange(length)
    cos, sin = ops.rope_tables(positions, 8, 1e7, torch.float32)
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
    want = layer(x[None], (cos[None], sin[None]), mask[None, None])[0][0]

    def head_norm(rows: Tensor, norm: torch.nn.Module) -> Tensor:
        return ops.rms_norm(rows, ops.unit_offset(norm.weight), 1e-6)

    q, raw = indexer.index_qk_proj(x).split([64, 16], dim=1)
    q = ops.apply_rope(head_norm(q.view(length, 4, 16), indexer.q_layernorm), cos, sin)
    scale, first = ops.unit_offset(indexer.k_layernorm.weight), torch.arange(18) * 4
    index = ops.index_keys(raw[:72].view(18, 4, 16), scale, 1e-6, first, 8, 1e7)
    index_pool, index_table = paged(index[None], 4, 0)
    blocks = ops.select_blocks(q[None], index_pool, index_table, positions[None], 4, 8)

    query, gate = layer.q_proj(x).view(length, 8, 64).chunk(2, dim=-1)
    query = ops.apply_rope(head_norm(query, layer.q_norm), cos, sin)
    key = layer.k_proj(x).view(length, 2, 32)
    key = ops.apply_rope(head_norm(key, layer.k_norm), cos, sin)
    value = layer.v_proj(x).view(length, 2, 32)
    k_pool, v_pool = torch.full((2, 7, 16, 2, 32), float("nan"))
    table = torch.tensor([[6, 1, 0, 5, 2]])
    slots = table[0, positions // 16] * 16 + positions % 16
    ops.write_kv_(k_pool, v_pool, slots, key, value)
    out = ops.paged_attention(
        query[None], k_pool, v_pool, table, positions[None], blocks, 4, (4, 4), 32**-0.5
    )[0]
    got = layer.o_proj((out * torch.sigmoid(gate)).flatten(1))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
