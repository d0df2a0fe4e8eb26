"""Routing and owned experts: ties, partial sums, empty ranks, production geometry."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers.models.qwen4_exp import modeling_qwen4_exp as oracle
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

from ops.reference import moe
from ops.registry import OpSet


def _weights(experts: int, hidden: int, inner: int) -> tuple[Tensor, Tensor]:
    gate_up = torch.randn(experts, 2 * inner, hidden) * hidden**-0.5
    return gate_up, torch.randn(experts, hidden, inner) * inner**-0.5


def _slow_experts(
    x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, local_of: Tensor
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    inner = down.shape[2]
    for t in range(len(x)):
        for weight, expert in zip(weights[t].double(), ids[t].tolist(), strict=True):
            local = int(local_of[expert])
            if local >= 0:
                h = gate_up[local].double() @ x[t].double()
                out[t] += weight * (down[local].double() @ (silu(h[:inner]) * h[inner:]))
    return out


def _distinct(tokens: int, experts: int, top_k: int) -> Tensor:
    return torch.rand(tokens, experts).argsort(dim=1)[:, :top_k]


def test_router_matches_transformers_at_512_experts(ops: OpSet) -> None:
    config = Qwen4ExpTextConfig(hidden_size=64, num_experts=512, num_experts_per_tok=10)
    router = oracle.Qwen4ExpTextTopKRouter(config).requires_grad_(False)
    router.weight.data.normal_()
    logits, weights, ids = router(torch.randn(40, 64))
    got_weights, got_ids = ops.route(logits, 10, True)
    assert torch.equal(got_ids, ids)
    torch.testing.assert_close(got_weights, weights)


def test_router_without_normalisation_keeps_probabilities(ops: OpSet) -> None:
    logits = torch.randn(3, 7)
    weights, ids = ops.route(logits, 2, False)
    assert torch.equal(weights, torch.softmax(logits, -1).gather(1, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_router_ties_go_to_the_lowest_id(ops: OpSet, dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 512, dtype=dtype)
    logits[1, [500, 17, 3]] = 4.0
    weights, ids = ops.route(logits, 10, True)
    assert weights.dtype == dtype
    assert ids[0].tolist() == list(range(10))
    assert ids[1].tolist() == [3, 17, 500, 0, 1, 2, 4, 5, 6, 7]


def test_router_with_a_nan_row_stays_in_range(ops: OpSet) -> None:
    logits = torch.full((2, 16), float("nan"))
    logits[1] = -logits[1]
    weights, ids = ops.route(logits, 4, True)
    assert weights.isnan().all()
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 16


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_both_regimes_follow_the_formula(ops: OpSet, tokens: int) -> None:
    gate_up, down = _weights(5, 24, 7)
    local_of = torch.tensor([-1, 0, 1, -1, 2, 3, 4, -1, -1])
    x, weights, ids = torch.randn(tokens, 24), torch.rand(tokens, 4), _distinct(tokens, 9, 4)
    want = _slow_experts(x, weights, ids, gate_up, down, local_of)
    local = local_of[ids]
    for out in (
        ops.moe_experts(x, weights, local_of[ids], gate_up, down),
        moe._by_route(x, weights, local, gate_up, down),
        moe._by_expert(x, weights, local, gate_up, down),
    ):
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-5)


def test_tiles_of_gathered_weights_do_not_change_the_sum(
    ops: OpSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate_up, down = _weights(6, 16, 8)
    x, weights, ids = torch.randn(7, 16), torch.rand(7, 3), _distinct(7, 6, 3)
    whole = ops.moe_experts(x, weights, ids, gate_up, down)
    monkeypatch.setattr(moe, "TILE_ELEMENTS", 2 * gate_up[0].numel())
    tiled = ops.moe_experts(x, weights, ids, gate_up, down)
    torch.testing.assert_close(tiled, whole)


@pytest.mark.parametrize("tokens", [4, 30])
def test_production_geometry_with_three_owned_of_512(ops: OpSet, tokens: int) -> None:
    gate_up, down = _weights(3, 2560, 640)
    local_of = torch.full((512,), -1)
    local_of[[7, 300, 511]] = torch.arange(3)
    ids = _distinct(tokens, 512, 10)
    ids[:, :2] = torch.tensor([511, 7])
    ids[:, 2:] = 8 + _distinct(tokens, 290, 8)
    x, weights = torch.randn(tokens, 2560), torch.rand(tokens, 10)
    got = ops.moe_experts(x, weights, local_of[ids], gate_up, down)
    want = _slow_experts(x, weights, ids, gate_up, down, local_of)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tokens", [3, 100])
@pytest.mark.parametrize("ranks", [1, 4, 6])
def test_partial_sums_of_ranks_add_up_to_transformers(ops: OpSet, ranks: int, tokens: int) -> None:
    config = Qwen4ExpTextConfig(
        hidden_size=32, num_experts=14, num_experts_per_tok=4, moe_intermediate_size=24
    )
    experts = oracle.Qwen4ExpTextExperts(config).requires_grad_(False)
    experts.gate_up_proj.data, experts.down_proj.data = _weights(14, 32, 24)
    x, ids = torch.randn(tokens, 32), _distinct(tokens, 14, 4)
    weights = torch.rand(tokens, 4)
    total = torch.zeros(tokens, 32)
    for owned in torch.tensor_split(torch.arange(14), ranks):
        local_of = torch.full((14,), -1)
        local_of[owned] = torch.arange(len(owned))
        total += ops.moe_experts(
            x, weights, local_of[ids], experts.gate_up_proj[owned], experts.down_proj[owned]
        )
    torch.testing.assert_close(total, experts(x, ids, weights), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [3, 100])
def test_routes_of_peers_give_exact_zeros(ops: OpSet, tokens: int) -> None:
    gate_up, down = (torch.full(s, float("nan")) for s in ((2, 12, 8), (2, 8, 6)))
    x, weights = torch.randn(tokens, 8), torch.rand(tokens, 3)
    local_of = torch.tensor([-1] * 6 + [0, 1])
    ids = _distinct(tokens, 6, 3)
    out = ops.moe_experts(x, weights, local_of[ids], gate_up, down)
    assert torch.equal(out, torch.zeros(tokens, 8))


def test_a_rank_without_experts_or_tokens_gives_zeros(ops: OpSet) -> None:
    gate_up, down = _weights(0, 8, 6)
    nobody = torch.full((4,), -1)
    x, ids, weights = torch.randn(3, 8), _distinct(3, 4, 2), torch.rand(3, 2)
    assert not ops.moe_experts(x, weights, nobody[ids], gate_up, down).any()
    gate_up, down = _weights(2, 8, 6)
    out = ops.moe_experts(x[:0], weights[:0], ids[:0], gate_up, down)
    assert out.shape == (0, 8)


def test_a_split_mlp_adds_up_to_transformers(ops: OpSet) -> None:
    config = Qwen4ExpTextConfig(hidden_size=24, shared_expert_intermediate_size=10)
    mlp = oracle.Qwen4ExpTextMLP(config, intermediate_size=10).requires_grad_(False)
    x, total = torch.randn(5, 24), torch.zeros(5, 24)
    for units in (slice(0, 7), slice(7, 10), slice(10, 10)):
        gate_up = torch.cat((mlp.gate_proj.weight[units], mlp.up_proj.weight[units]))
        total += ops.swiglu_mlp(x, gate_up, mlp.down_proj.weight[:, units])
    torch.testing.assert_close(total, mlp(x), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 5e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("tokens", [3, 100])
def test_half_experts_stay_close(
    ops: OpSet, dtype: torch.dtype, tolerance: float, tokens: int
) -> None:
    gate_up, down = (w.to(dtype) for w in _weights(4, 32, 16))
    x, weights = torch.randn(tokens, 32).to(dtype), torch.rand(tokens, 3).to(dtype)
    ids, local_of = _distinct(tokens, 4, 3), torch.arange(4)
    out = ops.moe_experts(x, weights, local_of[ids], gate_up, down)
    want = _slow_experts(x, weights, ids, gate_up, down, local_of)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
