"""Everything decided before a byte of weights is read: who owns what, and whether it fits.

A plan is a pure value: the same config, model and topology give the same `plan_id` on every rank.
Owns the number of pages. Knows no device; where ranks run on this machine's CPU, its memory has to
hold what they put beside their chips.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from placement.config import EngineConfig, RankShare
from placement.errors import ConfigError, PlanError
from placement.experts import LayerHolders
from placement.headers import CheckpointHeaders
from placement.host_memory import machine_bytes
from placement.ledger import (
    WEIGHT_ROWS,
    LedgerOptions,
    TablePlace,
    loaded_tensors,
    table_bytes,
)
from placement.models.quantised import check_cuts
from placement.ownership import (
    Layers,
    Ownership,
    OwnershipRequest,
    choose_ownership,
    with_replicas,
)
from placement.partition import local_index_ranges, make_shares
from placement.physical import DTYPE_BYTES
from placement.roofline import StepEstimate, estimate_decode_step, expert_bytes
from placement.sizing import PrefixStates, Shortfall, Sizing, make_sizing, shortfall
from placement.spec import MAX_DRAFTS, ModelSpec
from placement.topology import HOST_PROFILE, Topology, emulated_topology, find_profile

HOST_ROW = "host_memory"  # of a shortfall that is the machine's, not a chip's


@dataclass(frozen=True)
class PlanOptions:
    """What decides a plan besides EngineConfig. `ecc` is what the chips run with.

    How many bytes error correction takes from a 310P3 is not documented; with it on, the figure
    has to come in as `usable_bytes`.
    """

    ledger: LedgerOptions = field(default_factory=LedgerOptions)
    ownership: OwnershipRequest = field(default_factory=OwnershipRequest)
    ecc: bool = False


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
    ownership: Ownership
    replica_table: tuple[LayerHolders, ...] = field(repr=False)  # [layer][expert] -> ranks
    pages_per_context: int = 1
    ngram_table: TablePlace = TablePlace.DEVICE
    host_table_bytes: int = 0  # of the one copy that all ranks of a node share; 0 on device
    prefix: PrefixStates = field(default_factory=PrefixStates)
    formats: tuple[str, ...] = ()

    @property
    def shares(self) -> tuple[RankShare, ...]:
        return tuple(rank.share for rank in self.ranks)

    @property
    def num_slots(self) -> int:
        """Recurrent state slots: one for each running sequence."""
        return self.max_sequences

    @property
    def full_sequences(self) -> int:
        """Sequences of the configured length that the page pool holds at a time."""
        return min(self.max_sequences, self.num_pages // self.pages_per_context)

    @property
    def host_bytes(self) -> int:
        """Memory of the machine for the states of prefixes of all ranks and an n-gram table."""
        table = self.host_table_bytes if self.ngram_table is TablePlace.HOST else 0
        return table + self.prefix.host_bytes * self.world_size

    @property
    def fits(self) -> bool:
        return self.shortfall is None

    def to_json(self) -> dict[str, Any]:
        """Plain values for `nrank plan --json`; see `placement.plan_json`."""
        from placement.plan_json import plan_json

        return plan_json(self)


def make_plan(
    config: EngineConfig,
    spec: ModelSpec,
    headers: CheckpointHeaders | None,
    topology: Topology | None = None,
    ownership: Layers | None = None,
    options: PlanOptions = PlanOptions(),
) -> Plan:
    """Plans a gang. Rank r sits on the r-th chip of `topology` (default: cards of two chips).

    `ownership` is short for an exact one in `options`. Raises ConfigError for values that can't be;
    a plan that doesn't fit has a `shortfall`.
    """
    if ownership is not None:
        request = replace(options.ownership, exact=ownership)
        options = replace(options, ownership=request)
    chips = checked_topology(config, spec, topology, options)
    chosen, sizing = size_gang(config, spec, chips, options)
    for share in sizing.shares:
        owned = partial(local_index_ranges, share=share)
        check_cuts(loaded_tensors(config, spec), owned, share.rank)
    num_pages = sizing.num_pages(config)
    rows = sizing.rows(config, num_pages)
    ranks = tuple(
        RankPlan(share, usable, one)
        for share, usable, one in zip(sizing.shares, sizing.usable_bytes, rows, strict=True)
    )
    context, prefix = sizing.context_tokens(config), sizing.prefix_states(config)
    if config.prefix_bytes > 0 and prefix.state_bytes > config.prefix_bytes:
        raise ConfigError(
            f"prefix_bytes = {config.prefix_bytes}, but one state takes {prefix.state_bytes} bytes "
            "on the fullest rank: raise it, or turn the prefix cache off"
        )
    item = DTYPE_BYTES[config.dtype]
    table = options.ledger.ngram_table
    return Plan(
        plan_id=_plan_id(config, spec, ranks, num_pages, context, prefix, options),
        model=spec.name,
        device=config.device,
        dtype=config.dtype,
        world_size=config.ranks,
        ranks=ranks,
        num_pages=num_pages,
        page_tokens=config.page_tokens,
        max_sequences=config.max_sequences,
        context=ContextPlan(context, num_pages * config.page_tokens // config.max_sequences),
        shortfall=shortfall(rows, sizing.usable_bytes)
        or host_shortfall(config, spec, prefix, options),
        assumptions=_assumptions(config, spec, headers, chips, topology is None, prefix, options),
        estimate=estimate_decode_step(config, spec, sizing.shares, chips.profile, chosen.counts),
        num_layers=len(spec.layers),
        ownership=chosen,
        replica_table=chosen.table(spec),
        pages_per_context=sizing.pages_per_context(config),
        ngram_table=table,
        host_table_bytes=0 if table is TablePlace.DEVICE else table_bytes(spec, item),
        prefix=prefix,
        formats=spec.formats(),
    )


def checked_topology(
    config: EngineConfig, spec: ModelSpec, topology: Topology | None, options: PlanOptions
) -> Topology:
    """The chips to plan for. ConfigError for values that can't be."""
    _check(config, spec, options)
    chips = topology or _default_topology(config)
    if config.ranks > len(chips.chips):
        raise ConfigError(
            f"ranks = {config.ranks}, but there are {len(chips.chips)} chips and each rank "
            "needs one: lower ranks or raise chips"
        )
    return chips


