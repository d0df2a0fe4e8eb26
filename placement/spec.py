"""What a model is, in terms the engine dispatches on: kinds, shapes, tensors and their split.

Frozen values only. Owns no file access, no torch, and no model-type name: an adapter in
`placement/models/` turns a `config.json` and the safetensors headers into a `ModelSpec`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from placement.formats import WeightFormat


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
    DENSE_FFN = "dense_ffn"  # inner width of the layers without experts
    VOCAB = "vocab"
    NGRAM_ROWS = "ngram_rows"
    EXPERTS = "experts"


class DTypeRule(StrEnum):
    """How a tensor is held in memory: in the run's weight dtype, or always as named.

    STORED is the dtype of the file, of codes and scales.
    """

    WEIGHT = "weight"
    FLOAT32 = "float32"
    INT64 = "int64"
    STORED = "stored"


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


@dataclass(frozen=True, slots=True)
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
    format: WeightFormat | None = None  # None: held in the dtype that `dtype` says
    stacked: int = 1  # stored matrices that lie above each other in one of `shape` (gate over up)
    packed: int = 1  # values in one stored element along the last dimension (int4 in U8: 2)

    def payload_bytes(self, local_shape: tuple[int, ...]) -> int:
        """Bytes of the codes of a part of a tensor that has a format."""
        assert self.format is not None
        return self.format.payload_bytes(local_shape)

    def scale_bytes(self, local_shape: tuple[int, ...]) -> int:
        """Bytes of the scales of a part; 0 for a tensor without a format."""
        return self.format.scale_bytes_of(local_shape, self.stacked) if self.format else 0


class MixerKind(StrEnum):
    GATED_DELTA = "gated_delta"
    SPARSE_ATTENTION = "sparse_attention"
    KDA = "kda"
    GATED_ATTENTION = "gated_attention"
    LATENT_ATTENTION = "latent_attention"


class ResidualKind(StrEnum):
    GATED_STREAMS = "gated_streams"
    PLAIN = "plain"
    MIXED_STREAMS = "mixed_streams"  # manifold-constrained hyper-connections (mHC)


# Units of an axis that a rank owns; the units of the whole model for figures of the whole model.
Units = Callable[[Axis], int]
FLOAT32_BYTES = 4


@dataclass(frozen=True)
class SlotBytes:
    """What one sequence holds in one layer, whatever its length. Without the parts: 0."""

    recurrent: int = 0  # fp32 state
    conv: int = 0  # window of a short convolution
    index: int = 0  # raw index keys of the open block


@dataclass(frozen=True)
class PageBytes:
    """What one page of tokens holds in one layer."""

    kv: int = 0  # keys and values, or the latent that they are made from
    index: int = 0


# Every mixer spec answers the same questions, so that a ledger needs no knowledge of kinds:
#   kind, heads (axis -> units in the whole model),
#   slot_bytes(units, item_bytes), page_bytes(units, page_tokens, item_bytes),
#   page_multiple (a page is a multiple of so many tokens),
#   step_floats(units, tokens, context): live fp32 values of a step, the estimate of a workspace.
MAX_DRAFTS = 4  # draft tokens a step; rings of raw index keys have room for as many
SCORE_ROWS = 32  # queries whose gathered keys are held at once
TILE_ELEMENTS = 1 << 23  # an operator's temporary: 32 MiB of fp32
SELECTION_WORDS = 8  # a block and query: score, bits, 64-bit key and its masked copy, top-k


@dataclass(frozen=True)
class GatedDeltaSpec:
    """Gated delta rule: recurrent state [value_heads, key_dim, value_dim] fp32 a sequence."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    gate_activation: str  # "sigmoid" or "silu", applied to z after the output norm
    kind = MixerKind.GATED_DELTA
    page_multiple = 1

    @property
    def heads(self) -> Mapping[Axis, int]:
        return {Axis.VALUE_HEADS: self.num_value_heads, Axis.KEY_HEADS: self.num_key_heads}

    def _channels(self, units: Units) -> int:
        keys, values = units(Axis.KEY_HEADS), units(Axis.VALUE_HEADS)
        return 2 * keys * self.key_dim + values * self.value_dim

    def slot_bytes(self, units: Units, item_bytes: int) -> SlotBytes:
        state = units(Axis.VALUE_HEADS) * self.key_dim * self.value_dim * FLOAT32_BYTES
        return SlotBytes(state, (self.conv_kernel - 1) * self._channels(units) * item_bytes)

    def page_bytes(self, units: Units, page_tokens: int, item_bytes: int) -> PageBytes:
        return PageBytes()

    def step_floats(self, units: Units, tokens: int, context: int) -> int:
        return tokens * 2 * (self._channels(units) + units(Axis.VALUE_HEADS) * self.value_dim)


