"""A device that knows nothing but the plans it executes, and a run that checks every step.

Its model makes a token from all tokens before it, read through page table and recurrent state; its
copies of states complete late and out of order. So a lost, doubled or mixed-up token, page or
state shows in the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch

from rank_worker.late_streams import LateStreams
from rank_worker.messages import EngineRequest, FinishReason, TokenBatch
from rank_worker.prefix_tree import Node
from rank_worker.scheduler import NON_FINITE, Scheduler, SchedulerLimits
from rank_worker.state_store import StateStore
from rank_worker.step_logprobs import StepLogprobs
from rank_worker.step_plan import (
    INTO_SLOT,
    CopyKind,
    Opcode,
    Row,
    RowFlag,
    StateCopy,
    StepPlan,
    decode,
    encode,
    score_count,
)
from rank_worker.streams import Queue

GARBAGE = -77  # what memory holds before anything is put there
ENDS = {
    CopyKind.SAVE: ("slot", "cell"), CopyKind.SPILL: ("cell", "host cell"),
    CopyKind.RESTORE: ("cell", "slot"), CopyKind.FETCH: ("host cell", "slot"),
}  # fmt: skip
HASH_MODULUS = (1 << 61) - 1


def next_token(tokens: Iterable[int]) -> int:
    """The fake model: any token that is missing, doubled or another sequence's changes it."""
    text = ",".join(map(str, tokens)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=2).digest(), "big") % 997


def expected_ids(request: EngineRequest, context: int) -> tuple[int, ...]:
    tokens = list(request.prompt_ids)
    while True:
        tokens.append(next_token(tokens))
        made = tuple(tokens[len(request.prompt_ids) :])
        stopped = made[-1] in request.stop_token_ids and not request.ignore_eos
        if stopped or len(made) == request.max_tokens or len(tokens) >= context:
            return made


def absorbed(value: int, token: int) -> int:
    """The fake recurrent state after `token`: depends on all tokens and their order."""
    return (value * 1000003 + token + 1) % HASH_MODULUS


