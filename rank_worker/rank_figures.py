"""What a rank tells about drafts and reuse, put together from what counts them.

Owns no counter. Reads single numbers that another thread may be changing, never two that have to
agree.
"""

from __future__ import annotations

from collections.abc import Mapping

from rank_worker.messages import CopyFigures, DraftFigures, PrefixFigures
from rank_worker.model import Model
from rank_worker.prefix_cache import PrefixCache
from rank_worker.runner import Runner
from rank_worker.scheduler import Scheduler
from rank_worker.state_store import StateStore, Verb

DEVICE, HOST = "device", "host"


def draft_figures(scheduler: Scheduler | None) -> DraftFigures:
    """Of rank 0; on other ranks, and without drafts, nothing."""
    if scheduler is None or not scheduler.limits.num_drafts:
        return DraftFigures()
    rounds, drafts = scheduler.draft_rounds, scheduler.limits.num_drafts
    if not rounds:
        return DraftFigures(drafts)
    accepted = tuple(scheduler.accepted_by_position)
    tokens = 1 + sum(accepted) / rounds
    return DraftFigures(
        drafts,
        acceptance_by_position=tuple(min(1.0, count / rounds) for count in accepted),
        tokens_per_round=tokens,
        estimated_speedup=scheduler.cost.speedup(tokens),
    )


def copy_figures(store: StateStore) -> dict[str, CopyFigures]:
    """What the store copied so far. To be called between steps by the thread that runs them."""
    ledgers = {verb: store.ledger(verb) for verb in Verb}
    return {
        verb.value: CopyFigures(ledger.count, ledger.bytes, ledger.seconds)
        for verb, ledger in ledgers.items()
    }


def prefix_figures(
    store: StateStore, copies: Mapping[str, CopyFigures], cache: PrefixCache | None
) -> PrefixFigures:
    """Of one rank; `cache` is rank 0's."""
    cells = {DEVICE: store.num_cells, HOST: store.num_host_cells}
    cell_bytes = {DEVICE: store.nbytes(), HOST: store.host_nbytes()}
    if cache is None:
        return PrefixFigures(cells=cells, cell_bytes=cell_bytes, copies=dict(copies))
    hits, misses, counts = cache.counts.hits, dict(cache.counts.misses), cache.cells.counts
    queries = hits + sum(misses.values())
    return PrefixFigures(
        queries=queries,
        hits=hits,
        misses=misses,
        hit_rate=hits / queries if queries else None,
        evicted_pages=cache.counts.evicted_pages,
        cached_pages=cache.tree.num_nodes,
        events={
            "saved": counts.saves, "spilled": counts.spills, "restored": counts.restores,
            "fetched": counts.fetches, "dropped": counts.drops,
        },
        states={DEVICE: len(cache.cells.device.held), HOST: len(cache.cells.host.held)},
        cells=cells,
        cell_bytes=cell_bytes,
        copies=dict(copies),
    )  # fmt: skip


def recurrent_dtype(model: Model) -> str:
    """The type of recurrent states, as torch names it; empty for a model without any."""
    for layer in model.layers:
        for state in layer.mixer.state.tensors().get("recurrent_slots", ()):
            return str(state.dtype).removeprefix("torch.")
    return ""


def step_parts(runner: Runner | None) -> dict[str, float]:
    """Seconds of steps since the warm-up by `StepPart`; nothing before the load."""
    if runner is None:
        return {}
    return {part.value: max(0.0, seconds) for part, seconds in runner.model.clock.seconds.items()}


def eager_fallbacks(runner: Runner | None) -> dict[str, int]:
    """Decode steps that no graph took by `decode_graphs.FALLBACKS`; nothing before the load."""
    return {} if runner is None else dict(runner.graphs.counts.eager)


def op_implementations(runner: Runner | None) -> dict[str, str]:
    """Operator -> what computes it, as its module and function are named."""
    if runner is None:
        return {}
    return {one.op: one.implementation for one in runner.model.ops.op_info()}
