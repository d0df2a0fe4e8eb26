"""Tensor names of the Qwen4-Exp family: what lies where on disk, and how it is dealt out.

Owns the names, shapes and split rules of every tensor, fused and per-expert layouts, sharded
n-gram tables. Knows no file: it looks into headers only to see which layout is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from placement.errors import CheckpointError
from placement.headers import CheckpointHeaders
from placement.models.matching import match, refuse_quantised
from placement.spec import (
    Axis,
    Component,
    DTypeRule,
    GatedDeltaSpec,
    LayerSpec,
    MoeSpec,
    NgramSpec,
    Piece,
    ResidualSpec,
    Segment,
    SparseAttentionSpec,
    Split,
    TensorSpec,
)

# (text prefix, name of the output head); the first whose embedding is on disk is used
PREFIXES = (
    ("model.language_model.", "lm_head.weight"),
    ("language_model.model.", "language_model.lm_head.weight"),
    ("model.", "lm_head.weight"),
)
DRAFT = "mtp."
UNUSED_DRAFT = "mtp.hyper_connection_mixer.block_inject_weight"
REPLICATED = Split()


@dataclass(frozen=True)
class DiskTensors:
    """All tensors of a model, those of its draft head apart, and the names left unread."""

    tensors: tuple[TensorSpec, ...]
    draft_tensors: tuple[TensorSpec, ...]
    ignored: tuple[str, ...]

    @property
    def num_pieces(self) -> int:
        return sum(len(spec.pieces) for spec in (*self.tensors, *self.draft_tensors))


def disk_tensors(
    hidden: int,
    vocab: int,
    residual: ResidualSpec,
    layers: tuple[LayerSpec, ...],
    drafts: tuple[LayerSpec, ...],
    tied: bool,
    headers: CheckpointHeaders | None,
    nested: bool,
) -> DiskTensors:
    """Every tensor with its places on disk, checked against the headers when there are any."""
    prefix, head = _prefix(headers, nested)
    names = _Names(hidden, residual, headers)
    tensors = list(_top(names, vocab, prefix, prefix + "embed_tokens.weight" if tied else head))
    for layer in layers:
        base = f"{prefix}layers.{layer.index}."
        tensors += _layer(names, f"layers.{layer.index}.", base, layer, layer.index)
    draft_tensors = tuple(_draft(names, drafts, len(layers))) if drafts else ()
    ignored: tuple[str, ...] = ()
    if headers is not None:
        ignored = tuple(name for name in headers.tensors if _is_ignored(name, tied, head))
        refuse_quantised(headers, set(ignored))
        match([*tensors, *draft_tensors], headers, set(ignored))
    return DiskTensors(tuple(tensors), draft_tensors, ignored)


def _prefix(headers: CheckpointHeaders | None, nested: bool) -> tuple[str, str]:
    if headers is None:
        return PREFIXES[0] if nested else PREFIXES[-1]
    for prefix, head in PREFIXES:
        if prefix + "embed_tokens.weight" in headers.tensors:
            return prefix, head
    tried = ", ".join(prefix + "embed_tokens.weight" for prefix, _ in PREFIXES)
    raise CheckpointError(f"{headers.model_dir}: has no embedding (looked for {tried})")


def _is_ignored(name: str, tied: bool, head: str) -> bool:
    """Vision weights, a draft tensor that nothing uses, and a stored copy of a tied head."""
    if tied and name == head:
        return True
    return ".visual." in name or name.startswith(("visual.", UNUSED_DRAFT))


@dataclass(frozen=True)
class _Names:
    """What all tensor rows need: stream width, low rank, and the headers to see the layout."""

    hidden: int
    residual: ResidualSpec
    headers: CheckpointHeaders | None

    @property
    def width(self) -> int:
        return self.hidden * self.residual.num_streams

    def on_disk(self, name: str) -> bool:
        return self.headers is not None and name in self.headers.tensors


def _whole(
    role: str,
    name: str,
    shape: tuple[int, ...],
    split: Split = REPLICATED,
    component: Component = Component.DENSE,
    dtype: DTypeRule = DTypeRule.WEIGHT,
) -> TensorSpec:
    """A tensor that is one piece on disk."""
    piece = Piece(name, shape, (0,) * len(shape))
    return TensorSpec(role, shape, split, component, (piece,), dtype)


def _norm(role: str, name: str, size: int) -> TensorSpec:
    return _whole(role, name, (size,), dtype=DTypeRule.FLOAT32)


def _rows(axis: Axis, block: int, units: int) -> Split:
    return Split(0, (Segment(axis, block, units),))


def _columns(axis: Axis, block: int, units: int) -> Split:
    return Split(1, (Segment(axis, block, units),))


def _top(names: _Names, vocab: int, prefix: str, head: str) -> Iterator[TensorSpec]:
    shape, rows = (vocab, names.hidden), _rows(Axis.VOCAB, 1, vocab)
    yield _whole("embed", prefix + "embed_tokens.weight", shape, rows, Component.EMBEDDING)
    yield _whole("head", head, shape, rows, Component.EMBEDDING)
    yield from _mixer_site(names, "final_mixer.", prefix + "hyper_connection_mixer.")


def _mixer_site(names: _Names, role: str, base: str) -> Iterator[TensorSpec]:
    """The part of a hyper-connection that makes a block's input out of the streams."""
    width, rank = names.width, names.residual.low_rank
    yield _norm(role + "norm", base + "hc_norm.weight", width)
    yield _whole(role + "down", base + "input_mix_weight_down.weight", (rank, width))
    yield _whole(role + "up", base + "input_mix_weight_up.weight", (width, rank))


