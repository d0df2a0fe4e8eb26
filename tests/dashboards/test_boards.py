"""Boards are what the generator makes, load in Grafana, and show what the metrics table has."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.metrics import MetricSpec, MetricType
from dashboards.generate import BOARDS, files
from dashboards.query import TABLE, TARGET_LABELS, rate, series
from tests.dashboards.board_lint import faults

ROOT = Path(__file__).parents[2]
DASHBOARDS = ROOT / "dashboards"
MONITORING = ROOT / "deploy" / "monitoring"
NAME = re.compile(r"\bnrank_\w+")
LEGEND = re.compile(r"{{(\w+)}}")
PARTS = {
    MetricType.HISTOGRAM: ("_bucket", "_sum", "_count"),
    MetricType.SUMMARY: ("_sum", "_count"),
}
Json = dict[str, Any]


def boards() -> dict[str, Json]:
    return {board.uid: json.loads(json.dumps(board.to_json())) for board in BOARDS}


def targets(board: Json) -> list[Json]:
    return [target for panel in board["panels"] for target in panel.get("targets", ())]


def spec_of(name: str) -> MetricSpec:
    """KeyError for a name that the table doesn't have, with its suffix where it needs one."""
    exported = {
        f"{spec.name}{part}": spec
        for spec in TABLE.values()
        for part in PARTS.get(spec.type, ("",))
    }
    return exported[name]


def test_committed_files_are_what_the_generator_makes() -> None:
    made = files()
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, (
            f"run python -m dashboards.generate: {path}"
        )
    on_disk = {
        *(ROOT / "dashboards/grafana").iterdir(),
        *(ROOT / "dashboards/prometheus").iterdir(),
    }
    assert on_disk == set(made)


@pytest.mark.parametrize("uid", [board.uid for board in BOARDS])
def test_a_board_has_no_faults(uid: str) -> None:
    assert faults(boards()[uid]) == []


def test_uids_differ() -> None:
    assert len(boards()) == len(BOARDS)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda b: b.update(id=7), "id must be null"),
        (lambda b: b.update(__inputs=[]), "has __inputs"),
        (lambda b: b.update(schemaVersion=27), "schemaVersion"),
        (lambda b: b["panels"][1]["gridPos"].update(b["panels"][2]["gridPos"]), "overlaps"),
        (lambda b: b["panels"][2].update(id=2), "panel id 2 twice"),
        (lambda b: b["panels"][1]["fieldConfig"]["defaults"].update(unit="secs"), "unit"),
        (lambda b: b["panels"][1].update(description=""), "no description"),
        (lambda b: b["panels"][1]["targets"][0].update(expr="up{a=~'$node'}"), "undefined $node"),
        (lambda b: b["panels"][1]["targets"].append(b["panels"][1]["targets"][0]), "refIds"),
        (lambda b: b["panels"][1].update(datasource={"uid": "P1"}), "data source"),
    ],
)  # fmt: skip
def test_the_lint_sees_what_breaks_a_board(spoil: Callable[[Json], None], told: str) -> None:
    board = copy.deepcopy(boards()["nrank-overview"])
    spoil(board)
    assert any(told in fault for fault in faults(board))


@pytest.mark.parametrize("uid", [board.uid for board in BOARDS])
def test_queries_name_what_the_table_has(uid: str) -> None:
    """Every name in full, every label of a legend on some metric of its query."""
    for target in targets(boards()[uid]):
        specs = [spec_of(name) for name in NAME.findall(target["expr"])]
        assert specs, target["expr"]
        labels = {label for spec in specs for label in spec.labels} | set(TARGET_LABELS)
        assert set(LEGEND.findall(target["legendFormat"])) <= labels, target


def test_every_metric_is_on_a_board_and_its_panel_says_so() -> None:
    shown = set()
    for board in boards().values():
        for panel in board["panels"]:
            queried = {
                spec_of(name).name
                for target in panel.get("targets", ())
                for name in NAME.findall(target["expr"])
            }
            told = set(NAME.findall(panel.get("description", "")))
            assert queried - told <= {"nrank_rank_step_seconds"}, panel["title"]
            assert told <= queried, panel["title"]
            shown |= queried
    assert shown == set(TABLE)


@pytest.mark.parametrize(
    ("name", "where", "part", "told"),
    [
        ("nrank_no_such_thing", "", "", "not in the metrics table"),
        ("nrank_rank_up", 'node="a"', "", "no label node"),
        ("nrank_rank_up", "", "sum", "no part 'sum'"),
        ("nrank_rank_step_seconds", "", "bucket", "no part 'bucket'"),
        ("nrank_time_to_first_token_seconds", "", "", "no part ''"),
    ],
)
def test_a_query_that_the_table_refutes_is_refused(
    name: str, where: str, part: str, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        series(name, where, part)


def test_a_gauge_has_no_rate() -> None:
    with pytest.raises(ValueError, match="is a gauge"):
        rate("nrank_requests_running")


def test_provisioning_points_at_the_files_there_are() -> None:
    (provider,) = yaml.safe_load((MONITORING / "grafana/dashboards/nrank.yml").read_text())[
        "providers"
    ]
    assert provider["options"]["path"] == "$NRANK_HOME/dashboards/grafana"
    assert provider["allowUiUpdates"] is False
    (source,) = yaml.safe_load((MONITORING / "grafana/datasources/nrank.yml").read_text())[
        "datasources"
    ]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    prometheus = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    for pattern in prometheus["rule_files"]:
        assert (MONITORING / pattern).resolve().is_file()
    jobs = {job["job_name"]: job for job in prometheus["scrape_configs"]}
    assert jobs["nrank"]["static_configs"][0]["targets"] == ["127.0.0.1:8000"]
    (ray_files,) = jobs["ray"]["file_sd_configs"]
    assert ray_files["files"] == ["/tmp/ray/prom_metrics_service_discovery.json"]
