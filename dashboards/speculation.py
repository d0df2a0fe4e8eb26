"""Board: what drafts and the prefix cache bring, and what they cost."""

from __future__ import annotations

from dashboards.overview import INSTANCE
from dashboards.panel import Board, Panel, Query
from dashboards.query import rate, ratio, series, total

DRAFT_ROUNDS = total(rate("nrank_spec_decode_drafts_total"))
QUERIES = total(rate("nrank_prefix_cache_queries_total"))

DRAFTS = (
    Panel(
        "Drafts accepted, by position",
        "nrank_spec_decode_accepted_tokens_per_pos_total over nrank_spec_decode_drafts_total.",
        "percentunit",
        (
            Query(
                ratio(
                    total(rate("nrank_spec_decode_accepted_tokens_per_pos_total"), "position"),
                    DRAFT_ROUNDS,
                    "on () group_left ()",
                ),
                "position {{position}}",
            ),
        ),
    ),
    Panel(
        "Tokens a round",
        "1 + nrank_spec_decode_accepted_tokens_total over nrank_spec_decode_drafts_total.",
        "none",
        (
            Query(
                "1 + "
                + ratio(total(rate("nrank_spec_decode_accepted_tokens_total")), DRAFT_ROUNDS),
                "tokens",
            ),
        ),
    ),
    Panel(
        "Drafts accepted, all",
        "nrank_spec_decode_accepted_tokens_total over nrank_spec_decode_draft_tokens_total.",
        "percentunit",
        (
            Query(
                ratio(
                    total(rate("nrank_spec_decode_accepted_tokens_total")),
                    total(rate("nrank_spec_decode_draft_tokens_total")),
                ),
                "accepted",
            ),
        ),
    ),
    Panel(
        "Estimated gain",
        "nrank_spec_decode_estimated_speedup_ratio: rate of decoding over that without drafts.",
        "none",
        (Query(series("nrank_spec_decode_estimated_speedup_ratio"), "{{model_name}}"),),
        width=12,
        height=6,
    ),
    Panel(
        "Rounds a second",
        "nrank_spec_decode_drafts_total: rows that checked drafts.",
        "ops",
        (Query(DRAFT_ROUNDS, "rounds"),),
        width=12,
        height=6,
    ),
)
REUSE = (
    Panel(
        "Prompt tokens found",
        "nrank_prefix_cache_hits_total over nrank_prefix_cache_queries_total.",
        "percentunit",
        (Query(ratio(total(rate("nrank_prefix_cache_hits_total")), QUERIES), "found"),),
    ),
    Panel(
        "Prompt tokens not found, by reason",
        "nrank_prefix_cache_misses_total: state_dropped asks for more prefix_bytes, evicted for a "
        "larger page pool.",
        "suffix: tok/s",
        (Query(total(rate("nrank_prefix_cache_misses_total"), "reason"), "{{reason}}"),),
        stacked=True,
    ),
    Panel(
        "Pages",
        "nrank_prefix_cache_pages that a later prompt can find, and "
        "nrank_prefix_cache_evicted_pages_total a second.",
        "none",
        (
            Query(total(series("nrank_prefix_cache_pages")), "kept"),
            Query(total(rate("nrank_prefix_cache_evicted_pages_total")), "evicted a second"),
        ),
    ),
    Panel(
        "Kept states and room for them",
        "nrank_prefix_cache_states and nrank_prefix_cache_state_capacity, on each tier.",
        "none",
        (
            Query(total(series("nrank_prefix_cache_states"), "tier"), "kept on the {{tier}}"),
            Query(
                total(series("nrank_prefix_cache_state_capacity"), "tier"), "room on the {{tier}}"
            ),
        ),
    ),
    Panel(
        "Memory for kept states",
        "nrank_prefix_cache_state_bytes, set aside by each rank.",
        "bytes",
        (Query(series("nrank_prefix_cache_state_bytes"), "rank {{rank}} {{tier}}"),),
    ),
    Panel(
        "What became of states",
        "nrank_prefix_cache_state_events_total: saved, spilled, restored, fetched, dropped.",
        "ops",
        (Query(total(rate("nrank_prefix_cache_state_events_total"), "event"), "{{event}}"),),
    ),
    Panel(
        "Bytes of copied states",
        "nrank_state_copy_bytes_total.",
        "Bps",
        (Query(total(rate("nrank_state_copy_bytes_total"), "kind"), "{{kind}}"),),
    ),
    Panel(
        "Share of time in copies of states",
        "nrank_state_copy_seconds: on the device.",
        "percentunit",
        (
            Query(
                total(rate("nrank_state_copy_seconds", part="sum"), "rank", "kind"),
                "rank {{rank}} {{kind}}",
            ),
        ),
    ),
    Panel(
        "Prefill that waits for running answers",
        "nrank_prefill_owed_seconds: time that answers get before a prompt goes on.",
        "s",
        (Query(series("nrank_prefill_owed_seconds"), "{{instance}}"),),
    ),
)
BOARD = Board(
    "nrank-speculation",
    "nrank / Speculation and cache",
    "What drafts and reuse of prefixes bring.",
    (INSTANCE,),
    (("Drafts", DRAFTS), ("Reuse of prefixes", REUSE)),
)
