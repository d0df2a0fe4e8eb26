"""The scheduler of rank 0: which tokens of which sequences the next step computes.

No prefill phase and no decode phase: every sequence has computed tokens and known tokens, and a
step spends one token budget, decode rows first. Owns slots and pages. Knows no tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from placement.errors import ConfigError
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


@dataclass
class _Draft:
    """A plan being put together."""

    budget: int
    admits: list[Admit] = field(default_factory=list)
    pages: list[PageUpdate] = field(default_factory=list)
    decode: list[tuple[Sequence, int]] = field(default_factory=list)
    prefill: list[tuple[Sequence, int]] = field(default_factory=list)


class Scheduler:
    """schedule() -> StepPlan, then update(sampled ids) -> TokenBatches. One step in flight."""

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
        self._in_flight: list[tuple[Sequence, Row]] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: EngineRequest) -> None:
        self.waiting.append(Sequence.of(request))

    def abort(self, request_ids: Seq[str]) -> None:
        """Drops the named requests between steps; unknown names are ignored (already done)."""
        names = set(request_ids)
        self.waiting = deque(s for s in self.waiting if s.request.request_id not in names)
        for sequence in [s for s in self.running if s.request.request_id in names]:
            self._release(sequence)

    def schedule(self) -> StepPlan:
        """The next step's plan; opcode IDLE when there is nothing to compute."""
        assert not self._in_flight, "the previous step was not committed"
        draft = _Draft(budget=self.limits.step_tokens)
        for sequence in [s for s in self.running if s.is_decode]:
            self._add_decode(draft, sequence)
        for sequence in [s for s in self.running if not s.is_decode]:
            self._add_prefill(draft, sequence)
        while self.waiting and self.free_slots and draft.budget > 0:
            if not self._admit(draft):
                break
        return self._finish_plan(draft)

    def update(self, sampled: Seq[int], now_s: float = 0.0) -> list[TokenBatch]:
        """Commits the step in flight; `sampled` holds one id per SAMPLE row, in row order."""
        batches: list[TokenBatch] = []
        ids = iter(sampled)
        for sequence, row in self._in_flight:
            token = next(ids) if row.flags & RowFlag.SAMPLE else None
            if sequence.slot < 0:  # aborted while the step ran
                continue
            self.prompt_tokens += max(0, min(sequence.num_prompt - row.start, row.count))
            sequence.num_computed = row.start + row.count
            if token is not None:
                batches.append(self._accept(sequence, token, now_s))
        self._in_flight = []
        return batches

    def _accept(self, sequence: Sequence, token: int, now_s: float) -> TokenBatch:
        name, num_prompt = sequence.request.request_id, sequence.num_prompt
        if token == NON_FINITE:
            self._release(sequence)
            return TokenBatch(
                name, (), FinishReason.ERROR, now_s, "non_finite",
                f"logits of request {name} are not finite at position {len(sequence.tokens)}",
                prompt_tokens=num_prompt,
            )  # fmt: skip
        sequence.tokens.append(token)
        sequence.last_on_device = True
        self.generation_tokens += 1
        reason = sequence.finish_after(token, self.limits.context_tokens)
        if reason is not None:
            self._release(sequence)
        return TokenBatch(name, (token,), reason, now_s, prompt_tokens=num_prompt)

    def _add_decode(self, draft: _Draft, sequence: Sequence) -> None:
        if sequence.slot < 0 or draft.budget < 1:  # preempted by an earlier row of this step
            return
        if self._grow(draft, sequence, sequence.num_computed + 1):
            draft.decode.append((sequence, 1))
            draft.budget -= 1

    def _add_prefill(self, draft: _Draft, sequence: Sequence) -> None:
        if sequence.slot < 0 or draft.budget < 1:
            return
        count = min(sequence.num_pending, draft.budget)
        if self.limits.prefill_chunk_tokens:
            count = min(count, self.limits.prefill_chunk_tokens)
        if self._grow(draft, sequence, sequence.num_computed + count):
            draft.prefill.append((sequence, count))
            draft.budget -= count

    def _admit(self, draft: _Draft) -> bool:
        """Moves the first waiting sequence to a slot, or leaves it waiting for pages."""
        sequence = self.waiting[0]
        needed = -(-len(sequence.tokens) // self.limits.page_tokens)
        if self.pool.num_free < needed and self.running:
            return False
        self.waiting.popleft()
        sequence.slot = self.free_slots.pop()
        self.running.append(sequence)
        p = sequence.request.sampling
        draft.admits.append(
            Admit(sequence.slot, p.temperature, p.top_k, p.top_p, p.min_p, p.seed, p.choice)
        )
        self._add_prefill(draft, sequence)
        return True

    def _grow(self, draft: _Draft, sequence: Sequence, num_tokens: int) -> bool:
        """Gives `sequence` pages for `num_tokens`, preempting the newest others if it must."""
        needed = -(-num_tokens // self.limits.page_tokens)
        while len(sequence.pages) < needed:
            page = self.pool.take()
            if page is not None:
                draft.pages.append(PageUpdate(sequence.slot, len(sequence.pages), page))
                sequence.pages.append(page)
                continue
            victim = self.running[-1]
            self._preempt(draft, victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, draft: _Draft, victim: Sequence) -> None:
        """Takes slot and pages together; the sequence resumes by recompute."""
        draft.decode = [d for d in draft.decode if d[0] is not victim]
        draft.prefill = [d for d in draft.prefill if d[0] is not victim]
        draft.admits = [a for a in draft.admits if a.slot != victim.slot]
        draft.pages = [u for u in draft.pages if u.slot != victim.slot]
        self._release(victim)
        victim.num_computed = 0
        victim.last_on_device = False
        victim.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(victim)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.give_back(sequence.pages)
        self.free_slots.append(sequence.slot)
        sequence.pages = []
        sequence.slot = -1

    def _finish_plan(self, draft: _Draft) -> StepPlan:
        rows: list[Row] = []
        token_ids: list[int] = []
        for sequence, count in draft.decode + draft.prefill:
            end = sequence.num_computed + count
            flags = RowFlag.SAMPLE if end == len(sequence.tokens) else RowFlag.NONE
            if not sequence.is_decode:
                flags |= RowFlag.PREFILL
                token_ids += sequence.tokens[sequence.num_computed : end]
            row = Row(sequence.slot, sequence.num_computed, count, flags)
            rows.append(row)
            self._in_flight.append((sequence, row))
        if not rows:
            return StepPlan(Opcode.IDLE, self.limits.epoch, self.step)
        self.step += 1
        check = self.step % self.limits.check_interval_steps == 0
        return StepPlan(
            Opcode.STEP, self.limits.epoch, self.step, check,
            tuple(draft.admits), tuple(draft.pages), tuple(rows), tuple(token_ids),
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Raises AssertionError when pages or slots are lost, doubled or held by nobody."""
        self.pool.check([p for s in self.running for p in s.pages])
        slots = [s.slot for s in self.running] + self.free_slots
        assert sorted(slots) == list(range(self.limits.num_slots)), "slots lost or doubled"
