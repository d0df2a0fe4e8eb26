"""Seeded faults of the real engine: a small story of requests tells each from the engine as it is.

Slots and pages are used again, prefixes are found on the device and on the host, one request is
cancelled, one preempted, drafts are kept and rejected. The answers must be those of an engine that
has neither cache nor drafts and takes one request at a time. Faults of the rollback of drafts are
in `test_mtp_rollback`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from rank_worker import model as model_module
from rank_worker import rank as rank_module
from rank_worker import runner as runner_module
from rank_worker.batch import BatchBuilder, StepBatch
from rank_worker.gated_delta import GatedDeltaMixer
from rank_worker.messages import EngineRequest, SamplingParams
from rank_worker.model import Model
from rank_worker.runner import Runner, Sampled
from rank_worker.sampler import Sampler
from rank_worker.state_store import StateStore, Verb
from rank_worker.step_plan import CopyKind, StepPlan

Drivers = Callable[..., Any]
Answers = dict[str, list[int]]

BASE = tuple((29 * i * i + 3 * i + 1) % 500 for i in range(41))
OTHER = tuple((13 * i * i + 7 * i + 11) % 500 for i in range(50))
SAMPLED = SamplingParams(temperature=0.9, seed=7)
REQUESTS = {
    one.request_id: one
    for one in (
        EngineRequest("first", BASE, 12, ignore_eos=True),
        EngineRequest("other", OTHER, 12, ignore_eos=True),
        EngineRequest("fork", (*BASE[:36], 5, 6, 7), 12, SAMPLED, ignore_eos=True),
        EngineRequest("again", BASE, 12, SAMPLED, ignore_eos=True),
        EngineRequest("from host", (*OTHER, 1, 2, 3), 12, ignore_eos=True),
        EngineRequest("fills", (*BASE[:20], *OTHER[:40]), 40, ignore_eos=True),
        EngineRequest("beside", (*OTHER[:33], *BASE[:20]), 40, ignore_eos=True),
    )
}


def tell(one: Any) -> Iterator[Answers]:
    """The story; after each part the answers that are whole by then."""

    def steps(most: int = 1000) -> Answers:
        ended: Answers = {}
        for _ in range(most):
            if not one.scheduler.has_work:
                break
            for batch in one.step():
                told.setdefault(batch.request_id, []).extend(batch.token_ids)
                if batch.finish_reason:
                    ended[batch.request_id] = told[batch.request_id]
        return ended

    def add(*names: str) -> None:
        for name in names:
            one.scheduler.add(REQUESTS[name])

    told: Answers = {}
    for names in (["first"], ["again"]):
        add(*names)
        yield steps()
    one.scheduler.add(EngineRequest("cancelled", OTHER[::-1], 30, ignore_eos=True))
    steps(4)
    one.step(abort=["cancelled"])
    for names in (["other", "fork"], ["from host"]):
        add(*names)
        yield steps()
    add("fills", "beside")
    while not {"fills", "beside"} <= told.keys():
        steps(1)
    limits = one.scheduler.limits
    one.scheduler.limits = replace(limits, step_tokens=1)  # one goes on, the other stands still
    steps(6)
    one.scheduler.limits = limits
    yield steps()


@pytest.fixture(scope="module")
def truth(driver: Drivers) -> Answers:
    """The answers of a plain engine, one request after the other."""
    one = driver(0)
    answers: Answers = {}
    for request in REQUESTS.values():
        one.scheduler.add(request)
        answers.update(one.finish())
    return answers


@pytest.fixture(scope="module")
def cell_bytes(driver: Drivers) -> int:
    return int(driver(0).runner.store.cell_bytes())


@pytest.fixture
def start(driver: Drivers, cell_bytes: int) -> Callable[[], Any]:
    """An engine with one cell on the device, two on the host, and a pool that is too small."""

    def get() -> Any:
        return driver(
            2, prefix_cache=True, prefix_bytes=cell_bytes, prefix_host_bytes=2 * cell_bytes,
            prefix_interval_tokens=32, max_sequences=2, context_tokens=128, kv_pool_tokens=160,
        )  # fmt: skip

    return get


def test_the_story_is_told_the_same_with_cache_and_drafts(
    start: Callable[[], Any], truth: Answers
) -> None:
    one = start()
    told = [item for part in tell(one) for item in part.items()]
    assert dict(told) == truth
    counts = {verb: one.runner.store.ledger(verb).count for verb in Verb}
    assert min(counts.values()) > 0, counts
    assert one.scheduler.num_preemptions > 0
    assert one.scheduler.cache.counts.evicted_pages > 0
    assert 0 < sum(one.scheduler.accepted_by_position) < 2 * one.scheduler.draft_rounds


class NeverResets(Runner):
    def _reset_slot(self, slot: int) -> None:
        pass


class ResetsAfterRestore(Runner):
    def _start_sequences(self, plan: StepPlan) -> None:
        super()._start_sequences(plan)
        for admit in plan.admits:
            self._reset_slot(admit.slot)


class SavesAfterTheStep(Runner):
    def execute(self, plan: StepPlan) -> Sampled:
        saves = tuple(copy for copy in plan.copies if copy.kind is CopyKind.SAVE)
        others = tuple(copy for copy in plan.copies if copy.kind is not CopyKind.SAVE)
        sampled = super().execute(replace(plan, copies=others))
        for copy in saves:
            self._copy(copy)
        return sampled


class TornStore(StateStore):
    """Half of a state comes back."""

    def restore(self, cell: int, slot: int) -> None:
        parts = self._slots[slot]
        kept = [part.clone() for part in parts[: len(parts) // 2]]
        super().restore(cell, slot)
        for part, value in zip(parts, kept, strict=False):
            part.copy_(value)


class TornSpill(StateStore):
    """Half of a state reaches the host."""

    def spill(self, cell: int, host_cell: int) -> None:
        super().spill(cell, host_cell)
        for rows in self._host_cells:
            rows[host_cell, rows.shape[1] // 2 :] = 0


class KeepsNoConvolution(Model):
    def slot_tensors(self) -> list[Tensor]:
        mixers = [layer.mixer for layer in self.layers]
        return [m.state.recurrent for m in mixers if isinstance(m, GatedDeltaMixer)]


class KeepsNoNgrams(Model):
    def slot_tensors(self) -> list[Tensor]:
        mixers = [
            m for m in (layer.mixer for layer in self.layers) if isinstance(m, GatedDeltaMixer)
        ]
        return [tensor for m in mixers for tensor in (m.state.recurrent, m.state.conv)]


class DecaysOtherSlots(GatedDeltaMixer):
    """Rows that are not in the step are advanced by it, as padding rows would be."""

    def forward(self, x: Tensor, batch: StepBatch) -> Tensor:
        mine = {int(slot) for group in batch.groups for slot in group.slots}
        mine |= {row.slot for row in batch.prefill}
        y = super().forward(x, batch)
        for slot in set(range(self.state.recurrent.shape[0])) - mine:
            self.state.recurrent[slot] *= 0.5
        return y


class KeepsOldTables(BatchBuilder):
    """Pages that are found do not enter the slot's table."""

    def build(self, plan: StepPlan) -> StepBatch:
        starts = {row.slot: row.start for row in plan.rows}
        own = tuple(
            update for update in plan.page_updates
            if update.index >= starts.get(update.slot, 0) // self.page_tokens
        )  # fmt: skip
        return super().build(replace(plan, page_updates=own))


