"""Board: what clients get, and in what state the gang is."""

from __future__ import annotations

from dashboards.panel import Board, Panel, Query, Variable
from dashboards.query import UNPLANNED_FALLBACK, quantile, rate, ratio, series, total

INSTANCE = Variable("instance", "Server", "label_values(nrank_build_info, instance)")


def _quantiles(name: str) -> tuple[Query, ...]:
    return tuple(Query(quantile(q, name), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99))


STATE = (
    Panel(
        "State",
        "nrank_engine_state: the state that holds now.",
        "none",
        (Query(f"{series('nrank_engine_state')} == 1", "{{instance}} {{state}}"),),
        "stat",
        height=4,
    ),
    Panel(
        "Ranks up",
        "nrank_rank_up: ranks that report, of all.",
        "none",
        (
            Query(total(series("nrank_rank_up"), "instance"), "up on {{instance}}"),
            Query(f"count by (instance) ({series('nrank_rank_up')})", "of"),
        ),
        "stat",
        height=4,
    ),
    Panel(
        "Restarts of the gang in the last hour",
        "nrank_gang_restarts_total: how often the gang was started anew, by the phase that failed.",
        "none",
        (
            Query(
                f"sum by (instance) (increase({series('nrank_gang_restarts_total')}[1h]))",
                "{{instance}}",
            ),
        ),
        "stat",
        height=4,
    ),
    Panel(
        "What runs",
        "nrank_build_info: version, revision, plan and configuration of each server.",
        "none",
        (Query(series("nrank_build_info")),),
        "table",
        width=16,
        height=5,
    ),
    Panel(
        "Longest sequence",
        "nrank_context_tokens: as configured, as the page pool allows, as evidence certifies.",
        "none",
        (Query(series("nrank_context_tokens"), "{{kind}}"),),
        "stat",
        height=5,
    ),
)
RATES = (
    Panel(
        "Tokens a second",
        "nrank_generation_tokens_total and nrank_prompt_tokens_total. Tokens of a prompt count "
        "when it is admitted, cached ones too.",
        "suffix: tok/s",
        (
            Query(total(rate("nrank_generation_tokens_total")), "generated"),
            Query(total(rate("nrank_prompt_tokens_total")), "prompt"),
        ),
    ),
    Panel(
        "Requests running and waiting",
        "nrank_requests_running and nrank_requests_waiting: sequences in the batch and behind it.",
        "none",
        (
            Query(total(series("nrank_requests_running")), "running"),
            Query(total(series("nrank_requests_waiting")), "waiting"),
        ),
    ),
    Panel(
        "Room for sequences",
        "nrank_kv_cache_usage_ratio, nrank_kv_pages_used of nrank_kv_pages_capacity, "
        "nrank_state_slots_used of nrank_state_slots_capacity.",
        "percentunit",
        (
            Query(f"max({series('nrank_kv_cache_usage_ratio')})", "pages, fullest server"),
            Query(
                ratio(
                    total(series("nrank_kv_pages_used")), total(series("nrank_kv_pages_capacity"))
                ),
                "pages",
            ),
            Query(
                ratio(
                    total(series("nrank_state_slots_used")),
                    total(series("nrank_state_slots_capacity")),
                ),
                "slots",
            ),
        ),
    ),
)
LATENCY = (
    Panel(
        "Time to the first token",
        "nrank_time_to_first_token_seconds: from the arrival at the ingress.",
        "s",
        _quantiles("nrank_time_to_first_token_seconds"),
    ),
    Panel(
        "Time between tokens",
        "nrank_inter_token_latency_seconds: by the clock of rank 0.",
        "s",
        _quantiles("nrank_inter_token_latency_seconds"),
    ),
    Panel(
        "Time of a whole answer",
        "nrank_e2e_request_latency_seconds: from the arrival to the last token.",
        "s",
        _quantiles("nrank_e2e_request_latency_seconds"),
    ),
)
ENDS = (
    Panel(
        "Answers by how they ended",
        "nrank_request_success_total: complete answers, and nrank_requests_aborted_total: those "
        "that ended early, with the reason.",
        "reqps",
        (
            Query(total(rate("nrank_request_success_total"), "finish_reason"), "{{finish_reason}}"),
            Query(total(rate("nrank_requests_aborted_total"), "reason"), "early: {{reason}}"),
        ),
    ),
    Panel(
        "HTTP answers by code",
        "nrank_requests_total: probes and scrapes are not counted.",
        "reqps",
        (Query(total(rate("nrank_requests_total"), "code"), "{{code}}"),),
    ),
    Panel(
        "Refused at admission",
        "nrank_requests_rejected_total: queue_full says that more requests come than fit.",
        "reqps",
        (Query(total(rate("nrank_requests_rejected_total"), "reason"), "{{reason}}"),),
    ),
    Panel(
        "What should not happen",
        "nrank_nonfinite_rows_total, nrank_graph_eager_fallbacks_total but for mixed and check, "
        "and nrank_preemptions_total; nrank_integrity_checks_total counts checks that passed.",
        "ops",
        (
            Query(total(rate("nrank_nonfinite_rows_total")), "rows that weren't finite"),
            Query(
                total(rate("nrank_graph_eager_fallbacks_total", UNPLANNED_FALLBACK)),
                "steps outside graphs",
            ),
            Query(total(rate("nrank_preemptions_total")), "preemptions"),
            Query(total(rate("nrank_integrity_checks_total")), "checks that passed"),
        ),
        width=12,
    ),
    Panel(
        "Time at rest",
        "nrank_hold_seconds_total: share of time in which ranks rested, by cause.",
        "percentunit",
        (Query(total(rate("nrank_hold_seconds_total"), "cause"), "{{cause}}"),),
        width=12,
    ),
)
BOARD = Board(
    "nrank-overview",
    "nrank / Overview",
    "What clients get: rates, latencies, refusals.",
    (INSTANCE,),
    (("Server", STATE), ("Load", RATES), ("Latency", LATENCY), ("Ends", ENDS)),
)
