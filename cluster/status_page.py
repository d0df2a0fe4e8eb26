"""GET /status for a browser: one HTML page that needs nothing else and renews itself.

Owns how figures look there; status_page.html, .css and .js lie beside it. Asks nobody: status and
snapshots come in. What is unknown is a dash, never 0.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from cluster.client import EngineState, EngineStatus
from cluster.token_rates import TokenRates
from placement.explain import format_bytes
from rank_worker.messages import RankSnapshot

HERE = Path(__file__).parent
DASH = "\N{EN DASH}"
TONES = {  # of a state's badge; the others warn
    EngineState.SERVING: "good",
    EngineState.CUT: "bad",
    EngineState.FAILED: "bad",
}


def wants_page(accept: str) -> bool:
    """Whether an Accept header asks for HTML by name, and not for JSON before it."""
    weights: dict[str, float] = {}
    for part in accept.lower().split(","):
        kind, *parameters = (piece.strip() for piece in part.split(";"))
        weight = next((p[2:] for p in parameters if p.startswith("q=")), "1")
        try:
            weights[kind] = float(weight)
        except ValueError:
            weights[kind] = 0.0
    page = weights.get("text/html", 0.0)
    return page > 0 and page >= weights.get("application/json", 0.0)


class StatusPage:
    """One an app: its figures of tokens a second come from two looks at the counters."""

    def __init__(self) -> None:
        self._rates = TokenRates()
        style, script = ((HERE / f"status_page.{kind}").read_text() for kind in ("css", "js"))
        environment = Environment(
            loader=FileSystemLoader(HERE),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters |= {
            "dash": _dash,
            "size": _size,
            "count": _count,
            "fixed": _fixed,
            "percent": _percent,
            "moment": _moment,
        }
        environment.globals |= {"style": Markup(style), "script": Markup(script)}
        self._template = environment.get_template("status_page.html")
        self._headers = {
            "Cache-Control": "no-store",
            "Content-Security-Policy": _policy(style, script),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }

    def response(self, status: EngineStatus, snapshots: Sequence[RankSnapshot]) -> HTMLResponse:
        """`snapshots` is empty where no gang runs."""
        leader = next((snapshot for snapshot in snapshots if snapshot.rank == 0), None)
        page = self._template.render(
            status=status,
            heat=status.heat,
            held=", ".join(f"{cause} {held:.0f} s" for cause, held in status.heat.held_s.items()),
            tone=TONES.get(status.state, "warn"),
            is_known=status.world_size > 0,  # False while the coordinator does not answer
            seen={snapshot.rank: snapshot for snapshot in snapshots},
            rates=self._rates.observe(leader, time.monotonic()),
            limits={key: status.config.get(key) for key in ("hold_celsius", "resume_celsius")},
            now_s=time.time(),
        )
        return HTMLResponse(page, headers=self._headers)


def _policy(style: str, script: str) -> str:
    """Nothing from elsewhere, and of what stands in the page only our own style and script."""
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _dash(value: object) -> object:
    return DASH if value is None or value == "" else value


def _size(count: int | None) -> str:
    return DASH if count is None else format_bytes(count)


def _count(value: int | None) -> str:
    return DASH if value is None else f"{value:,}"


def _fixed(value: float | None, unit: str, places: int = 0) -> str:
    return DASH if value is None else f"{value:.{places}f} {unit}"


def _percent(part: float | None, whole: float) -> str:
    """Of a bar's length; at most all of it."""
    return f"{min(100.0, 100.0 * (part or 0) / whole):.2f}%"


def _moment(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