class KeepsParameters(Sampler):
    """A slot samples as its first owner did."""

    def admit(self, a: Any) -> None:
        if not self.seed[a.slot]:
            super().admit(a)


def keeps_all(matches: Tensor, dim: int) -> Tensor:
    """In place of a running product: drafts that match are counted, wherever they stand."""
    return matches


def fault(module: Any, name: str, one: Any, is_slow: bool = False) -> Any:
    marks = [pytest.mark.slow] if is_slow else []
    return pytest.param(module, name, one, id=one.__name__, marks=marks)


@pytest.mark.parametrize(
    ("module", "name", "faulty"),
    [
        fault(rank_module, "Runner", NeverResets),
        fault(rank_module, "Runner", ResetsAfterRestore, is_slow=True),
        fault(rank_module, "Runner", SavesAfterTheStep, is_slow=True),
        fault(runner_module, "StateStore", TornStore),
        fault(runner_module, "StateStore", TornSpill),
        fault(runner_module, "Model", KeepsNoConvolution, is_slow=True),
        fault(runner_module, "Model", KeepsNoNgrams, is_slow=True),
        fault(model_module, "GatedDeltaMixer", DecaysOtherSlots),
        fault(runner_module, "BatchBuilder", KeepsOldTables, is_slow=True),
        fault(runner_module, "Sampler", KeepsParameters, is_slow=True),
        fault(Tensor, "cumprod", keeps_all),
    ],
)
def test_a_seeded_fault_of_the_engine_changes_an_answer(
    start: Callable[[], Any], truth: Answers, monkeypatch: pytest.MonkeyPatch, module: Any,
    name: str, faulty: Any,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, name, faulty)
    parts = tell(start())
    assert any(truth[name] != answer for part in parts for name, answer in part.items())
