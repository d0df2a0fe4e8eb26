"""Alert rules: what someone should look at, as Prometheus reads them.

Owns thresholds and how long they must hold. Only counters that are 0 from the start are asked for
an increase: of one that is born with 1 Prometheus sees none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dashboards.query import UNPLANNED_FALLBACK, series

WARNING, CRITICAL = "warning", "critical"
NEAR_CELSIUS = 4  # so far below the limit at which ranks are held
PLAN_TOLERANCE = 1.05
MIN_DRAFTS = 100  # so few may all be wrong by chance


@dataclass(frozen=True)
class Alert:
    name: str
    expression: str
    hold: str  # how long it must hold
    severity: str
    summary: str
    remedy: str

    def to_yaml(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expression,
            "for": self.hold,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "description": self.remedy},
        }


def _all(name: str, where: str = "", part: str = "") -> str:
    """Of every server: rules know no board's variables."""
    return series(name, where, part, scope="")


def _increase(name: str, window: str, where: str = "", part: str = "") -> str:
    return f"sum by (instance) (increase({_all(name, where, part)}[{window}]))"


HOLD_CELSIUS = _all("nrank_chip_limit_celsius", 'kind="hold"')
HOLD = _all("nrank_heat_order", 'order="hold"') + " == 1"
CUT = _all("nrank_heat_order", 'order="cut"') + " == 1"
RESTS = _all("nrank_heat_order", 'order=~"hold|cut"') + " == 1"
ILL = _all("nrank_chip_health", 'state!="ok"') + " == 1"
BROKEN_BITS = _all("nrank_chip_ecc_errors_total", 'kind="double_bit"')
REFUSED = _increase("nrank_requests_rejected_total", "5m", 'reason="queue_full"')
MEASURED = _all("nrank_rank_memory_component_bytes")
PLANNED = _all("nrank_rank_memory_planned_bytes")

ALERTS = (
    Alert(
        "NrankDown",
        'up{job="nrank"} == 0',
        "1m",
        CRITICAL,
        "{{ $labels.instance }} tells no metrics",
        "Look at /health of the server and at its log.",
    ),
    Alert(
        "NrankChipHot",
        f"{_all('nrank_chip_temperature_celsius')} >= ignoring (kind) "
        f"({HOLD_CELSIUS} - {NEAR_CELSIUS})",
        "30s",
        WARNING,
        "card {{ $labels.card }} chip {{ $labels.chip }} is at {{ $value }} °C",
        f"At most {NEAR_CELSIUS} °C more and ranks are held (hold_celsius): look at the air flow.",
    ),
    Alert(
        "NrankHeld",
        HOLD,
        "1m",
        WARNING,
        "ranks of {{ $labels.instance }} are at rest",
        "/status tells who holds them: heat, sensors that are silent, or a hand.",
    ),
    Alert(
        "NrankCut",
        CUT,
        "0s",
        CRITICAL,
        "{{ $labels.instance }} is too hot to serve",
        "Running answers ended with an error. It serves again when every chip has cooled down.",
    ),
    Alert(
        "NrankSensorLost",
        f"{_all('nrank_sensor_silent_ranks')} > 0 or {_all('nrank_sensor_age_seconds')} > 10",
        "15s",
        CRITICAL,
        "temperatures of {{ $labels.instance }} can't be read",
        "Ranks are held after silence_s. Run `nrank doctor` and the driver's own tool.",
    ),
    Alert(
        "NrankChipUnhealthy",
        f"{ILL} or increase({BROKEN_BITS}[1h]) > 0",
        "0s",
        CRITICAL,
        "card {{ $labels.card }} chip {{ $labels.chip }} reports a fault",
        "Run `nrank doctor`: it tells health and error codes of every chip.",
    ),
    Alert(
        "NrankZeroAcceptance",
        f"{_increase('nrank_spec_decode_draft_tokens_total', '10m')} > {MIN_DRAFTS} and "
        f"{_increase('nrank_spec_decode_accepted_tokens_total', '10m')} == 0",
        "1m",
        WARNING,
        "{{ $labels.instance }} drafts and no draft is right",
        "The draft head doesn't fit the model, or its state is wrong; `--mtp 0` serves without.",
    ),
    Alert(
        "NrankRestarts",
        f"{_increase('nrank_gang_restarts_total', '10m')} > 0",
        "0s",
        CRITICAL,
        "the gang of {{ $labels.instance }} was restarted",
        "last_failure in /status tells rank, phase and the end of that rank's log.",
    ),
    Alert(
        "NrankRankDown",
        f"{_all('nrank_rank_up')} == 0",
        "1m",
        CRITICAL,
        "rank {{ $labels.rank }} of {{ $labels.instance }} does not report",
        "/status tells its state; while a gang loads, ranks report their progress.",
    ),
    Alert(
        "NrankMemoryAbovePlan",
        f"sum by (instance, rank) ({MEASURED}) > {PLAN_TOLERANCE} * sum by (instance, rank) "
        f"({PLANNED} and on (instance, rank, component) {MEASURED})",
        "1m",
        WARNING,
        "rank {{ $labels.rank }} of {{ $labels.instance }} has more in memory than planned",
        "Compare the rows in /status with `nrank plan`; please report it.",
    ),
    Alert(
        "NrankQueueFull",
        f"{REFUSED} > 0",
        "0s",
        WARNING,
        "{{ $labels.instance }} refuses requests: its queue is full",
        "Clients get 429. Raise max_queue_requests, or add a replica.",
    ),
    Alert(
        "NrankStepsStall",
        f"(sum by (instance) ({_all('nrank_requests_running')}) > 0 and "
        f"{_increase('nrank_rank_step_seconds', '1m', part='count')} == 0) "
        f"unless on (instance) {RESTS}",
        "15s",
        CRITICAL,
        "requests of {{ $labels.instance }} run and no step ends",
        "A gang that hangs is restarted after step_timeout_s; this one has hung for longer.",
    ),
    Alert(
        "NrankEagerFallback",
        f"{_increase('nrank_graph_eager_fallbacks_total', '10m', UNPLANNED_FALLBACK)} > 0",
        "0s",
        WARNING,
        "decode steps of {{ $labels.instance }} run outside captured graphs",
        "nrank_graph_eager_fallbacks_total has the reason, for refused the log of rank 0 has more; "
        "the step takes longer and nothing is wrong in its result.",
    ),
)


def rules() -> dict[str, Any]:
    """The rule file's content."""
    return {"groups": [{"name": "nrank", "rules": [alert.to_yaml() for alert in ALERTS]}]}
