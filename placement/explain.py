"""A plan as text for people: one line a ledger row, one column a rank. No colours, no widths."""

from __future__ import annotations

from collections.abc import Sequence

from placement.experts import as_ranges
from placement.ledger import ROWS, TablePlace
from placement.plan import HOST_ROW, Plan

GIB = 1 << 30
MIB = 1 << 20
SHOWN_REPLICAS = 8


def format_bytes(count: int) -> str:
    """Binary units with three significant places: 1.50 GiB, 12.0 MiB, 512 B."""
    if abs(count) >= GIB:
        return f"{count / GIB:.2f} GiB"
    if abs(count) >= MIB:
        return f"{count / MIB:.1f} MiB"
    return f"{count / 1024:.1f} KiB" if abs(count) >= 1024 else f"{count} B"


def explain(plan: Plan) -> str:
    """The whole plan: verdict, ledger, ownership, context, estimate, assumptions."""
    formats = f", {' and '.join(plan.formats)}" if plan.formats else ""
    lines = [
        f"plan {plan.plan_id}: {plan.model} on {plan.world_size} ranks "
        f"({plan.device}, {plan.dtype}{formats})",
        _verdict(plan),
        "",
        *_table(plan),
        *_host(plan),
        "",
        *_ownership(plan),
        f"context: {plan.context.configured_tokens} configured, "
        f"{plan.context.allocated_tokens} allocated to each of {plan.max_sequences} sequences, "
        f"{plan.context.certified_tokens} certified",
        f"pages: {plan.num_pages} of {plan.page_tokens} tokens; slots: {plan.num_slots}; "
        f"sequences at full length: {plan.full_sequences}",
        _prefix(plan),
        *_estimate(plan),
        *(f"assumed: {text}" for text in plan.assumptions),
    ]
    return "\n".join(lines)


def _prefix(plan: Plan) -> str:
    kept = plan.prefix
    if not kept.device:
        return "prefix cache: off"
    size = format_bytes(kept.state_bytes)
    return (
        f"prefix cache: {kept.device} states of at most {size} on each chip, {kept.host} more in "
        f"host memory ({format_bytes(kept.host_bytes)} a rank)"
    )


def _verdict(plan: Plan) -> str:
    short = plan.shortfall
    if short is None:
        return "fits"
    if short.row == HOST_ROW:
        return f"does not fit: {format_bytes(short.bytes)} missing in this machine's memory"
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
    return aligned([header, *body])


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """First column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    return ["  ".join([line[0].ljust(widths[0]), *_right(line, widths)]) for line in table]


def _right(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]


def _host(plan: Plan) -> list[str]:
    if plan.ngram_table is TablePlace.DEVICE:
        return []
    where = "in host memory, one copy" if plan.ngram_table is TablePlace.HOST else "mapped file"
    return [f"n-gram table: {format_bytes(plan.host_table_bytes)} ({where} for all ranks)"]


def _ownership(plan: Plan) -> list[str]:
    """The first layer with experts stands for all: where others differ, the line says so."""
    layers = list(zip(*(rank.share.experts for rank in plan.ranks), strict=True))
    shown = next(index for index, layer in enumerate(layers) if any(layer))
    told = []
    for rank, ids in enumerate(layers[shown]):
        runs = as_ranges(ids)
        text = ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
        told.append(f"rank {rank}: {text or 'none'}")
    differ = any(any(layer) and layer != layers[shown] for layer in layers)
    note = " (other layers differ, see --json)" if differ else ""
    lines = [f"experts of layer {shown}: {'; '.join(told)}{note}"]
    lines.append(f"ownership: {plan.ownership.reason}; {len(plan.ownership.moves)} experts moved")
    if plan.ownership.imbalance is not None:
        lines.append(
            f"load by the counts: busiest rank {plan.ownership.imbalance:.2f} times the mean"
        )
    return lines + _replicas(plan)


def _replicas(plan: Plan) -> list[str]:
    held = [
        f"layer {layer} expert {expert} on {', '.join(map(str, ranks))}"
        for layer, table in enumerate(plan.replica_table)
        for expert, ranks in enumerate(table)
        if len(ranks) > 1
    ]
    if not held:
        return []
    more = f"; and {len(held) - SHOWN_REPLICAS} more" if len(held) > SHOWN_REPLICAS else ""
    return [f"replicas: {'; '.join(held[:SHOWN_REPLICAS])}{more}"]


def _estimate(plan: Plan) -> list[str]:
    one = plan.estimate
    parts = ", ".join(f"{name} {format_bytes(n)}" for name, n in one.bytes_by_class.items())
    return [
        f"decode step: at least {one.decode_step_s * 1e3:.3g} ms, an estimate "
        f"({format_bytes(one.bytes_per_step)} read by the busiest rank in "
        f"{one.read_s * 1e3:.3g} ms, {one.collectives} collectives in "
        f"{one.collective_s * 1e3:.3g} ms)",
        f"  reads: {parts}",
        f"  busiest rank of a layer: {one.busiest_experts:.2f} experts a token, "
        f"{one.mean_experts:.2f} on average",
        *(f"  input: {text}" for text in one.inputs),
    ]
