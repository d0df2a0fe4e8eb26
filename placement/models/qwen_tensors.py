"""Tensor names that the Qwen families share: gated delta net, gated attention, MoE block.

Owns names, shapes and split rules of these parts; the layer around them is a family's own.
"""

from __future__ import annotations

from collections.abc import Iterator

from placement.models.rows import Names, by_columns, by_rows, experts, feed_forward, norm, whole
from placement.spec import (
    Axis,
    Component,
    DTypeRule,
    GatedAttentionSpec,
    GatedDeltaSpec,
    MoeSpec,
    Segment,
    SparseAttentionSpec,
    Split,
    TensorSpec,
)


def gated_delta(names: Names, role: str, base: str, spec: GatedDeltaSpec) -> Iterator[TensorSpec]:
    hidden, heads = names.hidden, spec.num_value_heads
    key_rows = Segment(Axis.KEY_HEADS, spec.key_dim, spec.num_key_heads)
    value_rows = Segment(Axis.VALUE_HEADS, spec.value_dim, heads)
    joined = Split(0, (key_rows, key_rows, value_rows))
    value_width = heads * spec.value_dim
    channels = 2 * spec.num_key_heads * spec.key_dim + value_width
    per_head = by_rows(Axis.VALUE_HEADS, 1, heads)
    conv = (channels, 1, spec.conv_kernel)
    float32 = DTypeRule.FLOAT32
    yield whole(role + "qkv", base + "in_proj_qkv.weight", (channels, hidden), joined)
    yield whole(role + "conv", base + "conv1d.weight", conv, joined)
    z_rows = Split(0, (value_rows,))
    yield whole(role + "z", base + "in_proj_z.weight", (value_width, hidden), z_rows)
    yield whole(role + "b", base + "in_proj_b.weight", (heads, hidden), per_head)
    yield whole(role + "a", base + "in_proj_a.weight", (heads, hidden), per_head)
    yield whole(role + "a_log", base + "A_log", (heads,), per_head, dtype=float32)
    yield whole(role + "dt_bias", base + "dt_bias", (heads,), per_head, dtype=float32)
    yield norm(role + "norm", base + "norm.weight", spec.value_dim)
    out = by_columns(Axis.VALUE_HEADS, spec.value_dim, heads)
    yield whole(role + "out", base + "out_proj.weight", (hidden, value_width), out)


def gated_attention(
    names: Names, role: str, base: str, spec: GatedAttentionSpec | SparseAttentionSpec
) -> Iterator[TensorSpec]:
    hidden, heads, dim = names.hidden, spec.num_heads, spec.head_dim
    # Query and gate of a head lie next to each other, so one unit is two head widths.
    q_rows = by_rows(Axis.QUERY_HEADS, 2 * dim, heads)
    kv_rows = by_rows(Axis.KV_HEADS, dim, spec.num_kv_heads)
    kv_shape = (spec.num_kv_heads * dim, hidden)
    yield whole(role + "q", base + "q_proj.weight", (2 * heads * dim, hidden), q_rows)
    yield whole(role + "k", base + "k_proj.weight", kv_shape, kv_rows)
    yield whole(role + "v", base + "v_proj.weight", kv_shape, kv_rows)
    out = by_columns(Axis.QUERY_HEADS, dim, heads)
    yield whole(role + "o", base + "o_proj.weight", (hidden, heads * dim), out)
    yield norm(role + "q_norm", base + "q_norm.weight", dim)
    yield norm(role + "k_norm", base + "k_norm.weight", dim)


def moe(
    names: Names, role: str, base: str, spec: MoeSpec, expert_layer: int
) -> Iterator[TensorSpec]:
    hidden = names.hidden
    yield whole(role + "router", base + "gate.weight", (spec.num_experts, hidden))
    yield whole(role + "shared_gate", base + "shared_expert_gate.weight", (1, hidden))
    yield from feed_forward(
        role + "shared_",
        base + "shared_expert.",
        hidden,
        spec.shared_intermediate,
        Axis.SHARED_FFN,
        Component.SHARED_EXPERTS,
    )
    yield from experts(names, role, base + "experts.", spec, expert_layer)
