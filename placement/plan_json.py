"""A plan as plain values for programs. Expert ranges are inclusive [first, last]."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from placement.experts import as_ranges
from placement.plan import Plan, RankPlan


def plan_json(plan: Plan) -> dict[str, Any]:
    """What `nrank plan --json` prints; `--ownership` and `--current` read it back."""
    short, estimate = plan.shortfall, plan.estimate
    return {
        "plan_id": plan.plan_id,
        "model": plan.model,
        "device": plan.device,
        "dtype": plan.dtype,
        "formats": list(plan.formats),
        "fits": plan.fits,
        "world_size": plan.world_size,
        "ranks": [_rank_json(rank, plan.num_layers) for rank in plan.ranks],
        "host": {"ngram_table": plan.ngram_table.value, "table_bytes": plan.host_table_bytes},
        "num_pages": plan.num_pages,
        "page_tokens": plan.page_tokens,
        "num_slots": plan.num_slots,
        "prefix_states": asdict(plan.prefix),
        "context": asdict(plan.context),
        "max_sequences": plan.max_sequences,
        "full_sequences": plan.full_sequences,
        "shortfall": short and {"rank": short.rank, "row": short.row, "bytes": short.bytes},
        "ownership": {
            "reason": plan.ownership.reason,
            "moved_experts": len(plan.ownership.moves),
            "moves": [[move.layer, move.expert, move.rank] for move in plan.ownership.moves],
            "imbalance": plan.ownership.imbalance,
        },
        "replicas": _replicas(plan),
        "estimate": {
            "decode_step_s": estimate.decode_step_s,
            "bytes_per_step": estimate.bytes_per_step,
            "bytes_by_class": dict(estimate.bytes_by_class),
            "read_s": estimate.read_s,
            "collective_s": estimate.collective_s,
            "collectives": estimate.collectives,
            "busiest_rank_experts": estimate.busiest_experts,
            "mean_rank_experts": estimate.mean_experts,
            "inputs": list(estimate.inputs),
        },
        "assumptions": list(plan.assumptions),
    }


def _rank_json(rank: RankPlan, num_layers: int) -> dict[str, Any]:
    layers = [[list(run) for run in as_ranges(ids)] for ids in rank.share.experts]
    return {
        "rank": rank.share.rank,
        "usable_bytes": rank.usable_bytes,
        "planned_bytes": rank.planned_bytes,
        "rows": dict(rank.rows),
        "ranges": {axis: list(span) for axis, span in rank.share.ranges.items()},
        "experts": layers[:num_layers],
        "draft_experts": layers[num_layers:],
    }


def _replicas(plan: Plan) -> list[dict[str, list[int]]]:
    """Per layer the experts that several ranks hold, with these ranks; empty without any."""
    found = [
        {str(expert): list(ranks) for expert, ranks in enumerate(layer) if len(ranks) > 1}
        for layer in plan.replica_table
    ]
    return found if any(found) else []
