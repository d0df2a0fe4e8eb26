"""Block selection: visibility, ties, tiles, and agreement with transformers' indexer."""

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


def _slow_selection(query: Tensor, keys: Tensor, position: int, ratio: int, most: int) -> list[int]:
    """Best complete blocks of one query [h, dim] over keys [n, dim], ties to the lowest."""
    visible = (position + 1) // ratio
    scores = [
        sum(max(0.0, float(q @ keys[block])) for q in query.double()) for block in range(visible)
    ]
    return sorted(sorted(range(visible), key=lambda block: (-scores[block], block))[:most])


def _chosen(ids: Tensor) -> list[int]:
    chosen = sorted(i for i in ids.tolist() if i >= 0)
    assert len(set(chosen)) == len(chosen)
    return chosen


@pytest.mark.parametrize("most", [1, 3, 40])
def test_best_complete_blocks_are_chosen(ops: OpSet, paged: Spread, most: int) -> None:
    keys, query = torch.randn(2, 13, 8), torch.randn(2, 5, 4, 8)
    pool, table = paged(keys, 4, 2)
    positions = torch.tensor([[0, 2, 3, 30, 51], [-1, 4, 51, 7, 8]])
    ids = ops.select_blocks(query, pool, table, positions, 4, most)
    assert ids.shape == (2, 5, min(most, 16))
    for b in range(2):
        for q in range(5):
            position = int(positions[b, q])
            want = _slow_selection(query[b, q], keys[b].double(), position, 4, most)
            assert _chosen(ids[b, q]) == want


def test_padding_rows_choose_nothing(ops: OpSet, paged: Spread) -> None:
    pool, table = paged(torch.randn(2, 8, 4), 4, 1)
    positions = torch.full((2, 3), -1)
    ids = ops.select_blocks(torch.randn(2, 3, 2, 4), pool, table, positions, 4, 5)
    assert (ids == -1).all()


def test_all_scores_zero_gives_the_first_blocks(ops: OpSet, paged: Spread) -> None:
    keys = -torch.rand(1, 600, 128)
    pool, table = paged(keys, 16, 3)
    positions = torch.tensor([[2399, 2398, 2047]])
    ids = ops.select_blocks(torch.rand(1, 3, 4, 128), pool, table, positions, 4, 512)
    for q in range(3):
        assert _chosen(ids[0, q]) == list(range(512))


def test_equal_scores_go_to_the_lowest_block(ops: OpSet, paged: Spread) -> None:
    score = torch.tensor([1.0, 3.0, 1.0, 0.0, 1.0, 2.0, 1.0])
    pool, table = paged(score[None, :, None].expand(1, 7, 4).contiguous(), 2, 0)
    positions = torch.tensor([[27]])
    ids = ops.select_blocks(torch.ones(1, 1, 1, 4), pool, table, positions, 4, 4)
    assert _chosen(ids[0, 0]) == [0, 1, 2, 5]


@pytest.mark.parametrize("blocks", [511, 512, 513])
def test_production_budget_boundary(ops: OpSet, paged: Spread, blocks: int) -> None:
    keys, query = torch.randn(1, blocks, 128), torch.randn(1, 4, 4, 128)
    pool, table = paged(keys, 16, 1)
    last = blocks * 4 - 1
    positions = torch.arange(last - 3, last + 1)[None]
    ids = ops.select_blocks(query, pool, table, positions, 4, 512)
    for q in range(4):
        visible = blocks - 1 if q < 3 else blocks
        chosen = _chosen(ids[0, q])
        assert len(chosen) == min(visible, 512)
        assert chosen[-1] < visible
    scores = torch.relu(query[0, 3].double() @ keys[0].double().T).sum(0)
    if blocks == 513:  # the one left out: the last of the lowest scores
        worst = int((scores == scores.min()).nonzero().max())
        assert set(range(513)) - set(_chosen(ids[0, 3])) == {worst}


def test_tiles_do_not_change_the_choice(
    ops: OpSet, paged: Spread, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, table = paged(torch.randn(3, 40, 16), 8, 2)
    query, positions = torch.randn(3, 17, 4, 16), torch.randint(-1, 160, (3, 17))
    whole = ops.select_blocks(query, pool, table, positions, 4, 9)
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 1000)
    tiled = ops.select_blocks(query, pool, table, positions, 4, 9)
    assert torch.equal(whole.sort(-1).values, tiled.sort(-1).values)


def test_unknown_table_entries_past_the_context_are_ignored(ops: OpSet, paged: Spread) -> None:
    keys, query = torch.randn(1, 8, 8), torch.randn(1, 1, 2, 8)
    pool, table = paged(keys, 4, 1)
    wide = torch.cat((table, torch.full((1, 3), -1)), dim=1)
    positions = torch.tensor([[20]])
    want = ops.select_blocks(query, pool, table, positions, 4, 3)
    assert torch.equal(ops.select_blocks(query, pool, wide, positions, 4, 3), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_keys_are_scored_in_fp32(ops: OpSet, paged: Spread, dtype: torch.dtype) -> None:
    keys, query = torch.randn(1, 64, 128).to(dtype), torch.randn(1, 1, 4, 128).to(dtype)
    pool, table = paged(keys, 16, 1)
    ids = ops.select_blocks(query, pool, table, torch.tensor([[255]]), 4, 20)
    assert _chosen(ids[0, 0]) == _slow_selection(query[0, 0], keys[0].double(), 255, 4, 20)


def test_keys_and_choice_match_the_indexer_of_transformers(ops: OpSet, paged: Spread) -> None:
    config = Qwen4ExpTextConfig(
        hidden_size=48,
        head_dim=256,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
        indexer_n_heads=4,
        indexer_kv_heads=1,
        indexer_head_dim=128,
        indexer_budget=32,
        indexer_compress_ratio=4,
    )
    indexer = oracle.Qwen4ExpTextQSAIndexer(config, 0).requires_grad_(False)
    for norm in (indexer.q_layernorm, indexer.k_layernorm):
        norm.weight.data.normal_(0, 0.2)
    length, x = 75, torch.randn(75, 48)
    positions = torch.arange(length)
    cos, sin = ops.rope_tables(positions, 64, 1e7, torch.float32)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = indexer(x[None], (cos[None], sin[None]), causal[None, None], None)[0, 0]

    q, raw = indexer.index_qk_proj(x).split([512, 128], dim=1)
    q = ops.rms_norm(q.view(length, 4, 128), ops.unit_offset(indexer.q_layernorm.weight), 1e-6)
    q = ops.apply_rope(q, cos, sin)
    blocks = length // 4
    scale = ops.unit_offset(indexer.k_layernorm.weight)
    grouped = raw[: blocks * 4].view(blocks, 4, 128)
    keys = ops.index_keys(grouped, scale, 1e-6, torch.arange(blocks) * 4, 64, 1e7)
    pool, table = paged(keys[None], 4, 1)
    ids = ops.select_blocks(q[None], pool, table, positions[None], 4, 8)[0]
    for position in range(length):
        tokens = {4 * block + i for block in _chosen(ids[position]) for i in range(4)}
        tokens |= set(range((position + 1) // 4 * 4, position + 1))
        assert tokens == set(mask[position].nonzero().flatten().tolist()), position
