"""Board: what each rank and its chip do: memory, heat, power, time of steps, who waits for whom."""

from __future__ import annotations

from dashboards.overview import INSTANCE
from dashboards.panel import Board, Panel, Query
from dashboards.query import rate, ratio, series, total

CHIP = "rank {{rank}} (card {{card}} chip {{chip}})"
STEPS = total(rate("nrank_rank_step_seconds", part="count"), "rank")


def _per_step(above: str) -> str:
    return ratio(above, STEPS, "on (rank)")


STEP = (
    Panel(
        "Time of a step",
        "nrank_rank_step_seconds: mean of steps with work.",
        "s",
        (
            Query(
                _per_step(total(rate("nrank_rank_step_seconds", part="sum"), "rank")),
                "rank {{rank}}",
            ),
        ),
    ),
    Panel(
        "What a step spends its time on",
        "nrank_rank_step_part_seconds_total a step: mean over ranks, all parts together are the "
        "step.",
        "s",
        (
            Query(
                ratio(
                    total(rate("nrank_rank_step_part_seconds_total"), "part"),
                    total(rate("nrank_rank_step_seconds", part="count")),
                    "on () group_left ()",
                ),
                "{{part}}",
            ),
        ),
        stacked=True,
    ),
    Panel(
        "Wait for the last rank, a step",
        "nrank_rank_step_part_seconds_total, collective_wait: the rank that waits least is the one "
        "that the others wait for. Only where the collectives can tell (shared memory).",
        "s",
        (
            Query(
                _per_step(
                    total(
                        rate("nrank_rank_step_part_seconds_total", 'part="collective_wait"'),
                        "rank",
                    )
                ),
                "rank {{rank}}",
            ),
        ),
    ),
    Panel(
        "Parts of a step by rank",
        "nrank_rank_step_part_seconds_total a step.",
        "s",
        (
            Query(
                ratio(
                    total(rate("nrank_rank_step_part_seconds_total"), "rank", "part"),
                    STEPS,
                    "on (rank) group_left ()",
                ),
                "rank {{rank}} {{part}}",
            ),
        ),
        width=12,
    ),
    Panel(
        "Collectives, a step",
        "nrank_collective_seconds: waiting and transfer together.",
        "s",
        (
            Query(
                _per_step(total(rate("nrank_collective_seconds", part="sum"), "rank")),
                "rank {{rank}}",
            ),
        ),
        width=6,
    ),
    Panel(
        "Load of experts",
        "nrank_expert_tokens_total: token-expert pairs a second. /status/experts tells each "
        "expert's.",
        "ops",
        (Query(total(rate("nrank_expert_tokens_total"), "rank"), "rank {{rank}}"),),
        width=6,
    ),
    Panel(
        "Decode steps outside graphs",
        "nrank_graph_eager_fallbacks_total by reason: mixed (rows with drafts and rows without) "
        "and check are by design, refused says that no graph could be captured, rows that the "
        "largest is too small. Nothing where none is asked for.",
        "ops",
        (
            Query(
                total(rate("nrank_graph_eager_fallbacks_total"), "rank", "reason"),
                "rank {{rank}} {{reason}}",
            ),
        ),
        width=24,
        height=6,
    ),
)
MEMORY = (
    Panel(
        "Weights, caches and states: measured",
        "nrank_rank_memory_component_bytes by row of the ledger.",
        "bytes",
        (
            Query(
                total(series("nrank_rank_memory_component_bytes"), "rank", "component"),
                "rank {{rank}} {{component}}",
            ),
        ),
        stacked=True,
    ),
    Panel(
        "Measured over planned",
        "nrank_rank_memory_component_bytes over nrank_rank_memory_planned_bytes of the same rows: "
        "above 1 the plan is wrong.",
        "percentunit",
        (
            Query(
                ratio(
                    total(series("nrank_rank_memory_component_bytes"), "instance", "rank"),
                    f"sum by (instance, rank) ({series('nrank_rank_memory_planned_bytes')} and on "
                    f"(instance, rank, component) {series('nrank_rank_memory_component_bytes')})",
                    "on (instance, rank)",
                ),
                "rank {{rank}}",
            ),
        ),
    ),
    Panel(
        "Memory of chips",
        "nrank_chip_memory_used_bytes, by all processes, and nrank_chip_memory_total_bytes.",
        "bytes",
        (
            Query(series("nrank_chip_memory_used_bytes"), f"used: {CHIP}"),
            Query(series("nrank_chip_memory_total_bytes"), f"all: {CHIP}"),
        ),
    ),
    Panel(
        "Weights read",
        "nrank_weights_loaded_bytes_total of nrank_weights_planned_bytes.",
        "percentunit",
        (
            Query(
                ratio(
                    series("nrank_weights_loaded_bytes_total"),
                    series("nrank_weights_planned_bytes"),
                ),
                "rank {{rank}}",
            ),
        ),
        width=12,
        height=6,
    ),
    Panel(
        "Time of the load",
        "nrank_weights_load_seconds: from the first read to the last.",
        "s",
        (Query(series("nrank_weights_load_seconds"), "rank {{rank}}"),),
        width=12,
        height=6,
    ),
)
HEAT = (
    Panel(
        "Temperature",
        "nrank_chip_temperature_celsius; nrank_chip_limit_celsius: the lowest of its kind; "
        "nrank_chip_shutdown_celsius where the card tells it.",
        "celsius",
        (
            Query(series("nrank_chip_temperature_celsius"), CHIP),
            Query(f"min by (kind) ({series('nrank_chip_limit_celsius')})", "{{kind}}"),
            Query(series("nrank_chip_shutdown_celsius"), f"shutdown: {CHIP}"),
        ),
        width=12,
    ),
    Panel(
        "What ranks may do",
        "nrank_heat_order: run, pace, hold or cut.",
        "none",
        (Query(series("nrank_heat_order"), "{{order}}"),),
        stacked=True,
        width=6,
    ),
    Panel(
        "Power of cards",
        "nrank_card_power_watts: a card's, with all its chips.",
        "watt",
        (Query(series("nrank_card_power_watts"), "card {{card}}"),),
        width=6,
    ),
    Panel(
        "Utilisation",
        "nrank_chip_core_utilisation_ratio and nrank_chip_bandwidth_utilisation_ratio.",
        "percentunit",
        (
            Query(series("nrank_chip_core_utilisation_ratio"), f"cores: {CHIP}"),
            Query(series("nrank_chip_bandwidth_utilisation_ratio"), f"bandwidth: {CHIP}"),
        ),
    ),
    Panel(
        "Health",
        "nrank_chip_health: the driver's word; nrank_chip_error_codes: how many it shows.",
        "none",
        (
            Query(f"{series('nrank_chip_health')} == 1", f"{{{{state}}}}: {CHIP}"),
            Query(series("nrank_chip_error_codes"), f"error codes: {CHIP}"),
        ),
    ),
    Panel(
        "Memory checks",
        "nrank_chip_ecc_enabled, and nrank_chip_ecc_errors_total since the driver started.",
        "none",
        (
            Query(series("nrank_chip_ecc_enabled"), f"on: {CHIP}"),
            Query(series("nrank_chip_ecc_errors_total"), f"{{{{kind}}}}: {CHIP}"),
        ),
    ),
    Panel(
        "Sensors",
        "nrank_sensor_age_seconds, and nrank_sensor_silent_ranks: ranks without a temperature.",
        "none",
        (
            Query(series("nrank_sensor_age_seconds"), "age of the reading, s"),
            Query(series("nrank_sensor_silent_ranks"), "silent ranks"),
        ),
        width=12,
        height=6,
    ),
    Panel(
        "Since a rank's last report",
        "nrank_rank_heartbeat_age_seconds: above 10 s a rank counts as down.",
        "s",
        (Query(series("nrank_rank_heartbeat_age_seconds"), "rank {{rank}}"),),
        width=12,
        height=6,
    ),
)
WHAT = (
    Panel(
        "Restarts that a rank caused",
        "nrank_rank_restarts_total, by the phase in which it failed.",
        "none",
        (Query(series("nrank_rank_restarts_total")),),
        "table",
    ),
    Panel(
        "Operators",
        "nrank_op_info: which implementation rank 0 runs.",
        "none",
        (Query(series("nrank_op_info")),),
        "table",
        width=16,
    ),
)
BOARD = Board(
    "nrank-ranks",
    "nrank / Ranks",
    "Memory, heat, power and time of every rank.",
    (INSTANCE,),
    (("Steps", STEP), ("Memory", MEMORY), ("Chips", HEAT), ("Restarts and operators", WHAT)),
)
