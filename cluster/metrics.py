"""The one table of metrics: every name that nrank exports, with its labels and its unit.

Owns names and nothing else: `cluster.engine_metrics` fills them, boards and alert rules are
generated from them. Imports no other module of nrank.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MetricType(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    SUMMARY = "summary"  # sum and count only


@dataclass(frozen=True)
class MetricSpec:
    """One family. A counter's name ends in `_total`."""

    name: str
    type: MetricType
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()


# Upper bounds in seconds. Dense where a 310P box lives: 15-65 ms a token, up to minutes of prefill.
TTFT_BUCKETS_S = (
    *(0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10),
    *(15, 20, 30, 45, 60, 90, 120, 180, 300, 600),
)
INTER_TOKEN_BUCKETS_S = (
    *(0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.05, 0.065),
    *(0.08, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10),
)
E2E_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15),
    *(20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)

_C, _G, _H, _S = MetricType.COUNTER, MetricType.GAUGE, MetricType.HISTOGRAM, MetricType.SUMMARY
_MODEL = ("model_name",)
_RANK = ("rank",)
_CHIP = ("rank", "card", "chip")  # rank is empty for a chip that no rank runs on

# What nrank_gang_restarts_total may say: the phase in which a gang failed.
RESTART_REASONS = (
    *("place", "assign", "listen", "connect", "rendezvous", "groups", "segment", "load", "loaded"),
    *("warm-up", "run", "plan", "step", "draft", "verify", "collective", "barrier"),
    *("check", "integrity", "other"),
)

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "nrank_build_info",
        _G,
        "1; what runs",
        ("version", "git_sha", "backend", "torch", "plan_id", "config_hash"),
    ),
    MetricSpec(
        "nrank_op_info",
        _G,
        "1; which implementation of an operator rank 0 runs",
        ("op", "implementation"),
    ),
    MetricSpec(
        "nrank_context_tokens",
        _G,
        "Longest sequence as configured, as the page pool allows, as evidence certifies",
        ("kind",),
    ),
    MetricSpec("nrank_engine_state", _G, "1 for the state the gang is in", ("state",)),
    MetricSpec("nrank_requests_total", _C, "HTTP requests", (*_MODEL, "endpoint", "code")),
    MetricSpec("nrank_request_success_total", _C, "Answers", (*_MODEL, "finish_reason")),
    MetricSpec("nrank_requests_aborted_total", _C, "Ended early", (*_MODEL, "reason")),
    MetricSpec("nrank_requests_rejected_total", _C, "Refused at admission", ("reason",)),
    MetricSpec("nrank_requests_running", _G, "Sequences in the batch", _MODEL),
    MetricSpec("nrank_requests_waiting", _G, "Sequences queued", _MODEL),
    MetricSpec(
        "nrank_time_to_first_token_seconds",
        _H,
        "Arrival at the ingress to the first token",
        _MODEL,
        "seconds",
        TTFT_BUCKETS_S,
    ),
    MetricSpec(
        "nrank_inter_token_latency_seconds",
        _H,
        "Time a token after the first on rank 0; k tokens of a step count k times its k-th part",
        _MODEL,
        "seconds",
        INTER_TOKEN_BUCKETS_S,
    ),
    MetricSpec(
        "nrank_e2e_request_latency_seconds",
        _H,
        "Arrival at the ingress to the last token of a complete answer",
        _MODEL,
        "seconds",
        E2E_BUCKETS_S,
    ),
    MetricSpec("nrank_prompt_tokens_total", _C, "Prompt tokens of served requests", _MODEL),
    MetricSpec("nrank_generation_tokens_total", _C, "Tokens generated", _MODEL),
    MetricSpec(
        "nrank_prefix_cache_queries_total",
        _C,
        "Tokens looked up when a sequence starts or resumes: hits and misses",
        _MODEL,
    ),
    MetricSpec("nrank_prefix_cache_hits_total", _C, "Tokens found", _MODEL),
    MetricSpec(
        "nrank_prefix_cache_misses_total",
        _C,
        "Tokens not found: state_dropped and evicted made room for others, no_state was never "
        "kept, open_page is behind the last full page, scored has its log-probabilities asked "
        "for, new was never seen",
        (*_MODEL, "reason"),
    ),
    MetricSpec("nrank_prefix_cache_evicted_pages_total", _C, "Pages that made room", _MODEL),
    MetricSpec("nrank_prefix_cache_pages", _G, "Pages that a later prompt can find", _MODEL),
    MetricSpec(
        "nrank_prefix_cache_states", _G, "Recurrent states that are kept", (*_MODEL, "tier")
    ),
    MetricSpec(
        "nrank_prefix_cache_state_capacity",
        _G,
        "Recurrent states that have room",
        (*_MODEL, "tier"),
    ),
    MetricSpec(
        "nrank_prefix_cache_state_bytes",
        _G,
        "Memory set aside for kept states; on the device part of the ledger's rows",
        ("rank", "tier"),
        "bytes",
    ),
    MetricSpec(
        "nrank_prefix_cache_state_events_total",
        _C,
        "States saved, spilled to the host, restored from the device, fetched from the host, "
        "dropped to make room",
        (*_MODEL, "event"),
    ),
    MetricSpec(
        "nrank_state_copy_bytes_total", _C, "Bytes of copied states", ("rank", "kind"), "bytes"
    ),
    MetricSpec(
        "nrank_state_copy_seconds",
        _S,
        "Time of copies of states on the device; the latest may be missing in the sum",
        ("rank", "kind"),
        "seconds",
    ),
    MetricSpec("nrank_spec_decode_drafts_total", _C, "Rows that checked drafts", _MODEL),
    MetricSpec("nrank_spec_decode_draft_tokens_total", _C, "Draft tokens checked", _MODEL),
    MetricSpec("nrank_spec_decode_accepted_tokens_total", _C, "Draft tokens accepted", _MODEL),
    MetricSpec(
        "nrank_spec_decode_accepted_tokens_per_pos_total",
        _C,
        "Rows that accepted the draft at this position, from 0",
        (*_MODEL, "position"),
    ),
    MetricSpec(
        "nrank_spec_decode_estimated_speedup_ratio",
        _G,
        "Rate of decoding over that without drafts, from acceptance and times of steps",
        _MODEL,
        "ratio",
    ),
    MetricSpec(
        "nrank_prefill_owed_seconds",
        _G,
        "Time that running answers get before prefill goes on",
        _MODEL,
        "seconds",
    ),
    MetricSpec(
        "nrank_integrity_checks_total",
        _C,
        "Checks of pages, slots and kept states that passed; a failed one restarts the gang",
        _MODEL,
    ),
    MetricSpec("nrank_preemptions_total", _C, "Sequences preempted", _MODEL),
    MetricSpec("nrank_nonfinite_rows_total", _C, "Logit rows that weren't finite", _MODEL),
    MetricSpec("nrank_kv_pages_used", _G, "KV pages in use", _MODEL),
    MetricSpec("nrank_kv_pages_capacity", _G, "KV pages there are", _MODEL),
    MetricSpec("nrank_kv_cache_usage_ratio", _G, "KV pages in use, 0..1", _MODEL, "ratio"),
    MetricSpec("nrank_state_slots_used", _G, "Recurrent slots in use", _MODEL),
    MetricSpec("nrank_state_slots_capacity", _G, "Recurrent slots there are", _MODEL),
    MetricSpec("nrank_gang_restarts_total", _C, "Restarts of the whole gang", ("reason",)),
    MetricSpec("nrank_rank_restarts_total", _C, "Restarts a rank caused", ("rank", "reason")),
    MetricSpec("nrank_rank_up", _G, "1: alive and reporting", _RANK),
    MetricSpec("nrank_rank_heartbeat_age_seconds", _G, "Since its last report", _RANK, "seconds"),
    MetricSpec(
        "nrank_rank_memory_component_bytes",
        _G,
        "Measured bytes by ledger row",
        ("rank", "component"),
        "bytes",
    ),
    MetricSpec(
        "nrank_rank_memory_planned_bytes",
        _G,
        "Planned bytes by ledger row",
        ("rank", "component"),
        "bytes",
    ),
    MetricSpec("nrank_rank_step_seconds", _S, "Time of steps with work", _RANK, "seconds"),
    MetricSpec(
        "nrank_rank_step_part_seconds_total",
        _C,
        "What steps with work spend their time on; host is all that the others aren't. "
        "collective_wait is for the last rank to arrive: the rank that waits least is the slow one",
        ("rank", "part"),
        "seconds",
    ),
    MetricSpec(
        "nrank_graph_eager_fallbacks_total",
        _C,
        "Decode steps that no captured graph ran; 0 where none is asked for. By design: mixed, "
        "rows with drafts and rows without, and check, which compares decisions. refused: none "
        "could be captured; rows: more than the largest has; unsampled: a row was not sampled",
        ("rank", "reason"),
    ),
    MetricSpec(
        "nrank_collective_seconds", _S, "Time in collectives a step with work", _RANK, "seconds"
    ),
    MetricSpec("nrank_expert_tokens_total", _C, "Token-expert pairs computed", _RANK),
    MetricSpec("nrank_weights_planned_bytes", _G, "Bytes to read at load", _RANK, "bytes"),
    MetricSpec("nrank_weights_loaded_bytes_total", _C, "Bytes read at load", _RANK, "bytes"),
    MetricSpec(
        "nrank_weights_load_seconds",
        _G,
        "First read of weights to the last, or to now while loading",
        _RANK,
        "seconds",
    ),
    MetricSpec("nrank_heat_order", _G, "1 for what ranks may do: run, pace, hold, cut", ("order",)),
    MetricSpec("nrank_hold_seconds_total", _C, "Time at rest, by what held", ("cause",), "seconds"),
    MetricSpec("nrank_sensor_silent_ranks", _G, "Ranks whose chip tells no temperature"),
    MetricSpec("nrank_sensor_age_seconds", _G, "Of the last reading", unit="seconds"),
    MetricSpec("nrank_chip_temperature_celsius", _G, "Of the chip", _CHIP, "celsius"),
    MetricSpec("nrank_chip_shutdown_celsius", _G, "Where the card ends it", _CHIP, "celsius"),
    MetricSpec(
        "nrank_chip_limit_celsius",
        _G,
        "Of the heat guard for the chip: hold, cut, and resume below both",
        (*_CHIP, "kind"),
        "celsius",
    ),
    MetricSpec("nrank_chip_memory_used_bytes", _G, "By all processes", _CHIP, "bytes"),
    MetricSpec("nrank_chip_memory_total_bytes", _G, "As the driver tells", _CHIP, "bytes"),
    MetricSpec("nrank_chip_core_utilisation_ratio", _G, "0..1", _CHIP, "ratio"),
    MetricSpec("nrank_chip_bandwidth_utilisation_ratio", _G, "0..1", _CHIP, "ratio"),
    MetricSpec("nrank_chip_health", _G, "1 for the driver's word", (*_CHIP, "state")),
    MetricSpec("nrank_chip_error_codes", _G, "Error codes that the driver shows", _CHIP),
    MetricSpec("nrank_chip_ecc_enabled", _G, "1: memory is checked", _CHIP),
    MetricSpec("nrank_chip_ecc_errors_total", _C, "Since the driver started", (*_CHIP, "kind")),
    MetricSpec("nrank_card_power_watts", _G, "Of the whole card", ("card",), "watts"),
)

