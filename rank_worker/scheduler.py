"""The scheduler of rank 0: which tokens of which sequences the next step computes.

No prefill phase and no decode phase: every sequence has computed tokens and known tokens, and a
step spends one token budget, decode rows first. Owns slots and pages. Knows no tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from placement.errors import ConfigError
from rank_worker.draft_gain import DraftCost
from rank_worker.messages import EngineRequest, FinishReason, TokenBatch
from rank_worker.pages import PagePool
from rank_worker.sequence import Sequence
from rank_worker.step_plan import Admit, Opcode, PageUpdate, Row, RowFlag, StepPlan

NON_FINITE = -1  # sampled in place of a token when a row's logits are not finite


@dataclass(frozen=True)
class SchedulerLimits:
    step_tokens: int
    prefill_chunk_tokens: int  # 0: no bound but the budget
    page_tokens: int
    num_pages: int
    num_slots: int
    context_tokens: int
    check_interval_steps: int
    epoch: int = 0
    num_drafts: int = 0
    drafts_auto: bool = True  # a sequence that drafting makes slower stops drafting


@dataclass
class _Outline:
    """A plan being put together: rows as (sequence, tokens, DRAFT and PROPOSE where they hold)."""

    budget: int
    admits: list[Admit] = field(default_factory=list)
    pages: list[PageUpdate] = field(default_factory=list)
    decode: list[_Part] = field(default_factory=list)
    prefill: list[_Part] = field(default_factory=list)


@dataclass
class _Part:
    sequence: Sequence
    count: int
    flags: RowFlag = RowFlag.NONE


class Scheduler:
    """schedule() -> StepPlan, then update(new tokens) -> TokenBatches. One step in flight."""

    def __init__(self, limits: SchedulerLimits) -> None:
        """ConfigError when the page pool can't hold one sequence of the whole context."""
        room = limits.num_pages * limits.page_tokens
        if room < limits.context_tokens:
            raise ConfigError(
                f"the page pool holds {room} tokens, less than one context of "
                f"{limits.context_tokens}: raise kv_pool_tokens or lower context_tokens"
            )
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest admission first
        self.pool = PagePool(limits.num_pages)
        self.free_slots = list(range(limits.num_slots - 1, -1, -1))
        self.step = 0
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.draft_rounds = 0
        self.accepted_by_position = [0] * limits.num_drafts
        self.cost = DraftCost(limits.num_drafts)
        self._in_flight: list[tuple[Sequence, Row]] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: EngineRequest) -> None:
        self.waiting.append(Sequence.of(request, is_drafting=self.limits.num_drafts > 0))

    def abort(self, request_ids: Seq[str]) -> None:
        """Drops the named requests between steps; unknown names are ignored (already done)."""
        names = set(request_ids)
        self.waiting = deque(s for s in self.waiting if s.request.request_id not in names)
        for sequence in [s for s in self.running if s.request.request_id in names]:
            self._release(sequence)

    def schedule(self) -> StepPlan:
        """The next step's plan; opcode IDLE when there is nothing to compute."""
        assert not self._in_flight, "the previous step was not committed"
        outline = _Outline(budget=self.limits.step_tokens)
        for sequence in [s for s in self.running if s.is_decode]:
            self._add_decode(outline, sequence)
        reserved = self._reserve_for_drafts(outline)
        for sequence in [s for s in self.running if not s.is_decode]:
            self._add_prefill(outline, sequence)
        while self.waiting and self.free_slots and outline.budget > 0:
            if not self._admit(outline):
                break
        if self.limits.num_drafts:
            outline.budget += reserved
            self._add_drafts(outline)
        return self._finish_plan(outline)

    def update(
        self, sampled: Seq[Seq[int]], now_s: float = 0.0, seconds: float = 0.0
    ) -> list[TokenBatch]:
        """Commits the step in flight, which took `seconds`.

        `sampled` holds the new tokens of each SAMPLE row, in row order: one, and one more for each
        draft that was accepted.
        """
        batches: list[TokenBatch] = []
        results = iter(sampled)
        self._note_time(seconds)
        for sequence, row in self._in_flight:
            tokens = next(results) if row.flags & RowFlag.SAMPLE else ()
            if sequence.slot < 0:  # aborted while the step ran
                continue
            is_round = bool(row.flags & RowFlag.DRAFT)
            self.prompt_tokens += max(0, min(sequence.num_prompt - row.start, row.count))
            sequence.num_computed = row.start + (len(tokens) if is_round else row.count)
            sequence.has_drafts = bool(row.flags & RowFlag.PROPOSE)
            if is_round:
                self._note_round(sequence, len(tokens) - 1)
            if tokens:
                batches.append(self._accept(sequence, tokens, now_s))
        self._in_flight = []
        return batches

    def _note_time(self, seconds: float) -> None:
        """Keeps the time of a step whose rows are all draft rounds, or all plain."""
        rows = [row for _, row in self._in_flight]
        kinds = {row.flags & (RowFlag.PREFILL | RowFlag.DRAFT | RowFlag.PROPOSE) for row in rows}
        if kinds == {RowFlag.NONE}:
            self.cost.saw_plain(len(rows), seconds)
        elif kinds == {RowFlag.DRAFT | RowFlag.PROPOSE}:
            self.cost.saw_round(len(rows), seconds)

    def _note_round(self, sequence: Sequence, accepted: int) -> None:
        self.draft_rounds += 1
        for position in range(accepted):
            self.accepted_by_position[position] += 1
        sequence.draft_tokens += self.limits.num_drafts
        if self.limits.drafts_auto:
            sequence.gain.note(accepted, self.cost.ratio(len(self._in_flight)))
            if sequence.gain.is_lost:
                sequence.is_drafting = sequence.has_drafts = False

    def _accept(self, sequence: Sequence, tokens: Seq[int], now_s: float) -> TokenBatch:
        """Takes `tokens` up to the one that ends the sequence; the others never were."""
        name = sequence.request.request_id
        taken: list[int] = []
        reason: FinishReason | None = None
        for token in tokens:
            if token == NON_FINITE:
                reason = FinishReason.ERROR
                break
            taken.append(token)
            sequence.tokens.append(token)
            reason = sequence.finish_after(token, self.limits.context_tokens)
            if reason is not None:
                break
        sequence.last_on_device = True
        sequence.accepted_tokens += min(len(taken), len(tokens) - 1)
        self.generation_tokens += len(taken)
        if reason is not None:
            self._release(sequence)
        is_bad = reason is FinishReason.ERROR
        text = f"logits of request {name} are not finite at position {len(sequence.tokens)}"
        return TokenBatch(
            name, tuple(taken), reason, now_s, "non_finite" if is_bad else None,
            text if is_bad else None, prompt_tokens=sequence.num_prompt,
            draft_tokens=sequence.draft_tokens, accepted_tokens=sequence.accepted_tokens,
        )  # fmt: skip

    def _add_decode(self, outline: _Outline, sequence: Sequence) -> None:
        if sequence.slot < 0 or outline.budget < 1:  # preempted by an earlier row of this step
            return
        if self._grow(outline, sequence, sequence.num_computed + 1):
            outline.decode.append(_Part(sequence, 1))
            outline.budget -= 1

    def _add_prefill(self, outline: _Outline, sequence: Sequence) -> None:
        if sequence.slot < 0 or outline.budget < 1:
            return
        count = min(sequence.num_pending, outline.budget)
        if self.limits.prefill_chunk_tokens:
            count = min(count, self.limits.prefill_chunk_tokens)
        if self._grow(outline, sequence, sequence.num_computed + count):
            outline.prefill.append(_Part(sequence, count))
            outline.budget -= count

    def _admit(self, outline: _Outline) -> bool:
        """Moves the first waiting sequence to a slot, or leaves it waiting for pages."""
        sequence = self.waiting[0]
        needed = -(-len(sequence.tokens) // self.limits.page_tokens)
        if self.pool.num_free < needed and self.running:
            return False
        self.waiting.popleft()
        sequence.slot = self.free_slots.pop()
        self.running.append(sequence)
        p = sequence.request.sampling
        outline.admits.append(
            Admit(sequence.slot, p.temperature, p.top_k, p.top_p, p.min_p, p.seed, p.choice)
        )
        self._add_prefill(outline, sequence)
        return True

    def _grow(self, outline: _Outline, sequence: Sequence, num_tokens: int) -> bool:
        """Gives `sequence` pages for `num_tokens`, preempting the newest others if it must."""
        needed = -(-num_tokens // self.limits.page_tokens)
        while len(sequence.pages) < needed:
            page = self.pool.take()
            if page is not None:
                outline.pages.append(PageUpdate(sequence.slot, len(sequence.pages), page))
                sequence.pages.append(page)
                continue
            victim = self.running[-1]
            self._preempt(outline, victim)
            if victim is sequence:
                return False
        return True

    def _reserve_for_drafts(self, outline: _Outline) -> int:
        """Keeps budget from prefill for drafts that are there, half of it at most."""
        rows = sum(part.sequence.has_drafts for part in outline.decode)
        reserved = min(rows * self.limits.num_drafts, outline.budget // 2)
        outline.budget -= reserved
        return reserved

    def _add_drafts(self, outline: _Outline) -> None:
        """Widens decode rows by their drafts and says who makes new ones.

        Pages come from what is free when all rows have theirs: drafts never cause a preemption.
        """
        is_plain = self._is_plain(outline)
        k, limit = self.limits.num_drafts, self.limits.context_tokens
        for part in (*outline.decode, *outline.prefill):
            sequence, left = part.sequence, self._tokens_left(part.sequence)
            wide = sequence.num_computed + 1 + k
            if (
                sequence.has_drafts and not is_plain and left > 1
                and wide <= limit and k <= outline.budget
                and self._grow_free(outline, sequence, wide)
            ):  # fmt: skip
                part.count = 1 + k
                part.flags |= RowFlag.DRAFT
                outline.budget -= k
            # Two more tokens after this step's, or there is nothing to draft.
            if not sequence.is_drafting or left <= 2:
                continue
            part.flags |= RowFlag.ENTER
            end = sequence.num_computed + part.count
            is_last = end >= len(sequence.tokens)
            proposes = is_last and not is_plain
            if proposes and self._grow_free(outline, sequence, min(end + k - 1, limit)):
                part.flags |= RowFlag.PROPOSE

    def _is_plain(self, outline: _Outline) -> bool:
        """True when this step leaves drafts unused, to learn what a step without them takes."""
        rows = outline.decode
        return (
            self.limits.drafts_auto
            and not outline.prefill
            and any(part.sequence.has_drafts for part in rows)
            and self.cost.wants_plain(len(rows))
        )

    def _tokens_left(self, sequence: Sequence) -> int:
        """Tokens that the sequence may still get, this step's with them."""
        return min(
            sequence.request.max_tokens - sequence.num_generated,
            self.limits.context_tokens - len(sequence.tokens),
        )

    def _grow_free(self, outline: _Outline, sequence: Sequence, num_tokens: int) -> bool:
        """Gives `sequence` pages for `num_tokens` if so many are free."""
        missing = -(-num_tokens // self.limits.page_tokens) - len(sequence.pages)
        return missing <= self.pool.num_free and self._grow(outline, sequence, num_tokens)

    def _preempt(self, outline: _Outline, victim: Sequence) -> None:
        """Takes slot and pages together; the sequence resumes by recompute."""
        outline.decode = [part for part in outline.decode if part.sequence is not victim]
        outline.prefill = [part for part in outline.prefill if part.sequence is not victim]
        outline.admits = [a for a in outline.admits if a.slot != victim.slot]
        outline.pages = [u for u in outline.pages if u.slot != victim.slot]
        self._release(victim)
        victim.num_computed = 0
        victim.last_on_device = victim.has_drafts = False
        victim.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.give_back(sequence.pages)
        self.free_slots.append(sequence.slot)
        sequence.pages = []
        sequence.slot = -1

    def _finish_plan(self, outline: _Outline) -> StepPlan:
        rows: list[Row] = []
        token_ids: list[int] = []
        outline.decode.sort(key=lambda part: part.count)  # equal widths together
        for part in outline.decode + outline.prefill:
            row = self._row(part, token_ids)
            rows.append(row)
            self._in_flight.append((part.sequence, row))
        if not rows:
            return StepPlan(Opcode.IDLE, self.limits.epoch, self.step)
        self.step += 1
        check = self.step % self.limits.check_interval_steps == 0
        return StepPlan(
            Opcode.STEP, self.limits.epoch, self.step, check,
            tuple(outline.admits), tuple(outline.pages), tuple(rows), tuple(token_ids),
        )  # fmt: skip

    @staticmethod
    def _row(part: _Part, token_ids: list[int]) -> Row:
        """The row of `part`; a prefill row's tokens are added to `token_ids`."""
        sequence, flags, next_token = part.sequence, part.flags, 0
        start, end = sequence.num_computed, sequence.num_computed + part.count
        if end >= len(sequence.tokens):
            flags |= RowFlag.SAMPLE
        else:
            next_token = sequence.tokens[end]
        if not sequence.is_decode:
            flags |= RowFlag.PREFILL
            token_ids += sequence.tokens[start:end]
        return Row(sequence.slot, start, part.count, flags, next_token)

    def check_integrity(self) -> None:
        """Raises AssertionError when pages or slots are lost, doubled or held by nobody."""
        self.pool.check([p for s in self.running for p in s.pages])
        slots = [s.slot for s in self.running] + self.free_slots
        assert sorted(slots) == list(range(self.limits.num_slots)), "slots lost or doubled"
