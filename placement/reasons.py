"""Why a plan is as it is: one sentence for each ledger row and for each decision."""

from __future__ import annotations

from placement.capacity import Question
from placement.explain import format_bytes
from placement.ledger import ROWS, TablePlace
from placement.plan import Plan
from placement.roofline import expert_bytes
from placement.spec import Component, ModelSpec
from placement.topology import ChipProfile, find_profile


def reasons(question: Question, plan: Plan) -> list[str]:
    """Lines of `nrank plan --explain`, of the fullest rank."""
    profile = find_profile(question.config.device, question.config.chip_profile)
    worst = max(plan.ranks, key=lambda rank: rank.planned_bytes - rank.usable_bytes)
    told = _row_reasons(question, plan, profile)
    lines = [f"rows of rank {worst.share.rank}, the fullest:"]
    for row in ROWS:
        if worst.rows[row]:
            lines.append(f"  {row}: {format_bytes(worst.rows[row])}, {told[row]}")
    return [*lines, "decisions:", *(f"  {text}" for text in _decisions(question, plan, profile))]


def _row_reasons(question: Question, plan: Plan, profile: ChipProfile) -> dict[str, str]:
    config, spec = question.config, question.spec
    pages = f"{plan.num_pages} pages of {plan.page_tokens} tokens"
    slots = (
        f"{plan.max_sequences} sequences"
        f"{f' and {plan.prefix.device} of the prefix cache' if plan.prefix.device else ''}"
    )
    widened = ""
    if spec.is_packed and profile.widened_bytes:
        widened = (
            f"; {format_bytes(profile.widened_bytes)} of packed weights that are widened at once"
        )
    buffers = f"{profile.collective_buffers} x {format_bytes(profile.collective_buffer_bytes)}"
    return {
        "routed_experts": _expert_reason(question, profile),
        "shared_experts": f"its slice of the shared experts of {len(spec.layers)} layers",
        "dense": "its heads and slices, and everything that every rank holds whole",
        "embedding": f"its rows of {spec.vocab} in the embedding and the output head",
        "ngram_table": f"its rows of the table, placed on the {plan.ngram_table.value}",
        "scales": f"scales and zero points of {', '.join(spec.formats()) or 'no format'}",
        "kv_pages": f"{pages}, its K/V heads; two ranks that share a head both hold it",
        "index_pages": f"{pages}, index keys whole on every rank, and the open block a sequence",
        "recurrent_slots": f"fp32 states of its heads for {slots}",
        "conv_state": f"convolution windows for {slots}",
        "mtp_weights": f"the draft head, loaded because mtp is {config.mtp}",
        "mtp_state": f"{pages} of the draft head",
        "graph": f"captured decode graphs, {format_bytes(profile.graph_bytes)} and "
        f"{format_bytes(profile.graph_draft_bytes)} a draft token",
        "collective": f"{buffers} for one communicator"
        if profile.collective_bytes
        else "shared memory of the host's collectives",
        "tables": "page tables, owners and counts of experts, settings of the sampler",
        "padding": _padding_reason(profile),
        "workspace": f"live values of a step of {config.step_tokens} tokens, and logits{widened}",
        "reserve": "left to the runtime, its context and fragmentation",
    }


def _padding_reason(profile: ChipProfile) -> str:
    unit, extra = profile.allocation_bytes, profile.allocation_extra_bytes
    tiles = "matrices at whole tiles of 16 x 32 bytes, and " if profile.fractal_layout else ""
    more = f" of {extra} bytes more than asked for" if extra else ""
    return f"{tiles}each tensor in units of {unit} bytes{more}"


def _expert_reason(question: Question, profile: ChipProfile) -> str:
    sizes = [size for size in expert_bytes(question.config, question.spec, profile) if size]
    low, high = min(sizes), max(sizes)
    each = format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
    experts = question.spec.num_experts
    return f"its share of {experts} experts a layer, {each} an expert with scales"


def _decisions(question: Question, plan: Plan, profile: ChipProfile) -> list[str]:
    config, spec = question.config, question.spec
    one = plan.pages_per_context
    asked = "as kv_pool_tokens asks" if config.kv_pool_tokens else (
        f"{plan.max_sequences} contexts of {one} pages, or what the fullest rank has room for, at "
        "least one context"
    )  # fmt: skip
    lines = [
        f"experts: {plan.ownership.reason}",
        f"pages: {plan.num_pages}, {asked}",
        f"context: {plan.context.configured_tokens} tokens, "
        f"{'asked for' if config.context_tokens else 'the limit of the model'}",
        f"chips: rank r on chip r of profile {profile.name}; the fullest rank decides",
        _table_decision(spec, plan),
        f"draft head: {'loaded' if config.mtp else 'left on disk'}, mtp is {config.mtp}",
        *_head_decisions(plan),
    ]
    return [line for line in lines if line]


def _table_decision(spec: ModelSpec, plan: Plan) -> str:
    if not any(tensor.component is Component.NGRAM_TABLE for tensor in spec.tensors):
        return ""
    why = {
        TablePlace.DEVICE: "its rows dealt over the ranks: no host memory, one reduction",
        TablePlace.HOST: "one host copy for all ranks: chip memory stays free for pages",
        TablePlace.MMAP: "read from its file: no memory is set aside, a cold row waits for disk",
    }
    return f"n-gram table: {why[plan.ngram_table]}"


def _head_decisions(plan: Plan) -> list[str]:
    """Axes that don't divide, and the units that more than one rank holds."""
    lines = []
    for axis in plan.shares[0].ranges:
        sizes = [share.ranges[axis][1] - share.ranges[axis][0] for share in plan.shares]
        last = max(share.ranges[axis][1] for share in plan.shares)
        if sum(sizes) > last:
            lines.append(f"{axis}: {last} over the ranks as {sizes}, shared ones held twice")
        elif len(set(sizes)) > 1:
            lines.append(f"{axis}: {last} dealt as {sizes}, they don't divide")
    return lines
