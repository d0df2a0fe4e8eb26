"""Tensor names of the GLM5-Next family: what lies where on disk, and how it is dealt out.

Owns the names, shapes and split rules of every tensor. Experts are one matrix each on disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from placement.headers import CheckpointHeaders
from placement.models.assembly import DiskTensors, find_prefix, settle_tensors
from placement.models.rows import (
    Names,
    by_columns,
    by_rows,
    experts,
    feed_forward,
    norm,
    whole,
)
from placement.spec import (
    Axis,
    Component,
    DenseSpec,
    DTypeRule,
    KdaSpec,
    LatentAttentionSpec,
    LayerSpec,
    MoeSpec,
    ResidualSpec,
    TensorSpec,
)

# (text prefix, name of the output head); the first whose embedding is on disk is used
PREFIXES = (("model.language_model.", "lm_head.weight"), ("model.", "lm_head.weight"))
FLOAT32 = DTypeRule.FLOAT32


@dataclass(frozen=True)
class _Names(Names):
    """The shared part and the residual streams. Releases hold experts as single matrices."""

    num_streams: int = 1

    def per_expert(self, base: str) -> bool:
        return True


def disk_tensors(
    hidden: int,
    vocab: int,
    residual: ResidualSpec,
    layers: tuple[LayerSpec, ...],
    drafts: tuple[LayerSpec, ...],
    config: Mapping[str, Any],
    headers: CheckpointHeaders | None,
) -> DiskTensors:
    """Every tensor with its places on disk, checked against the headers when there are any."""
    prefix, head = find_prefix(PREFIXES, headers, "text_config" in config)
    names = _Names(hidden, headers, num_streams=residual.num_streams)
    tensors = list(_top(names, vocab, prefix, head))
    for layer in layers:
        role, base = f"layers.{layer.index}.", f"{prefix}layers.{layer.index}."
        tensors += _streams(names, role, base)
        tensors += _layer(names, role, base, layer, layer.index)
    base = prefix.removesuffix(".") + draft_base(len(layers))
    draft = [replace(t, component=Component.MTP) for t in _draft(names, base, drafts, len(layers))]
    return settle_tensors(tensors, draft, headers, config, _is_ignored)


def draft_base(num_layers: int) -> str:
    """Infix of the draft layer's names: it has the number after the last layer."""
    return f".layers.{num_layers}."


def _is_ignored(name: str) -> bool:
    return ".visual." in name or name.startswith("visual.")


def _top(names: _Names, vocab: int, prefix: str, head: str) -> Iterator[TensorSpec]:
    shape, split = (vocab, names.hidden), by_rows(Axis.VOCAB, 1, vocab)
    yield whole("embed", prefix + "embed_tokens.weight", shape, split, Component.EMBEDDING)
    yield whole("head", head, shape, split, Component.EMBEDDING)
    yield norm("final_norm", prefix + "norm.weight", names.hidden)


def _streams(names: _Names, role: str, base: str) -> Iterator[TensorSpec]:
    """Both mixing sites of a layer: weights to read and write streams, and to mix them."""
    streams = names.num_streams
    mixes = streams * (2 + streams)
    for site, name in (("mixer_site", "hc_attn"), ("channel_site", "hc_ffn")):
        for part, shape in (
            ("fn", (mixes, streams * names.hidden)),
            ("base", (mixes,)),
            ("scale", (3,)),
        ):
            yield whole(f"{role}{site}.{part}", f"{base}{name}_{part}", shape, dtype=FLOAT32)


def _layer(
    names: _Names, role: str, base: str, layer: LayerSpec, expert_layer: int
) -> Iterator[TensorSpec]:
    yield norm(role + "mixer_norm", base + "input_layernorm.weight", names.hidden)
    yield norm(role + "channel_norm", base + "post_attention_layernorm.weight", names.hidden)
    if isinstance(layer.mixer, KdaSpec):
        yield from _kda(names, role + "mixer.", base + "self_attn.", layer.mixer)
    if isinstance(layer.mixer, LatentAttentionSpec):
        yield from _attention(names, role + "mixer.", base + "self_attn.", layer.mixer)
        indexer = base + "self_attn.indexer."
        yield from _indexer(names, role + "mixer.index_", indexer, layer.mixer)
    if isinstance(layer.channel, DenseSpec):
        inner, axis = layer.channel.intermediate, Axis.DENSE_FFN
        channel = role + "channel."
        yield from feed_forward(channel, base + "mlp.", names.hidden, inner, axis, Component.DENSE)
    else:
        yield from _moe(names, role + "channel.", base + "mlp.", layer.channel, expert_layer)


