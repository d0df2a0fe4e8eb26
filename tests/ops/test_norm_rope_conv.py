"""Norms, rotary embedding and causal convolution against plain formulas and transformers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.qwen4_exp import modeling_qwen4_exp as oracle
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

from ops.registry import OpSet

LOW = [(torch.bfloat16, 2e-2), (torch.float16, 2e-3)]


def _rms(row: list[float], eps: float) -> list[float]:
    mean = sum(v * v for v in row) / len(row)
    return [v / math.sqrt(mean + eps) for v in row]


@pytest.mark.parametrize("width", [1, 7, 128])
def test_rms_norm_divides_by_the_root_mean_square(ops: OpSet, width: int) -> None:
    x, weight = torch.randn(3, width), torch.randn(width)
    want = torch.tensor([_rms(row, 1e-6) for row in x.double().tolist()]) * (1 + weight)
    got = ops.rms_norm(x, ops.unit_offset(weight), 1e-6)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_unit_offset_is_fp32_even_for_half_weights(ops: OpSet) -> None:
    scale = ops.unit_offset(torch.tensor([2.0**-12, -1.0], dtype=torch.bfloat16))
    assert scale.dtype == torch.float32
    assert scale.tolist() == [1 + 2.0**-12, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_give_the_bits_of_transformers(ops: OpSet, dtype: torch.dtype) -> None:
    x = torch.randn(5, 4 * 96).to(dtype)
    weight = (0.2 * torch.randn(4 * 96)).to(dtype)
    plain = oracle.Qwen4ExpTextRMSNorm(4 * 96, eps=1e-6)
    grouped = oracle.Qwen4ExpTextRMSNorm(4 * 96, group_size=96, eps=1e-6)
    plain.weight.data, grouped.weight.data = weight, weight
    scale = ops.unit_offset(weight)
    assert torch.equal(ops.rms_norm(x, scale, 1e-6), plain(x))
    got = ops.grouped_rms_norm(x.view(5, 4, 96), scale.view(4, 96), 1e-6)
    assert torch.equal(got.flatten(1), grouped(x))


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gated_norm_matches_transformers(ops: OpSet, activation: str, dtype: torch.dtype) -> None:
    x, gate = torch.randn(2, 9, 3, 128).to(dtype)
    layer = oracle.Qwen4ExpTextRMSNormGated(128, eps=1e-6, activation=activation)
    layer.weight.data = torch.rand(128) + 0.5
    got = ops.gated_rms_norm(x, layer.weight.data, gate, 1e-6, activation)
    assert torch.equal(got, layer(x, gate))


def test_unknown_gate_activation_is_named(ops: OpSet) -> None:
    x = torch.ones(1, 4)
    with pytest.raises(ValueError, match="'gelu'"):
        ops.gated_rms_norm(x, x[0], x, 1e-6, "gelu")


def test_fp16_norm_survives_squares_beyond_its_range(ops: OpSet) -> None:
    x = torch.full((1, 8), 3e4, dtype=torch.float16)
    assert torch.equal(ops.rms_norm(x, torch.ones(8), 1e-6), torch.ones(1, 8).half())


def test_rope_turns_each_pair_by_its_own_angle(ops: OpSet) -> None:
    x, positions = torch.randn(2, 3, 10), torch.tensor([5, 4097])
    cos, sin = ops.rope_tables(positions, 6, 1e7, torch.float32)
    got = ops.apply_rope(x, cos, sin)
    assert torch.equal(got[..., 6:], x[..., 6:])
    for row, position in enumerate(positions.tolist()):
        for i in range(3):
            angle = position * 1e7 ** (-2 * i / 6)
            a, b = x[row, :, i].double(), x[row, :, i + 3].double()
            first = a * math.cos(angle) - b * math.sin(angle)
            second = b * math.cos(angle) + a * math.sin(angle)
            torch.testing.assert_close(got[row, :, i].double(), first, rtol=0, atol=1e-3)
            torch.testing.assert_close(got[row, :, i + 3].double(), second, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rope_is_text_mrope_of_transformers(ops: OpSet, dtype: torch.dtype) -> None:
    config = Qwen4ExpTextConfig(
        head_dim=256,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    )
    positions = torch.tensor([[0, 1, 2047, 262143]])
    x = torch.randn(1, 4, 3, 256).to(dtype)
    cos, sin = oracle.Qwen4ExpTextRotaryEmbedding(config)(x, positions[None])
    got_cos, got_sin = ops.rope_tables(positions, 64, 1e7, dtype)
    assert torch.equal(got_cos, cos)
    assert torch.equal(got_sin, sin)
    want = oracle.apply_rotary_pos_emb(x, cos=cos, sin=sin, unsqueeze_dim=2)
    assert torch.equal(ops.apply_rope(x, got_cos, got_sin), want)


def _slow_conv(x: Tensor, weight: Tensor, window: Tensor, dilation: int) -> Tensor:
    past = torch.cat((window, x)).double()
    rows = []
    for t in range(len(x)):
        here = t + len(window)
        total = torch.zeros(x.shape[1], dtype=torch.float64)
        for tap in range(weight.shape[1]):
            total += weight[:, tap].double() * past[here - (weight.shape[1] - 1 - tap) * dilation]
        rows.append(total * torch.sigmoid(total))
    return torch.stack(rows)


@pytest.mark.parametrize(("kernel", "dilation"), [(4, 1), (4, 3), (2, 5), (1, 1)])
@pytest.mark.parametrize("length", [1, 2, 13])
def test_convolution_reads_its_window(ops: OpSet, kernel: int, dilation: int, length: int) -> None:
    width = (kernel - 1) * dilation
    x, weight = torch.randn(length, 6), torch.randn(6, kernel)
    window = torch.randn(width, 6)
    y, after = ops.causal_conv_chunk(x, weight, window, dilation)
    want = _slow_conv(x, weight, window, dilation).float()
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)
    assert torch.equal(after, torch.cat((window, x))[length:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_chunks_and_steps_agree_and_leave_one_window(ops: OpSet, dtype: torch.dtype) -> None:
    x = torch.randn(11, 40).to(dtype)
    weight, start = torch.randn(40, 4).to(dtype), torch.zeros(9, 40, dtype=dtype)
    whole, end = ops.causal_conv_chunk(x, weight, start, 3)
    first, middle = ops.causal_conv_chunk(x[:4], weight, start, 3)
    windows = torch.full((3, 9, 40), float("nan"), dtype=dtype)
    windows[2] = middle
    slots = torch.tensor([2])
    steps = [ops.causal_conv_step(row[None], weight, windows, slots, 3) for row in x[4:]]
    torch.testing.assert_close(torch.cat([first, *steps]), whole)
    assert torch.equal(windows[2], end)
    assert windows[:2].isnan().all()


def test_step_rows_keep_to_their_slots(ops: OpSet) -> None:
    x, weight = torch.randn(2, 5), torch.randn(5, 4)
    windows = torch.randn(4, 3, 5)
    before = windows.clone()
    y = ops.causal_conv_step(x, weight, windows, torch.tensor([3, 1]))
    for row, slot in ((0, 3), (1, 1)):
        want, after = ops.causal_conv_chunk(x[row : row + 1], weight, before[slot])
        assert torch.equal(y[row : row + 1], want)
        assert torch.equal(windows[slot], after)
    assert torch.equal(windows[[0, 2]], before[[0, 2]])


def test_convolution_matches_transformers_at_production_width(ops: OpSet) -> None:
    x, weight = torch.randn(9, 10240), torch.randn(10240, 4)
    y, _ = ops.causal_conv_chunk(x, weight, torch.zeros(3, 10240))
    want = oracle.causal_conv1d_fn(x.T[None], weight, None, activation="silu")[0].T
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), LOW)
def test_half_convolution_accumulates_in_fp32(
    ops: OpSet, dtype: torch.dtype, tolerance: float
) -> None:
    x, weight = torch.randn(6, 32).to(dtype), torch.randn(32, 4).to(dtype)
    y, _ = ops.causal_conv_chunk(x, weight, torch.zeros(3, 32, dtype=dtype))
    want = _slow_conv(x, weight, torch.zeros(3, 32), 1)
    torch.testing.assert_close(y.double(), want, rtol=tolerance, atol=tolerance)
