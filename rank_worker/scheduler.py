"""The scheduler of rank 0: which tokens of which sequences the next step computes.

No prefill phase and no decode phase: every sequence has computed tokens and known tokens, and a
step spends one token budget, decode rows first. Owns slots, pages and kept states. Knows no
tensors.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import attrgetter

from placement.errors import ConfigError
from rank_worker.draft_gain import DraftCost
from rank_worker.messages import EngineRequest, FinishReason, TokenBatch, TokenLogprob
from rank_worker.outline import Outline, Part, row_of
from rank_worker.pacing import Pacer
from rank_worker.pages import PagePool
from rank_worker.prefix_cache import PrefixCache
from rank_worker.sequence import Sequence
from rank_worker.step_logprobs import StepLogprobs
from rank_worker.step_plan import Opcode, PageUpdate, Row, RowFlag, StepPlan, score_count

NON_FINITE = -1  # sampled in place of a token when a row's logits are not finite
_ORDER = attrgetter("order")
_KIND = RowFlag.PREFILL | RowFlag.DRAFT | RowFlag.ENTER | RowFlag.PROPOSE


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
    prefix_states: int = 0  # states of prefixes that are kept on the device; 0: no reuse
    prefix_host_states: int = 0
    prefix_interval_tokens: int = 512
    decode_share: float = 0.0  # see Pacer


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
        self.waiting: list[Sequence] = []  # by priority, then arrival
        self.running: list[Sequence] = []  # in the same order
        self.cache = PrefixCache(
            PagePool(limits.num_pages), limits.page_tokens, limits.prefix_interval_tokens,
            limits.prefix_states, limits.prefix_host_states,
        )  # fmt: skip
        self.free_slots = list(range(limits.num_slots - 1, -1, -1))
        self.step = 0
        self.num_preemptions = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.draft_rounds = 0
        self.accepted_by_position = [0] * limits.num_drafts
        self.cost = DraftCost(limits.num_drafts)
        self.pacer = Pacer(limits.decode_share)
        self._arrivals = 0
        self._in_flight: list[tuple[Sequence, Row]] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: EngineRequest) -> None:
        self._arrivals += 1
        sequence = Sequence.of(request, self._arrivals, is_drafting=self.limits.num_drafts > 0)
        sequence.gain = self.cost.gain()
        insort(self.waiting, sequence, key=_ORDER)

    def abort(self, request_ids: Seq[str]) -> None:
        """Drops the named requests between steps; unknown names are ignored (already done)."""
        names = set(request_ids)
        self.waiting = [s for s in self.waiting if s.request.request_id not in names]
        for sequence in [s for s in self.running if s.request.request_id in names]:
            self._release(sequence)

    def schedule(self) -> StepPlan:
        """The next step's plan; opcode IDLE when there is nothing to compute."""
        assert not self._in_flight, "the previous step was not committed"
        outline = Outline(budget=self.limits.step_tokens)
        for sequence in self.running:
            outline.copies += self.cache.save(sequence)
        decoding = [s for s in self.running if s.is_decode]
        for sequence in decoding:
            self._add_decode(outline, sequence)
        reserved = self._reserve_for_drafts(outline)
        if not outline.decode or self.pacer.allows_prefill:
            self._add_prefills(outline)
        if self.limits.num_drafts:
            outline.budget += reserved
            self._add_drafts(outline)
        return self._finish_plan(outline)

    def update(
        self,
        sampled: Seq[Seq[int]],
        now_s: float = 0.0,
        seconds: float = 0.0,
        logprobs: StepLogprobs | None = None,
    ) -> list[TokenBatch]:
        """Commits the step in flight, which took `seconds`.

        `sampled` holds the new tokens of each SAMPLE row, in row order: one, and one more for each
        draft that was accepted.
        """
        batches: list[TokenBatch] = []
        results, read = iter(sampled), logprobs or StepLogprobs()
        self._note_time(seconds)
        for sequence, row in self._in_flight:
            top = sequence.request.logprobs
            scores = read.take_scored(score_count(row), top)
            tokens, told = list[int](), list[TokenLogprob]()
            if row.flags & RowFlag.SAMPLE:
                tokens, told = list(next(results)), read.take_sampled(row, top)
            if sequence.slot < 0:  # aborted while the step ran
                continue
            is_round = bool(row.flags & RowFlag.DRAFT)
            self.prompt_tokens += max(0, min(sequence.num_prompt - row.start, row.count))
            sequence.num_computed = row.start + (len(tokens) if is_round else row.count)
            sequence.has_drafts = bool(row.flags & RowFlag.PROPOSE)
            if row.flags & RowFlag.SCORE:
                sequence.add_scores(row.start, scores)
            if is_round:
                self._note_round(sequence, len(tokens) - 1)
            if tokens:
                batches.append(self._accept(sequence, tokens, told, now_s))
            else:
                self.cache.publish(sequence)
        self._in_flight = []
        return batches

    def _note_time(self, seconds: float) -> None:
        """Keeps the time of a step whose rows are all draft rounds, or all plain."""
        rows = [row for _, row in self._in_flight]
        prefill = [row.count for row in rows if row.flags & RowFlag.PREFILL]
        self.pacer.note(len(rows) - len(prefill), sum(prefill), seconds)
        kinds = {row.flags & _KIND for row in rows}
        if kinds <= {RowFlag.NONE, RowFlag.ENTER}:
            self.cost.saw_plain(len(rows), seconds, entered=RowFlag.ENTER in kinds)
        elif kinds == {RowFlag.DRAFT | RowFlag.ENTER | RowFlag.PROPOSE}:
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

    def _accept(
        self, sequence: Sequence, tokens: Seq[int], told: Seq[TokenLogprob], now_s: float
    ) -> TokenBatch:
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
        is_first, sequence.last_on_device = not sequence.last_on_device, True
        sequence.accepted_tokens += min(len(taken), len(tokens) - 1)
        self.generation_tokens += len(taken)
        is_bad = reason is FinishReason.ERROR
        if is_bad:
            self.cache.forget(sequence, with_hit=is_first)
        else:
            self.cache.publish(sequence)
        if reason is not None:
            self._release(sequence)
        text = f"logits of request {name} are not finite at position {len(sequence.tokens)}"
        return TokenBatch(
            name, tuple(taken), reason, now_s, "non_finite" if is_bad else None,
            text if is_bad else None, prompt_tokens=sequence.num_prompt,
            cached_tokens=sequence.cached_tokens, draft_tokens=sequence.draft_tokens,
            accepted_tokens=sequence.accepted_tokens, logprobs=tuple(told[: len(taken)]),
            prompt_logprobs=sequence.take_scores(),
        )  # fmt: skip

    def _add_decode(self, outline: Outline, sequence: Sequence) -> None:
        if sequence.slot < 0 or outline.budget < 1:  # preempted by an earlier row of this step
            return
        if self._grow(outline, sequence, sequence.num_computed + 1):
            outline.decode.append(Part(sequence, 1))
            outline.budget -= 1

    def _add_prefills(self, outline: Outline) -> None:
        """Goes on with prompts that have a slot, then admits others while there is room."""
        for sequence in [s for s in self.running if not s.is_decode]:
            self._add_prefill(outline, sequence)
        while self.waiting and self.free_slots and outline.budget > 0:
            if not self._admit(outline):
                break

    def _add_prefill(self, outline: Outline, sequence: Sequence) -> None:
        if sequence.slot < 0 or outline.budget < 1:
            return
        count = min(sequence.room(sequence.num_pending), outline.budget)
        if self.limits.prefill_chunk_tokens:
            count = min(count, self.limits.prefill_chunk_tokens)
        if self._grow(outline, sequence, sequence.num_computed + count):
            outline.prefill.append(Part(sequence, count))
            outline.budget -= count

    def _admit(self, outline: Outline) -> bool:
        """Moves the first waiting sequence to a slot, or leaves it waiting for pages."""
        sequence = self.waiting[0]
        self.cache.open(sequence)
        needed = -(-len(sequence.tokens) // self.limits.page_tokens) - len(sequence.pages)
        if self.cache.num_available < needed and self.running:
            self._withdraw(sequence)
            return False
        self.waiting.pop(0)
        sequence.slot = self.free_slots.pop()
        insort(self.running, sequence, key=_ORDER)
        outline.admit(sequence)
        outline.copies += self.cache.admit(sequence)
        sequence.is_drafting &= all(node.is_drafted for node in sequence.nodes)
        if not sequence.preemptions:
            sequence.cached_tokens = sequence.num_hit
        self._add_prefill(outline, sequence)
        return True

    def _grow(self, outline: Outline, sequence: Sequence, num_tokens: int) -> bool:
        """Gives `sequence` pages for `num_tokens`, preempting the last others if it must."""
        needed = -(-num_tokens // self.limits.page_tokens)
        while len(sequence.pages) < needed:
            page = self.cache.take_page()
            if page is not None:
                outline.pages.append(PageUpdate(sequence.slot, len(sequence.pages), page))
                sequence.pages.append(page)
                continue
            if self._take_back_spare(outline, sequence, num_tokens):
                continue
            if self.cache.drop_copies(self.running):
                continue
            victim = self.running[-1]
            self._preempt(outline, victim)
            if victim is sequence:
                return False
        return True

    def _take_back_spare(self, outline: Outline, growing: Sequence, num_tokens: int) -> bool:
        """Frees pages that were given for drafts and that no row of this step needs.

        `growing` is about to get a row that ends at `num_tokens`.
        """
        ends = {
            part.sequence: part.sequence.num_computed + part.count
            for part in (*outline.decode, *outline.prefill)
        }
        ends[growing] = num_tokens
        spare: list[int] = []
        for sequence in self.running:
            end = ends.get(sequence, sequence.num_computed + 1)
            spare += self.cache.spare_pages(sequence, end)
        return bool(spare)

    def _reserve_for_drafts(self, outline: Outline) -> int:
        """Keeps budget from prefill for drafts that are there, half of it at most."""
        rows = sum(part.sequence.has_drafts for part in outline.decode)
        reserved = min(rows * self.limits.num_drafts, outline.budget // 2)
        outline.budget -= reserved
        return reserved

    def _add_drafts(self, outline: Outline) -> None:
        """Widens decode rows by their drafts and says who makes new ones.

        Pages come from what is free when all rows have theirs: drafts never cause a preemption.
        """
        is_plain = self._is_plain(outline)
        k, limit = self.limits.num_drafts, self.limits.context_tokens
        for part in (*outline.decode, *outline.prefill):
            sequence = part.sequence
            left, wide = sequence.tokens_left(limit), sequence.num_computed + 1 + k
            if (
                sequence.has_drafts and not is_plain and left > 1
                and wide <= limit and k <= outline.budget and sequence.room(1 + k) == 1 + k
                and self._grow_free(outline, sequence, wide)
            ):  # fmt: skip
                part.count = 1 + k
                part.flags |= RowFlag.DRAFT
                outline.budget -= k
            # Two more tokens after this step's, or there is nothing to draft. But who finds this
            # sequence's pages later may want to.
            pays = left > 2
            if not sequence.is_drafting or not (pays or self.cache.is_on):
                continue
            part.flags |= RowFlag.ENTER
            end = sequence.num_computed + part.count
            proposes = pays and end >= len(sequence.tokens) and not is_plain
            if proposes and self._grow_free(outline, sequence, min(end + k - 1, limit)):
                part.flags |= RowFlag.PROPOSE

    def _is_plain(self, outline: Outline) -> bool:
        """True when this step leaves drafts unused, to learn what a step without them takes."""
        rows = outline.decode
        return (
            self.limits.drafts_auto
            and not outline.prefill
            and any(part.sequence.has_drafts for part in rows)
            and self.cost.wants_plain(len(rows))
        )

    def _grow_free(self, outline: Outline, sequence: Sequence, num_tokens: int) -> bool:
        """Gives `sequence` pages for `num_tokens` if so many are available."""
        missing = -(-num_tokens // self.limits.page_tokens) - len(sequence.pages)
        return missing <= self.cache.num_available and self._grow(outline, sequence, num_tokens)

    def _preempt(self, outline: Outline, victim: Sequence) -> None:
        """Takes slot and pages together; the sequence resumes by recompute."""
        outline.withdraw(victim)
        self._release(victim)
        victim.last_on_device = victim.has_drafts = False
        victim.preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, victim, key=_ORDER)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.free_slots.append(sequence.slot)
        self._withdraw(sequence)

    def _withdraw(self, sequence: Sequence) -> None:
        """`sequence` has nothing on the device any more."""
        self.cache.release(sequence)
        sequence.slot = -1
        sequence.num_computed = 0

    def _finish_plan(self, outline: Outline) -> StepPlan:
        rows: list[Row] = []
        token_ids: list[int] = []
        for part in outline.parts():
            row, tokens = row_of(part)
            rows.append(row)
            token_ids += tokens
            self._in_flight.append((part.sequence, row))
        if not rows:
            assert not outline.copies, "a state is copied in a step without rows"
            return StepPlan(Opcode.IDLE, self.limits.epoch, self.step)
        self.step += 1
        check = self.step % self.limits.check_interval_steps == 0
        return StepPlan(
            Opcode.STEP, self.limits.epoch, self.step, check, tuple(outline.admits),
            tuple(outline.pages), tuple(rows), tuple(token_ids), tuple(outline.copies),
        )  # fmt: skip

    def check_integrity(self) -> None:
        """Raises AssertionError when pages, slots or kept states are lost, doubled or nobody's."""
        self.cache.check(self.running)
        slots = [s.slot for s in self.running] + self.free_slots
        assert sorted(slots) == list(range(self.limits.num_slots)), "slots lost or doubled"
