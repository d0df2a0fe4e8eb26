"""How far a run is: one line redrawn on a terminal, a line now and then elsewhere.

A terminal that was closed ends no run: what can't be written is not seen, and that is all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from deploy.gpqa.report import Report
from deploy.gpqa.report_text import duration, score_text
from deploy.load_display import BAR_CELLS, DEFAULT_COLUMNS, is_terminal

LINE_S = 10.0  # without a terminal at most one line in this time, and one at the end


class Display:
    """`update` after each question; `close` before anything else is printed."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._redraws = is_terminal(stream)
        self._next_s = 0.0
        self._drawn = False

    def update(self, report: Report, remaining_s: float | None) -> None:
        text = progress_text(report, remaining_s)
        if self._redraws:
            line = f"{_bar(report)} {text}"
            self._write(f"\r{line[: self._columns() - 1]}\x1b[K")
            self._drawn = True
        elif self._clock() >= self._next_s or report.is_complete:
            self._next_s = self._clock() + LINE_S
            self._write(f"{text}\n")

    def close(self) -> None:
        if self._drawn:
            self._write("\n")

    def _write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)
            self._stream.flush()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or DEFAULT_COLUMNS
        except OSError:
            return DEFAULT_COLUMNS


def progress_text(report: Report, remaining_s: float | None) -> str:
    rate = report.speed.tokens_per_s
    parts = [
        f"{report.settled}/{report.header.questions}",
        f"right {score_text(report.scores['robust'])}",
        f"truncated {report.states['truncated']}",
        f"failed {report.states['failed']}",
        "" if rate is None else f"{rate:.1f} tok/s",
        "" if remaining_s is None else f"{duration(remaining_s)} left",
    ]
    return ", ".join(filter(None, parts))


def _bar(report: Report) -> str:
    full = report.settled * BAR_CELLS // report.header.questions
    return f"[{'#' * full}{'.' * (BAR_CELLS - full)}]"
