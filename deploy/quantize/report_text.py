"""What a user reads of a conversion: how far it is, and at the end a line a layer."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from statistics import mean
from typing import Any, TextIO

from deploy.load_display import BAR_CELLS
from deploy.redrawn_line import RedrawnLine

LINE_S = 5.0  # without a terminal at most one line in this time
MIB = 1 << 20
HEADER = (
    f"{'layer':>6}  {'format':12} {'matrices':>8} {'mean error':>10} {'worst error':>11}  "
    f"{'rms':>9} {'of source':>9} {'growth':>7} {'of source':>9}  flags"
)


class Progress:
    """One line redrawn on a terminal, a line in a while elsewhere."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._line, self._clock = RedrawnLine(stream), clock
        self._next_s = clock() + LINE_S

    def update(self, what: str, done: int, total: int) -> None:
        """Bytes, or layers where they are checked."""
        unit = 1 if what == "checking" else MIB
        amount = f"{done // unit} of {total // unit} {'layers' if unit == 1 else 'MiB'}"
        full = done * BAR_CELLS // total if total else BAR_CELLS
        text = f"[{'#' * full}{'.' * (BAR_CELLS - full)}] {what}: {amount}"
        if self._line.redraws:
            self._line.draw(text)
        elif self._clock() >= self._next_s:
            self._next_s = self._clock() + LINE_S
            self._line.write(f"{text}\n")

    def clear(self) -> None:
        self._line.clear()


def report_lines(receipts: dict[str, Any], out: str, was_complete: bool) -> Iterator[str]:
    """The same for a conversion that was complete before."""
    yield HEADER
    growth = receipts["growth"] or {"layers": (), "flags": (), "divergence": None}
    rows = {str(row["layer"]): row for row in growth["layers"]}
    flags = {str(flag["layer"]): flag for flag in growth["flags"]}
    for group in dict.fromkeys((*rows, *receipts["matrices"])):
        matrices = receipts["matrices"].get(group, [])
        yield _row(group, matrices, rows.get(group), group in flags)
    for name, one in receipts["components"].items():
        before, after = one["before_bytes"], one["after_bytes"]
        if before != after:
            smaller = f"{before / after:.2f} times smaller"
            yield f"{name}: {before:,} bytes are {after:,} now, {smaller}"
    yield _checked(receipts)
    for flag in flags.values():
        expert = f", expert {flag['expert']} most" if flag["expert"] >= 0 else ""
        where = f"layer {flag['layer']}" if flag["layer"] >= 0 else "logits"
        yield f"FLAGGED {where}{expert}: {flag['text']}"
    yield f"{out} {'was complete already' if was_complete else 'is complete'}"


def _row(
    group: str, matrices: list[dict[str, Any]], row: dict[str, Any] | None, is_flagged: bool
) -> str:
    formats = ",".join(dict.fromkeys(one["format"] for one in matrices)) or "-"
    errors = [one["error"] for one in matrices]
    error = f"{mean(errors):10.4f} {max(errors):11.4f}" if errors else f"{'-':>10} {'-':>11}"
    text = f"{group:>6}  {formats:12} {len(matrices):8} {error}"
    if row is not None:
        text += (
            f"  {_figure(row['packed_rms']):9.4f} {_figure(row['source_rms']):9.4f} "
            f"{_figure(row['packed_growth']):7.3f} {_figure(row['source_growth']):9.3f}  "
            f"{'GROWS' if is_flagged else ''}"
        )
    return text.rstrip()


def _checked(receipts: dict[str, Any]) -> str:
    growth, calibration = receipts["growth"], receipts["calibration"]
    if growth is None or calibration is None:
        return "not checked on a text: no rank can run this model yet"
    tokens = f"{calibration['tokens']} tokens ({calibration['origin']})"
    return (
        f"on {tokens} next-token distributions diverge by {_figure(growth['divergence']):.4f} "
        "nats a token"
    )


def _figure(value: float | None) -> float:
    """NaN for null: the figure was no finite number."""
    return math.nan if value is None else value
