"""Each alert fires under its fault and stays calm without it, by Prometheus' own promtool."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from time import time
from typing import Any

import pytest
import yaml

from cluster.engine_metrics import EngineMetrics
from dashboards.alerts import ALERTS
from dashboards.query import TABLE, series
from rank_worker.messages import RankSnapshot
from tests.dashboards.prometheus_tools import program

ROOT = Path(__file__).parents[2]
RULES = ROOT / "dashboards/prometheus/alerts.yml"
MONITORING = ROOT / "deploy/monitoring"
STEP_S = 5
INSTANCE = "127.0.0.1:8000"
Row = dict[str, str]


def row(name: str, values: str, part: str = "", **labels: str) -> Row:
    """One series as the server exports it: all labels that the table says, and the target's."""
    spec = TABLE[name]
    assert set(labels) == set(spec.labels), f"{name} has the labels {spec.labels}"
    labels |= {"instance": INSTANCE, "job": "nrank"}
    matchers = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": series(name, part=part, scope=matchers), "values": values}


def chip(name: str, values: str, **labels: str) -> Row:
    return row(name, values, rank="0", card="2", chip="1", **labels)


def heat(celsius: str, hold_celsius: int) -> tuple[Row, ...]:
    limits = {"hold": hold_celsius, "resume": hold_celsius - 9, "cut": hold_celsius + 2}
    kinds = (
        chip("nrank_chip_limit_celsius", f"{limit}x60", kind=kind) for kind, limit in limits.items()
    )
    return chip("nrank_chip_temperature_celsius", celsius), *kinds


def order(held: str, values: str) -> Row:
    return row("nrank_heat_order", values, order=held)


def memory(measured: int, planned: int, unmeasured: int = 1000) -> tuple[Row, ...]:
    """One row of the ledger in both, and one that is planned only: workspace is no tensor."""
    return (
        row("nrank_rank_memory_component_bytes", f"{measured}x60", rank="1", component="dense"),
        row("nrank_rank_memory_planned_bytes", f"{planned}x60", rank="1", component="dense"),
        row("nrank_rank_memory_planned_bytes", f"{unmeasured}x60", rank="1", component="reserve"),
    )


def drafts(drafted: str, accepted: str) -> tuple[Row, ...]:
    return (
        row("nrank_spec_decode_draft_tokens_total", drafted, model_name="m"),
        row("nrank_spec_decode_accepted_tokens_total", accepted, model_name="m"),
    )


def steps(running: str, count: str, held: str = "0x60") -> tuple[Row, ...]:
    return (
        row("nrank_requests_running", running, model_name="m"),
        row("nrank_rank_step_seconds", count, part="count", rank="0"),
        order("hold", held),
    )


def rejected(values: str, reason: str = "queue_full") -> Row:
    return row("nrank_requests_rejected_total", values, reason=reason)


def sensors(silent: str, age_s: str) -> tuple[Row, ...]:
    return row("nrank_sensor_silent_ranks", silent), row("nrank_sensor_age_seconds", age_s)


@dataclass(frozen=True)
class Case:
    """Values are `start+step x times`, one every STEP_S; the alert is looked for at 3 minutes."""

    faulty: tuple[Row, ...]
    calm: tuple[Row, ...]


