"""Gated delta rule: step, chunk and transformers agree at 16 / 48 heads of 128."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers.models.qwen4_exp import modeling_qwen4_exp as oracle
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

from ops.registry import OpSet

KEY_HEADS, VALUE_HEADS, DIM = 16, 48, 128
KEY_HEAD = torch.arange(VALUE_HEADS) // 3


@dataclass
class _Tokens:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def part(self, start: int, stop: int) -> tuple[Tensor, ...]:
        return tuple(x[start:stop] for x in (self.q, self.k, self.v, self.g, self.beta))


def _tokens(n: int, hk: int = KEY_HEADS, hv: int = VALUE_HEADS, dim: int = DIM) -> _Tokens:
    decay = -torch.rand(n, hv) * 3
    decay[::7] = -80.0  # a head that forgets all
    return _Tokens(
        torch.randn(n, hk, dim),
        torch.randn(n, hk, dim),
        torch.randn(n, hv, dim),
        decay,
        torch.rand(n, hv),
    )


def _slow(tokens: _Tokens, key_head: list[int], state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence in float64, one token and one head at a time."""
    state = state.double().clone()
    output = torch.zeros(tokens.v.shape, dtype=torch.float64)
    for t in range(len(tokens.v)):
        for head, source in enumerate(key_head):
            q, k = tokens.q[t, source].double(), tokens.k[t, source].double()
            q = q / (q @ q + 1e-6).sqrt() * q.shape[0] ** -0.5
            k = k / (k @ k + 1e-6).sqrt()
            state[head] *= tokens.g[t, head].double().exp()
            delta = tokens.beta[t, head].double() * (tokens.v[t, head] - state[head].T @ k)
            state[head] += torch.outer(k, delta)
            output[t, head] = state[head].T @ q
    return output, state


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_chunk_follows_the_recurrence(ops: OpSet, chunk: int) -> None:
    tokens, start = _tokens(23, 2, 5, 12), torch.randn(5, 12, 12)
    key_head = torch.tensor([0, 0, 1, 1, 1])
    want, after = _slow(tokens, key_head.tolist(), start)
    got, end = ops.gated_delta_chunk(*tokens.part(0, 23), key_head, start, chunk)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(end.double(), after, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 130])
