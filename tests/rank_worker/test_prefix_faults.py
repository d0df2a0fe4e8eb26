"""Seeded faults of scheduler, prefix cache and copies: what the checks of the soak are for.

Each fault is a small subclass of the part that would have it. The soak is the one that passes
without; the message is that of the check which sees the fault. The real engine has its own:
`test_engine_faults`, and `test_mtp_rollback` for drafts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from rank_worker import prefix_cache as prefix_cache_module
from rank_worker import scheduler as scheduler_module
from rank_worker.outline import Outline
from rank_worker.prefix_cache import PrefixCache
from rank_worker.prefix_tree import Node, PrefixTree
from rank_worker.scheduler import Scheduler, SchedulerLimits
from rank_worker.sequence import Sequence
from rank_worker.state_cells import StateCells
from rank_worker.state_store import StateStore
from rank_worker.step_plan import CopyKind, Row, RowFlag, StateCopy, StepPlan
from rank_worker.streams import Queue
from tests.rank_worker.fake_device import FakeDevice, next_token
from tests.rank_worker.test_prefix_soak import soak
from tests.rank_worker.test_state_store import WAITS, without_wait

OPERATIONS, SEED = 6_000, 0
LENGTH, PREFIX, TORN = "a state of another length", "a state of another prefix", "a torn state"


def name_of(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else ""


class NeverZeroes(FakeDevice):
    """A recycled slot keeps its last owner's state."""

    def zero(self, slot: int) -> None:
        pass


class ZeroesWhatWasRestored(FakeDevice):
    """The slot is zeroed after its state has come."""

    def start(self, plan: StepPlan) -> None:
        super().start(plan)
        for admit in plan.admits:
            self.zero(admit.slot)


class AbsorbsRejectedDrafts(FakeDevice):
    """All tokens of a row enter the state, whatever stays of them."""

    def absorb(self, row: Row) -> None:
        places = [self.place(row.slot, row.start + at) for at in range(row.count)]
        tokens = [self.entries[place][0] for place in places]
        self.compute(partial(self.advance, row.slot, tokens))


class AbsorbsForOthers(FakeDevice):
    """Every row's tokens enter the state of the slot beside it too, as padding might."""

    def absorb(self, row: Row) -> None:
        super().absorb(row)
        other = (row.slot + 1) % self.limits.num_slots
        if other != row.slot:
            self.compute(partial(self.advance, other, [0]))


class AcceptsAfterARejection(FakeDevice):
    """A draft that follows from those before it stays, although one of them did not."""

    def sample(self, row: Row) -> list[int]:
        made = super().sample(row)
        if not row.flags & RowFlag.DRAFT:
            return made
        places = [self.place(row.slot, row.start + at) for at in range(row.count)]
        self.computed[row.slot] = row.start + row.count
        known, drafts = self.read(row.slot), [self.entries[place][0] for place in places[1:]]
        first = row.start + 1
        kept = sum(draft == next_token(known[: first + at]) for at, draft in enumerate(drafts))
        self.computed[row.slot] = first + kept
        self.last[row.slot] = next_token(known[: first + kept])
        return [*drafts[:kept], self.last[row.slot]]


class SavesOneStepLate(FakeDevice):
    """The state is copied when the step has gone past the boundary."""

    def execute(self, plan: StepPlan) -> list[list[int]]:
        self.late: list[StateCopy] = []
        sampled = super().execute(plan)
        for copy in self.late:
            super().copy(copy)
        return sampled

    def copy(self, copy: StateCopy) -> None:
        if copy.kind is CopyKind.SAVE:
            self.late.append(copy)
        else:
            super().copy(copy)


class SavesOneStepEarly(FakeDevice):
    """The state is copied as it was before the step that reached the boundary."""

    def __init__(self, limits: SchedulerLimits, seed: int, late_compute: bool) -> None:
        super().__init__(limits, seed, late_compute)
        self.before = self.now = (self.hashes.clone(), self.copies.clone())

    def execute(self, plan: StepPlan) -> list[list[int]]:
        sampled = super().execute(plan)
        self.before, self.now = self.now, (self.hashes.clone(), self.copies.clone())
        return sampled

    def copy(self, copy: StateCopy) -> None:
        if copy.kind is CopyKind.SAVE:
            self.hashes.copy_(self.before[0])
            self.copies.copy_(self.before[1])
        super().copy(copy)
        if copy.kind is CopyKind.SAVE:
            self.hashes.copy_(self.now[0])
            self.copies.copy_(self.now[1])


DEVICES = [
    (NeverZeroes, TORN),
    (ZeroesWhatWasRestored, LENGTH),
    (AbsorbsRejectedDrafts, LENGTH),
    (AbsorbsForOthers, LENGTH),
    (AcceptsAfterARejection, "not the model's answer"),
    (SavesOneStepLate, LENGTH),
    (SavesOneStepEarly, LENGTH),
]