def _site(names: _Names, role: str, base: str) -> Iterator[TensorSpec]:
    yield from _mixer_site(names, role, base)
    shape = (names.residual.num_streams, names.width)
    yield _whole(role + "inject", base + "block_inject_weight.weight", shape)


def _layer(
    names: _Names, role: str, base: str, layer: LayerSpec, expert_layer: int
) -> Iterator[TensorSpec]:
    yield from _site(names, role + "mixer_site.", base + "attn_hyper_connection.")
    yield from _site(names, role + "channel_site.", base + "mlp_hyper_connection.")
    if isinstance(layer.mixer, GatedDeltaSpec):
        yield from _gated_delta(names, role + "mixer.", base + "linear_attn.", layer.mixer)
    if isinstance(layer.mixer, SparseAttentionSpec):
        yield from _attention(names, role + "mixer.", base + "self_attn.", layer.mixer)
    yield from _moe(names, role + "channel.", base + "mlp.", layer.moe)
    yield from _experts(names, role + "channel.", base + "mlp.", layer.moe, expert_layer)
    if layer.ngram is not None:
        yield from _ngram(names, role + "ngram.", base + "ple.", layer.ngram)


def _gated_delta(names: _Names, role: str, base: str, spec: GatedDeltaSpec) -> Iterator[TensorSpec]:
    hidden, heads = names.hidden, spec.num_value_heads
    key_rows = Segment(Axis.KEY_HEADS, spec.key_dim, spec.num_key_heads)
    value_rows = Segment(Axis.VALUE_HEADS, spec.value_dim, heads)
    joined = Split(0, (key_rows, key_rows, value_rows))
    value_width = heads * spec.value_dim
    channels = 2 * spec.num_key_heads * spec.key_dim + value_width
    per_head = _rows(Axis.VALUE_HEADS, 1, heads)
    conv = (channels, 1, spec.conv_kernel)
    float32 = DTypeRule.FLOAT32
    yield _whole(role + "qkv", base + "in_proj_qkv.weight", (channels, hidden), joined)
    yield _whole(role + "conv", base + "conv1d.weight", conv, joined)
    z_rows = Split(0, (value_rows,))
    yield _whole(role + "z", base + "in_proj_z.weight", (value_width, hidden), z_rows)
    yield _whole(role + "b", base + "in_proj_b.weight", (heads, hidden), per_head)
    yield _whole(role + "a", base + "in_proj_a.weight", (heads, hidden), per_head)
    yield _whole(role + "a_log", base + "A_log", (heads,), per_head, dtype=float32)
    yield _whole(role + "dt_bias", base + "dt_bias", (heads,), per_head, dtype=float32)
    yield _norm(role + "norm", base + "norm.weight", spec.value_dim)
    columns = _columns(Axis.VALUE_HEADS, spec.value_dim, heads)
    yield _whole(role + "out", base + "out_proj.weight", (hidden, value_width), columns)


