"""Bytes of one rank by purpose, as the engine allocates them. Needs no device and no weight.

Rows are fixed bytes plus what each page (K, V, index keys) and each sequence (recurrent state,
windows) adds. `placement.ledger_weights` has the weights, `placement.ledger_state` the tensors
beside them one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from placement.config import EngineConfig, RankShare
from placement.ledger_state import Blocks, ngram_bytes, state_blocks, table_blocks
from placement.ledger_weights import PADDING
from placement.physical import DTYPE_BYTES, FLOAT32_BYTES, tensor_bytes
from placement.spec import Axis, Component, DenseSpec, LayerSpec, ModelSpec, TensorSpec, Units
from placement.topology import HOST_PROFILE, ChipProfile

ROWS = (
    "routed_experts", "shared_experts", "dense", "embedding", "ngram_table", "scales",
    "kv_pages", "index_pages", "recurrent_slots", "conv_state", "mtp_weights", "mtp_state",
    "tables", PADDING, "graph", "collective", "workspace", "reserve",
)  # fmt: skip
WEIGHT_ROWS = tuple(component.value for component in Component)
PAGE_ROWS = ("kv_pages", "index_pages", "mtp_state")
SLOT_ROWS = ("recurrent_slots", "conv_state")
HOST_COLLECTIVE_BYTES = 2 << 20  # shared memory: two halves of 1 MiB a rank


class TablePlace(StrEnum):
    """Where the n-gram table lies."""

    DEVICE = "device"  # its rows dealt out over the ranks
    HOST = "host"  # one copy in host memory for all ranks of a node
    MMAP = "mmap"  # read from its file on demand; the page cache holds what it can


@dataclass(frozen=True)
class LedgerOptions:
    """What decides bytes besides EngineConfig."""

    ngram_table: TablePlace = TablePlace.DEVICE


@dataclass(frozen=True)
class RankLedger:
    """`fixed` bytes, and what one `page` and one sequence (`slot`) add to their rows.

    `blocks` are the tensors beside the weights; what the allocator adds to them is padding.
    """

    fixed: Mapping[str, int]
    page: Mapping[str, int]
    slot: Mapping[str, int]
    blocks: Blocks

    def rows(self, num_pages: int, sequences: int) -> dict[str, int]:
        """All ledger rows in their order, 0 where nothing is."""
        rows = {
            row: self.fixed.get(row, 0)
            + self.page.get(row, 0) * num_pages
            + self.slot.get(row, 0) * sequences
            for row in ROWS
        }
        rows[PADDING] += self.blocks.padding(num_pages, sequences)
        return rows

    def bytes_without_pages(self, sequences: int) -> int:
        """At most: the padding of pages depends on how many there are."""
        fixed = sum(self.fixed.values()) + sum(self.slot.values()) * sequences
        return fixed + self.blocks.padding_at_most(sequences)

    @property
    def page_bytes(self) -> int:
        return sum(self.page.values())


def step_rows(config: EngineConfig) -> int:
    """Tokens of a sequence in a decode step: the last one and its drafts."""
    return 1 + config.mtp


def rank_units(share: RankShare) -> Units:
    """Units of an axis that a rank owns; 0 of an axis that the model lacks."""

    def units(axis: Axis) -> int:
        start, stop = share.ranges.get(axis.value, (0, 0))
        return stop - start

    return units


def loaded_tensors(config: EngineConfig, spec: ModelSpec) -> tuple[TensorSpec, ...]:
    return spec.tensors + (spec.draft_tensors if config.mtp else ())


def loaded_scales(config: EngineConfig, spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """Scales of the loaded tensors, for who reads them; the ledger counts them with their codes."""
    return spec.scale_tensors + (spec.draft_scale_tensors if config.mtp else ())


def rank_ledger(
    config: EngineConfig,
    spec: ModelSpec,
    share: RankShare,
    weights: Mapping[str, int],
    profile: ChipProfile,
    options: LedgerOptions,
    turns: Sequence[int],
    prefix_states: int = 0,
) -> RankLedger:
    """The ledger of one rank before the numbers of pages and sequences are known.

    `weights` are its `weight_rows`, `turns` those of `table_blocks`; `prefix_states` are kept
    beside those of the sequences.
    """
    fixed, page, slot = dict(weights), dict[str, int](), dict[str, int]()
    units, item = rank_units(share), DTYPE_BYTES[config.dtype]
    for layer in spec.layers:
        state = _layer_slot(layer, spec, units, item)
        _add_pages(page, layer, units, config.page_tokens, item)
        for row in SLOT_ROWS:
            _add(slot, row, state.get(row, 0))
            _add(fixed, row, state.get(row, 0) * prefix_states)
        _add(slot, "index_pages", state.get("index_pages", 0))
    if config.mtp:
        _add_draft(page, slot, config, spec, units, item)
    alone = share.world_size == 1
    fixed["collective"] = 0 if alone else profile.collective_bytes or HOST_COLLECTIVE_BYTES
    fixed["graph"] = profile.graph_bytes + profile.graph_draft_bytes * config.mtp
    fixed["workspace"], slot["workspace"] = workspace_bytes(config, spec, share, options)
    fixed["workspace"] += profile.widened_bytes if spec.is_packed else 0
    fixed["reserve"] = profile.reserve_bytes
    tables = Counter(table_blocks(config, spec, units, turns))
    fixed["tables"] = sum(block.fixed * count for block, count in tables.items())
    slot["tables"] = sum(block.slot * count for block, count in tables.items())
    states = Counter(state_blocks(config, spec, units, prefix_states))
    return RankLedger(fixed, page, slot, Blocks(tables + states, profile))


def state_bytes(config: EngineConfig, spec: ModelSpec, share: RankShare) -> int:
    """One recurrent state of the rank, with the windows that belong to it, as a cache keeps it."""
    units, item = rank_units(share), DTYPE_BYTES[config.dtype]
    layers = [_layer_slot(layer, spec, units, item) for layer in spec.layers]
    return sum(layer[row] for layer in layers for row in SLOT_ROWS)


def _add(rows: dict[str, int], row: str, nbytes: int) -> None:
    rows[row] = rows.get(row, 0) + nbytes


def _layer_slot(layer: LayerSpec, spec: ModelSpec, units: Units, item: int) -> dict[str, int]:
    """What one state of one sequence takes in a layer, by ledger row."""
    size = layer.mixer.slot_bytes(units, item)
    conv = size.conv + sum(ngram_bytes(layer, spec, item))
    return {"recurrent_slots": size.recurrent, "conv_state": conv, "index_pages": size.index}


def _add_pages(
    page: dict[str, int], layer: LayerSpec, units: Units, page_tokens: int, item: int
) -> None:
    size = layer.mixer.page_bytes(units, page_tokens, item)
    _add(page, "kv_pages", size.kv)
    _add(page, "index_pages", size.index)


def _add_draft(
    page: dict[str, int],
    slot: dict[str, int],
    config: EngineConfig,
    spec: ModelSpec,
    units: Units,
    item: int,
) -> None:
    """The draft head has pages like an attention layer of the model, in a row of its own."""
    inner: dict[str, int] = {}
    for layer in spec.draft_layers:
        _add_pages(inner, layer, units, config.page_tokens, item)
        _add(slot, "mtp_state", sum(_layer_slot(layer, spec, units, item).values()))
    page["mtp_state"] = sum(inner.values())


def workspace_bytes(
    config: EngineConfig,
    spec: ModelSpec,
    share: RankShare,
    options: LedgerOptions = LedgerOptions(),
) -> tuple[int, int]:
    """Estimate for the worst step of T = step_tokens rows in fp32: fixed, and a sequence.

    T * (3 streams of S*H, 4 of H, the channel mixer's inner rows) and the mixer's live values (see
    `step_floats` of its spec); two copies of one logit row for each token that a sequence samples;
    with drafts what a commit replays; rows of an n-gram table that isn't on the chip. An estimate:
    after the start the measured bytes stand beside it.
    """
    tokens = config.step_tokens
    units, context = rank_units(share), config.context_tokens or spec.max_context
    streams = 3 * spec.residual.num_streams * spec.hidden + 4 * spec.hidden
    inner = max(_channel_floats(layer, spec.hidden) for layer in spec.layers)
    mixer = max(layer.mixer.step_floats(units, tokens, context) for layer in spec.layers)
    staged = _staged_row_bytes(spec, DTYPE_BYTES[config.dtype], options) * tokens
    logits = 2 * spec.vocab * step_rows(config) * FLOAT32_BYTES
    fixed = (tokens * (streams + inner) + mixer) * FLOAT32_BYTES + staged
    return fixed, logits + _replay_floats(config, spec, units) * FLOAT32_BYTES


def _replay_floats(config: EngineConfig, spec: ModelSpec, units: Units) -> int:
    """Inputs of a sequence's tokens in all recurrent layers, held until it is known which stay."""
    if not config.mtp:
        return 0
    rows, width, total = step_rows(config), spec.residual.num_streams * spec.hidden, 0
    for layer in spec.layers:
        if layer.mixer.slot_bytes(units, 1).recurrent:
            total += layer.mixer.step_floats(units, rows, rows)
        if layer.ngram is not None:
            total += rows * width
    return total


def _channel_floats(layer: LayerSpec, hidden: int) -> int:
    channel = layer.channel
    if isinstance(channel, DenseSpec):
        return 2 * channel.intermediate + hidden
    return channel.top_k * (2 * channel.intermediate + hidden)


def _staged_row_bytes(spec: ModelSpec, item: int, options: LedgerOptions) -> int:
    """Table rows of one token that come from the host."""
    if options.ngram_table is TablePlace.DEVICE:
        return 0
    return sum(layer.ngram.embed_dim * item for layer in spec.layers if layer.ngram is not None)


def table_bytes(spec: ModelSpec, item_bytes: int) -> int:
    """The whole n-gram table as it would lie on a host: values and scales, no padding."""
    tables = [t for t in spec.tensors if t.component is Component.NGRAM_TABLE]
    sizes = [tensor_bytes(t, t.shape, item_bytes, HOST_PROFILE) for t in tables]
    return sum(size.payload + size.scales for size in sizes)
