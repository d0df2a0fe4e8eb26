"""A step plan as device tensors: flattened tokens, decode rows first, then prefill rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rank_worker.step_plan import Row, RowFlag, StepPlan


@dataclass
class PrefillRow:
    """One prefill chunk: rows `begin:end` of the flattened tokens."""

    slot: int
    start: int
    begin: int
    end: int
    num_pages: int


@dataclass
class StepBatch:
    """T tokens of one step. Decode tokens are rows 0..num_decode-1, one each."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    kv_slots: Tensor  # [T] int64, flat token slots in the page pool
    num_decode: int
    decode_slots: Tensor  # [num_decode] int64
    decode_tables: Tensor  # [num_decode, pages] int64
    decode_starts: tuple[int, ...]
    prefill: tuple[PrefillRow, ...]
    sample_rows: Tensor  # [S] int64 into T
    sample_slots: Tensor  # [S] int64
    sample_slots_host: tuple[int, ...]
    sample_positions: Tensor  # [S] int64, position of the sampled token
    all_sampled: bool  # sample_rows is 0..T-1
    max_end: int  # largest context length of a row
    page_tables: Tensor = field(repr=False)  # [slots, max_pages] int64, of the whole rank
    decisions: list[Tensor] | None = None  # filled in check steps: what the ranks decided

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    def table_of(self, row: PrefillRow) -> Tensor:
        """Page table of a prefill row, [1, pages]."""
        return self.page_tables[row.slot : row.slot + 1, : row.num_pages]

    def note_decision(self, values: Tensor) -> None:
        """Records a decision taken from replicated data, in check steps only."""
        if self.decisions is not None:
            weights = torch.arange(1, values.numel() + 1, dtype=torch.int64)
            self.decisions.append((values.reshape(-1).to(torch.int64) * weights).sum())


def _int64(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


class BatchBuilder:
    """Keeps every slot's page table and last token; turns each plan into a StepBatch."""

    def __init__(self, num_slots: int, max_pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.page_tables = torch.zeros(num_slots, max_pages, dtype=torch.int64)
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64)

    def build(self, plan: StepPlan) -> StepBatch:
        for update in plan.page_updates:
            self.page_tables[update.slot, update.index] = update.page
        decode = [r for r in plan.rows if not r.flags & RowFlag.PREFILL]
        prefill = [r for r in plan.rows if r.flags & RowFlag.PREFILL]
        assert plan.rows[: len(decode)] == tuple(decode), "decode rows come first"
        slots = _int64([r.slot for r in decode])
        token_ids = self.last_tokens.index_select(0, slots)
        if prefill:
            token_ids = torch.cat([token_ids, _int64(list(plan.token_ids))])
        positions = self._positions(decode, prefill)
        num_pages = max((self._pages(r.start + r.count) for r in decode), default=1)
        sample = _sample_rows(plan.rows)
        return StepBatch(
            token_ids=token_ids,
            positions=positions,
            kv_slots=self._kv_slots(plan.rows, positions),
            num_decode=len(decode),
            decode_slots=slots,
            decode_tables=self.page_tables.index_select(0, slots)[:, :num_pages],
            decode_starts=tuple(r.start for r in decode),
            prefill=tuple(self._prefill_rows(prefill, len(decode))),
            sample_rows=_int64([at for at, _ in sample]),
            sample_slots=_int64([r.slot for _, r in sample]),
            sample_slots_host=tuple(r.slot for _, r in sample),
            sample_positions=_int64([r.start + r.count for _, r in sample]),
            all_sampled=[at for at, _ in sample] == list(range(token_ids.shape[0])),
            max_end=max(r.start + r.count for r in plan.rows),
            page_tables=self.page_tables,
            decisions=[] if plan.check else None,
        )

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    @staticmethod
    def _positions(decode: list[Row], prefill: list[Row]) -> Tensor:
        parts = [_int64([r.start for r in decode])]
        parts += [torch.arange(r.start, r.start + r.count) for r in prefill]
        return torch.cat(parts) if prefill else parts[0]

    def _kv_slots(self, rows: tuple[Row, ...], positions: Tensor) -> Tensor:
        counts = _int64([r.count for r in rows])
        slots = torch.repeat_interleave(_int64([r.slot for r in rows]), counts)
        pages = self.page_tables[slots, positions // self.page_tokens]
        return pages * self.page_tokens + positions % self.page_tokens

    def _prefill_rows(self, rows: list[Row], begin: int) -> list[PrefillRow]:
        out = []
        for r in rows:
            pages = self._pages(r.start + r.count)
            out.append(PrefillRow(r.slot, r.start, begin, begin + r.count, pages))
            begin += r.count
        return out


def _sample_rows(rows: tuple[Row, ...]) -> list[tuple[int, Row]]:
    """(index of the row's last token in the flattened batch, row) of every SAMPLE row."""
    out, at = [], 0
    for row in rows:
        at += row.count
        if row.flags & RowFlag.SAMPLE:
            out.append((at - 1, row))
    return out
