"""A plan as text for people: one line a ledger row, one column a rank. No colours, no widths."""

from __future__ import annotations

from placement.experts import as_ranges
from placement.ledger import ROWS
from placement.plan import Plan

GIB = 1 << 30
MIB = 1 << 20


def format_bytes(count: int) -> str:
    """Binary units with three significant places: 1.50 GiB, 12.0 MiB, 512 B."""
    if abs(count) >= GIB:
        return f"{count / GIB:.2f} GiB"
    if abs(count) >= MIB:
        return f"{count / MIB:.1f} MiB"
    return f"{count / 1024:.1f} KiB" if abs(count) >= 1024 else f"{count} B"


def explain(plan: Plan) -> str:
    """The whole plan: verdict, ledger, ownership, context, estimate, assumptions."""
    lines = [
        f"plan {plan.plan_id}: {plan.model} on {plan.world_size} ranks "
        f"({plan.device}, {plan.dtype})",
        _verdict(plan),
        "",
        *_table(plan),
        "",
        f"experts of layer 0: {_experts(plan)}",
        f"context: {plan.context.configured_tokens} configured, "
        f"{plan.context.allocated_tokens} allocated to each of {plan.max_sequences} sequences, "
        f"{plan.context.certified_tokens} certified",
        f"pages: {plan.num_pages} of {plan.page_tokens} tokens; slots: {plan.num_slots}",
        f"decode step: at least {plan.estimate.decode_step_s * 1e3:.3g} ms "
        f"({format_bytes(plan.estimate.bytes_per_step)} read by the busiest rank)",
        *(f"assumed: {text}" for text in plan.assumptions),
    ]
    return "\n".join(lines)


def _verdict(plan: Plan) -> str:
    short = plan.shortfall
    if short is None:
        return "fits"
    return (
        f"does not fit: rank {short.rank}, row {short.row}, {short.bytes} bytes missing "
        f"({format_bytes(short.bytes)})"
    )


def _table(plan: Plan) -> list[str]:
    header = ["row", *(f"rank {rank.share.rank}" for rank in plan.ranks)]
    body = [
        [row, *(format_bytes(rank.rows[row]) for rank in plan.ranks)]
        for row in ROWS
        if any(rank.rows[row] for rank in plan.ranks)
    ]
    body.append(["planned", *(format_bytes(rank.planned_bytes) for rank in plan.ranks)])
    body.append(["usable", *(format_bytes(rank.usable_bytes) for rank in plan.ranks)])
    table = [header, *body]
    widths = [max(len(line[i]) for line in table) for i in range(len(header))]
    return ["  ".join([line[0].ljust(widths[0]), *_right(line, widths)]) for line in table]


def _right(line: list[str], widths: list[int]) -> list[str]:
    return [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]


def _experts(plan: Plan) -> str:
    """Layer 0 stands for all: other layers differ only under a user's ownership."""
    told = []
    for rank in plan.ranks:
        runs = as_ranges(rank.share.experts[0])
        ids = ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
        told.append(f"rank {rank.share.rank}: {ids or 'none'}")
    return "; ".join(told)
