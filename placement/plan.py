"""Everything decided before a byte of weights is read: who owns what, and whether it fits.

A plan is a pure value: the same config, model and topology give the same `plan_id` on every rank.
Owns the number of pages. Knows no device.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from placement.config import EngineConfig, RankShare
from placement.errors import ConfigError, PlanError
from placement.experts import as_ranges
from placement.headers import CheckpointHeaders
from placement.ledger import DTYPE_BYTES, WEIGHT_ROWS, RankLedger, rank_ledger
from placement.partition import make_shares
from placement.roofline import StepEstimate, estimate_decode_step
from placement.spec import ModelSpec, SparseAttentionSpec
from placement.topology import Topology, emulated_topology, find_profile

# In this order rows are charged when a rank is full, so that the row named is the one that
# a reader can do something about: the elastic pools come last.
CHARGE_ORDER = (
    "reserve", "collective", "graph", "dense", "shared_experts", "embedding", "scales",
    "routed_experts", "ngram_table", "mtp_weights", "workspace", "recurrent_slots", "conv_state",
    "mtp_state", "index_pages", "kv_pages",
)  # fmt: skip


@dataclass(frozen=True)
class RankPlan:
    """One rank: its share, its memory and its ledger rows."""

    share: RankShare
    usable_bytes: int
    rows: Mapping[str, int]

    @property
    def planned_bytes(self) -> int:
        return sum(self.rows.values())


@dataclass(frozen=True)
class ContextPlan:
    """Tokens a sequence may have: asked for, given by the page pool, and proven by evidence."""

    configured_tokens: int
    allocated_tokens: int
    certified_tokens: int = 0


@dataclass(frozen=True)
class Shortfall:
    rank: int
    row: str
    bytes: int


@dataclass(frozen=True)
class Plan:
    plan_id: str
    model: str
    device: str
    dtype: str
    world_size: int
    ranks: tuple[RankPlan, ...]
    num_pages: int
    page_tokens: int
    max_sequences: int
    context: ContextPlan
    shortfall: Shortfall | None
    assumptions: tuple[str, ...]
    estimate: StepEstimate
    num_layers: int

    @property
    def shares(self) -> tuple[RankShare, ...]:
        return tuple(rank.share for rank in self.ranks)

    @property
    def num_slots(self) -> int:
        """Recurrent state slots: one for each running sequence."""
        return self.max_sequences

    @property
    def fits(self) -> bool:
        return self.shortfall is None

    def to_json(self) -> dict[str, Any]:
        """Plain values for `nrank plan --json`; expert ranges are inclusive [first, last]."""
        short = self.shortfall
        return {
            "plan_id": self.plan_id,
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "fits": self.fits,
            "world_size": self.world_size,
            "ranks": [_rank_json(rank, self.num_layers) for rank in self.ranks],
            "num_pages": self.num_pages,
            "page_tokens": self.page_tokens,
            "num_slots": self.num_slots,
            "context": {
                "configured_tokens": self.context.configured_tokens,
                "allocated_tokens": self.context.allocated_tokens,
                "certified_tokens": self.context.certified_tokens,
            },
            "max_sequences": self.max_sequences,
            "shortfall": short and {"rank": short.rank, "row": short.row, "bytes": short.bytes},
            "estimate": {
                "decode_step_s": self.estimate.decode_step_s,
                "bytes_per_step": self.estimate.bytes_per_step,
            },
            "assumptions": list(self.assumptions),
        }


def _rank_json(rank: RankPlan, num_layers: int) -> dict[str, Any]:
    layers = rank.share.experts[:num_layers]
    return {
        "rank": rank.share.rank,
        "usable_bytes": rank.usable_bytes,
        "planned_bytes": rank.planned_bytes,
        "rows": dict(rank.rows),
        "ranges": {axis: list(span) for axis, span in rank.share.ranges.items()},
        "experts": [[list(run) for run in as_ranges(ids)] for ids in layers],
    }


def make_plan(
    config: EngineConfig,
    spec: ModelSpec,
    headers: CheckpointHeaders | None,
    topology: Topology | None = None,
    ownership: Sequence[Sequence[Sequence[int]]] | None = None,
) -> Plan:
    """Plans a gang. Rank r sits on the r-th chip of `topology` (default: cards of two chips).

    Raises ConfigError for values that can't be; a plan that doesn't fit has a `shortfall`.
    """
    _check(config, spec)
    chips = topology or _default_topology(config)
    if config.ranks > len(chips.chips):
        raise ConfigError(
            f"ranks = {config.ranks}, but there are {len(chips.chips)} chips and each rank "
            "needs one: lower ranks or raise chips"
        )
    shares = make_shares(spec, config.ranks, ownership)
    profile = chips.profile
    ledgers = [
        rank_ledger(config, spec, share, profile.reserve_bytes, profile.collective_bytes)
        for share in shares
    ]
    usable = [chips.chips[rank].memory_bytes for rank in range(config.ranks)]
    context = config.context_tokens or spec.max_context
    num_pages = _num_pages(config, context, ledgers, usable)
    ranks = tuple(
        RankPlan(share, size, ledger.rows(num_pages))
        for share, size, ledger in zip(shares, usable, ledgers, strict=True)
    )
    return Plan(
        plan_id=_plan_id(config, spec, ranks, num_pages, context),
        model=spec.name,
        device=config.device,
        dtype=config.dtype,
        world_size=config.ranks,
        ranks=ranks,
        num_pages=num_pages,
        page_tokens=config.page_tokens,
        max_sequences=config.max_sequences,
        context=ContextPlan(context, num_pages * config.page_tokens // config.max_sequences),
        shortfall=_worst_shortfall(ranks),
        assumptions=_assumptions(config, spec, headers, chips, topology is None),
        estimate=estimate_decode_step(spec, shares, DTYPE_BYTES[config.dtype], profile),
        num_layers=len(spec.layers),
    )


def require_fits(plan: Plan) -> None:
    """PlanError naming the fullest rank, the ledger row and the missing bytes."""
    short = plan.shortfall
    if short is None:
        return
    rank = plan.ranks[short.rank]
    raise PlanError(
        f"rank {short.rank} does not fit: {short.row} needs {short.bytes} bytes more than the "
        f"{rank.usable_bytes} usable ({rank.planned_bytes} planned); {_remedy(short.row)}",
        rank=short.rank,
        row=short.row,
        missing_bytes=short.bytes,
    )


def _remedy(row: str) -> str:
    if row in WEIGHT_ROWS:
        return "use more ranks, chips with more memory or a smaller dtype"
    if row == "workspace":
        return "lower step_tokens or use more ranks"
    if row in ("reserve", "collective", "graph"):
        return "use chips with more memory"
    return "lower context_tokens, max_sequences or kv_pool_tokens, or use more ranks"


def _check(config: EngineConfig, spec: ModelSpec) -> None:
    if config.dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype = {config.dtype!r}, supported: {', '.join(DTYPE_BYTES)}")
    for key in ("max_sequences", "step_tokens", "page_tokens"):
        if getattr(config, key) < 1:
            raise ConfigError(f"{key} = {getattr(config, key)}, needs at least 1")
    for key in ("context_tokens", "kv_pool_tokens", "usable_bytes", "mtp", "chips"):
        if getattr(config, key) < 0:
            raise ConfigError(f"{key} = {getattr(config, key)}, needs at least 0")
    if config.context_tokens > spec.max_context:
        raise ConfigError(
            f"context_tokens = {config.context_tokens}, but {spec.name} goes to "
            f"{spec.max_context}: ask for at most that"
        )
    for layer in spec.layers:
        mixer = layer.mixer
        if isinstance(mixer, SparseAttentionSpec) and config.page_tokens % mixer.block_tokens:
            raise ConfigError(
                f"page_tokens = {config.page_tokens}, needs a multiple of {mixer.block_tokens} "
                "(tokens of one index block)"
            )
    if config.mtp and not spec.draft_tensors:
        raise ConfigError(f"mtp = {config.mtp}, but {spec.name} has no draft head: use mtp 0")


def _default_topology(config: EngineConfig) -> Topology:
    profile = find_profile(config.device, config.chip_profile)
    return emulated_topology(config.chips or config.ranks, profile, config.usable_bytes)


def _num_pages(
    config: EngineConfig, context: int, ledgers: Sequence[RankLedger], usable: Sequence[int]
) -> int:
    """What was asked for; without a figure as many full contexts as fit, at least one."""
    if config.kv_pool_tokens:
        return -(-config.kv_pool_tokens // config.page_tokens)
    one = -(-context // config.page_tokens)
    room = [
        (size - ledger.fixed_bytes) // ledger.page_bytes
        for ledger, size in zip(ledgers, usable, strict=True)
        if ledger.page_bytes
    ]
    return max(one, min([config.max_sequences * one, *room]))


def _worst_shortfall(ranks: Sequence[RankPlan]) -> Shortfall | None:
    worst = max(ranks, key=lambda rank: rank.planned_bytes - rank.usable_bytes)
    missing = worst.planned_bytes - worst.usable_bytes
    if missing <= 0:
        return None
    charged = 0
    for row in CHARGE_ORDER:
        charged += worst.rows[row]
        if charged > worst.usable_bytes:
            return Shortfall(worst.share.rank, row, missing)
    raise AssertionError("CHARGE_ORDER lacks a ledger row")


def _assumptions(
    config: EngineConfig,
    spec: ModelSpec,
    headers: CheckpointHeaders | None,
    chips: Topology,
    emulated: bool,
) -> tuple[str, ...]:
    told = [f"chip profile {chips.profile.name}: {chips.profile.source}"]
    if config.usable_bytes:
        told.append(f"usable_bytes = {config.usable_bytes} from the configuration")
    elif emulated:
        told.append("chip memory is the profile's, not measured; two chips a card")
    if headers is None:
        told.append("no headers: shapes come from config.json, experts taken as stored fused")
    told.append("workspace is an estimate, compare it with the measured bytes after start")
    if spec.draft_tensors and not config.mtp:
        told.append("mtp 0: the draft head on disk is not loaded")
    return tuple(told)


def _plan_id(
    config: EngineConfig,
    spec: ModelSpec,
    ranks: Sequence[RankPlan],
    num_pages: int,
    context: int,
) -> str:
    """Hash of all that is decided; paths and host names have no part in it."""
    tensors = [(t.role, t.shape, t.dtype.value) for t in (*spec.tensors, *spec.draft_tensors)]
    decided = {
        "model": [spec.family, spec.name, repr(spec.layers), repr(spec.residual), tensors],
        "run": [config.device, config.dtype, config.mtp, config.max_sequences, context],
        "step": [config.step_tokens, config.prefill_chunk_tokens, config.prefix_cache],
        "pages": [num_pages, config.page_tokens],
        "ranks": [
            [rank.usable_bytes, rank.rows, rank.share.ranges, rank.share.experts] for rank in ranks
        ],
    }
    text = json.dumps(decided, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