UP = {"series": f'up{{job="nrank",instance="{INSTANCE}"}}', "values": "1x60"}
CASES = {
    "NrankDown": Case(({**UP, "values": "1x10 0x50"},), (UP,)),
    "NrankChipHot": Case(
        heat("70x10 91x50", 94),
        heat("89.9x60", 94),
    ),
    "NrankHeld": Case((order("hold", "0x10 1x50"),), (order("hold", "0x33 1x27"),)),
    "NrankCut": Case((order("cut", "0x30 1x30"),), (order("hold", "1x60"), order("cut", "0x60"))),
    "NrankSensorLost": Case(sensors("0x10 1x50", "1x60"), sensors("0x60", "1 2 9 1 2 9x60")),
    "NrankChipUnhealthy": Case(
        (chip("nrank_chip_health", "0x10 1x50", state="alarm"),),
        (
            chip("nrank_chip_health", "1x60", state="ok"),
            chip("nrank_chip_ecc_errors_total", "4x60", kind="double_bit"),
            chip("nrank_chip_ecc_errors_total", "0+1x60", kind="single_bit"),
        ),
    ),
    "NrankZeroAcceptance": Case(drafts("0+10x60", "7x60"), drafts("0+10x60", "0x10 1x50")),
    "NrankRestarts": Case(
        (row("nrank_gang_restarts_total", "0x30 1x30", reason="run"),),
        (row("nrank_gang_restarts_total", "3x60", reason="run"),),
    ),
    "NrankRankDown": Case(
        (row("nrank_rank_up", "1x10 0x50", rank="1"),), (row("nrank_rank_up", "1x60", rank="1"),)
    ),
    "NrankMemoryAbovePlan": Case(memory(1060, 1000), memory(1040, 1000)),
    "NrankQueueFull": Case(
        (rejected("0x30 1x30"),), (rejected("5x60"), rejected("0+1x60", "invalid_request"))
    ),
    "NrankStepsStall": Case(steps("1x60", "0+20x10 200x50"), steps("1x60", "200x60", "1x60")),
    "NrankEagerFallback": Case(
        (row("nrank_graph_eager_fallbacks_total", "0x20 0+1x40", rank="0", reason="rows"),),
        (
            row("nrank_graph_eager_fallbacks_total", "0x60", rank="0", reason="refused"),
            row("nrank_graph_eager_fallbacks_total", "0+1x60", rank="0", reason="mixed"),
        ),
    ),
}
MORE = {
    "NrankChipHot": (heat("70x10 76x50", 80),),
    "NrankSensorLost": (sensors("0x60", "1+5x60"),),
    "NrankChipUnhealthy": ((chip("nrank_chip_ecc_errors_total", "0x10 1x50", kind="double_bit"),),),
}  # other faults of the same alert
MORE_CALM = {
    "NrankChipHot": (heat("75.9x60", 80),),
    "NrankStepsStall": (steps("0x60", "200x60"), steps("1x60", "0+1x60")),
    "NrankZeroAcceptance": (drafts("0x60", "0x60"), drafts("0+1x60", "0x60")),
}


def verdict(name: str, input_series: tuple[Row, ...], fires: bool) -> dict[str, Any]:
    """At 3 minutes the alert fires once, or not at all."""
    firing = f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'
    expected = [{"labels": "{}", "value": 1}] if fires else []
    return {
        "interval": f"{STEP_S}s",
        "input_series": list(input_series),
        "promql_expr_test": [{"expr": firing, "eval_time": "3m", "exp_samples": expected}],
    }


def promtool(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [str(program("promtool")), *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


def run_verdicts(folder: Path, verdicts: list[dict[str, Any]]) -> str:
    """What promtool found wrong; empty when all is as it says."""
    path = folder / "test.yml"
    test = {
        "rule_files": [str(RULES)], "evaluation_interval": f"{STEP_S}s", "tests": verdicts,
    }  # fmt: skip
    path.write_text(yaml.safe_dump(test))
    told = promtool("test", "rules", str(path))
    return told.stdout + told.stderr if told.returncode else ""


def test_promtool_accepts_the_rules() -> None:
    told = promtool("check", "rules", str(RULES))
    assert not told.returncode, told.stderr
    assert f"{len(ALERTS)} rules found" in told.stdout


def test_promtool_accepts_the_configuration_and_a_page_of_metrics() -> None:
    told = promtool("check", "config", str(MONITORING / "prometheus.yml"))
    assert not told.returncode, told.stderr
    metrics = EngineMetrics("m", 2)
    metrics.update_snapshots(RankSnapshot(rank, 1, time(), 3, pages_total=9) for rank in range(2))
    told = promtool("check", "metrics", text=metrics.render().decode())
    assert (told.returncode, told.stdout + told.stderr) == (0, "")


def test_every_alert_has_a_fault_and_a_calm_case() -> None:
    assert set(CASES) == {alert.name for alert in ALERTS}


@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_under_its_fault_only(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    faulty = [case.faulty, *MORE.get(name, ())]
    calm = [case.calm, *MORE_CALM.get(name, ())]
    verdicts = [verdict(name, rows, True) for rows in faulty]
    verdicts += [verdict(name, rows, False) for rows in calm]
    assert run_verdicts(tmp_path, verdicts) == ""


def test_promtool_would_tell_an_alert_that_stays_silent(tmp_path: Path) -> None:
    case = CASES["NrankRestarts"]
    assert "FAILED" in run_verdicts(tmp_path, [verdict("NrankRestarts", case.calm, True)])


def test_texts_name_labels_that_the_alert_has() -> None:
    """A label that the expression aggregates away would be empty in the message."""
    for alert in ALERTS:
        grouped = re.findall(r"sum by \(([\w, ]+)\)", alert.expression)
        named = re.findall(r"nrank_\w+?(?:_count)?(?={|\[|\)| )", alert.expression)
        kept = {"instance", "job"}
        if grouped:
            kept |= set.intersection(*({*one.split(", ")} for one in grouped))
        else:
            kept |= {label for name in named if name in TABLE for label in TABLE[name].labels}
        used = set(re.findall(r"\$labels\.(\w+)", alert.summary + alert.remedy))
        assert used <= kept, alert.name