def _kda(names: _Names, role: str, base: str, spec: KdaSpec) -> Iterator[TensorSpec]:
    hidden, heads, dim = names.hidden, spec.num_heads, spec.head_dim
    width, wide = heads * dim, by_rows(Axis.VALUE_HEADS, dim, heads)
    per_head = by_rows(Axis.VALUE_HEADS, 1, heads)
    for part in ("q", "k", "v"):
        yield whole(role + part, f"{base}{part}_proj.weight", (width, hidden), wide)
        conv = (width, 1, spec.conv_kernel)
        yield whole(f"{role}conv_{part}", f"{base}{part}_conv1d.weight", conv, wide, dtype=FLOAT32)
    for gate in ("f", "g"):
        low, high = (spec.gate_rank, hidden), (width, spec.gate_rank)
        yield whole(f"{role}{gate}_a", f"{base}{gate}_a_proj.weight", low)
        yield whole(f"{role}{gate}_b", f"{base}{gate}_b_proj.weight", high, wide)
    yield whole(role + "b", base + "b_proj.weight", (heads, hidden), per_head)
    yield whole(role + "a_log", base + "A_log", (heads,), per_head, dtype=FLOAT32)
    yield whole(role + "dt_bias", base + "dt_bias", (width,), wide, dtype=FLOAT32)
    yield norm(role + "norm", base + "o_norm.weight", dim)
    out = by_columns(Axis.VALUE_HEADS, dim, heads)
    yield whole(role + "out", base + "o_proj.weight", (hidden, width), out)


def _attention(
    names: _Names, role: str, base: str, spec: LatentAttentionSpec
) -> Iterator[TensorSpec]:
    hidden, heads = names.hidden, spec.num_heads
    yield whole(role + "q_a", base + "q_a_proj.weight", (spec.query_rank, hidden))
    yield norm(role + "q_a_norm", base + "q_a_layernorm.weight", spec.query_rank)
    q_shape = (heads * spec.query_dim, spec.query_rank)
    q_rows = by_rows(Axis.QUERY_HEADS, spec.query_dim, heads)
    yield whole(role + "q_b", base + "q_b_proj.weight", q_shape, q_rows)
    yield whole(role + "kv_a", base + "kv_a_proj_with_mqa.weight", (spec.latent_dim, hidden))
    yield norm(role + "kv_a_norm", base + "kv_a_layernorm.weight", spec.latent_dim)
    # Key and value rows of a head lie next to each other.
    per_head = spec.query_dim + spec.value_dim
    kv_rows = by_rows(Axis.QUERY_HEADS, per_head, heads)
    kv_shape = (heads * per_head, spec.latent_dim)
    yield whole(role + "kv_b", base + "kv_b_proj.weight", kv_shape, kv_rows)
    out = by_columns(Axis.QUERY_HEADS, spec.value_dim, heads)
    yield whole(role + "o", base + "o_proj.weight", (hidden, heads * spec.value_dim), out)


def _indexer(
    names: _Names, role: str, base: str, spec: LatentAttentionSpec
) -> Iterator[TensorSpec]:
    """Replicated: each rank selects blocks for all of its heads."""
    hidden, dim = names.hidden, spec.index_dim
    yield whole(role + "q", base + "wq_b.weight", (spec.index_heads * dim, spec.query_rank))
    yield whole(role + "k", base + "wk.weight", (dim, hidden))
    yield whole(role + "weights", base + "weights_proj.weight", (spec.index_heads, hidden))
    yield norm(role + "k_norm", base + "k_norm.weight", dim)
    yield norm(role + "k_norm_bias", base + "k_norm.bias", dim)
    yield whole(role + "pool_gate", base + "index_kpool_compress_gate", (dim, hidden))
    pool = (spec.block_tokens, dim)
    yield whole(role + "pool_bias", base + "index_kpool_compress_ape", pool, dtype=FLOAT32)


def _moe(
    names: _Names, role: str, base: str, spec: MoeSpec, expert_layer: int
) -> Iterator[TensorSpec]:
    yield whole(role + "router", base + "gate.weight", (spec.num_experts, names.hidden))
    bias = base + "gate.e_score_correction_bias"
    yield whole(role + "router_bias", bias, (spec.num_experts,), dtype=FLOAT32)
    yield from feed_forward(
        role + "shared_",
        base + "shared_experts.",
        names.hidden,
        spec.shared_intermediate,
        Axis.SHARED_FFN,
        Component.SHARED_EXPERTS,
    )
    yield from experts(names, role, base + "experts.", spec, expert_layer)


def _draft(
    names: _Names, base: str, drafts: tuple[LayerSpec, ...], expert_layer: int
) -> Iterator[TensorSpec]:
    """A block with a plain residual between a fusion of embedding and hidden state and a norm."""
    for layer in drafts:
        role, hidden = f"draft.layers.{layer.index}.", names.hidden
        yield norm("draft.norm_embedding", base + "enorm.weight", hidden)
        yield norm("draft.norm_hidden", base + "hnorm.weight", hidden)
        yield whole("draft.fc", base + "eh_proj.weight", (hidden, 2 * hidden))
        yield norm("draft.final_norm", base + "shared_head.norm.weight", hidden)
        yield from _layer(names, role, base, layer, expert_layer)
