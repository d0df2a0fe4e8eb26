"""What a user reads while weights are loaded: a line a rank on a terminal, seldom a line else.

Owns drawing and its pace only; the words are those of `rank_worker.load_progress`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from rank_worker.load_progress import gang_text, rank_text, slowest
from rank_worker.messages import LoadProgress

LINE_S = 5.0  # without a terminal at most one line in this time
BAR_CELLS = 24
DEFAULT_COLUMNS = 80


def is_terminal(stream: TextIO) -> bool:
    """One that lines can be redrawn on."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


class LoadDisplay:
    """Redraws one line a rank in place. `clear` before anything else is printed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn = 0

    def update(self, ranks: Sequence[LoadProgress]) -> None:
        late = slowest(ranks)
        lines = [_bar(one, is_late=len(ranks) > 1 and one is late) for one in ranks]
        width = self._columns() - 1  # a line that wraps could not be redrawn
        text = "".join(f"{line[:width]}\x1b[K\n" for line in lines)
        self._stream.write(self._back() + text)
        self._stream.flush()
        self._drawn = len(lines)

    def clear(self) -> None:
        if self._drawn:
            self._stream.write(f"{self._back()}\x1b[J")
            self._stream.flush()
            self._drawn = 0

    def _back(self) -> str:
        return f"\x1b[{self._drawn}A\r" if self._drawn else ""

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or DEFAULT_COLUMNS
        except OSError:
            return DEFAULT_COLUMNS


class LoadLines:
    """Says one line for all ranks at once, and then at most one every LINE_S seconds."""

    def __init__(
        self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self._clock = clock
        self._next_s = 0.0

    def update(self, ranks: Sequence[LoadProgress]) -> None:
        now_s = self._clock()
        if now_s >= self._next_s:
            self._next_s = now_s + LINE_S
            self._say(f"loading: {gang_text(ranks)}")

    def clear(self) -> None:
        """Nothing to take back: what is said stays."""


def _bar(progress: LoadProgress, is_late: bool) -> str:
    share = progress.read_bytes / progress.planned_bytes if progress.planned_bytes else 0.0
    full = int(share * BAR_CELLS)
    mark = "  <- slowest" if is_late else ""
    return f"[{'#' * full}{'.' * (BAR_CELLS - full)}] {rank_text(progress)}{mark}"
