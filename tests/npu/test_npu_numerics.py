"""The compositions of ops/npu against the reference, on CPU tensors in fp16 at production shapes.

The operators of torch_npu are played by functions written from their documented meaning. They
enforce what the chip would not forgive: ids within range, types alike, whole segments; and they
fill what the real ones leave undefined with NaN.
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

HALF = torch.float16


class PlayedLibrary:
    """torch_npu's operators on CPU tensors; every argument's type is one that a 310P has."""

    ALLOWED = (HALF, torch.float32, torch.int8, torch.int32, torch.int64, torch.bool)

    def __getattribute__(self, name: str) -> Any:
        function = object.__getattribute__(self, name)
        if not name.startswith("npu_"):
            return function

        def checked(*arguments: Any, **named: Any) -> Any:
            flat = [*arguments, *named.values()]
            tensors = [t for a in flat for t in (a if isinstance(a, list) else [a])]
            for tensor in tensors:
                if isinstance(tensor, Tensor):
                    assert tensor.dtype in self.ALLOWED, f"{name} got {tensor.dtype}"
            return function(*arguments, **named)

        return checked

    def npu_rms_norm(self, x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        assert x.dtype == gamma.dtype
        inverse = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
        return (x.float() * inverse * gamma.float()).to(x.dtype), inverse

    def npu_rotary_mul(self, x: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        assert x.dim() == r1.dim() == r2.dim() == 4
        assert x.shape[-1] == r1.shape[-1]
        assert x.dtype == r1.dtype == r2.dtype
        first, second = x.chunk(2, dim=-1)
        swapped = torch.cat((-second, first), dim=-1)
        return (x.float() * r1.float() + swapped.float() * r2.float()).to(x.dtype)

    def npu_swiglu(self, x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)

    def npu_moe_init_routing_v2(
        self, x: Tensor, ids: Tensor, *, active_num: int, expert_capacity: int, expert_num: int,
        drop_pad_mode: int, expert_tokens_num_type: int, expert_tokens_num_flag: bool,
        quant_mode: int, active_expert_range: list[int], row_idx_type: int,
    ) -> tuple[Tensor, Tensor, Tensor, None]:  # fmt: skip
        assert (drop_pad_mode, quant_mode, row_idx_type, expert_tokens_num_type) == (0, -1, 0, 0)
        assert expert_tokens_num_flag
        assert ids.dtype is torch.int32
        assert active_num == ids.numel(), "a capacity below tokens x top-k"
        assert active_expert_range == [0, expert_num]
        if not ((ids >= 0) & (ids < expert_num)).all():
            raise IndexError("an expert id outside 0..expert_num-1 writes out of bounds")
        order = ids.flatten().argsort(stable=True)
        row_of = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        counts = torch.bincount(ids.flatten(), minlength=expert_num).cumsum(0)
        return x[order // ids.shape[1]], row_of.int(), counts.int(), None

    def npu_grouped_matmul(
        self, x: list[Tensor], weight: list[Tensor], *, group_list: Tensor, split_item: int,
        group_type: int, group_list_type: int,
    ) -> list[Tensor]:  # fmt: skip
        assert (split_item, group_type, group_list_type) == (2, 0, 0)
        (rows,), (bank,) = x, weight
        assert rows.dtype is HALF
        assert bank.dtype is HALF
        assert group_list.dtype is torch.int64
        assert rows.shape[1] == bank.shape[1]
        out = torch.full((rows.shape[0], bank.shape[2]), math.nan, dtype=HALF)
        begin = 0
        for expert, end in enumerate(group_list.tolist()):
            out[begin:end] = (rows[begin:end].float() @ bank[expert].float()).half()
            begin = end
        return [out]

    def npu_quant_grouped_matmul_dequant(
        self, x: Tensor, bank: Tensor, scale: Tensor, ends: Tensor
    ) -> Tensor:
        assert bank.dtype is torch.int8
        assert scale.dtype is torch.float32
        assert ends.dtype is torch.int64
        steps = x.float().abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
        codes = (x.float() / steps).round().clamp(-127, 127)
        out = torch.full((x.shape[0], bank.shape[1]), math.nan, dtype=HALF)
        begin = 0
        for expert, end in enumerate(ends.tolist()):
            product = codes[begin:end] @ bank[expert].float().t() * scale[expert]
            out[begin:end] = (product * steps[begin:end]).half()
            begin = end
        return out

    def npu_moe_token_unpermute(self, rows: Tensor, row_of: Tensor, shares: Tensor) -> Tensor:
        assert row_of.dtype is torch.int32
        assert rows.dtype == shares.dtype
        routed = rows[row_of.long()].view(*shares.shape, -1).float()
        return (routed * shares.float()[..., None]).sum(1).to(rows.dtype)

    def npu_scatter_nd_update_(self, target: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        assert target.dtype == updates.dtype
        assert ((indices >= 0) & (indices < target.shape[0])).all()
        return target.index_copy_(0, indices[:, 0], updates)

    def npu_prompt_flash_attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, atten_mask: Tensor, num_heads: int,
        scale_value: float, input_layout: str, num_key_value_heads: int, sparse_mode: int,
    ) -> Tensor:  # fmt: skip
        assert (input_layout, sparse_mode) == ("BNSD", 0)
        assert query.dtype is key.dtype is value.dtype is HALF
        assert query.shape[1] == num_heads
        assert atten_mask.dtype is torch.bool
        group = num_heads // num_key_value_heads
        key, value = (x.float().repeat_interleave(group, dim=1) for x in (key, value))
        scores = query.float() @ key.transpose(2, 3) * scale_value
        weights = scores.masked_fill(atten_mask, -math.inf).softmax(-1).nan_to_num(0)
        return (weights @ value).half()


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


@pytest.mark.parametrize("tokens", [1, 40])
def test_int8_experts(tokens: int) -> None:
    x, owned, top_k = half(tokens, 256), 6, 4
    gate_up, down = banks(owned)
    codes, scales = [], []
    for bank in (gate_up, down):
        scale = bank.float().abs().amax(2) / 127
        codes.append((bank.float() / scale[..., None]).round().to(torch.int8))
        scales.append(scale)
    local = torch.rand(tokens, owned + 2).argsort(dim=1)[:, :top_k]
    local = torch.where(local < owned, local, -1)
    weights = torch.rand(tokens, top_k).half()
    found = experts.w8a8_experts(x, weights, local, codes[0], scales[0], codes[1], scales[1])
    close(found, moe.moe_experts(x, weights, local, gate_up, down), 0.03)


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
