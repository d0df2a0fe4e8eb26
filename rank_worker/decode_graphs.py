"""Decode steps recorded once and replayed: the forward pass of rows of one token each, or of one
and its drafts.

A graph has a fixed number of rows; a step with fewer repeats its last row, which writes the same
values to the same places again and isn't counted, so it leaves no trace. That holds where operators
read all rows before they write one, which is checked when a graph is made.

Prefill, steps with both kinds of rows and steps whose decisions are compared run without a graph,
as do the commit of drafts and the draft head, which is one layer. All ranks record the same sizes
or none: a rank alone in another path would wait for collectives that nobody sends.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from rank_worker.batch import BatchBuilder, DecodeGroup, StepBatch
from rank_worker.comm import Comm
from rank_worker.device import CapturedGraph, Device
from rank_worker.model import Model

_log = logging.getLogger(__name__)

# Why no graph took a decode step: none could be recorded; ranks compared their decisions in it;
# some of its rows carried drafts and some none; it had more rows than the largest graph of its
# width; not all of its rows were sampled.
FALLBACKS = ("refused", "check", "mixed", "rows", "unsampled")
TOLERANCE = 1e-2  # of the largest logit, between a replay and the same step without a graph


class GraphSize(NamedTuple):
    """Rows of a graph, and tokens of each: 1, or 1 and the drafts."""

    width: int
    rows: int


def graph_sizes(max_rows: int, num_drafts: int, max_graphs: int | None) -> tuple[GraphSize, ...]:
    """Graphs of a rank: powers of two and the largest step, with drafts and without.

    Where only so many may be, rows with drafts get the odd one, and of each kind the smallest and
    the largest are kept.
    """
    rows = sorted({1 << n for n in range(max_rows.bit_length()) if 1 << n < max_rows} | {max_rows})
    widths = (1 + num_drafts, 1) if num_drafts else (1,)
    sizes = []
    for index, width in enumerate(widths):
        count = len(rows)
        if max_graphs is not None:
            count = min(count, (max_graphs + len(widths) - 1 - index) // len(widths))
        kept = rows[: count - 1] + rows[-1:] if count else []
        sizes += [GraphSize(width, one) for one in kept]
    return tuple(sorted(sizes))


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
    size: GraphSize
    slots: Tensor  # [rows] int64
    starts: Tensor  # [rows] int64, position of each row's first token
    counted: Tensor  # [rows] int64, 0 for rows that are repeated
    graph: CapturedGraph
    uncommitted: list[int]  # how many of the graph's last results belong to each layer


@dataclass
class DecodeGraphs:
    """Graphs of one rank's model. `forward` takes a step that one of them fits."""

    device: Device
    model: Model
    builder: BatchBuilder
    context_tokens: int
    counts: GraphCounts = field(default_factory=GraphCounts)
    _recorded: dict[GraphSize, _Recorded] = field(default_factory=dict)

    def record(self, sizes: tuple[GraphSize, ...], comm: Comm) -> None:
        """Records a graph a size, the largest first, and checks each with two inputs.

        To be called once everything has run: a state made while recording would belong to the
        graph. Where a rank fails, no rank keeps any.
        """
        for size in sorted(sizes, reverse=True):
            reason = self._record(size, comm)
            is_failed = self._failed(reason, comm)  # all ranks meet in the check, or none does
            if not is_failed:
                reason = self.check(self._recorded[size])
                is_failed = self._failed(reason, comm)
            if is_failed:
                self._recorded.clear()
                self.counts.refused = reason or "another rank could not"
                _log.warning("no decode graphs: %s", self.counts.refused)
                return
        if sizes:
            named = ", ".join(f"{rows} x {width}" for width, rows in sorted(sizes))
            _log.info("decode graphs of rows x tokens: %s", named)

    def _record(self, size: GraphSize, comm: Comm) -> str:
        """Why there is no graph of `size`; empty when there is, not checked yet."""
        slots = self.builder.upload([0] * size.rows)
        starts = self.builder.upload([0] * size.rows)
        counted = self.builder.upload([1] * size.rows)
        self._forward(slots, starts, size.width)  # what is made once is made now
        counts: list[int] = []

        def run() -> tuple[Tensor, ...]:
            results = self._forward(slots, starts, size.width, counted)
            inputs = self.model.uncommitted() if size.width > 1 else []
            counts[:] = map(len, inputs)
            return (*results, *(x for own in inputs for x in own))

        try:
            with comm.recording():
                graph = self.device.capture(run)
        except RuntimeError as error:
            reason = (str(error).splitlines() or ["?"])[0]
            return f"recording {size.rows} rows failed: {reason}"
        self._recorded[size] = _Recorded(size, slots, starts, counted, graph, counts)
        return ""

    def _failed(self, reason: str, comm: Comm) -> bool:
        """Whether this rank or another has one."""
        mine = self.builder.last_tokens.new_full((1,), int(bool(reason)))
        return bool(comm.all_gather(mine).any())

    def check(self, recorded: _Recorded) -> str:
        """Replays one row, repeated, with two inputs, against that row alone without a graph.

        A result that was merely kept from recording would not follow its input; an operator that
        updates states row by row in place would count a repeated row twice. Whatever is found,
        both inputs run: the other ranks' collectives wait for this one's.
        """
        width, rows = recorded.size
        row = self._group(recorded.slots[:1], recorded.starts[:1], width)
        seen, reasons = [], list[str]()
        for token in (1, 2):
            self.builder.last_tokens.fill_(token)
            self.builder.drafts.fill_(token)
            self.model.reset_slot(0)
            logits = self._forward(row.slots, recorded.starts[:1], width)[0].clone()
            expected = [logits, *self._slot(row)]
            self.model.reset_slot(0)
            self._replay(recorded, row)
            replayed = recorded.graph.result[0].clone()
            found = [replayed.view(rows, *logits.shape), *self._slot(row)]
            seen.append(found[0])
            if not _close(found[0], expected[0]):
                reasons.append(f"a replay of {rows} rows differs from the pass without a graph")
            elif not all(map(_close, found[1:], expected[1:])):
                reasons.append(
                    f"a row that is repeated {rows} times changes its state more than once"
                )
        if seen[0].numel() and torch.equal(*seen):
            reasons.append(f"a replay of {rows} rows does not follow its input")
        return reasons[0] if reasons else ""

    def _slot(self, row: DecodeGroup) -> list[Tensor]:
        """What slot 0 holds once all tokens of `row` are kept."""
        if row.is_draft:
            self.model.commit(row.slots.new_full((1,), row.width))
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
        if len(batch.groups) > 1:
            return "mixed"
        if not self._fitting(batch.groups[0]):
            return "rows"
        return "" if batch.all_sampled else "unsampled"

    def _fitting(self, group: DecodeGroup) -> list[GraphSize]:
        """Graphs that have the width of `group` and its rows."""
        rows = len(group.starts)
        return [size for size in self._recorded if size.width == group.width and size.rows >= rows]

    def forward(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """What `Model.forward` gives; the next replay writes over it."""
        group = batch.groups[0]
        recorded = self._recorded[min(self._fitting(group))]
        self._replay(recorded, group)
        logits, streams, *_ = recorded.graph.result
        tokens = len(group.starts) * group.width
        return logits[:tokens], streams[:tokens]

    def _replay(self, recorded: _Recorded, group: DecodeGroup) -> None:
        """Runs the graph with the rows of `group`, and its last one again for those that lack."""
        rows, starts = len(group.starts), group.positions[:, 0]
        recorded.slots[:rows].copy_(group.slots)
        recorded.starts[:rows].copy_(starts)
        recorded.counted[:rows].fill_(1)
        if missing := recorded.size.rows - rows:
            recorded.slots[rows:].copy_(group.slots[-1:].expand(missing))
            recorded.starts[rows:].copy_(starts[-1:].expand(missing))
            recorded.counted[rows:].zero_()
        recorded.graph.replay()
        if group.is_draft:
            made = iter(recorded.graph.result[2:])
            inputs = [tuple(islice(made, count)) for count in recorded.uncommitted]
            self.model.hold_uncommitted(group, inputs)

    def _group(self, slots: Tensor, starts: Tensor, width: int) -> DecodeGroup:
        """Rows that only the device knows, each as long as it may become."""
        tables = self.builder.page_tables.index_select(0, slots)
        positions = starts[:, None]
        if width > 1:
            positions = positions + torch.arange(width, device=starts.device)
        longest = (self.context_tokens - width,) * slots.shape[0]
        return DecodeGroup(0, width, width > 1, slots, tables, longest, positions)

    def _forward(
        self, slots: Tensor, starts: Tensor, width: int, counted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """A decode step of rows at `starts` [rows] that carry their drafts if they are wider."""
        builder, group = self.builder, self._group(slots, starts, width)
        token_ids = builder.last_tokens.index_select(0, slots)
        if group.is_draft:
            drafts = builder.drafts.index_select(0, slots)
            token_ids = torch.cat([token_ids[:, None], drafts], dim=1).flatten()
        page = group.tables.gather(1, group.positions // builder.page_tokens).flatten()
        positions = group.positions.flatten()
        nothing = slots[:0]
        batch = StepBatch(
            decisions=None,
            token_ids=token_ids,
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
            counted=None if counted is None else counted[:, None].expand(-1, width).reshape(-1),
        )
        return self.model.forward(batch)


def _close(found: Tensor, expected: Tensor) -> bool:
    if not expected.numel():
        return True
    bound = TOLERANCE * expected.float().abs().amax()
    return bool((found.float() - expected.float()).abs().le(bound).all())
