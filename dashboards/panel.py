"""Panels and boards as Grafana's classic JSON, schemaVersion 39.

Owns that format and the grid. Knows no metric.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 39  # Grafana 10.4; later ones migrate it when they load it
GRID_COLUMNS = 24
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
KINDS = ("timeseries", "stat", "table")


@dataclass(frozen=True)
class Query:
    expression: str
    legend: str = "__auto"


@dataclass(frozen=True)
class Panel:
    """`unit` is Grafana's name of one. `kind` is one of KINDS; a table shows labels."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    stacked: bool = False
    width: int = 8
    height: int = 8

    def to_json(self, panel_id: int, x: int, y: int) -> dict[str, Any]:
        return {
            "id": panel_id,
            "title": self.title,
            "description": self.description,
            "type": self.kind,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": self._options(),
            "targets": [self._target(at, query) for at, query in enumerate(self.queries)],
        }

    def _target(self, at: int, query: Query) -> dict[str, Any]:
        is_table = self.kind == "table"
        return {
            "refId": chr(ord("A") + at),
            "datasource": SOURCE,
            "expr": query.expression,
            "legendFormat": query.legend,
            "instant": self.kind != "timeseries",
            "range": self.kind == "timeseries",
            "format": "table" if is_table else "time_series",
        }

    def _defaults(self) -> dict[str, Any]:
        found: dict[str, Any] = {"unit": self.unit}
        if self.kind == "timeseries":
            mode = "normal" if self.stacked else "none"
            found["custom"] = {
                "fillOpacity": 25 if self.stacked else 5,
                "lineWidth": 1,
                "showPoints": "never",
                "stacking": {"mode": mode, "group": "A"},
            }
        return found

    def _options(self) -> dict[str, Any]:
        if self.kind == "timeseries":
            return {
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        if self.kind == "stat":
            calculation = {"calcs": ["lastNotNull"], "fields": "", "values": False}
            return {"reduceOptions": calculation, "textMode": "value_and_name"}
        return {"showHeader": True}


@dataclass(frozen=True)
class Variable:
    """A choice of label values: any of them, or all."""

    name: str
    label: str
    query: str

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "label": self.label,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": self.query, "refId": self.name},
            "definition": self.query,
            "refresh": 2,
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "sort": 1,
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        }


@dataclass(frozen=True)
class Board:
    """`rows` are sections: a heading with its panels, left to right."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    since: str = "now-1h"

    def to_json(self) -> dict[str, Any]:
        return {
            "id": None,
            "uid": self.uid,
            "title": self.title,
            "description": self.description,
            "tags": ["nrank"],
            "schemaVersion": SCHEMA_VERSION,
            "version": 1,
            "editable": True,
            "graphTooltip": 1,
            "timezone": "browser",
            "refresh": "10s",
            "time": {"from": self.since, "to": "now"},
            "timepicker": {},
            "annotations": {"list": []},
            "links": [_LINK],
            "templating": {"list": [_DATASOURCE, *(one.to_json() for one in self.variables)]},
            "panels": self._panels(),
        }

    def _panels(self) -> list[dict[str, Any]]:
        panels: list[dict[str, Any]] = []
        y = 0
        for heading, members in self.rows:
            panels.append(_row(heading, len(panels) + 1, y))
            y, x, tallest = y + 1, 0, 0
            for panel in members:
                if x + panel.width > GRID_COLUMNS:
                    x, y, tallest = 0, y + tallest, 0
                panels.append(panel.to_json(len(panels) + 1, x, y))
                x, tallest = x + panel.width, max(tallest, panel.height)
            y += tallest
        return panels


def _row(heading: str, panel_id: int, y: int) -> dict[str, Any]:
    return {
        "id": panel_id, "title": heading, "type": "row", "collapsed": False, "panels": [],
        "gridPos": {"x": 0, "y": y, "w": GRID_COLUMNS, "h": 1},
    }  # fmt: skip


_DATASOURCE = {
    "name": "datasource",
    "label": "Data source",
    "type": "datasource",
    "query": "prometheus",
    "includeAll": False,
    "multi": False,
    "current": {},
}
_LINK = {
    "title": "nrank",
    "type": "dashboards",
    "tags": ["nrank"],
    "asDropdown": True,
    "includeVars": True,
    "keepTime": True,
}