@pytest.mark.parametrize(("fault", "check"), DEVICES, ids=name_of)
def test_a_fault_of_the_device_is_seen(fault: type[FakeDevice], check: str) -> None:
    with pytest.raises(AssertionError, match=check):
        soak(OPERATIONS, SEED, make_device=fault)


def with_store(store: type[StateStore], *arguments: Any) -> FakeDevice:
    return FakeDevice(*arguments, store_class=store)


# A plan spills only to make room for a save, which waits for the spill, and a fetch waits for
# what came before it: so here its own wait for the spill is never the only one.
VISIBLE = [wait for wait in WAITS if wait.values != (Queue.RESTORE, Queue.ARCHIVE)]


@pytest.mark.parametrize(("queue", "after"), VISIBLE)
def test_a_missing_fence_is_seen(queue: Queue, after: Queue) -> None:
    device = partial(with_store, without_wait(queue, after))
    with pytest.raises(AssertionError, match=f"{LENGTH}|{PREFIX}|{TORN}"):
        soak(OPERATIONS, SEED, late_compute=True, make_device=device)


class FindsPagesAlone(PrefixCache):
    """A hit is as long as the pages go; the state is the last one before."""

    def open(self, sequence: Sequence) -> None:
        super().open(sequence)
        self.tree.leave(sequence.nodes)
        last = (len(sequence.tokens) - 1) // self.page_tokens
        sequence.nodes = self.tree.match(sequence.tokens, last)
        self.tree.enter(sequence.nodes)
        sequence.pages = [node.page for node in sequence.nodes]
        sequence.num_computed = sequence.num_hit = len(sequence.nodes) * self.page_tokens

    def admit(self, sequence: Sequence) -> list[StateCopy]:
        self._count(sequence)
        self.plan_next_save(sequence)
        kept = [node for node in sequence.nodes if self.cells.has(node)]
        return [self.cells.load(kept[-1], sequence.slot)] if kept else []


class FreesPagesInUse(PrefixCache):
    """Whoever leaves gives back all its pages, shared ones too."""

    def release(self, sequence: Sequence) -> None:
        pages = {node.page for node in sequence.nodes}
        super().release(sequence)
        self.pool.give_back(sorted(pages - set(self.pool._free)))


class PublishesWhatIsNotComputed(PrefixCache):
    def publish(self, sequence: Sequence) -> None:
        computed = sequence.num_computed
        sequence.num_computed = min(len(sequence.tokens), len(sequence.pages) * self.page_tokens)
        super().publish(sequence)
        sequence.num_computed = computed


class NeverForgets(PrefixCache):
    def forget(self, sequence: Sequence, with_hit: bool) -> None:
        pass


class ForgetsOnlyWhatWasAdded(PrefixCache):
    def forget(self, sequence: Sequence, with_hit: bool) -> None:
        super().forget(sequence, with_hit=False)


class KeepsBothCopies(PrefixCache):
    def drop_copies(self, sequences: Any) -> bool:
        return False


class KeepsStatesOfEvicted(PrefixCache):
    def take_page(self) -> int | None:
        drop, self.cells.drop = self.cells.drop, lambda node: None  # type: ignore[method-assign]
        page = super().take_page()
        self.cells.drop = drop  # type: ignore[method-assign]
        return page


class TakesBackTooMuch(PrefixCache):
    """Pages for drafts are taken back with the one that the next token needs."""

    def spare_pages(self, sequence: Sequence, num_tokens: int) -> list[int]:
        return super().spare_pages(sequence, num_tokens - self.page_tokens)


class SaysThatAllIsDrafted(PrefixCache):
    def publish(self, sequence: Sequence) -> None:
        before = len(sequence.nodes)
        super().publish(sequence)
        for node in sequence.nodes[before:]:
            node.is_drafted = True


