"""A step plan as device tensors: flattened tokens, decode rows first, then prefill rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from rank_worker.step_plan import Row, RowFlag, StepPlan, score_count


@dataclass(frozen=True)
class DecodeGroup:
    """B decode rows of Q tokens each: rows `begin:end` of the flattened tokens, row by row.

    A group of drafts leaves all state as it is; a commit follows once it is known what stays.
    """

    begin: int
    width: int  # Q
    is_draft: bool
    slots: Tensor  # [B] int64
    tables: Tensor  # [B, pages] int64
    starts: tuple[int, ...]
    positions: Tensor  # [B, Q] int64

    @property
    def end(self) -> int:
        return self.begin + len(self.starts) * self.width

    def of(self, x: Tensor) -> Tensor:
        """x [T, ...] -> this group's part [B, Q, ...]."""
        rows = x[self.begin : self.end]
        return rows.unsqueeze(1) if self.width == 1 else rows.view(-1, self.width, *x.shape[1:])


@dataclass(frozen=True)
class Uncommitted:
    """What one layer's commit of a draft group replays."""

    group: DecodeGroup
    inputs: tuple[Tensor, ...]  # each [B, Q, ...]


@dataclass(frozen=True)
class PrefillRow:
    """One prefill chunk: rows `begin:end` of the flattened tokens."""

    slot: int
    start: int
    begin: int
    end: int
    num_pages: int


@dataclass
class Noted:
    """What the ranks decided in a check step, None in others; and which rows' routes count.

    `counted` [T] int64 is 1 for rows that do and 0 for the others; None: all do.
    """

    decisions: list[Tensor] | None
    counted: Tensor | None = field(default=None, kw_only=True)

    def note_decision(self, values: Tensor) -> None:
        """Records a decision taken from replicated data, in check steps only."""
        if self.decisions is not None:
            weights = torch.arange(1, values.numel() + 1, device=values.device)
            self.decisions.append((values.reshape(-1).to(torch.int64) * weights).sum())


