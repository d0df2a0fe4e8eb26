"""The compositions of ops/npu against the reference, on CPU tensors in fp16 at production shapes.

The operators of torch_npu are played, see `tests/npu/played.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.npu import attention, delta, experts, library, norms, rope
from ops.reference import attention as attention_reference
from ops.reference import delta as delta_reference
from ops.reference import hyper, moe, norm, select
from ops.reference import rope as rope_reference
from tests.npu.played import PlayedLibrary

HALF = torch.float16


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library, "library", PlayedLibrary)
    torch.manual_seed(5)
    yield
    norms._ones.cache_clear()


def half(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).half()


def close(found: Tensor, expected: Tensor, bound: float = 4e-3) -> None:
    """Largest error at most `bound` of the largest value; fp16 has 2^-11 a rounding."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert torch.isfinite(found).all()
    error = (found.float() - expected.float()).abs().max() if found.numel() else torch.zeros(())
    assert error <= bound * expected.float().abs().max().clamp_min(1e-3), error


@pytest.mark.parametrize("shape", [(1, 2048), (7, 16, 128), (3, 4, 4096)])
def test_norms(shape: tuple[int, ...]) -> None:
    x, scale = half(*shape, scale=3), 1 + 0.1 * torch.randn(shape[-1])
    close(norms.rms_norm(x, scale, 1e-6), norm.rms_norm(x, scale, 1e-6))
    gate = half(*shape)
    for activation in ("silu", "sigmoid"):
        found = norms.gated_rms_norm(x, scale, gate, 1e-6, activation)
        close(found, norm.gated_rms_norm(x, scale, gate, 1e-6, activation))
    if len(shape) == 3:
        scales = 1 + 0.1 * torch.randn(*shape[1:])
        found = norms.grouped_rms_norm(x, scales, 1e-6)
        close(found, norm.grouped_rms_norm(x, scales, 1e-6))


@pytest.mark.parametrize("tokens", [1, 5])
def test_stream_mix(tokens: int) -> None:
    streams, rank = half(tokens, 4, 2048), 64
    scale = 1 + 0.1 * torch.randn(4, 2048)
    down, up = half(rank + 4, 8192, scale=0.02), half(8192, rank, scale=0.1)
    for rows in (down, down[:rank]):
        found = norms.hyper_mix(streams, scale, rows, up, 1e-6, rank)
        expected = hyper.hyper_mix(streams, scale, rows, up, 1e-6, rank)
        close(found[0], expected[0])
        if expected[1] is None:
            assert found[1] is None
        else:
            assert found[1] is not None
            close(found[1], expected[1])


@pytest.mark.parametrize(("heads", "dim", "rotary"), [(16, 128, 128), (24, 256, 64), (12, 32, 16)])
def test_rotation_of_a_part_of_the_head(heads: int, dim: int, rotary: int) -> None:
    x, positions = half(9, heads, dim), torch.arange(40_000, 40_009)
    tables = rope_reference.rope_tables(positions, rotary, 1e6, HALF)
    close(rope.apply_rope(x, *tables), rope_reference.apply_rope(x, *tables))


@pytest.mark.parametrize("tokens", [1, 3, 1023, 1025])
def test_routing_with_ties(tokens: int) -> None:
    logits = half(tokens, 512)
    logits[:, 100:108] = logits.amax(1, keepdim=True)  # eight equal best: the lowest ids win
    for normalise in (True, False):
        weights, ids = experts.route(logits, 10, normalise)
        expected = moe.route(logits, 10, normalise)
        assert torch.equal(ids, expected[1])
        close(weights, expected[0])


def banks(owned: int, hidden: int = 256, inner: int = 96) -> tuple[Tensor, Tensor]:
    return half(owned, 2 * inner, hidden, scale=0.06), half(owned, hidden, inner, scale=0.1)


@pytest.mark.parametrize("tokens", [1, 4, 129])
@pytest.mark.parametrize(("owned", "all_experts"), [(512, 512), (86, 512), (1, 14)])
def test_experts_of_a_part_of_the_bank(tokens: int, owned: int, all_experts: int) -> None:
    """Peers' routes, experts without a token and one that gets all add up as in the reference."""
    x, top_k = half(tokens, 256), 10
    gate_up, down = banks(owned)
    ids = torch.rand(tokens, all_experts).argsort(dim=1)[:, :top_k]
    ids[:, 0] = 0  # the first expert is everybody's
    for row in ids:
        row[1:][row[1:] == 0] = all_experts - 1
    local = torch.where(ids < owned, ids, -1)
    weights = torch.rand(tokens, top_k).half()
    found = experts.moe_experts(x, weights, local, gate_up, down)
    close(found, moe.moe_experts(x, weights, local, gate_up, down), 6e-3)


def test_routes_that_are_all_peers_give_exact_zeros() -> None:
    gate_up, down = banks(8)
    local = torch.full((3, 4), -1)
    found = experts.moe_experts(half(3, 256), torch.rand(3, 4).half(), local, gate_up, down)
    assert torch.equal(found, torch.zeros(3, 256, dtype=HALF))