class FakeDevice:
    """Slots, pages and cells as a rank holds them. An entry of a page is (token, state there).

    With `late_compute` the states lag behind the plans too, as on a rank that never waits for its
    device; then a state that is wrong shows in a later step, or when the copies are drained.
    """

    def __init__(
        self, limits: SchedulerLimits, seed: int = 0, late_compute: bool = False,
        store_class: type[StateStore] = StateStore,
    ) -> None:  # fmt: skip
        self.limits = limits
        self.computed: dict[int, int] = {}  # slot -> tokens in its state
        self.tables: dict[int, dict[int, int]] = {}
        self.entries: dict[tuple[int, int], tuple[int, int]] = {}  # (page, offset) ->
        self.last: dict[int, int] = {}
        self.drafts: dict[int, list[int]] = {}
        self.head: set[tuple[int, int]] = set()  # places of tokens that the draft head knows
        self.found: dict[int, int] = {}  # slot -> tokens that were there when it was handed out
        self.foretold: dict[int, int] = {}  # the prompt's next token
        self.written: set[int] = set()  # pages of the last step
        self.scores: list[tuple[float]] = []  # of the last step; a token's is its own id
        self.struck: set[int] = set()  # slots whose values turn not finite in the next step
        self.bad_places: set[tuple[int, int]] = set()  # not finite, as all that comes of them
        self.bad_states: set[tuple[str, int]] = set()
        self.plans: list[StepPlan] = []
        # A slot's state is the hash of its tokens; the rest makes a torn copy visible.
        self.hashes = torch.full((limits.num_slots, 3), GARBAGE)
        self.copies = torch.full((limits.num_slots, 2), float(GARBAGE), dtype=torch.float64)
        self.streams = LateStreams(seed, late_compute)
        cells, host_cells = limits.prefix_states, limits.prefix_host_states
        self.store = store_class([self.hashes, self.copies], cells, host_cells, self.streams)

    def execute(self, plan: StepPlan) -> list[list[int]]:
        plan = decode(encode(plan))
        self.plans.append(plan)
        self.written, self.scores = set(), []
        self.start(plan)
        for update in plan.page_updates:
            self.tables[update.slot][update.index] = update.page
        for slot, table in self.tables.items():
            for index in range(-(-self.computed[slot] // self.limits.page_tokens)):
                assert index in table, "a page of a computed token is missing"
        tokens = iter(plan.token_ids)
        for row in plan.rows:
            self.write(row, tokens)
        assert next(tokens, None) is None, "tokens that no row takes"
        results = [self.sample(row) for row in plan.rows if row.flags & RowFlag.SAMPLE]
        for row in plan.rows:
            self.absorb(row)
            self.propose(row)
        self.struck.clear()
        return results

    def start(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            if copy.kind not in INTO_SLOT:
                self.copy(copy)
        for admit in plan.admits:
            slot = admit.slot
            self.zero(slot)
            self.computed[slot] = self.found[slot] = 0
            self.tables[slot] = {}
            for known in (self.last, self.drafts, self.foretold):
                known.pop(slot, None)  # type: ignore[attr-defined]
        admitted = {admit.slot for admit in plan.admits}
        starts = {row.slot: row.start for row in plan.rows}
        for copy in plan.copies:
            if copy.kind in INTO_SLOT:
                assert copy.target in admitted, "a state for a sequence that already runs"
                self.copy(copy)
                self.computed[copy.target] = self.found[copy.target] = starts[copy.target]

    def compute(self, work: partial[None]) -> None:
        self.streams.run(Queue.COMPUTE, work)

    def zero(self, slot: int) -> None:
        self.bad_states.discard(("slot", slot))
        self.compute(partial(self.put, slot, 0, 0))

    def copy(self, copy: StateCopy) -> None:
        verbs = {
            CopyKind.SAVE: self.store.save, CopyKind.SPILL: self.store.spill,
            CopyKind.RESTORE: self.store.restore, CopyKind.FETCH: self.store.fetch,
        }  # fmt: skip
        verbs[copy.kind](copy.source, copy.target)
        source, target = ENDS[copy.kind]
        if (source, copy.source) in self.bad_states:
            self.bad_states.add((target, copy.target))
        else:
            self.bad_states.discard((target, copy.target))

    def put(self, slot: int, count: int, value: int) -> None:
        self.hashes[slot] = torch.tensor([count, value, count ^ value])
        self.copies[slot] = torch.tensor([count, value % 9973], dtype=torch.float64)

    def check_state(self, slot: int, tokens: int, value: int) -> None:
        """The slot's state must be whole and that of the tokens in its pages."""
        count, got, mark = self.hashes[slot].tolist()
        assert (count, got) == (mark ^ got, got), "a torn state"
        assert self.copies[slot].tolist() == [float(count), float(got % 9973)], "a torn state"
        assert count == tokens, "a state of another length"
        assert got == value, "a state of another prefix"

    def absorb(self, row: Row) -> None:
        """The tokens that stay enter the recurrent state."""
        kept = range(row.start, self.computed[row.slot])
        tokens = [self.entries[self.place(row.slot, position)][0] for position in kept]
        self.compute(partial(self.advance, row.slot, tokens))

    def advance(self, slot: int, tokens: list[int]) -> None:
        count, value, _ = self.hashes[slot].tolist()
        for token in tokens:
            value = absorbed(value, token)
        self.put(slot, count + len(tokens), value)

    def write(self, row: Row, tokens: Iterator[int]) -> None:
        assert row.start == self.computed[row.slot], "a row that does not continue its state"
        value = self.value_after(row.slot)
        self.compute(partial(self.check_state, row.slot, row.start, value))
        self.taint(row)
        if not row.flags & RowFlag.PREFILL:
            drafts = self.drafts.pop(row.slot) if row.flags & RowFlag.DRAFT else []
            assert row.count == 1 + len(drafts)
            tokens = iter([self.last[row.slot], *drafts])
        foretold = self.foretold.pop(row.slot, None)
        for position in range(row.start, row.start + row.count):
            token = next(tokens)
            assert foretold in (None, token), "not the token that the row before announced"
            foretold = None
            value = absorbed(value, token)
            place = self.place(row.slot, position)
            self.entries[place] = (token, value)
            self.note_bad(place, row.slot)
            self.head.discard(place)
            self.written.add(place[0])
        self.computed[row.slot] += row.count
        if not row.flags & RowFlag.SAMPLE:
            self.foretold[row.slot] = row.next_token
        following = [
            self.entries[self.place(row.slot, p)][0]
            for p in range(row.start + 1, row.start + row.count)
        ]
        self.scores += [
            (float(token),) for token in [*following, row.next_token][: score_count(row)]
        ]

    def taint(self, row: Row) -> None:
        """What comes of a value that is not finite is not finite either."""
        seen = {self.place(row.slot, position) for position in range(row.start)}
        if row.slot in self.struck or seen & self.bad_places:
            self.bad_states.add(("slot", row.slot))

    def note_bad(self, place: tuple[int, int], slot: int) -> None:
        if ("slot", slot) in self.bad_states:
            self.bad_places.add(place)
        else:
            self.bad_places.discard(place)

    def is_bad(self, page: int) -> bool:
        return any(bad == page for bad, _ in self.bad_places)

    def sample(self, row: Row) -> list[int]:
        """New tokens of a row; drafts that are not the model's own leave its state."""
        known = self.read(row.slot)
        if ("slot", row.slot) in self.bad_states:
            self.computed[row.slot] = row.start + (1 if row.flags & RowFlag.DRAFT else row.count)
            self.last[row.slot] = 0
            return [NON_FINITE]
        if row.flags & RowFlag.DRAFT:
            end = self.computed[row.slot] = row.start + 1
            while end < len(known) and known[end] == next_token(known[:end]):
                end = self.computed[row.slot] = end + 1
        else:
            end = len(known)
        self.last[row.slot] = next_token(known[:end])
        first = row.start + 1 if row.flags & RowFlag.DRAFT else end
        return [*known[first:end], self.last[row.slot]]

    def propose(self, row: Row) -> None:
        """The head knows all tokens or none; one guess may be wrong, others follow from it."""
        if not row.flags & RowFlag.ENTER:
            assert not row.flags & RowFlag.PROPOSE
            return
        places = [self.place(row.slot, at) for at in range(self.computed[row.slot])]
        assert self.head.issuperset(places[: row.start]), "an entry is missing"
        self.head.update(places)
        if not row.flags & RowFlag.PROPOSE:
            return
        k, known = self.limits.num_drafts, [*self.read(row.slot), self.last[row.slot]]
        furthest = row.start + row.count - 1 + k - 1  # an entry of the longest acceptance
        place = self.place(row.slot, min(furthest, self.limits.context_tokens - 1))
        self.written.add(place[0])
        right = sum(known) % (k + 1)
        for at in range(k):
            known.append((next_token(known) + (at == right)) % 997)
        self.drafts[row.slot] = known[-k:]

    def place(self, slot: int, position: int) -> tuple[int, int]:
        size = self.limits.page_tokens
        return self.tables[slot][position // size], position % size

    def value_after(self, slot: int) -> int:
        """The state after all of the slot's tokens, as its pages have it."""
        count = self.computed[slot]
        return self.entries[self.place(slot, count - 1)][1] if count else 0

    def added_pages(self, slot: int) -> set[int]:
        """Pages that whoever has the slot has written itself."""
        first, last = self.found[slot], self.computed[slot]
        return {self.place(slot, position)[0] for position in range(first, last)}

    def read(self, slot: int) -> list[int]:
        """The slot's tokens; every entry must follow from those before it."""
        tokens, value = [], 0
        for position in range(self.computed[slot]):
            token, after = self.entries[self.place(slot, position)]
            value = absorbed(value, token)
            assert value == after, "a page of another prefix"
            tokens.append(token)
        return tokens


class Run:
    """A scheduler and its device; checks the invariants of every step."""

    def __init__(
        self, limits: SchedulerLimits, device: FakeDevice | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:  # fmt: skip
        self.scheduler = scheduler or Scheduler(limits)
        self.device = device or FakeDevice(limits)
        self.batches: list[TokenBatch] = []
        self.arrivals: dict[str, int] = {}  # name -> how many came before

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.arrivals[request.request_id] = len(self.arrivals)
            self.scheduler.add(request)

    def step(
        self, during: tuple[str, ...] = (), spoil: int | None = None, seconds: float = 0.0
    ) -> StepPlan:
        """One step; `during` is aborted while it runs, sampled row `spoil` is not finite."""
        has_work = self.scheduler.has_work
        plan = self.scheduler.schedule()
        assert has_work == (plan.opcode is Opcode.STEP), "work but no step"
        self.check(plan)
        cached = self.cached_pages()
        sampled = self.device.execute(plan)
        assert not cached & self.device.written, "a page that others may read is written"
        if spoil is not None and sampled:
            sampled[spoil % len(sampled)][-1] = NON_FINITE
        self.scheduler.abort(during)
        before = {s.request.request_id: (s.slot, list(s.nodes)) for s in self.scheduler.running}
        logprobs = StepLogprobs(None, self.device.scores)
        batches = self.scheduler.update(sampled, 1.5, seconds, logprobs)
        for batch in batches:
            if batch.finish_reason is FinishReason.ERROR:
                self.check_forgotten(*before[batch.request_id])
        self.batches += batches
        self.scheduler.check_integrity()
        return plan

    def check_forgotten(self, slot: int, nodes: list[Node]) -> None:
        """The sequence that was in `slot`, on `nodes`, ended with a row that was not finite."""
        device, cells = self.device, self.scheduler.cache.cells
        added = device.added_pages(slot)
        assert not added & self.cached_pages(), "what is not finite stays cached"
        for node in nodes:
            places = {
                ("cell", cells.device.held.get(node)),
                ("host cell", cells.host.held.get(node)),
            }
            is_bad = device.is_bad(node.page) or places & device.bad_states
            assert not (node.is_cached and is_bad), "who comes next finds what is not finite"

    def cached_pages(self) -> set[int]:
        return {node.page for node in self.scheduler.cache.tree.nodes()}

    def check(self, plan: StepPlan) -> None:
        self.scheduler.check_integrity()
        assert sum(row.count for row in plan.rows) <= self.scheduler.limits.step_tokens
        slots = {row.slot for row in plan.rows}
        assert len(slots) == len(plan.rows), "a slot in two rows"
        admitted = [admit.slot for admit in plan.admits]
        assert len(set(admitted)) == len(admitted)
        updates = [(update.slot, update.index) for update in plan.page_updates]
        assert len(set(updates)) == len(updates)
        named = {*admitted, *(slot for slot, _ in updates)}
        assert named <= slots, "something is left of a preempted sequence"
        for queue in (self.scheduler.running, self.scheduler.waiting):
            order = [self.order(s.request) for s in queue]
            assert order == sorted(order), "first come, first served"
        kinds = [bool(row.flags & RowFlag.PREFILL) for row in plan.rows]
        assert kinds == sorted(kinds), "decode rows come first"
        assert all(row.count > 0 for row in plan.rows)

    def order(self, request: EngineRequest) -> tuple[int, int]:
        return request.priority, self.arrivals[request.request_id]

    def finish(self, most_steps: int = 5000) -> None:
        for _ in range(most_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the requests never end")

    def check_idle(self) -> None:
        """Nothing is left of the requests, and every kept state is that of its prefix."""
        scheduler, device = self.scheduler, self.device
        cache = scheduler.cache
        assert not scheduler.has_work
        assert len(scheduler.free_slots) == scheduler.limits.num_slots, "a slot was lost"
        assert cache.pool.num_free + cache.tree.num_nodes == scheduler.limits.num_pages
        assert cache.num_available == scheduler.limits.num_pages, "a page is used by nobody"
        device.streams.drain()
        for kind, tier in (
            (CopyKind.RESTORE, cache.cells.device),
            (CopyKind.FETCH, cache.cells.host),
        ):
            for node, cell in tier.held.items():
                tokens, value = path_tokens(node), 0
                for token in tokens:
                    value = absorbed(value, token)
                device.copy(StateCopy(kind, cell, 0))
                device.streams.drain()
                device.check_state(0, len(tokens), value)

    def ids(self, request: EngineRequest) -> tuple[int, ...]:
        mine = [b for b in self.batches if b.request_id == request.request_id]
        return tuple(token for batch in mine for token in batch.token_ids)

    def reason(self, request: EngineRequest) -> FinishReason | None:
        ends = [b.finish_reason for b in self.batches if b.request_id == request.request_id]
        assert not any(ends[:-1]), "tokens after the end"
        return ends[-1] if ends else None

    def answer(self, *prompt: int, max_tokens: int = 4, **options: Any) -> TokenBatch:
        """Runs one request alone to its end; its last batch. The answer must be right."""
        one = EngineRequest(f"q{len(self.arrivals)}", prompt, max_tokens, **options)
        self.add(one)
        self.finish()
        check_answers(self, [one])
        return next(b for b in reversed(self.batches) if b.request_id == one.request_id)


def path_tokens(node: Node) -> list[int]:
    """All tokens from the root of the tree to the end of the node's page."""
    return [*(path_tokens(node.parent) if node.parent else []), *node.tokens]


def check_answers(run: Run, requests: Iterable[EngineRequest]) -> None:
    for one in requests:
        assert run.ids(one) == expected_ids(one, run.scheduler.limits.context_tokens)
        assert run.reason(one) in (FinishReason.LENGTH, FinishReason.STOP)