def _attention(
    names: _Names, role: str, base: str, spec: SparseAttentionSpec
) -> Iterator[TensorSpec]:
    hidden, heads, dim = names.hidden, spec.num_heads, spec.head_dim
    # Query and gate of a head lie next to each other, so one unit is two head widths.
    q_rows = _rows(Axis.QUERY_HEADS, 2 * dim, heads)
    kv_rows = _rows(Axis.KV_HEADS, dim, spec.num_kv_heads)
    kv_shape = (spec.num_kv_heads * dim, hidden)
    yield _whole(role + "q", base + "q_proj.weight", (2 * heads * dim, hidden), q_rows)
    yield _whole(role + "k", base + "k_proj.weight", kv_shape, kv_rows)
    yield _whole(role + "v", base + "v_proj.weight", kv_shape, kv_rows)
    columns = _columns(Axis.QUERY_HEADS, dim, heads)
    yield _whole(role + "o", base + "o_proj.weight", (hidden, heads * dim), columns)
    yield _norm(role + "q_norm", base + "q_norm.weight", dim)
    yield _norm(role + "k_norm", base + "k_norm.weight", dim)
    index_shape = ((spec.index_heads + 1) * spec.index_dim, hidden)
    yield _whole(role + "index_qk", base + "indexer.index_qk_proj.weight", index_shape)
    yield _norm(role + "index_q_norm", base + "indexer.q_layernorm.weight", spec.index_dim)
    yield _norm(role + "index_k_norm", base + "indexer.k_layernorm.weight", spec.index_dim)


def _moe(names: _Names, role: str, base: str, spec: MoeSpec) -> Iterator[TensorSpec]:
    hidden, inner = names.hidden, spec.shared_intermediate
    shared, rows = Component.SHARED_EXPERTS, _rows(Axis.SHARED_FFN, 1, inner)
    expert = base + "shared_expert."
    yield _whole(role + "router", base + "gate.weight", (spec.num_experts, hidden))
    gate = _whole(role + "shared_gate", base + "shared_expert_gate.weight", (1, hidden))
    yield gate
    for part in ("gate_proj", "up_proj"):
        shape = (inner, hidden)
        yield _whole(role + f"shared_{part}", expert + f"{part}.weight", shape, rows, shared)
    columns = _columns(Axis.SHARED_FFN, 1, inner)
    down = (hidden, inner)
    yield _whole(role + "shared_down", expert + "down_proj.weight", down, columns, shared)


def _experts(
    names: _Names, role: str, base: str, spec: MoeSpec, expert_layer: int
) -> Iterator[TensorSpec]:
    count, inner, hidden = spec.num_experts, spec.intermediate, names.hidden
    base += "experts."
    per_expert = names.on_disk(base + "0.gate_proj.weight")
    gate_up, down = (count, 2 * inner, hidden), (count, hidden, inner)
    pieces = _per_expert_pieces(base, spec, hidden) if per_expert else None
    for part, shape in (("gate_up", gate_up), ("down", down)):
        fused = (Piece(f"{base}{part}_proj", shape, (0, 0, 0)),)
        yield TensorSpec(
            role=f"{role}experts_{part}",
            shape=shape,
            split=_rows(Axis.EXPERTS, 1, count),
            component=Component.ROUTED_EXPERTS,
            pieces=pieces[part] if pieces else fused,
            expert_layer=expert_layer,
        )


def _per_expert_pieces(base: str, spec: MoeSpec, hidden: int) -> dict[str, tuple[Piece, ...]]:
    inner, gate_up, down = spec.intermediate, [], []
    for e in range(spec.num_experts):
        gate_up.append(Piece(f"{base}{e}.gate_proj.weight", (inner, hidden), (e, 0, 0)))
        gate_up.append(Piece(f"{base}{e}.up_proj.weight", (inner, hidden), (e, inner, 0)))
        down.append(Piece(f"{base}{e}.down_proj.weight", (hidden, inner), (e, 0, 0)))
    return {"gate_up": tuple(gate_up), "down": tuple(down)}