class SavesForThePageBefore(PrefixCache):
    def save(self, sequence: Sequence) -> list[StateCopy]:
        done = sequence.num_computed
        if sequence.next_save != done or done <= self.page_tokens:
            return super().save(sequence)
        self.plan_next_save(sequence)
        node = sequence.nodes[done // self.page_tokens - 2]
        return self.cells.save(node, sequence.slot) if node.is_cached else []


class MissesTheBoundary(PrefixCache):
    """Saves for the last page whenever it is asked, at a boundary or not."""

    def save(self, sequence: Sequence) -> list[StateCopy]:
        if not sequence.nodes or not sequence.nodes[-1].is_cached or not sequence.next_save:
            return []
        if sequence.next_save == sequence.num_computed:
            self.plan_next_save(sequence)
        return self.cells.save(sequence.nodes[-1], sequence.slot)


class EvictsWhatIsUsed(PrefixTree):
    def evict(self) -> Node | None:
        leaf = next((node for node in self.nodes() if not node.children), None)
        if leaf is not None:
            self._take_out(leaf)
        return leaf


class SpillsNothing(StateCells):
    """A state changes its tier, and nobody copies it."""

    def _make_room(self) -> list[StateCopy]:
        super()._make_room()
        return []


class LoadsFromTheOtherTier(StateCells):
    def load(self, node: Node, slot: int) -> StateCopy:
        copy = super().load(node, slot)
        other = CopyKind.FETCH if copy.kind is CopyKind.RESTORE else CopyKind.RESTORE
        tier = self.host if other is CopyKind.FETCH else self.device
        return StateCopy(other, copy.source % tier.num_cells, slot) if tier.num_cells else copy


class OverwritesWithoutSpill(StateCells):
    """The least recently used cell is written again, and its node still counts on it."""

    def _make_room(self) -> list[StateCopy]:
        node = self.device.oldest()
        self.device.free.append(self.device.held[node])
        return []


CACHES: list[tuple[Any, str, type, str]] = [
    (scheduler_module, "PrefixCache", FindsPagesAlone, f"{LENGTH}|does not continue its state"),
    (scheduler_module, "PrefixCache", FreesPagesInUse, "pages lost or doubled|freed twice"),
    (scheduler_module, "PrefixCache", PublishesWhatIsNotComputed, "others may read is written"),
    (scheduler_module, "PrefixCache", NeverForgets, "what is not finite stays cached"),
    (scheduler_module, "PrefixCache", ForgetsOnlyWhatWasAdded, "finds what is not finite"),
    (scheduler_module, "PrefixCache", KeepsBothCopies, "the requests never end"),
    (scheduler_module, "PrefixCache", KeepsStatesOfEvicted, "state of an evicted prefix is kept"),
    (scheduler_module, "PrefixCache", TakesBackTooMuch, f"{PREFIX}|a page of another prefix"),
    (scheduler_module, "PrefixCache", SaysThatAllIsDrafted, "an entry is missing"),
    (scheduler_module, "PrefixCache", SavesForThePageBefore, LENGTH),
    (scheduler_module, "PrefixCache", MissesTheBoundary, LENGTH),
    (prefix_cache_module, "PrefixTree", EvictsWhatIsUsed, "pages lost or doubled"),
    (prefix_cache_module, "StateCells", SpillsNothing, f"{TORN}|{LENGTH}|{PREFIX}"),
    (prefix_cache_module, "StateCells", LoadsFromTheOtherTier, f"{TORN}|{LENGTH}|{PREFIX}"),
    (prefix_cache_module, "StateCells", OverwritesWithoutSpill, "state cells lost or doubled"),
]


def soak_often() -> None:
    for seed in range(SEED, SEED + 5):
        soak(OPERATIONS, seed)


@pytest.mark.parametrize(("module", "name", "fault", "check"), CACHES, ids=name_of)
def test_a_fault_of_the_prefix_cache_is_seen(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, fault: type, check: str
) -> None:
    """Most show in the first hundreds of operations; some need a rare order of them."""
    monkeypatch.setattr(module, name, fault)
    with pytest.raises(AssertionError, match=check):
        soak_often()


class ResumesWhereItWas(Scheduler):
    def _withdraw(self, sequence: Sequence) -> None:
        computed = sequence.num_computed
        super()._withdraw(sequence)
        sequence.num_computed = computed


class LosesTheSlot(Scheduler):
    def abort(self, request_ids: Any) -> None:
        slots = list(self.free_slots)
        super().abort(request_ids)
        self.free_slots = slots


class HoldsPrefillBackForNobody(Scheduler):
    """Prefill waits for answers that were preempted in the same step."""

    def schedule(self) -> StepPlan:
        self.was_decoding = any(sequence.is_decode for sequence in self.running)
        return super().schedule()

    def _add_prefills(self, outline: Outline) -> None:
        if not self.was_decoding or self.pacer.allows_prefill:
            super()._add_prefills(outline)


SCHEDULERS = [
    (ResumesWhereItWas, "does not continue its state|page of a computed token is missing"),
    (LosesTheSlot, "slots lost or doubled"),
    (HoldsPrefillBackForNobody, "work but no step|a state is copied in a step without rows"),
]


@pytest.mark.parametrize(("fault", "check"), SCHEDULERS, ids=name_of)
def test_a_fault_of_the_scheduler_is_seen(fault: type[Scheduler], check: str) -> None:
    with pytest.raises(AssertionError, match=check):
        soak(OPERATIONS, SEED, make_scheduler=fault)
