"""What a model is, in terms the engine dispatches on: kinds, shapes, tensors and their split.

Frozen values only. Owns no file access, no torch, and no model-type name: an adapter in
`placement/models/` turns a `config.json` and the safetensors headers into a `ModelSpec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Component(StrEnum):
    """Ledger row that a tensor's bytes belong to."""

    ROUTED_EXPERTS = "routed_experts"
    SHARED_EXPERTS = "shared_experts"
    DENSE = "dense"
    EMBEDDING = "embedding"
    NGRAM_TABLE = "ngram_table"
    SCALES = "scales"
    MTP = "mtp_weights"


class Axis(StrEnum):
    """A dimension of the model that is dealt out over the ranks in whole units."""

    QUERY_HEADS = "query_heads"
    KV_HEADS = "kv_heads"  # follows QUERY_HEADS, replicated where two ranks need one head
    VALUE_HEADS = "value_heads"
    KEY_HEADS = "key_heads"  # follows VALUE_HEADS, replicated where two ranks need one head
    SHARED_FFN = "shared_ffn"
    VOCAB = "vocab"
    NGRAM_ROWS = "ngram_rows"
    EXPERTS = "experts"


class DTypeRule(StrEnum):
    """How a tensor is held in memory: in the run's weight dtype, or always as named."""

    WEIGHT = "weight"
    FLOAT32 = "float32"
    INT64 = "int64"


@dataclass(frozen=True)
class Segment:
    """`units` units of `block` consecutive positions each along the split dimension."""

    axis: Axis
    block: int
    units: int


@dataclass(frozen=True)
class Split:
    """One rule a tensor: `dim` is cut along `segments`; no segments means replicated."""

    dim: int = 0
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True)
class Piece:
    """A tensor on disk: the box at `origin` of the logical tensor that it fills.

    `shape` is the piece's shape on disk; leading logical dimensions that the piece lacks are 1.
    """

    name: str
    shape: tuple[int, ...]
    origin: tuple[int, ...]


@dataclass(frozen=True)
class TensorSpec:
    """A logical tensor: the engine's name (`role`), its full shape, split and places on disk."""

    role: str
    shape: tuple[int, ...]
    split: Split
    component: Component
    pieces: tuple[Piece, ...]
    dtype: DTypeRule = DTypeRule.WEIGHT
    expert_layer: int = -1  # index into RankShare.experts for tensors split by expert


class MixerKind(StrEnum):
    GATED_DELTA = "gated_delta"
    SPARSE_ATTENTION = "sparse_attention"


class ResidualKind(StrEnum):
    GATED_STREAMS = "gated_streams"


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Gated delta rule: recurrent state [value_heads, key_dim, value_dim] fp32 a sequence."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    gate_activation: str  # "sigmoid" or "silu", applied to z after the output norm


@dataclass(frozen=True)
class SparseAttentionSpec:
    """Gated attention over blocks that an indexer selects."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    index_heads: int
    index_dim: int
    block_tokens: int  # tokens one index key stands for
    budget_tokens: int  # selected tokens a query, besides the tail of an incomplete block

    @property
    def max_blocks(self) -> int:
        return self.budget_tokens // self.block_tokens

    @property
    def ring_rows(self) -> int:
        """Raw index keys kept a sequence: an open block and up to 4 draft tokens, whole blocks."""
        return self.block_tokens * -(-(self.block_tokens + 4) // self.block_tokens)


@dataclass(frozen=True)
class MoeSpec:
    num_experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int
    normalise_top_k: bool


@dataclass(frozen=True)
class ResidualSpec:
    kind: ResidualKind
    num_streams: int
    low_rank: int


@dataclass(frozen=True)
class NgramSpec:
    """Hashed n-gram embedding added to every residual stream of one layer."""

    ngram_size: int
    heads_per_ngram: int
    embed_dim: int
    conv_kernel: int
    eos_token_id: int
    multipliers: tuple[int, ...]  # [ngram_size]
    head_vocab_sizes: tuple[int, ...]  # [(ngram_size - 1) * heads_per_ngram]
    head_offsets: tuple[int, ...]
    table_rows: int

    @property
    def context_tokens(self) -> int:
        return self.ngram_size - 1

    @property
    def conv_window(self) -> int:
        """Past positions that the dilated convolution reads (dilation = ngram_size)."""
        return (self.conv_kernel - 1) * self.ngram_size


@dataclass(frozen=True)
class LayerSpec:
    index: int
    mixer: GatedDeltaSpec | SparseAttentionSpec
    channel: MoeSpec
    ngram: NgramSpec | None = None

    @property
    def mixer_kind(self) -> MixerKind:
        if isinstance(self.mixer, GatedDeltaSpec):
            return MixerKind.GATED_DELTA
        return MixerKind.SPARSE_ATTENTION


@dataclass(frozen=True)
class ModelSpec:
    """A whole model. `draft_tensors` belong to the MTP head and load only when it is on."""

    name: str
    family: str
    hidden: int
    vocab: int
    norm_eps: float
    max_context: int
    checkpoint_dtype: str  # "bfloat16", "float16" or "float32"
    residual: ResidualSpec
    layers: tuple[LayerSpec, ...]
    tensors: tuple[TensorSpec, ...]
    draft_tensors: tuple[TensorSpec, ...]
    eos_token_ids: tuple[int, ...]
    total_tensors_on_disk: int
    ignored_tensors: tuple[str, ...] = ()
    draft_layers: tuple[LayerSpec, ...] = ()  # of the MTP head; empty when it isn't on disk

    @property
    def num_experts(self) -> int:
        return self.layers[0].channel.num_experts