@dataclass
class StepBatch(Noted):
    """T tokens of one step. R rows are sampled, at S tokens: each token of a draft row is."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    kv_slots: Tensor  # [T] int64, flat token slots in the page pool
    groups: tuple[DecodeGroup, ...]  # at most one of each width
    prefill: tuple[PrefillRow, ...]
    sample_rows: Tensor  # [S] int64 into T
    sample_slots: Tensor  # [S] int64
    sample_slots_host: tuple[int, ...]
    sample_positions: Tensor  # [S] int64, position of the sampled token
    all_sampled: bool  # sample_rows is 0..T-1
    sampled: tuple[Row, ...]  # R rows in order
    score_rows: Tensor  # [P] int64 into T: prompt tokens whose next one is to be scored
    score_targets: Tensor  # [P] int64, those next ones
    page_tables: Tensor = field(repr=False)  # [slots, max_pages] int64, of the whole rank

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def drafts(self) -> DecodeGroup | None:
        """The group whose rows carry drafts."""
        return next((group for group in self.groups if group.is_draft), None)

    def table_of(self, row: PrefillRow) -> Tensor:
        """Page table of a prefill row, [1, pages]."""
        return self.page_tables[row.slot : row.slot + 1, : row.num_pages]


@dataclass
class DraftRows(Noted):
    """One token of each of B sequences, at positions that only the device knows."""

    slots: Tensor  # [B] int64
    slots_host: tuple[int, ...]
    tables: Tensor  # [B, pages] int64
    positions: Tensor  # [B] int64
    kv_slots: Tensor  # [B] int64
    context: int  # no row sees more tokens


def host_int64(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


class BatchBuilder:
    """Keeps every slot's page table, last token and drafts; turns each plan into a StepBatch."""

    def __init__(
        self, num_slots: int, max_pages: int, page_tokens: int, num_drafts: int = 0,
        upload: Callable[[Sequence[int]], Tensor] = host_int64,
    ) -> None:  # fmt: skip
        """`upload` puts integers on the device."""
        self.upload = upload
        self.page_tokens, self.num_drafts = page_tokens, num_drafts
        self.page_tables = torch.zeros(num_slots, max_pages, dtype=torch.int64)
        self.last_tokens = torch.zeros(num_slots, dtype=torch.int64)
        self.drafts = torch.zeros(num_slots, num_drafts, dtype=torch.int64)

    def build(self, plan: StepPlan) -> StepBatch:
        for update in plan.page_updates:
            self.page_tables[update.slot, update.index] = update.page
        decode = [r for r in plan.rows if not r.flags & RowFlag.PREFILL]
        prefill = plan.rows[len(decode) :]
        assert all(r.flags & RowFlag.PREFILL for r in prefill), "decode rows come first"
        parts = [self._decode_tokens(decode)] if decode else []
        if prefill:
            parts.append(self.upload(plan.token_ids))
        token_ids = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self.assemble(plan.rows, token_ids, [] if plan.check else None, plan.token_ids)

    def assemble(
        self,
        rows: tuple[Row, ...],
        token_ids: Tensor,
        decisions: list[Tensor] | None,
        scored_ids: Sequence[int] = (),
    ) -> StepBatch:
        """The batch of `rows`, whose tokens are `token_ids` [T]. `scored_ids` are the prefill
        rows' own, where rows may be scored.
        """
        groups = tuple(self._groups(rows))
        prefill = tuple(self._prefill_rows(rows))
        positions = self._positions(groups, prefill)
        sample = _sample_rows(rows)
        at = [index for index, _, _ in sample]
        score, targets = _score_rows(rows, scored_ids)
        return StepBatch(
            decisions=decisions,
            token_ids=token_ids,
            positions=positions,
            kv_slots=self._kv_slots(rows, positions),
            groups=groups,
            prefill=prefill,
            sample_rows=self.upload(at),
            sample_slots=self.upload([row.slot for _, row, _ in sample]),
            sample_slots_host=tuple(row.slot for _, row, _ in sample),
            sample_positions=self.upload([position for _, _, position in sample]),
            all_sampled=at == list(range(token_ids.shape[0])),
            sampled=tuple(row for row in rows if row.flags & RowFlag.SAMPLE),
            score_rows=self.upload(score),
            score_targets=self.upload(targets),
            page_tables=self.page_tables,
        )

    def draft_rows(
        self, slots: tuple[int, ...], context: int, decisions: list[Tensor] | None
    ) -> DraftRows:
        """Rows without positions yet; each sees at most `context` tokens."""
        on_device = self.upload(slots)
        tables = self.page_tables.index_select(0, on_device)[:, : self._pages(context)]
        nowhere = on_device.new_empty(0)
        return DraftRows(decisions, on_device, slots, tables, nowhere, nowhere, context)

    def place(self, rows: DraftRows, positions: Tensor) -> None:
        """Moves `rows` to `positions` [B], which have their pages."""
        page = (positions // self.page_tokens)[:, None]
        rows.positions = positions
        rows.kv_slots = rows.tables.gather(1, page)[:, 0] * self.page_tokens
        rows.kv_slots += positions % self.page_tokens

    def _decode_tokens(self, rows: Sequence[Row]) -> Tensor:
        """The last tokens of their slots, with the drafts of the rows that carry them."""
        parts = []
        for is_draft, group in groupby(rows, key=_is_draft):
            slots = self.upload([r.slot for r in group])
            last = self.last_tokens.index_select(0, slots)
            if is_draft:
                last = torch.cat([last[:, None], self.drafts.index_select(0, slots)], 1).flatten()
            parts.append(last)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _groups(self, rows: Sequence[Row]) -> list[DecodeGroup]:
        out: list[DecodeGroup] = []
        decode = [r for r in rows if not r.flags & RowFlag.PREFILL]
        for is_draft, members in groupby(decode, key=_is_draft):
            group = tuple(members)
            width = 1 + self.num_drafts if is_draft else 1
            assert all(r.count == width for r in group), "a decode row of another width"
            starts, slots = tuple(r.start for r in group), self.upload([r.slot for r in group])
            pages = self._pages(max(starts) + width)
            tables = self.page_tables.index_select(0, slots)[:, :pages]
            positions = self.upload(starts)[:, None]
            if is_draft:
                positions = positions + torch.arange(width, device=positions.device)
            begin = out[-1].end if out else 0
            out.append(DecodeGroup(begin, width, is_draft, slots, tables, starts, positions))
        assert len({g.is_draft for g in out}) == len(out), "rows of one width stand together"
        return out

    def _pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_tokens)

    def _kv_slots(self, rows: Sequence[Row], positions: Tensor) -> Tensor:
        slots = self.upload([r.slot for r in rows for _ in range(r.count)])
        pages = self.page_tables[slots, positions // self.page_tokens]
        return pages * self.page_tokens + positions % self.page_tokens

    def _positions(self, groups: Sequence[DecodeGroup], prefill: Sequence[PrefillRow]) -> Tensor:
        parts = [group.positions.flatten() for group in groups]
        device = self.page_tables.device
        parts += [torch.arange(r.start, r.start + r.end - r.begin, device=device) for r in prefill]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prefill_rows(self, rows: Sequence[Row]) -> list[PrefillRow]:
        out, begin = [], 0
        for r in rows:
            if r.flags & RowFlag.PREFILL:
                pages = self._pages(r.start + r.count)
                out.append(PrefillRow(r.slot, r.start, begin, begin + r.count, pages))
            begin += r.count
        return out


def _is_draft(row: Row) -> bool:
    return bool(row.flags & RowFlag.DRAFT)


def _sample_rows(rows: Sequence[Row]) -> list[tuple[int, Row, int]]:
    """(index in the flattened batch, row, position of the sampled token) of every sampled token.

    The last token of a SAMPLE row; of a row with drafts all of them.
    """
    out, at = [], 0
    for row in rows:
        if row.flags & RowFlag.SAMPLE:
            first = 0 if _is_draft(row) else row.count - 1
            out += [(at + i, row, row.start + i + 1) for i in range(first, row.count)]
        at += row.count
    return out


def _score_rows(rows: Sequence[Row], scored_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Indices in the flattened batch of the tokens that are scored, and the tokens after them."""
    at = sum(row.count for row in rows if not row.flags & RowFlag.PREFILL)
    score, targets, begin = list[int](), list[int](), 0
    prefill = [row for row in rows if row.flags & RowFlag.PREFILL]
    for row in prefill:
        if count := score_count(row):
            known = [*scored_ids[begin + 1 : begin + row.count], row.next_token]
            score += range(at, at + count)
            targets += known[:count]
        begin, at = begin + row.count, at + row.count
    return score, targets
