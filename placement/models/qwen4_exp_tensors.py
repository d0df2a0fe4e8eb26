"""Tensor names of the Qwen4-Exp family: what lies where on disk, and how it is dealt out.

Owns the names, shapes and split rules of every tensor, fused and per-expert layouts, sharded
n-gram tables. Knows no file: it looks into headers only to see which layout is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from placement.errors import CheckpointError
from placement.headers import CheckpointHeaders
from placement.models.assembly import DiskTensors, find_prefix, quantisation_of, settle_tensors
from placement.models.qwen_tensors import gated_attention, gated_delta, moe
from placement.models.rows import Names, by_rows, norm, whole
from placement.spec import (
    Axis,
    Component,
    DTypeRule,
    GatedDeltaSpec,
    LayerSpec,
    NgramSpec,
    Piece,
    ResidualSpec,
    SparseAttentionSpec,
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


def disk_tensors(
    hidden: int,
    vocab: int,
    residual: ResidualSpec,
    layers: tuple[LayerSpec, ...],
    drafts: tuple[LayerSpec, ...],
    config: Mapping[str, Any],
    tied: bool,
    headers: CheckpointHeaders | None,
) -> DiskTensors:
    """Every tensor with its places on disk, checked against the headers when there are any."""
    prefix, head = find_prefix(PREFIXES, headers, "text_config" in config)
    export = quantisation_of(config) is not None
    shards = config.get("text_config", config).get("split_ngram_parts") if export else None
    streams, rank = residual.num_streams, residual.low_rank
    names = _Names(hidden, headers, export, streams, rank, shards or 0)
    tensors = list(_top(names, vocab, prefix, prefix + "embed_tokens.weight" if tied else head))
    for layer in layers:
        base = f"{prefix}layers.{layer.index}."
        tensors += _layer(names, f"layers.{layer.index}.", base, layer, layer.index)
    draft_tensors = tuple(_draft(names, drafts, len(layers))) if drafts else ()

    def ignores(name: str) -> bool:
        return is_ignored(name, tied, head)

    return settle_tensors(tensors, draft_tensors, headers, config, ignores)


def is_ignored(name: str, tied: bool, head: str) -> bool:
    """Vision weights, a draft tensor that nothing uses, and a stored copy of a tied head."""
    if tied and name == head:
        return True
    return ".visual." in name or name.startswith(("visual.", UNUSED_DRAFT))


@dataclass(frozen=True)
class _Names(Names):
    """Besides the shared part: streams, and the table shards that a release without headers has."""

    num_streams: int = 1
    low_rank: int = 1
    table_shards: int = 0

    @property
    def width(self) -> int:
        return self.hidden * self.num_streams


def _top(names: _Names, vocab: int, prefix: str, head: str) -> Iterator[TensorSpec]:
    shape, rows = (vocab, names.hidden), by_rows(Axis.VOCAB, 1, vocab)
    yield whole("embed", prefix + "embed_tokens.weight", shape, rows, Component.EMBEDDING)
    yield whole("head", head, shape, rows, Component.EMBEDDING)
    yield from _mixer_site(names, "final_mixer.", prefix + "hyper_connection_mixer.")


def _mixer_site(names: _Names, role: str, base: str) -> Iterator[TensorSpec]:
    """The part of a hyper-connection that makes a block's input out of the streams."""
    width, rank = names.width, names.low_rank
    yield norm(role + "norm", base + "hc_norm.weight", width)
    yield whole(role + "down", base + "input_mix_weight_down.weight", (rank, width))
    yield whole(role + "up", base + "input_mix_weight_up.weight", (width, rank))


def _site(names: _Names, role: str, base: str) -> Iterator[TensorSpec]:
    yield from _mixer_site(names, role, base)
    shape = (names.num_streams, names.width)
    yield whole(role + "inject", base + "block_inject_weight.weight", shape)


def _layer(
    names: _Names, role: str, base: str, layer: LayerSpec, expert_layer: int
) -> Iterator[TensorSpec]:
    yield from _site(names, role + "mixer_site.", base + "attn_hyper_connection.")
    yield from _site(names, role + "channel_site.", base + "mlp_hyper_connection.")
    if isinstance(layer.mixer, GatedDeltaSpec):
        yield from gated_delta(names, role + "mixer.", base + "linear_attn.", layer.mixer)
    if isinstance(layer.mixer, SparseAttentionSpec):
        yield from _sparse_attention(names, role + "mixer.", base + "self_attn.", layer.mixer)
    yield from moe(names, role + "channel.", base + "mlp.", layer.moe, expert_layer)
    if layer.ngram is not None:
        yield from _ngram(names, role + "ngram.", base + "ple.", layer.ngram)


