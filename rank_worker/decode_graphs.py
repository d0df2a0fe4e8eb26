"""Decode steps recorded once and replayed: the forward pass of rows of one token each.

A graph has a fixed number of rows; a step with fewer repeats its last row, which writes the same
values to the same places again, so it leaves no trace but in the counts of routes. That holds
where operators read all rows before they write one, which is checked when a graph is made.

Prefill, rows with drafts and steps whose decisions are compared run without a graph. All ranks
record the same sizes or none: a rank alone in another path would wait for collectives that nobody
sends.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rank_worker.batch import BatchBuilder, DecodeGroup, StepBatch
from rank_worker.comm import Comm
from rank_worker.device import CapturedGraph, Device
from rank_worker.model import Model

_log = logging.getLogger(__name__)

# Why no graph took a decode step: none could be recorded; ranks compared their decisions in it; a
# row carried drafts; it had more rows than the largest graph; not all of its rows were sampled.
FALLBACKS = ("refused", "check", "drafts", "rows", "unsampled")
TOLERANCE = 1e-2  # of the largest logit, between a replay and the same step without a graph


def graph_sizes(max_rows: int, max_graphs: int | None) -> tuple[int, ...]:
    """Rows of the graphs of a rank, largest last: powers of two and the largest step.

    Where only so many may be, the smallest and the largest of these.
    """
    sizes = sorted({1 << n for n in range(max_rows.bit_length()) if 1 << n < max_rows} | {max_rows})
    if max_graphs is None or len(sizes) <= max_graphs:
        return tuple(sizes)
    return tuple(sizes[: max_graphs - 1] + sizes[-1:]) if max_graphs else ()


@dataclass
class GraphCounts:
    """Decode steps since the start, by how their forward pass ran; and why there are no graphs.

    `eager` has a count for each of FALLBACKS; all stay 0 where no graphs are asked for.
    """

    replayed: int = 0
    eager: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FALLBACKS, 0))
    refused: str = ""


@dataclass(frozen=True)
class _Recorded:
    slots: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64
    graph: CapturedGraph


@dataclass
class DecodeGraphs:
    """Graphs of one rank's model. `forward` takes a step that one of them fits."""

    device: Device
    model: Model
    builder: BatchBuilder
    context_tokens: int
    counts: GraphCounts = field(default_factory=GraphCounts)
    _recorded: dict[int, _Recorded] = field(default_factory=dict)

    def record(self, sizes: tuple[int, ...], comm: Comm) -> None:
        """Records a graph a size, the largest first, and checks each with two inputs.

        To be called once everything has run: a state made while recording would belong to the
        graph. Where a rank fails, no rank keeps any.
        """
        for rows in sorted(sizes, reverse=True):
            reason = self._record(rows)
            if self._failed(reason, comm):
                self._recorded.clear()
                self.counts.refused = reason or "another rank could not"
                _log.warning("no decode graphs: %s", self.counts.refused)
                return
        if sizes:
            _log.info("decode graphs of %s rows", ", ".join(map(str, sorted(sizes))))

    def _record(self, rows: int) -> str:
        """Why there is no graph of `rows` rows; empty when there is."""
        slots = self.builder.upload([0] * rows)
        positions = self.builder.upload([0] * rows)
        self._forward(slots, positions)  # what is made once is made now
        try:
            graph = self.device.capture(lambda: self._forward(slots, positions))
        except RuntimeError as error:
            return f"recording {rows} rows failed: {(str(error).splitlines() or ['?'])[0]}"
        self._recorded[rows] = recorded = _Recorded(slots, positions, graph)
        return self.check(rows, recorded)

    def _failed(self, reason: str, comm: Comm) -> bool:
        """Whether this rank or another has one."""
        mine = self.builder.last_tokens.new_full((1,), int(bool(reason)))
        return bool(comm.all_gather(mine).any())

    def check(self, rows: int, recorded: _Recorded) -> str:
        """Replays one row, repeated, with two inputs, against that row alone without a graph.

        A result that was merely kept from recording would not follow its input; an operator that
        updates states row by row in place would count a repeated row twice.
        """
        slots, positions, seen = recorded.slots, recorded.positions, []
        for token in (1, 2):
            self.builder.last_tokens.fill_(token)
            self.model.reset_slot(0)
            expected = [self._forward(slots[:1], positions[:1])[0].clone(), *self._slot()]
            self.model.reset_slot(0)
            recorded.graph.replay()
            found = [recorded.graph.result[0].clone(), *self._slot()]
            seen.append(found[0])
            if not _close(found[0], expected[0]):
                return f"a replay of {rows} rows differs from the pass without a graph"
            if not all(map(_close, found[1:], expected[1:])):
                return f"a row that is repeated {rows} times changes its state more than once"
        if seen[0].numel() and torch.equal(*seen):
            return f"a replay of {rows} rows does not follow its input"
        return ""

    def _slot(self) -> list[Tensor]:
        """What slot 0 holds now."""
        return [tensor[0].clone() for tensor in self.model.slot_tensors()]

    def takes(self, batch: StepBatch) -> bool:
        """Whether a graph fits; counts the decode steps that one could have been for."""
        is_asked = bool(self._recorded or self.counts.refused)
        if batch.prefill or not batch.groups or not is_asked:
            return False
        reason = self._fallback(batch)
        if reason:
            self.counts.eager[reason] += 1
        else:
            self.counts.replayed += 1
        return not reason

    def _fallback(self, batch: StepBatch) -> str:
        """One of FALLBACKS; empty where a graph fits."""
        if self.counts.refused:
            return "refused"
        if batch.decisions is not None:
            return "check"
        if batch.drafts is not None:
            return "drafts"
        if len(batch.groups[0].starts) > max(self._recorded):
            return "rows"
        return "" if batch.all_sampled else "unsampled"

    def forward(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """What `Model.forward` gives; the next replay writes over it."""
        group, rows = batch.groups[0], len(batch.groups[0].starts)
        size = min(size for size in self._recorded if size >= rows)
        one = self._recorded[size]
        one.slots[:rows].copy_(group.slots)
        one.positions[:rows].copy_(group.positions[:, 0])
        if size > rows:
            one.slots[rows:].copy_(group.slots[-1:].expand(size - rows))
            one.positions[rows:].copy_(group.positions[-1:, 0].expand(size - rows))
        one.graph.replay()
        logits, streams = one.graph.result
        return logits[:rows], streams[:rows]

    def _forward(self, slots: Tensor, positions: Tensor) -> Any:
        """A decode step of rows that only the device knows, each as long as it may become."""
        builder, rows = self.builder, slots.shape[0]
        tables = builder.page_tables.index_select(0, slots)
        page = tables.gather(1, (positions // builder.page_tokens)[:, None])[:, 0]
        starts = (self.context_tokens - 1,) * rows
        group = DecodeGroup(0, 1, False, slots, tables, starts, positions[:, None])
        nothing = slots[:0]
        batch = StepBatch(
            decisions=None,
            token_ids=builder.last_tokens.index_select(0, slots),
            positions=positions,
            kv_slots=page * builder.page_tokens + positions % builder.page_tokens,
            groups=(group,),
            prefill=(),
            sample_rows=nothing,
            sample_slots=slots,
            sample_slots_host=(),
            sample_positions=positions,
            all_sampled=True,
            sampled=(),
            score_rows=nothing,
            score_targets=nothing,
            page_tables=builder.page_tables,
        )
        return self.model.forward(batch)


def _close(found: Tensor, expected: Tensor) -> bool:
    if not expected.numel():
        return True
    bound = TOLERANCE * expected.float().abs().amax()
    return bool((found.float() - expected.float()).abs().le(bound).all())