def test_a_sentinel_id_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seeded fault: the peers' bucket is left out, so their id is the number of experts."""
    whole = PlayedLibrary.npu_moe_init_routing_v2

    def without_bucket(self: PlayedLibrary, x: Tensor, ids: Tensor, **named: Any) -> Any:
        named["expert_num"] -= 1
        named["active_expert_range"] = [0, named["expert_num"]]
        return whole(self, x, ids, **named)

    monkeypatch.setattr(PlayedLibrary, "npu_moe_init_routing_v2", without_bucket)
    gate_up, down = banks(8)
    local = torch.tensor([[0, -1, 7]])
    with pytest.raises(IndexError, match="writes out of bounds"):
        experts.moe_experts(half(1, 256), torch.rand(1, 3).half(), local, gate_up, down)


def pools(kv_heads: int, dim: int, pages: int = 12, page: int = 64) -> tuple[Tensor, Tensor]:
    k, v = half(pages, page, kv_heads, dim), half(pages, page, kv_heads, dim)
    for pool in (k, v):
        pool[5] = math.nan  # a page that nobody may trust
    return k, v


@pytest.mark.parametrize("groups", [(8,), (12, 12), (4, 2)])
@pytest.mark.parametrize("queries", [1, 3, 33])
def test_dense_attention(groups: tuple[int, ...], queries: int) -> None:
    k, v = pools(len(groups), 128)
    batch = 1 if queries == 33 else 2
    query = half(batch, queries, sum(groups), 128)
    table = torch.tensor([[1, 2, 3, 5], [7, 8, 9, 5]])[:batch]
    last = torch.tensor([150, 101])[:batch, None]
    positions = last - queries + 1 + torch.arange(queries)
    positions[0, 0] = -1  # padding
    arguments = (query, k, v, table, positions, None, 4, groups, 128**-0.5)
    found = attention.paged_attention(*arguments)
    close(found, attention_reference.paged_attention(*arguments), 8e-3)
    assert not found[0, 0].any()


@pytest.mark.parametrize("queries", [1, 5])
def test_attention_over_selected_blocks(queries: int) -> None:
    """As many blocks as the budget, one more and one less are visible."""
    k, v = pools(2, 128)
    table = torch.tensor([[1, 2, 3, 5], [7, 8, 9, 5]])
    positions = torch.tensor([[131], [187]]) - queries + 1 + torch.arange(queries)
    index = half(12, 16, 64)
    index_query = half(2, queries, 4, 64)
    for budget in (31, 32, 33, 64):
        chosen = attention.select_blocks(index_query, index, table, positions, 4, budget)
        expected = select.select_blocks(index_query, index, table, positions, 4, budget)
        assert (chosen == expected).float().mean() > 0.98  # fp16 products may swap near equals
        arguments = (half(2, queries, 12, 128), k, v, table, positions, expected, 4, (6, 6), 0.09)
        found = attention.paged_attention(*arguments)
        close(found, attention_reference.paged_attention(*arguments), 8e-3)


def test_equal_blocks_are_chosen_from_the_lowest() -> None:
    index = torch.ones(4, 16, 64, dtype=HALF)
    table, positions = torch.arange(4)[None], torch.tensor([[255]])
    chosen = attention.select_blocks(half(1, 1, 4, 64), index, table, positions, 4, 10)
    assert chosen.flatten().tolist() == list(range(10))


def test_cache_write() -> None:
    pool_k, pool_v = pools(2, 128)
    expected_k, expected_v = pool_k.clone(), pool_v.clone()
    slots, k, v = torch.tensor([3, 700, 64]), half(3, 2, 128), half(3, 2, 128)
    attention.write_kv_(pool_k, pool_v, slots, k, v)
    attention_reference.write_kv_(expected_k, expected_v, slots, k, v)
    assert torch.equal(pool_k.nan_to_num(), expected_k.nan_to_num())
    assert torch.equal(pool_v.nan_to_num(), expected_v.nan_to_num())


def test_index_keys() -> None:
    raw, scale = half(6, 4, 128), 1 + 0.1 * torch.randn(128)
    arguments = (raw, scale, 1e-6, torch.arange(0, 24, 4), 64, 1e6)
    close(norms.index_keys(*arguments), select.index_keys(*arguments))


@pytest.mark.parametrize("tokens", [1, 7, 8, 63, 64, 65, 200])
def test_delta_rule_in_chunks(tokens: int) -> None:
    """16 key heads, 48 value heads of 128; a state comes in and goes out."""
    q, k, v = half(tokens, 16, 128), half(tokens, 16, 128), half(tokens, 48, 128)
    g = -torch.rand(tokens, 48) * 0.2
    beta = torch.rand(tokens, 48)
    key_head = torch.arange(48) // 3
    state = torch.randn(48, 128, 128) * 0.1
    found = delta.gated_delta_chunk(q, k, v, g, beta, key_head, state)
    expected = delta_reference.gated_delta_chunk(q, k, v, g, beta, key_head, state)
    close(found[0], expected[0])
    close(found[1], expected[1], 1e-4)


def test_the_inverse_stands_equal_keys_without_decay() -> None:
    """The worst case of a series: all keys alike, full strength, nothing forgotten."""
    lower = torch.ones(1, 64, 64).tril(-1)
    expected = torch.linalg.inv(torch.eye(64, dtype=torch.float64) + lower.double())
    assert (delta.inverse(lower).double() - expected).abs().max() < 1e-5