def test_chunk_equals_steps_and_transformers(ops: OpSet, length: int) -> None:
    tokens, start = _tokens(length), torch.randn(VALUE_HEADS, DIM, DIM)
    got, end = ops.gated_delta_chunk(*tokens.part(0, length), KEY_HEAD, start)
    states = torch.full((3, *start.shape), float("nan"))
    states[1] = start
    steps = [
        ops.gated_delta_step(*tokens.part(t, t + 1), KEY_HEAD, states, torch.tensor([1]))
        for t in range(length)
    ]
    torch.testing.assert_close(torch.cat(steps), got, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states[1], end, rtol=1e-4, atol=1e-5)
    assert states[[0, 2]].isnan().all()
    want, after = oracle.torch_chunk_gated_delta_rule(
        *(x[None] for x in tokens.part(0, length)),
        initial_state=start[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(got, want[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(end, after[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cuts", [(1, 130), (64, 130), (63, 65, 130), (17, 81, 130)])
def test_state_carries_over_any_cut(ops: OpSet, cuts: tuple[int, ...]) -> None:
    tokens, state = _tokens(130), torch.zeros(VALUE_HEADS, DIM, DIM)
    want, after = ops.gated_delta_chunk(*tokens.part(0, 130), KEY_HEAD, state)
    start, outputs = 0, []
    for stop in cuts:
        out, state = ops.gated_delta_chunk(*tokens.part(start, stop), KEY_HEAD, state)
        outputs.append(out)
        start = stop
    torch.testing.assert_close(torch.cat(outputs), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, after, rtol=1e-4, atol=1e-5)


def test_thousand_steps_do_not_drift(ops: OpSet) -> None:
    tokens = _tokens(1000, 1, 2, 16)
    key_head = torch.zeros(2, dtype=torch.int64)
    _, want = _slow(tokens, [0, 0], torch.zeros(2, 16, 16))
    states = torch.zeros(1, 2, 16, 16)
    for t in range(1000):
        ops.gated_delta_step(*tokens.part(t, t + 1), key_head, states, torch.tensor([0]))
    torch.testing.assert_close(states[0].double(), want, rtol=1e-4, atol=1e-5)


def test_step_rows_keep_to_their_slots(ops: OpSet) -> None:
    tokens, states = _tokens(2, 2, 4, 8), torch.randn(5, 4, 8, 8)
    key_head, before = torch.tensor([0, 0, 1, 1]), states.clone()
    out = ops.gated_delta_step(*tokens.part(0, 2), key_head, states, torch.tensor([4, 0]))
    for row, slot in ((0, 4), (1, 0)):
        want, after = ops.gated_delta_chunk(*tokens.part(row, row + 1), key_head, before[slot])
        torch.testing.assert_close(out[row : row + 1], want, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(states[slot], after, rtol=1e-5, atol=1e-6)
    assert torch.equal(states[1:4], before[1:4])


def test_a_split_of_value_heads_computes_its_part(ops: OpSet) -> None:
    tokens, state = _tokens(70), torch.randn(VALUE_HEADS, DIM, DIM)
    whole, after = ops.gated_delta_chunk(*tokens.part(0, 70), KEY_HEAD, state)
    heads, keys = slice(8, 16), slice(2, 6)  # value heads 8..15 read key heads 2..5
    q, k, v, g, beta = tokens.part(0, 70)
    part = (q[:, keys], k[:, keys], v[:, heads], g[:, heads], beta[:, heads])
    out, end = ops.gated_delta_chunk(*part, KEY_HEAD[heads] - 2, state[heads])
    torch.testing.assert_close(out, whole[:, heads], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(end, after[heads], rtol=1e-5, atol=1e-6)


def test_a_rank_without_heads_computes_nothing(ops: OpSet) -> None:
    tokens, none = _tokens(3, 0, 0, 8), torch.zeros(0, dtype=torch.int64)
    out, state = ops.gated_delta_chunk(*tokens.part(0, 3), none, torch.zeros(0, 8, 8))
    assert out.shape == (3, 0, 8)
    assert state.shape == (0, 8, 8)
    states, slots = torch.zeros(2, 0, 8, 8), torch.tensor([1, 0, 0])
    assert ops.gated_delta_step(*tokens.part(0, 3), none, states, slots).shape == (3, 0, 8)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_inputs_keep_an_fp32_state(ops: OpSet, dtype: torch.dtype, tolerance: float) -> None:
    tokens = _tokens(9, 2, 4, 16)
    for name in "qkv":
        setattr(tokens, name, getattr(tokens, name).to(dtype))
    key_head = torch.tensor([0, 0, 1, 1])
    want, after = _slow(tokens, key_head.tolist(), torch.zeros(4, 16, 16))
    out, state = ops.gated_delta_chunk(*tokens.part(0, 9), key_head, torch.zeros(4, 16, 16))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(state.double(), after, rtol=1e-5, atol=1e-5)


def test_gates_follow_their_formula(ops: OpSet) -> None:
    a, b = torch.randn(3, 4).bfloat16(), torch.randn(3, 4).bfloat16()
    a_log, dt_bias = torch.randn(4), torch.randn(4)
    g, beta = ops.delta_gates(a, b, a_log, dt_bias)
    want = -a_log.double().exp() * torch.log1p((a.double() + dt_bias).exp())
    torch.testing.assert_close(g.double(), want, rtol=1e-5, atol=1e-6)
    assert torch.equal(beta, torch.sigmoid(b).float())


def test_a_whole_layer_matches_transformers(ops: OpSet) -> None:
    """Projections, convolution, gates, delta rule and output norm at production heads."""
    config = Qwen4ExpTextConfig(
        hidden_size=48,
        num_hidden_layers=4,
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        output_gate_type="sigmoid",
    )
    layer = oracle.Qwen4ExpTextGatedDeltaNet(config, 0).eval()
    x = torch.randn(70, 48)
    with torch.no_grad():
        want = layer(x[None])[0]
        mixed = layer.in_proj_qkv(x)
        window = torch.zeros(3, mixed.shape[1])
        mixed, _ = ops.causal_conv_chunk(mixed, layer.conv1d.weight[:, 0], window)
        q, k, v = (
            part.reshape(70, -1, DIM)
            for part in mixed.split([KEY_HEADS * DIM, KEY_HEADS * DIM, VALUE_HEADS * DIM], dim=1)
        )
        gates = ops.delta_gates(
            layer.in_proj_a(x), layer.in_proj_b(x), layer.A_log.data, layer.dt_bias.data
        )
        state = torch.zeros(VALUE_HEADS, DIM, DIM)
        out, _ = ops.gated_delta_chunk(q, k, v, *gates, KEY_HEAD, state)
        z = layer.in_proj_z(x).view(70, VALUE_HEADS, DIM)
        out = ops.gated_rms_norm(out, layer.norm.weight.data, z, config.rms_norm_eps, "sigmoid")
        got = layer.out_proj(out.flatten(1))
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
