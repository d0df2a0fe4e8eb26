"""What a user reads of a certification: how far it is, and at the end a table of lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TextIO

from deploy.load_display import BAR_CELLS
from deploy.redrawn_line import RedrawnLine
from placement.evidence import Cell, Evidence, Pass


class Progress:
    """One line redrawn on a terminal, a line for each cell elsewhere; failures always stay."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._line, self._clock = RedrawnLine(stream), clock
        self._began_s = clock()
        self._tokens = 0  # of cells since then

    def update(self, evidence: Evidence, cell: Cell) -> None:
        self._tokens += cell.length
        done, all_cells = len(evidence.cells), evidence.asked.num_cells
        text = f"{cell_text(cell)}; {done}/{all_cells} cells"
        left_s = self._left_s(evidence)
        if left_s is not None and done < all_cells:
            text += f", {_duration(left_s)} left"
        if not self._line.redraws:
            self._line.write(f"{text}\n")
            return
        if not cell.passed:
            self.clear()
            self._line.write(f"{cell_text(cell)}\n")
        full = done * BAR_CELLS // all_cells
        self._line.draw(f"[{'#' * full}{'.' * (BAR_CELLS - full)}] {text}")

    def clear(self) -> None:
        """Before anything else is printed."""
        self._line.clear()

    def _left_s(self, evidence: Evidence) -> float | None:
        """By the tokens of the cells run since, as if each took as long as the mean one."""
        all_tokens = sum(
            length * len(evidence.asked.indices(stage))
            for length in evidence.asked.lengths
            for stage in Pass
        )
        left = all_tokens - sum(cell.length for cell in evidence.cells)
        return left * (self._clock() - self._began_s) / self._tokens if self._tokens else None


def cell_text(cell: Cell) -> str:
    end = "passed" if cell.passed else f"FAILED: {cell.reason}"
    extra = f", {cell.cached_tokens} cached" if cell.cached_tokens else ""
    if cell.preemptions:
        extra += f", {cell.preemptions} preemptions"
    return (
        f"{cell.stage} {cell.length} tokens, needle at {cell.depth} %, {cell.seconds:.1f} s"
        f"{extra}: {end}"
    )


def table(evidence: Evidence) -> Iterator[str]:
    """A row a length: at which depths the needle was found, and what the other passes said."""
    heads = " ".join(f"{stage:>8}" for stage in Pass)
    yield f"{'tokens':>8}  {'code found at depth, %':<24} {heads}  at once"
    for length in evidence.asked.lengths:
        verdicts = " ".join(f"{evidence.verdict(stage, length):>8}" for stage in Pass)
        held = max((cell.at_once for cell in evidence.of(Pass.FILL, length)), default=0)
        at_once = f"{held} of {evidence.asked.sequences}"
        yield f"{length:>8}  {found_at(evidence, length):<24} {verdicts}  {at_once:>7}"
    yield certified_text(evidence)


def found_at(evidence: Evidence, length: int) -> str:
    """Depths in percent at which all needles of a length were found; "all", or "not run"."""
    cells = evidence.of(Pass.GRID, length)
    if not cells:
        return "not run"
    depths = dict.fromkeys(evidence.asked.depths)
    good = [d for d in depths if all(c.passed for c in cells if c.depth == d)]
    tried = {cell.depth for cell in cells}
    good = [depth for depth in good if depth in tried]
    return "all" if len(good) == len(depths) else ", ".join(map(str, good)) or "none"


def certified_text(evidence: Evidence) -> str:
    certified = evidence.certified_tokens
    limit = evidence.limit_reason
    what = f"certified: {certified} tokens" if certified else "certified: no length"
    return f"{what}; {limit}" if limit else what


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
