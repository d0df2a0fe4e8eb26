"""Ledgers of all ranks of a gang, and the page pool that fits into what they leave.

Weights are measured once; other numbers of sequences or tokens are then cheap to try. Knows no
identity of a plan and no text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from placement.config import EngineConfig, RankShare
from placement.ledger import (
    LedgerOptions,
    RankLedger,
    TablePlace,
    loaded_tensors,
    rank_ledger,
    state_bytes,
)
from placement.ledger_weights import PADDING, weight_rows
from placement.physical import DTYPE_BYTES
from placement.spec import Component, ModelSpec
from placement.topology import ChipProfile

# In this order rows are charged when a rank is full, so that the row named is the one that
# a reader can do something about: the elastic pools come last.
CHARGE_ORDER = (
    "reserve", "collective", "graph", "dense", "shared_experts", "embedding", "scales",
    "routed_experts", "ngram_table", "mtp_weights", PADDING, "tables", "workspace",
    "recurrent_slots", "conv_state", "mtp_state", "index_pages", "kv_pages",
)  # fmt: skip


@dataclass(frozen=True)
class Shortfall:
    """The fullest rank, the first row that has no room there, and all bytes it lacks."""

    rank: int
    row: str
    bytes: int


STATES_PER_SEQUENCE = 2  # that the prefix cache keeps on the device unless told otherwise
HOST_STATES = 4  # on the host for each of them


@dataclass(frozen=True)
class PrefixStates:
    """Recurrent states that the prefix cache keeps, and the bytes of one on the fullest rank."""

    device: int = 0
    host: int = 0
    state_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        return self.host * self.state_bytes


@dataclass(frozen=True)
class Sizing:
    """A gang's shares and weights; `weights` and `usable_bytes` have one entry a rank.

    `turns`: on how many ranks an expert of each layer is at most, draft layers last.
    """

    spec: ModelSpec
    shares: tuple[RankShare, ...]
    weights: tuple[dict[str, int], ...]
    usable_bytes: tuple[int, ...]
    profile: ChipProfile
    options: LedgerOptions
    turns: tuple[int, ...]

    def prefix_states(self, config: EngineConfig) -> PrefixStates:
        """As many on every rank as the byte budgets hold on the rank whose states are largest."""
        if not config.prefix_cache:
            return PrefixStates()
        size = max(state_bytes(config, self.spec, share) for share in self.shares)
        states = STATES_PER_SEQUENCE * config.max_sequences
        if config.prefix_bytes >= 0:
            states = config.prefix_bytes // max(1, size)
        host = HOST_STATES * states
        if config.prefix_host_bytes >= 0:
            host = config.prefix_host_bytes // max(1, size)
        return PrefixStates(states, host, size)

    def ledgers(self, config: EngineConfig) -> list[RankLedger]:
        states = self.prefix_states(config).device
        return [
            rank_ledger(
                config, self.spec, share, weights, self.profile, self.options, self.turns, states
            )
            for share, weights in zip(self.shares, self.weights, strict=True)
        ]

    def context_tokens(self, config: EngineConfig) -> int:
        return config.context_tokens or self.spec.max_context

    def pages_per_context(self, config: EngineConfig) -> int:
        return -(-self.context_tokens(config) // config.page_tokens)

    def num_pages(self, config: EngineConfig) -> int:
        """What was asked for; without a figure as many full contexts as fit, at least one."""
        if config.kv_pool_tokens:
            return -(-config.kv_pool_tokens // config.page_tokens)
        one = self.pages_per_context(config)
        room = [
            (usable - ledger.bytes_without_pages(config.max_sequences)) // ledger.page_bytes
            for ledger, usable in zip(self.ledgers(config), self.usable_bytes, strict=True)
            if ledger.page_bytes
        ]
        return max(one, min([config.max_sequences * one, *room]))

    def rows(self, config: EngineConfig, num_pages: int) -> list[dict[str, int]]:
        ledgers = self.ledgers(config)
        return [ledger.rows(num_pages, config.max_sequences) for ledger in ledgers]

    def free_bytes(self, config: EngineConfig) -> list[int]:
        """What each rank has left beside one full context; negative where it lacks bytes."""
        pages = -(-config.kv_pool_tokens // config.page_tokens) or self.pages_per_context(config)
        rows = self.rows(config, pages)
        return [
            usable - sum(one.values()) for usable, one in zip(self.usable_bytes, rows, strict=True)
        ]

    def free_for_copies(self, config: EngineConfig) -> list[int]:
        """The same where any expert may be on every rank: all ranks' tables of who computes it are
        longer then, and a rank without room for its own leaves no copies to the others.
        """
        widest = tuple(len(self.shares) if turns else 0 for turns in self.turns)
        free = replace(self, turns=widest).free_bytes(config)
        return free if min(free) >= 0 else [0] * len(free)

    def fits(self, config: EngineConfig) -> bool:
        return min(self.free_bytes(config)) >= 0

    def holds(self, config: EngineConfig, sequences: int, tokens: int) -> bool:
        """True when so many sequences can all be `tokens` long at the same time."""
        pages = sequences * -(-tokens // config.page_tokens)
        asked = replace(
            config,
            max_sequences=sequences,
            context_tokens=tokens,
            kv_pool_tokens=pages * config.page_tokens,
        )
        return self.fits(asked)


def make_sizing(
    config: EngineConfig,
    spec: ModelSpec,
    shares: tuple[RankShare, ...],
    usable_bytes: Sequence[int],
    profile: ChipProfile,
    options: LedgerOptions,
) -> Sizing:
    item = DTYPE_BYTES[config.dtype]
    tensors = [
        tensor
        for tensor in loaded_tensors(config, spec)
        if tensor.component is not Component.NGRAM_TABLE or options.ngram_table is TablePlace.DEVICE
    ]
    weights = tuple(weight_rows(tensors, share, item, profile) for share in shares)
    return Sizing(spec, shares, weights, tuple(usable_bytes), profile, options, _turns(shares))


def _turns(shares: Sequence[RankShare]) -> tuple[int, ...]:
    layers = zip(*(share.experts for share in shares), strict=True)
    counts = (Counter(expert for owned in layer for expert in owned) for layer in layers)
    return tuple(max(count.values(), default=0) for count in counts)


def shortfall(rows: Sequence[dict[str, int]], usable_bytes: Sequence[int]) -> Shortfall | None:
    """What the fullest rank lacks, or None."""
    missing = [sum(one.values()) - usable for one, usable in zip(rows, usable_bytes, strict=True)]
    worst = max(range(len(missing)), key=lambda rank: (missing[rank], -rank))
    if missing[worst] <= 0:
        return None
    charged = 0
    for row in CHARGE_ORDER:
        charged += rows[worst][row]
        if charged > usable_bytes[worst]:
            return Shortfall(worst, row, missing[worst])
    raise AssertionError("CHARGE_ORDER lacks a ledger row")