def size_gang(
    config: EngineConfig, spec: ModelSpec, chips: Topology, options: PlanOptions
) -> tuple[Ownership, Sizing]:
    """Who holds which expert, replicas included, and the ledgers that follow."""
    chosen = choose_ownership(options.ownership, spec, config.ranks)
    usable = [chips.chips[rank].memory_bytes for rank in range(config.ranks)]

    def sizing_of(owned: Ownership) -> Sizing:
        shares = make_shares(spec, config.ranks, owned.layers, owned.replicated)
        return make_sizing(config, spec, shares, usable, chips.profile, options.ledger)

    sizing = sizing_of(chosen)
    if options.ownership.replicas_bytes:
        sizes = expert_bytes(config, spec, chips.profile)
        free = sizing.free_for_copies(config)
        chosen = with_replicas(chosen, options.ownership, sizes, free, spec)
        sizing = sizing_of(chosen)
    return chosen, sizing


def host_shortfall(
    config: EngineConfig, spec: ModelSpec, prefix: PrefixStates, options: PlanOptions
) -> Shortfall | None:
    """What this machine lacks for what ranks on its CPU put beside their chips, or None.

    A table that is mapped from its file takes page cache only and is not counted.
    """
    if config.device != HOST_PROFILE.device:
        return None
    needed = prefix.host_bytes * config.ranks
    if options.ledger.ngram_table is TablePlace.HOST:
        needed += table_bytes(spec, DTYPE_BYTES[config.dtype])
    missing = needed - machine_bytes()
    return Shortfall(0, HOST_ROW, missing) if missing > 0 else None


def require_fits(plan: Plan, remedies: Sequence[str] = ()) -> None:
    """PlanError naming the fullest rank, the ledger row and the missing bytes.

    `remedies` are changes that were tried and make it fit; without them the message is general.
    """
    short = plan.shortfall
    if short is None:
        return
    rank = plan.ranks[short.rank]
    fits_with = f"it fits with {', or with '.join(remedies)}" if remedies else _remedy(short.row)
    if short.row == HOST_ROW:
        what = (
            "this machine does not fit: states of prefixes and an n-gram table in its memory need "
            f"{short.bytes} bytes more than it has ({plan.host_bytes} planned)"
        )
    else:
        what = (
            f"rank {short.rank} does not fit: {short.row} needs {short.bytes} bytes more than the "
            f"{rank.usable_bytes} usable ({rank.planned_bytes} planned)"
        )
    raise PlanError(
        f"{what}; {fits_with}",
        rank=short.rank,
        row=short.row,
        missing_bytes=short.bytes,
    )


def _remedy(row: str) -> str:
    if row in WEIGHT_ROWS:
        return "use more ranks, chips with more memory or a smaller format"
    if row == "workspace":
        return "lower step_tokens or use more ranks"
    if row in ("reserve", "collective", "graph"):
        return "use chips with more memory"
    if row == HOST_ROW:
        return "lower prefix_host_bytes, or leave the n-gram table on the chips"
    return "lower context_tokens, max_sequences, kv_pool_tokens or prefix_bytes, or use more ranks"


