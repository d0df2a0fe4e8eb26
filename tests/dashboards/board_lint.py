"""What a classic Grafana board must be, so that it loads by provisioning and reads well."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations
from typing import Any

FORBIDDEN = ("__inputs", "__requires", "style", "gnetId")  # they break provisioning, or are old
PANEL_TYPES = ("timeseries", "stat", "table")
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
UNITS = {
    "none", "s", "bytes", "Bps", "percentunit", "celsius", "watt", "ops", "reqps", "suffix: tok/s",
}  # fmt: skip
BUILT_IN = re.compile(r"\$__\w+")
VARIABLE = re.compile(r"\$\{?(\w+)\}?")


def faults(board: dict[str, Any]) -> list[str]:
    """One line for everything that is wrong; empty for a good board."""
    found = [f"has {key}" for key in FORBIDDEN if key in board]
    found += [] if board["id"] is None else ["id must be null"]
    found += [] if 36 <= board["schemaVersion"] <= 42 else ["schemaVersion outside 36..42"]
    found += [] if re.fullmatch(r"[a-z0-9-]{1,40}", board["uid"]) else ["bad uid"]
    found += [] if board["title"] and board["description"] else ["no title or description"]
    panels = board["panels"]
    repeated = [one for one, count in Counter(p["id"] for p in panels).items() if count > 1]
    found += [f"panel id {one} twice" for one in repeated]
    names = [p["title"] for p in panels]
    found += [f"title {name!r} twice" for name, count in Counter(names).items() if count > 1]
    pairs = [(a, b) for a, b in combinations(panels, 2) if _hit(a["gridPos"], b["gridPos"])]
    found += [f"{a['title']} overlaps {b['title']}" for a, b in pairs]
    variables = {one["name"] for one in board["templating"]["list"]}
    for panel in panels:
        if panel["type"] != "row":
            found += [f"{panel['title']}: {text}" for text in _panel_faults(panel, variables)]
    return found


def _panel_faults(panel: dict[str, Any], variables: set[str]) -> list[str]:
    found = [] if panel["type"] in PANEL_TYPES else [f"type {panel['type']}"]
    grid, targets = panel["gridPos"], panel["targets"]
    found += [] if grid["x"] + grid["w"] <= 24 and grid["h"] >= 3 else ["outside the grid"]
    found += [] if len(panel["description"]) > 10 else ["no description"]
    found += [] if panel["fieldConfig"]["defaults"]["unit"] in UNITS else ["unknown unit"]
    sources = [panel["datasource"], *(one["datasource"] for one in targets)]
    found += [] if all(one == SOURCE for one in sources) else ["a data source of its own"]
    refs = [one["refId"] for one in targets]
    found += [] if refs and len(refs) == len(set(refs)) else ["refIds repeat or are missing"]
    for target in targets:
        used = set(VARIABLE.findall(BUILT_IN.sub("", target["expr"])))
        found += [f"undefined ${name}" for name in sorted(used - variables)]
    return found


def _hit(one: dict[str, int], two: dict[str, int]) -> bool:
    return (
        one["x"] < two["x"] + two["w"]
        and two["x"] < one["x"] + one["w"]
        and one["y"] < two["y"] + two["h"]
        and two["y"] < one["y"] + one["h"]
    )