@dataclass(frozen=True)
class KdaSpec:
    """Delta rule with a decay a channel: state [heads, dim, dim] fp32, convolved q, k and v.

    Its heads are value heads with as many key heads.
    """

    num_heads: int
    head_dim: int
    conv_kernel: int
    gate_rank: int  # inner width of the two low-rank gates
    gate_lower_bound: float
    kind = MixerKind.KDA
    page_multiple = 1

    @property
    def heads(self) -> Mapping[Axis, int]:
        return {Axis.VALUE_HEADS: self.num_heads}

    def slot_bytes(self, units: Units, item_bytes: int) -> SlotBytes:
        width = units(Axis.VALUE_HEADS) * self.head_dim
        window = (self.conv_kernel - 1) * 3 * width * item_bytes
        return SlotBytes(width * self.head_dim * FLOAT32_BYTES, window)

    def page_bytes(self, units: Units, page_tokens: int, item_bytes: int) -> PageBytes:
        return PageBytes()

    def step_floats(self, units: Units, tokens: int, context: int) -> int:
        """q, k, v before and after the convolution, the decay, the gate and the output."""
        return tokens * 9 * units(Axis.VALUE_HEADS) * self.head_dim


@dataclass(frozen=True)
class GatedAttentionSpec:
    """Full causal attention with grouped K/V heads and an output gate."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    kind = MixerKind.GATED_ATTENTION
    page_multiple = 1

    @property
    def heads(self) -> Mapping[Axis, int]:
        return {Axis.QUERY_HEADS: self.num_heads, Axis.KV_HEADS: self.num_kv_heads}

    def slot_bytes(self, units: Units, item_bytes: int) -> SlotBytes:
        return SlotBytes()

    def page_bytes(self, units: Units, page_tokens: int, item_bytes: int) -> PageBytes:
        return PageBytes(2 * units(Axis.KV_HEADS) * self.head_dim * page_tokens * item_bytes)

    def step_floats(self, units: Units, tokens: int, context: int) -> int:
        heads, kv_heads = units(Axis.QUERY_HEADS), units(Axis.KV_HEADS)
        gathered = min(tokens, SCORE_ROWS) * context * heads
        return tokens * self.head_dim * (3 * heads + 2 * kv_heads) + gathered


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
    kind = MixerKind.SPARSE_ATTENTION

    @property
    def heads(self) -> Mapping[Axis, int]:
        return {Axis.QUERY_HEADS: self.num_heads, Axis.KV_HEADS: self.num_kv_heads}

    @property
    def page_multiple(self) -> int:
        return self.block_tokens

    def slot_bytes(self, units: Units, item_bytes: int) -> SlotBytes:
        return SlotBytes(index=self.ring_rows * self.index_dim * item_bytes)

    def page_bytes(self, units: Units, page_tokens: int, item_bytes: int) -> PageBytes:
        """Index keys aren't split: every rank selects blocks for all of its heads."""
        kv = 2 * units(Axis.KV_HEADS) * self.head_dim * page_tokens * item_bytes
        return PageBytes(kv, page_tokens // self.block_tokens * self.index_dim * item_bytes)

    def step_floats(self, units: Units, tokens: int, context: int) -> int:
        heads, kv_heads = units(Axis.QUERY_HEADS), units(Axis.KV_HEADS)
        projected = tokens * self.head_dim * (3 * heads + 2 * kv_heads)
        blocks = context // self.block_tokens
        at_once = max(1, min(tokens, TILE_ELEMENTS // max(1, blocks * (self.index_heads + 2))))
        scores = blocks * (at_once * (self.index_heads + SELECTION_WORDS) + self.index_dim)
        selected = min(context, self.budget_tokens + self.block_tokens)
        keys = selected * (2 * kv_heads * self.head_dim + heads)
        return projected + max(scores, min(tokens, SCORE_ROWS) * keys)

    @property
    def max_blocks(self) -> int:
        return self.budget_tokens // self.block_tokens

    @property
    def ring_rows(self) -> int:
        """Raw index keys kept a sequence: an open block and MAX_DRAFTS tokens, whole blocks."""
        return self.block_tokens * -(-(self.block_tokens + MAX_DRAFTS) // self.block_tokens)


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Attention from one latent a token, over blocks that an indexer with pooled keys selects.

    The latent and the pooled keys are not split by head: every rank holds all of them.
    """

    num_heads: int
    query_rank: int
    latent_dim: int
    query_dim: int  # of a head, no rotary part
    value_dim: int
    index_heads: int
    index_dim: int
    block_tokens: int
    budget_tokens: int
    kind = MixerKind.LATENT_ATTENTION

    @property
    def heads(self) -> Mapping[Axis, int]:
        return {Axis.QUERY_HEADS: self.num_heads}

    @property
    def page_multiple(self) -> int:
        return self.block_tokens

    def slot_bytes(self, units: Units, item_bytes: int) -> SlotBytes:
        """Key and gate of each token of the open block, and of MAX_DRAFTS, whole blocks."""
        rows = self.block_tokens * -(-(self.block_tokens + MAX_DRAFTS) // self.block_tokens)
        return SlotBytes(index=rows * 2 * self.index_dim * item_bytes)

    def page_bytes(self, units: Units, page_tokens: int, item_bytes: int) -> PageBytes:
        index = page_tokens // self.block_tokens * self.index_dim * item_bytes
        return PageBytes(page_tokens * self.latent_dim * item_bytes, index)

    def step_floats(self, units: Units, tokens: int, context: int) -> int:
        heads = units(Axis.QUERY_HEADS)
        projected = tokens * heads * (self.query_dim + 2 * self.latent_dim + self.value_dim)
        scores = tokens * (context // self.block_tokens)
        selected = min(context, self.budget_tokens + self.block_tokens)
        return projected + scores + min(tokens, SCORE_ROWS) * selected * (self.latent_dim + heads)


MixerSpec = (
    GatedDeltaSpec | KdaSpec | GatedAttentionSpec | SparseAttentionSpec | LatentAttentionSpec
)


@dataclass(frozen=True)
class DenseSpec:
    """A gated feed-forward block without experts."""

    intermediate: int
    clamp: float = 0.0  # limit of gate and up before the product; 0: none

    @property
    def num_experts(self) -> int:
        return 0


@dataclass(frozen=True)
class MoeSpec:
    num_experts: int
    top_k: int
    intermediate: int
    shared_intermediate: int
    normalise_top_k: bool
    scoring: str = "softmax"  # or "sigmoid", which selects by score + a bias an expert
    routed_scale: float = 1.0
    shared_gated: bool = True
    clamp: float = 0.0


@dataclass(frozen=True)
class ResidualSpec:
    kind: ResidualKind
    num_streams: int
    low_rank: int = 0
    sinkhorn_steps: int = 0


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

    def slot_bytes(self, width: int, item_bytes: int) -> int:
        """Convolution window of all streams (`width` channels) and the int64 token context."""
        return self.conv_window * width * item_bytes + self.context_tokens * 8


@dataclass(frozen=True)
class LayerSpec:
    index: int
    mixer: MixerSpec
    channel: MoeSpec | DenseSpec
    ngram: NgramSpec | None = None

    @property
    def mixer_kind(self) -> MixerKind:
        return self.mixer.kind

    @property
    def moe(self) -> MoeSpec:
        """The experts of a layer that is known to have some."""
        assert isinstance(self.channel, MoeSpec), f"layer {self.index} has no experts"
        return self.channel


@dataclass(frozen=True)
class ModelSpec:
    """A whole model. `draft_tensors` belong to the MTP head and load only when it is on.

    Scales of tensors with a format are tensors of their own, in `scale_tensors` and
    `draft_scale_tensors`, for those who read them. A ledger takes `TensorSpec.scale_bytes` instead,
    never both.
    """

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
    draft_norm_per_stream: bool = False  # its hidden norm: each stream alone, not all as one
    scale_tensors: tuple[TensorSpec, ...] = ()
    draft_scale_tensors: tuple[TensorSpec, ...] = ()
    obstacles: tuple[str, ...] = ()  # why the engine can't run it; it can still be planned
    remarks: tuple[str, ...] = ()  # what config and checkpoint say differently

    @property
    def num_experts(self) -> int:
        """Experts of a layer that has any; ranks can't be more."""
        return max(layer.channel.num_experts for layer in self.layers)

    @property
    def runnable(self) -> bool:
        return not self.obstacles

    @property
    def is_packed(self) -> bool:
        """Whether some tensor is kept with scales."""
        tensors = (*self.tensors, *self.draft_tensors)
        return any(one.format is not None and not one.format.is_plain for one in tensors)

    def formats(self) -> tuple[str, ...]:
        """Names of the formats that tensors have, the most frequent first."""
        counts: dict[str, int] = {}
        for tensor in (*self.tensors, *self.draft_tensors):
            if tensor.format is not None:
                counts[tensor.format.name] = counts.get(tensor.format.name, 0) + 1
        return tuple(sorted(counts, key=lambda name: -counts[name]))