def _check(config: EngineConfig, spec: ModelSpec, options: PlanOptions) -> None:
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
    context = config.context_tokens or spec.max_context
    if 0 < config.kv_pool_tokens < context:
        raise ConfigError(
            f"kv_pool_tokens = {config.kv_pool_tokens}, but one sequence may have {context}: "
            "raise it or lower context_tokens"
        )
    for multiple in sorted({layer.mixer.page_multiple for layer in spec.layers}):
        if config.page_tokens % multiple:
            raise ConfigError(
                f"page_tokens = {config.page_tokens}, needs a multiple of {multiple} "
                "(tokens of one index block)"
            )
    if config.mtp > MAX_DRAFTS:
        raise ConfigError(f"mtp = {config.mtp}, at most {MAX_DRAFTS} drafts a step are possible")
    if config.mtp and not spec.draft_tensors:
        raise ConfigError(f"mtp = {config.mtp}, but {spec.name} has no draft head: use mtp 0")
    if config.mtp and len(spec.draft_layers) != 1:
        raise ConfigError(
            f"mtp = {config.mtp}, but the draft head of {spec.name} has "
            f"{len(spec.draft_layers)} layers, 1 is supported: use mtp 0"
        )
    if config.prefix_interval_tokens < 1:
        raise ConfigError(
            f"prefix_interval_tokens = {config.prefix_interval_tokens}, needs at least 1"
        )
    if not 0 <= config.decode_share < 1:
        raise ConfigError(f"decode_share = {config.decode_share}, needs at least 0 and below 1")
    if options.ownership.replicas_bytes < 0:
        raise ConfigError(f"replicas_bytes = {options.ownership.replicas_bytes}, needs at least 0")
    if options.ecc and not config.usable_bytes:
        raise ConfigError(
            "ecc = on, but no source says what it takes from a chip: read the total with "
            "`npu-smi info` and give it as usable_bytes"
        )


def _default_topology(config: EngineConfig) -> Topology:
    profile = find_profile(config.device, config.chip_profile)
    return emulated_topology(config.chips or config.ranks, profile, config.usable_bytes)


def _assumptions(
    config: EngineConfig,
    spec: ModelSpec,
    headers: CheckpointHeaders | None,
    chips: Topology,
    emulated: bool,
    prefix: PrefixStates,
    options: PlanOptions,
) -> tuple[str, ...]:
    profile = chips.profile
    told = [f"chip profile {profile.name}: {profile.source}"]
    if config.dtype in profile.missing_dtypes:
        told.append(
            f"{profile.name} has no {config.dtype} and refuses it at the start; use float16, "
            "unless the chips are of another family"
        )
    if config.usable_bytes:
        told.append(f"usable_bytes = {config.usable_bytes} from the configuration")
    elif emulated:
        told.append("chip memory is the profile's, not measured; two chips a card")
    if headers is None:
        told.append("no headers: shapes and formats come from config.json")
    told.append("workspace is an estimate, compare it with the measured bytes after start")
    if profile.collective_buffers > 1:
        told.append(
            f"one communicator with {profile.collective_buffers} buffers of "
            f"{profile.collective_buffer_bytes} bytes"
        )
    if profile.fractal_layout:
        told.append("formats below 8 bits lie packed in rows on the chip, without padding")
    if config.mtp:
        told.append(
            f"mtp {config.mtp}: one recurrent state a sequence, and the inputs of the tokens of a "
            "step to replay those that stay; a state after each draft would take more bytes"
        )
    elif spec.draft_tensors:
        told.append("mtp 0: the draft head on disk is not loaded")
    if options.ledger.ngram_table is TablePlace.HOST:
        told.append("n-gram table: one copy in host memory for all ranks, rows copied each step")
    if options.ledger.ngram_table is TablePlace.MMAP:
        told.append("n-gram table: read from its file; host memory is page cache, not counted")
    if prefix.host and config.device != HOST_PROFILE.device:
        told.append(
            f"host memory: states of prefixes take {prefix.host_bytes * config.ranks} bytes of it, "
            "which were not compared with what the box has"
        )
    told += [f"checkpoint: {remark}" for remark in spec.remarks]
    told += [f"can be planned, not run: {obstacle}" for obstacle in spec.obstacles]
    return tuple(told)


def _plan_id(
    config: EngineConfig,
    spec: ModelSpec,
    ranks: Sequence[RankPlan],
    num_pages: int,
    context: int,
    prefix: PrefixStates,
    options: PlanOptions,
) -> str:
    """Hash of all that is decided; paths and host names have no part in it."""
    tensors = [
        (t.role, t.shape, t.dtype.value, t.format.name if t.format else "")
        for t in (*spec.tensors, *spec.draft_tensors)
    ]
    decided = {
        "model": [spec.family, spec.name, repr(spec.layers), repr(spec.residual), tensors],
        "run": [config.device, config.dtype, config.mtp, config.max_sequences, context],
        "step": [config.step_tokens, config.prefill_chunk_tokens],
        "pages": [num_pages, config.page_tokens],
        "places": [options.ledger.ngram_table.value],
        "prefix": [prefix.device, prefix.host, prefix.device and config.prefix_interval_tokens],
        "ranks": [
            [rank.usable_bytes, rank.rows, rank.share.ranges, rank.share.experts] for rank in ranks
        ],
    }
    text = json.dumps(decided, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
