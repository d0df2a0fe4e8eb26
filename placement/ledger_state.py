"""Tensors of a rank that aren't weights: caches, states, kept states, and the tables of a step.

One `Block` a tensor, so that what the allocator adds to each can be told; the ledger's rows of the
same bytes are `placement.ledger`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from placement.config import EngineConfig
from placement.physical import DTYPE_BYTES, FLOAT32_BYTES, INT64_BYTES, block_bytes
from placement.spec import (
    Axis,
    GatedAttentionSpec,
    GatedDeltaSpec,
    LayerSpec,
    ModelSpec,
    SparseAttentionSpec,
    Units,
)
from placement.topology import ChipProfile

# Of a sequence's sampling: seed, choice and top-k; temperature, top-p and min-p.
SAMPLER_BYTES = (INT64_BYTES,) * 3 + (FLOAT32_BYTES,) * 3


@dataclass(frozen=True)
class Block:
    """One tensor: `fixed` bytes, and what each page and each sequence (slot) adds."""

    fixed: int = 0
    page: int = 0
    slot: int = 0

    def nbytes(self, num_pages: int, sequences: int) -> int:
        return self.fixed + self.page * num_pages + self.slot * sequences


@dataclass(frozen=True)
class Blocks:
    """All of a rank, with how many there are of each kind."""

    counts: Mapping[Block, int]
    profile: ChipProfile

    def padding(self, num_pages: int, sequences: int) -> int:
        """What the allocator takes above the bytes of the tensors."""
        total = 0
        for block, count in self.counts.items():
            size = block.nbytes(num_pages, sequences)
            total += count * (block_bytes(size, self.profile) - size)
        return total

    def padding_at_most(self, sequences: int) -> int:
        """The same for any number of pages."""
        unit, extra = self.profile.allocation_bytes, self.profile.allocation_extra_bytes
        paged = sum(count for block, count in self.counts.items() if block.page)
        still = {block: count for block, count in self.counts.items() if not block.page}
        return Blocks(still, self.profile).padding(0, sequences) + paged * (unit - 1 + extra)


def state_blocks(
    config: EngineConfig, spec: ModelSpec, units: Units, prefix_states: int
) -> Iterator[Block]:
    """Caches and states of all layers, and the cells of kept states: a tensor for each dtype."""
    item = DTYPE_BYTES[config.dtype]
    cells: Counter[int | str] = Counter()  # by width of a value; int64 apart
    for layer in spec.layers:
        yield from _page_blocks(layer, units, config.page_tokens, item)
        size = layer.mixer.slot_bytes(units, item)
        window, history = ngram_bytes(layer, spec, item)
        yield from (Block(slot=one) for one in (size.recurrent, size.conv, size.index))
        yield from (Block(slot=one) for one in (window, history))
        cells[FLOAT32_BYTES] += size.recurrent
        cells[item] += size.conv + window
        cells["int64"] += history
    for layer in spec.draft_layers if config.mtp else ():
        yield from _page_blocks(layer, units, config.page_tokens, item)
        yield Block(slot=layer.mixer.slot_bytes(units, item).index)
    yield from (Block(fixed=nbytes * prefix_states) for nbytes in cells.values())


def ngram_bytes(layer: LayerSpec, spec: ModelSpec, item: int) -> tuple[int, int]:
    """Of a sequence in a layer: window of the n-gram convolution, and the last token ids."""
    if layer.ngram is None:
        return 0, 0
    history = layer.ngram.context_tokens * INT64_BYTES
    width = spec.residual.num_streams * spec.hidden
    return layer.ngram.slot_bytes(width, item) - history, history


def _page_blocks(layer: LayerSpec, units: Units, page_tokens: int, item: int) -> Iterator[Block]:
    size = layer.mixer.page_bytes(units, page_tokens, item)
    parts = 2 if isinstance(layer.mixer, SparseAttentionSpec | GatedAttentionSpec) else 1
    yield from (Block(page=size.kv // parts) for _ in range(parts))
    yield Block(page=size.index)


def table_blocks(
    config: EngineConfig, spec: ModelSpec, units: Units, turns: Sequence[int]
) -> Iterator[Block]:
    """Integers and settings that a step looks up.

    `turns` has for each layer with experts, draft layers last, the most ranks that one is on.
    """
    pages = -(-(config.context_tokens or spec.max_context) // config.page_tokens)
    for width in (pages, 1, config.mtp):  # page table, last token, drafts
        yield Block(slot=width * INT64_BYTES)
    yield from (Block(slot=nbytes) for nbytes in SAMPLER_BYTES)
    layers = (*spec.layers, *(spec.draft_layers if config.mtp else ()))
    for layer, num_turns in zip(layers, turns, strict=False):
        if isinstance(layer.mixer, GatedDeltaSpec):  # key head of each value head
            yield Block(units(Axis.VALUE_HEADS) * INT64_BYTES)
        if layer.channel.num_experts:  # routes to each, a one to count by, and who computes them
            for count in (1, num_turns):
                yield Block(count * layer.channel.num_experts * INT64_BYTES)
            yield Block(INT64_BYTES)
        yield from _hash_blocks(layer, {tensor.role for tensor in spec.tensors})


def _hash_blocks(layer: LayerSpec, roles: set[str]) -> Iterator[Block]:
    """Constants of n-gram ids; where the checkpoint has them, they are weights."""
    ngram = layer.ngram
    if ngram is None:
        return
    sizes = {
        "multipliers": ngram.ngram_size,
        "vocab_sizes": len(ngram.head_vocab_sizes),
        "offsets": len(ngram.head_offsets),
    }
    for name, size in sizes.items():
        if f"layers.{layer.index}.ngram.{name}" not in roles:
            yield Block(size * INT64_BYTES)