def _sparse_attention(
    names: _Names, role: str, base: str, spec: SparseAttentionSpec
) -> Iterator[TensorSpec]:
    yield from gated_attention(names, role, base, spec)
    index_shape = ((spec.index_heads + 1) * spec.index_dim, names.hidden)
    yield whole(role + "index_qk", base + "indexer.index_qk_proj.weight", index_shape)
    yield norm(role + "index_q_norm", base + "indexer.q_layernorm.weight", spec.index_dim)
    yield norm(role + "index_k_norm", base + "indexer.k_layernorm.weight", spec.index_dim)


def _ngram(names: _Names, role: str, base: str, spec: NgramSpec) -> Iterator[TensorSpec]:
    width, hidden, dim = names.width, names.hidden, spec.embed_dim
    yield whole(role + "key", base + "key_proj.weight", (width, dim))
    yield whole(role + "value", base + "value_proj.weight", (hidden, dim))
    for part in ("norm_key", "norm_query", "norm_conv"):
        yield norm(role + part, f"{base}{part}.weight", width)
    yield whole(role + "conv", base + "conv1d.weight", (width, 1, spec.conv_kernel))
    yield _ngram_table(names, role + "table", base + "ple_embedding.ngram_embedding", spec)
    heads = len(spec.head_vocab_sizes)
    for part, name, size in (
        ("multipliers", "layer_multipliers", spec.ngram_size),
        ("vocab_sizes", "ngram_heads_vocab_sizes", heads),
        ("offsets", "ngram_heads_offsets", heads),
    ):
        if names.on_disk(f"{base}ple_embedding.{name}"):
            disk_name = f"{base}ple_embedding.{name}"
            yield whole(role + part, disk_name, (size,), dtype=DTypeRule.INT64)


def _ngram_table(names: _Names, role: str, base: str, spec: NgramSpec) -> TensorSpec:
    rows = spec.table_rows
    shape = (rows, spec.embed_dim // len(spec.head_vocab_sizes))
    shards = _table_shards(names, base, shape)
    pieces = shards or (Piece(base + ".weight", shape, (0, 0)),)
    split = by_rows(Axis.NGRAM_ROWS, 1, rows)
    return TensorSpec(role, shape, split, Component.NGRAM_TABLE, pieces)


def _table_shards(names: _Names, base: str, shape: tuple[int, int]) -> tuple[Piece, ...]:
    """Shards in their order; their rows have to add up to the table that the hash needs."""
    if names.headers is None:
        return _even_shards(base, shape, names.table_shards)
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


def _even_shards(base: str, shape: tuple[int, int], count: int) -> tuple[Piece, ...]:
    """As many equal shards as a config says; none where the rows don't divide."""
    if count < 1 or shape[0] % count:
        return ()
    each = shape[0] // count
    return tuple(
        Piece(f"{base}.shard_{i}.weight", (each, shape[1]), (i * each, 0)) for i in range(count)
    )


def _draft(
    names: _Names, drafts: tuple[LayerSpec, ...], first_expert_layer: int
) -> Iterator[TensorSpec]:
    """The draft head: its bytes form one ledger row whatever they are."""
    for spec in _draft_rows(names, drafts, first_expert_layer):
        yield replace(spec, component=Component.MTP)


def _draft_rows(
    names: _Names, drafts: tuple[LayerSpec, ...], first_expert_layer: int
) -> Iterator[TensorSpec]:
    square = (names.hidden, names.hidden)
    yield whole("draft.fc_embedding", DRAFT + "fc_embedding.weight", square)
    yield whole("draft.fc_hidden", DRAFT + "fc_hidden.weight", square)
    before = DRAFT + "pre_fc_norm_"
    yield norm("draft.norm_embedding", before + "embedding.weight", names.hidden)
    yield norm("draft.norm_hidden", before + "hidden.weight", names.width)
    yield from _mixer_site(names, "draft.final_mixer.", DRAFT + "hyper_connection_mixer.")
    for layer in drafts:
        role = f"draft.layers.{layer.index}."
        base = f"{DRAFT}layers.{layer.index}."
        yield from _layer(names, role, base, layer, first_expert_layer + layer.index)
