"""A board as one page without Grafana: `python -m dashboards.board_page --board overview ...`.

Owns the drawing of a committed board with what Prometheus has: every query of every panel becomes
lines, of stat and table panels too. Stacks nothing. Writes one HTML file that loads nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from jinja2 import Environment, FileSystemLoader, StrictUndefined

FOLDER = Path(__file__).parent
PREFIX = "nrank-"
NAMES = tuple(
    sorted(path.stem.removeprefix(PREFIX) for path in FOLDER.glob(f"grafana/{PREFIX}*.json"))
)
RATE_INTERVAL = "1m"  # four times prometheus.yml's 15 s, as Grafana takes it
MAX_POINTS = 120  # of a line
LIMIT_S = 30.0  # of one query
LABEL = re.compile(r"{{\s*(\w+)\s*}}")
UNITS = {"s": " s", "celsius": " °C", "watt": " W", "ops": " /s", "reqps": " /s"}
Point = tuple[float, float]  # seconds since 1970, value


class BoardPageError(Exception):
    """One line for whoever asked for the page."""


@dataclass(frozen=True)
class Line:
    """One series. `points` are in order of time and finite, with at least one."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Window:
    """What is asked for: seconds since 1970."""

    start_s: float
    end_s: float

    @property
    def step_s(self) -> float:
        return max(1.0, (self.end_s - self.start_s) / MAX_POINTS)


class Series:
    """Asks Prometheus at `base_url`; BoardPageError for what it refuses and for no answer."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url.rstrip("/")

    def lines(self, expression: str, legend: str, window: Window) -> Iterator[Line]:
        for found in self._ask(expression, window):
            numbers = ((float(at), float(value)) for at, value in found["values"])
            points = tuple(point for point in numbers if math.isfinite(point[1]))
            if points:
                yield Line(line_name(legend, found["metric"]), points)

    def _ask(self, expression: str, window: Window) -> list[dict[str, Any]]:
        asked = {
            "query": expression, "start": window.start_s, "end": window.end_s,
            "step": window.step_s,
        }  # fmt: skip
        url = f"{self._base_url}/api/v1/query_range"
        try:
            told = httpx.get(url, params=asked, timeout=LIMIT_S).json()
            if told["status"] != "success":
                raise BoardPageError(f"Prometheus refuses {expression}: {told.get('error')}")
            return told["data"]["result"]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BoardPageError(
                f"no Prometheus answers at {url}: {error}; give its address with --prometheus"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise BoardPageError(f"{url} does not answer as Prometheus does") from error


def line_name(legend: str, labels: Mapping[str, str]) -> str:
    """As Grafana names it: of the labels alone where the panel gives no legend."""
    if legend == "__auto":
        shown = {key: value for key, value in labels.items() if key != "__name__"}
        return ", ".join(f"{key} {value}" for key, value in sorted(shown.items())) or "value"
    return LABEL.sub(lambda found: labels.get(found[1], ""), legend)


def expression_of(target: Mapping[str, Any], board: Mapping[str, Any]) -> str:
    """With every choice of the board on "all"."""
    expression = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
    for variable in board["templating"]["list"]:
        if "allValue" in variable:
            expression = re.sub(rf"\${variable['name']}\b", variable["allValue"], expression)
    return expression


def told(value: float, unit: str) -> str:
    """A value with its unit; `unit` is Grafana's name of one."""
    if unit == "percentunit":
        return f"{_short(value * 100)} %"
    if unit in ("bytes", "Bps"):
        power = min(4, int(math.log(abs(value), 1024))) if abs(value) >= 1 else 0
        prefix = ("", "Ki", "Mi", "Gi", "Ti")[power]
        return f"{_short(value / 1024**power)} {prefix}B{'/s' if unit == 'Bps' else ''}"
    if unit == "s" and abs(value) < 1:
        return f"{_short(value * 1000)} ms"
    return _short(value) + UNITS.get(unit, unit.removeprefix("suffix:") if ":" in unit else "")


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def panel_view(panel: Mapping[str, Any], lines: Sequence[Line], window: Window) -> dict[str, Any]:
    """What the template shows of a panel; paths lie in a box of 100 x 100, y downwards."""
    unit = panel["fieldConfig"]["defaults"]["unit"]
    values = [value for line in lines for _, value in line.points]
    low, high = min([0.0, *values]), max([0.0, *values])
    height = (high - low) or 1.0
    return {
        "title": panel["title"],
        "description": panel["description"],
        "columns": panel["gridPos"]["w"],
        "low": told(low, unit),
        "high": told(high, unit),
        "lines": [
            {
                "name": line.name,
                "last": _last(line.points[-1], unit, window),
                "path": _path(line.points, window, low, height),
            }
            for line in lines
        ],
    }


def _last(point: Point, unit: str, window: Window) -> str:
    """The last value, and since when there is no newer one."""
    at_s, value = point
    is_old = window.end_s - at_s > 1.5 * window.step_s
    return told(value, unit) + (f" until {_clock(at_s)}" if is_old else "")


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.gmtime(at_s))


def _path(points: Sequence[Point], window: Window, low: float, height: float) -> str:
    """Broken where a value is missing in between; one value alone is a short stroke."""
    width_s = window.end_s - window.start_s
    parts, before_s = [], -math.inf
    for at_s, value in points:
        x, y = 100 * (at_s - window.start_s) / width_s, 100 * (1 - (value - low) / height)
        joined = at_s - before_s < 1.5 * window.step_s
        parts.append(f"L{x:.2f} {y:.2f}" if joined else f"M{x:.2f} {y:.2f}h0.5")
        before_s = at_s
    return "".join(parts)


def render(name: str, series: Series, window: Window) -> str:
    """The page of a committed board, one of NAMES."""
    board = json.loads((FOLDER / f"grafana/{PREFIX}{name}.json").read_text(encoding="utf-8"))
    views = []
    for panel in board["panels"]:
        if panel["type"] == "row":
            views.append({"heading": panel["title"]})
            continue
        lines = [
            line
            for target in panel["targets"]
            for line in series.lines(expression_of(target, board), target["legendFormat"], window)
        ]
        views.append(panel_view(panel, lines, window))
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined
    )
    clock = [_clock(window.start_s), _clock(window.end_s)]
    return environment.get_template("board_page.html").render(board=board, views=views, clock=clock)


def write_whole(path: Path, text: str) -> None:
    """All of it or nothing: a page that was there before stays when the disk is full."""
    if path.exists() and not path.is_file():
        raise BoardPageError(f"--out {path} is no file; name one")
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> str | None:
    """What went wrong, in one line; None when the file is written."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.board_page", description=__doc__)
    parser.add_argument("--board", choices=NAMES, required=True)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--minutes", type=int, default=60, help="so far back (1 to 1440)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    asked = parser.parse_args(arguments)
    if not 1 <= asked.minutes <= 1440:
        parser.error(f"--minutes {asked.minutes} is not in 1..1440")
    now_s = time.time()
    try:
        page = render(
            asked.board, Series(asked.prometheus), Window(now_s - 60 * asked.minutes, now_s)
        )
        write_whole(asked.out, page)
    except (BoardPageError, OSError) as error:
        return f"board_page: {error}"
    return None


if __name__ == "__main__":
    sys.exit(main())
