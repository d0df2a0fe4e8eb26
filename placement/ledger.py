"""Bytes of one rank by purpose, as the engine allocates them. Needs no device and no weight.

Rows are fixed bytes plus two pools: pages (K, V, index keys) and slots (recurrent state, windows).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from placement.config import EngineConfig, RankShare
from placement.partition import local_shape
from placement.spec import (
    Axis,
    Component,
    DTypeRule,
    GatedDeltaSpec,
    LayerSpec,
    ModelSpec,
    SparseAttentionSpec,
    TensorSpec,
)

ROWS = (
    "routed_experts", "shared_experts", "dense", "embedding", "ngram_table", "scales",
    "kv_pages", "index_pages", "recurrent_slots", "conv_state", "mtp_weights", "mtp_state",
    "graph", "collective", "workspace", "reserve",
)  # fmt: skip
WEIGHT_ROWS = tuple(component.value for component in Component)
PAGE_ROWS = ("kv_pages", "index_pages", "mtp_state")
SLOT_ROWS = ("recurrent_slots", "conv_state")
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
FLOAT32_BYTES = 4
INT64_BYTES = 8
HOST_COLLECTIVE_BYTES = 2 << 20  # shared memory: two halves of 1 MiB a rank
SCORE_ROWS = 32  # queries whose gathered keys are held at once, see workspace_bytes


@dataclass(frozen=True)
class RankLedger:
    """`fixed` holds everything but the page pool; `page` is what one page adds to its rows."""

    fixed: Mapping[str, int]
    page: Mapping[str, int]

    def rows(self, num_pages: int) -> dict[str, int]:
        """All ledger rows in their order, 0 where nothing is."""
        return {row: self.fixed.get(row, 0) + self.page.get(row, 0) * num_pages for row in ROWS}

    @property
    def fixed_bytes(self) -> int:
        return sum(self.fixed.values())

    @property
    def page_bytes(self) -> int:
        return sum(self.page.values())


def rank_ledger(
    config: EngineConfig,
    spec: ModelSpec,
    share: RankShare,
    reserve_bytes: int,
    collective_bytes: int,
) -> RankLedger:
    """The ledger of one rank before the number of pages is known."""
    item = DTYPE_BYTES[config.dtype]
    fixed = weight_bytes(_loaded(config, spec), share, item)
    page: dict[str, int] = {}
    for layer in spec.layers:
        _add_layer_state(fixed, page, config, spec, layer, share)
    if config.mtp:
        _add_draft_state(fixed, page, config, spec, share)
    alone = share.world_size == 1
    fixed["collective"] = 0 if alone else collective_bytes or HOST_COLLECTIVE_BYTES
    fixed["workspace"] = workspace_bytes(config, spec, share)
    fixed["reserve"] = reserve_bytes
    return RankLedger(fixed, page)


def _loaded(config: EngineConfig, spec: ModelSpec) -> tuple[TensorSpec, ...]:
    return spec.tensors + (spec.draft_tensors if config.mtp else ())


def weight_bytes(
    tensors: Iterable[TensorSpec], share: RankShare, item_bytes: int
) -> dict[str, int]:
    """Ledger row -> bytes of the rank's parts in the run's weight dtype."""
    rows: dict[str, int] = {}
    sizes = {
        DTypeRule.WEIGHT: item_bytes,
        DTypeRule.FLOAT32: FLOAT32_BYTES,
        DTypeRule.INT64: INT64_BYTES,
    }
    for tensor in tensors:
        nbytes = prod(local_shape(tensor, share)) * sizes[tensor.dtype]
        rows[tensor.component.value] = rows.get(tensor.component.value, 0) + nbytes
    return rows


def _span(share: RankShare, axis: Axis) -> int:
    start, stop = share.ranges.get(axis.value, (0, 0))
    return stop - start


def _add(rows: dict[str, int], row: str, nbytes: int) -> None:
    rows[row] = rows.get(row, 0) + nbytes


def _add_layer_state(
    fixed: dict[str, int],
    page: dict[str, int],
    config: EngineConfig,
    spec: ModelSpec,
    layer: LayerSpec,
    share: RankShare,
) -> None:
    slots, item = config.max_sequences, DTYPE_BYTES[config.dtype]
    if isinstance(layer.mixer, GatedDeltaSpec):
        recurrent, conv = recurrent_slot_bytes(layer.mixer, share, item)
        _add(fixed, "recurrent_slots", recurrent * slots)
        _add(fixed, "conv_state", conv * slots)
    else:
        kv, index = attention_page_bytes(layer.mixer, share, config.page_tokens, item)
        _add(page, "kv_pages", kv)
        _add(page, "index_pages", index)
        _add(fixed, "index_pages", layer.mixer.ring_rows * layer.mixer.index_dim * item * slots)
    if layer.ngram is not None:
        window = layer.ngram.conv_window * spec.residual.num_streams * spec.hidden * item
        ids = layer.ngram.context_tokens * INT64_BYTES
        _add(fixed, "conv_state", (window + ids) * slots)


def _add_draft_state(
    fixed: dict[str, int],
    page: dict[str, int],
    config: EngineConfig,
    spec: ModelSpec,
    share: RankShare,
) -> None:
    """The draft head has pages like an attention layer of the model, in a row of its own."""
    inner_fixed: dict[str, int] = {}
    inner_page: dict[str, int] = {}
    for layer in spec.draft_layers:
        _add_layer_state(inner_fixed, inner_page, config, spec, layer, share)
    fixed["mtp_state"] = sum(inner_fixed.values())
    page["mtp_state"] = sum(inner_page.values())


def recurrent_slot_bytes(
    spec: GatedDeltaSpec, share: RankShare, item_bytes: int
) -> tuple[int, int]:
    """Bytes one sequence needs in one layer: the fp32 state, and the convolution window."""
    values, keys = _span(share, Axis.VALUE_HEADS), _span(share, Axis.KEY_HEADS)
    channels = 2 * keys * spec.key_dim + values * spec.value_dim
    state = values * spec.key_dim * spec.value_dim * FLOAT32_BYTES
    return state, (spec.conv_kernel - 1) * channels * item_bytes


def attention_page_bytes(
    spec: SparseAttentionSpec, share: RankShare, page_tokens: int, item_bytes: int
) -> tuple[int, int]:
    """Bytes of one page in one layer: local K and V, and the index keys that every rank holds."""
    kv = page_tokens * _span(share, Axis.KV_HEADS) * spec.head_dim * 2 * item_bytes
    return kv, page_tokens // spec.block_tokens * spec.index_dim * item_bytes


def workspace_bytes(config: EngineConfig, spec: ModelSpec, share: RankShare) -> int:
    """Estimate for the worst step, of T = step_tokens rows, everything counted as fp32.

    T * (3 streams of S*H, 4 of H, top_k expert rows of 2I + H, q k v z channels of the mixer),
    index scores of T rows against all blocks of one context, the selected K and V of SCORE_ROWS
    queries with their scores, and two copies of one logit row a sequence. An estimate: after the
    start the measured bytes stand beside it.
    """
    tokens = config.step_tokens
    streams = 3 * spec.residual.num_streams * spec.hidden + 4 * spec.hidden
    routed = max(
        layer.channel.top_k * (2 * layer.channel.intermediate + spec.hidden)
        for layer in spec.layers
    )
    context = config.context_tokens or spec.max_context
    mixer = max(_mixer_floats(layer, share, tokens, context) for layer in spec.layers)
    logits = 2 * config.max_sequences * spec.vocab
    return (tokens * (streams + routed) + mixer + logits) * FLOAT32_BYTES


def _mixer_floats(layer: LayerSpec, share: RankShare, tokens: int, context: int) -> int:
    mixer = layer.mixer
    if isinstance(mixer, GatedDeltaSpec):
        values, keys = _span(share, Axis.VALUE_HEADS), _span(share, Axis.KEY_HEADS)
        return tokens * 2 * (2 * keys * mixer.key_dim + 2 * values * mixer.value_dim)
    heads, kv_heads = _span(share, Axis.QUERY_HEADS), _span(share, Axis.KV_HEADS)
    projected = tokens * mixer.head_dim * (3 * heads + 2 * kv_heads)
    scores = tokens * (context // mixer.block_tokens)
    selected = min(context, mixer.budget_tokens + mixer.block_tokens)
    gathered = min(tokens, SCORE_ROWS) * selected * (2 * kv_heads * mixer.head_dim + heads)
    return projected + scores + gathered