# What a run of an evaluation exports on a port of its own while it lasts. kind "job" of the boards.
_RUN = ("run_id",)
JOB_METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("nrank_eval_info", _G, "1; what is evaluated", (*_RUN, "model_name", "dataset")),
    MetricSpec("nrank_eval_questions", _G, "Answers that the run asks for, repeats too", _RUN),
    MetricSpec(
        "nrank_eval_answers",
        _G,
        "Answers so far: correct, wrong, no_answer, truncated, failed; each in one state",
        (*_RUN, "state"),
    ),
    MetricSpec(
        "nrank_eval_accuracy_ratio",
        _G,
        "Correct answers over all asked so far, 0..1, by the extraction rule: strict, robust",
        (*_RUN, "rule"),
        "ratio",
    ),
    MetricSpec(
        "nrank_eval_accuracy_bound_ratio",
        _G,
        "Ends of the 95 % Wilson interval of the accuracy: low, high",
        (*_RUN, "rule", "end"),
        "ratio",
    ),
    MetricSpec("nrank_eval_tokens_total", _C, "Prompt and completion tokens", (*_RUN, "kind")),
    MetricSpec("nrank_eval_elapsed_seconds", _G, "Of this run, resumed parts too", _RUN, "seconds"),
    MetricSpec("nrank_eval_remaining_seconds", _G, "At the rate so far", _RUN, "seconds"),
)
