"""Gated residual streams against the formula and transformers, 4 x 2560 with rank 320."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.qwen4_exp import modeling_qwen4_exp as oracle
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

from ops.registry import OpSet


def _layer(hidden: int, rank: int, inject: bool) -> oracle.Qwen4ExpTextGatedResidual:
    config = Qwen4ExpTextConfig(hidden_size=hidden, hc_count=4, hc_lowrank=rank)
    layer = oracle.Qwen4ExpTextGatedResidual(config, use_combine=inject)
    layer.hc_norm.weight.data.normal_(0, 0.2)
    for name, weight in layer.named_parameters():
        if name != "hc_norm.weight":
            weight.data.normal_(0, 2 * weight.shape[1] ** -0.5)
    return layer.requires_grad_(False)


def _down_inject(layer: oracle.Qwen4ExpTextGatedResidual) -> Tensor:
    rows = [layer.input_mix_weight_down.weight]
    if layer.block_inject_weight is not None:
        rows.append(layer.block_inject_weight.weight)
    return torch.cat(rows) / 4


@pytest.mark.parametrize(("hidden", "rank", "tokens"), [(2560, 320, 3), (7, 5, 9), (8, 1, 1)])
@pytest.mark.parametrize("inject", [True, False])
def test_mix_matches_transformers(
    ops: OpSet, hidden: int, rank: int, tokens: int, inject: bool
) -> None:
    layer, streams = _layer(hidden, rank, inject), torch.randn(tokens, 4, hidden)
    scale = ops.unit_offset(layer.hc_norm.weight).view(4, hidden)
    up = layer.input_mix_weight_up.weight
    mixed, weights = ops.hyper_mix(streams, scale, _down_inject(layer), up, 1e-6, rank)
    want = layer(streams.flatten(1))
    if not inject:
        assert weights is None
        torch.testing.assert_close(mixed, want, rtol=1e-4, atol=1e-5)
        return
    torch.testing.assert_close(mixed, want[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, want[2], rtol=1e-4, atol=1e-5)


def test_mix_follows_its_formula(ops: OpSet) -> None:
    streams, scale = torch.randn(2, 4, 3), torch.rand(4, 3) + 0.5
    down, up = torch.randn(2 + 4, 12), torch.randn(12, 2)
    mixed, inject = ops.hyper_mix(streams, scale, down, up, 1e-6, 2)
    for t in range(2):
        norm = [
            v / math.sqrt(sum(u * u for u in row) / 3 + 1e-6)
            for row in streams[t].double().tolist()
            for v in row
        ]
        n = torch.tensor(norm, dtype=torch.float64) * scale.flatten()
        p = down.double() @ n
        w = torch.sigmoid(up.double() @ (p[:2] * torch.sigmoid(p[:2])))
        want = (w * n).view(4, 3).mean(0)
        torch.testing.assert_close(mixed[t].double(), want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(inject[t].double(), 2 * torch.sigmoid(p[2:]), rtol=1e-5, atol=0)


def test_inject_writes_each_stream_in_place(ops: OpSet) -> None:
    streams, inject, y = torch.randn(3, 4, 5), torch.rand(3, 4), torch.randn(3, 5)
    want = streams + torch.einsum("ts,th->tsh", inject, y)
    same = ops.hyper_inject_(streams, inject, y)
    assert same.data_ptr() == streams.data_ptr()
    torch.testing.assert_close(streams, want)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 5e-2), (torch.float16, 5e-3)])
def test_half_streams_stay_close(ops: OpSet, dtype: torch.dtype, tolerance: float) -> None:
    layer, streams = _layer(64, 16, True), torch.randn(5, 4, 64).to(dtype)
    scale = ops.unit_offset(layer.hc_norm.weight).view(4, 64)
    down, up = _down_inject(layer).to(dtype), layer.input_mix_weight_up.weight.to(dtype)
    mixed, weights = ops.hyper_mix(streams, scale, down, up, 1e-6, 16)
    want = layer(streams.float().flatten(1))
    assert mixed.dtype == weights.dtype == dtype
    torch.testing.assert_close(mixed.float(), want[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(weights.float(), want[2], rtol=tolerance, atol=tolerance)
