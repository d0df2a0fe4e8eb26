"""How far a run is: one line redrawn on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from deploy.gpqa.report import Report
from deploy.gpqa.report_text import duration, score_text
from deploy.load_display import BAR_CELLS
from deploy.redrawn_line import RedrawnLine

LINE_S = 10.0  # without a terminal at most one line in this time, and one at the end


class Display:
    """`update` after each question; `close` before anything else is printed."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._line, self._clock = RedrawnLine(stream), clock
        self._next_s = 0.0

    def update(self, report: Report, remaining_s: float | None) -> None:
        text = progress_text(report, remaining_s)
        if self._line.redraws:
            self._line.draw(f"{_bar(report)} {text}")
        elif self._clock() >= self._next_s or report.is_complete:
            self._next_s = self._clock() + LINE_S
            self._line.write(f"{text}\n")

    def close(self) -> None:
        if self._line.is_drawn:
            self._line.write("\n")


def progress_text(report: Report, remaining_s: float | None) -> str:
    rate = report.speed.tokens_per_s
    parts = [
        f"{report.settled}/{report.header.questions}",
        f"right {score_text(report.scores['robust'])}" if report.answered else "",
        f"truncated {report.states['truncated']}",
        f"failed {report.states['failed']}",
        "" if rate is None else f"{rate:.1f} tok/s",
        "" if remaining_s is None else f"{duration(remaining_s)} left",
    ]
    return ", ".join(filter(None, parts))


def _bar(report: Report) -> str:
    full = report.settled * BAR_CELLS // report.header.questions
    return f"[{'#' * full}{'.' * (BAR_CELLS - full)}]"