def _ngram(names: _Names, role: str, base: str, spec: NgramSpec) -> Iterator[TensorSpec]:
    width, hidden, dim = names.width, names.hidden, spec.embed_dim
    yield _whole(role + "key", base + "key_proj.weight", (width, dim))
    yield _whole(role + "value", base + "value_proj.weight", (hidden, dim))
    for part in ("norm_key", "norm_query", "norm_conv"):
        yield _norm(role + part, f"{base}{part}.weight", width)
    yield _whole(role + "conv", base + "conv1d.weight", (width, 1, spec.conv_kernel))
    yield _ngram_table(names, role + "table", base + "ple_embedding.ngram_embedding", spec)
    heads = len(spec.head_vocab_sizes)
    for part, name, size in (
        ("multipliers", "layer_multipliers", spec.ngram_size),
        ("vocab_sizes", "ngram_heads_vocab_sizes", heads),
        ("offsets", "ngram_heads_offsets", heads),
    ):
        if names.on_disk(f"{base}ple_embedding.{name}"):
            disk_name = f"{base}ple_embedding.{name}"
            yield _whole(role + part, disk_name, (size,), dtype=DTypeRule.INT64)


def _ngram_table(names: _Names, role: str, base: str, spec: NgramSpec) -> TensorSpec:
    rows = spec.table_rows
    shape = (rows, spec.embed_dim // len(spec.head_vocab_sizes))
    shards = _table_shards(names, base, shape)
    pieces = shards or (Piece(base + ".weight", shape, (0, 0)),)
    split = _rows(Axis.NGRAM_ROWS, 1, rows)
    return TensorSpec(role, shape, split, Component.NGRAM_TABLE, pieces)


def _table_shards(names: _Names, base: str, shape: tuple[int, int]) -> tuple[Piece, ...]:
    """Shards in their order; their rows have to add up to the table that the hash needs."""
    if names.headers is None:
        return ()
    pieces: list[Piece] = []
    row = 0
    while (name := f"{base}.shard_{len(pieces)}.weight") in names.headers.tensors:
        rows = (*names.headers.tensors[name].shape, 0)[0]
        pieces.append(Piece(name, (rows, shape[1]), (row, 0)))
        row += rows
    if pieces and row != shape[0]:
        raise CheckpointError(
            f"{names.headers.model_dir}: {base} has {row} rows in {len(pieces)} shards "
            f"(next would be {name}), config.json says {shape[0]}"
        )
    return tuple(pieces)


def _draft(
    names: _Names, drafts: tuple[LayerSpec, ...], first_expert_layer: int
) -> Iterator[TensorSpec]:
    """The draft head: its bytes form one ledger row whatever they are."""
    for spec in _draft_rows(names, drafts, first_expert_layer):
        yield TensorSpec(
            role=spec.role,
            shape=spec.shape,
            split=spec.split,
            component=Component.MTP,
            pieces=spec.pieces,
            dtype=spec.dtype,
            expert_layer=spec.expert_layer,
        )


def _draft_rows(
    names: _Names, drafts: tuple[LayerSpec, ...], first_expert_layer: int
) -> Iterator[TensorSpec]:
    square = (names.hidden, names.hidden)
    yield _whole("draft.fc_embedding", DRAFT + "fc_embedding.weight", square)
    yield _whole("draft.fc_hidden", DRAFT + "fc_hidden.weight", square)
    before = DRAFT + "pre_fc_norm_"
    yield _norm("draft.norm_embedding", before + "embedding.weight", names.hidden)
    yield _norm("draft.norm_hidden", before + "hidden.weight", names.width)
    yield from _mixer_site(names, "draft.final_mixer.", DRAFT + "hyper_connection_mixer.")
    for layer in drafts:
        role = f"draft.layers.{layer.index}."
        base = f"{DRAFT}layers.{layer.index}."
        yield from _layer(names, role, base, layer, first_expert_layer + layer.index)
