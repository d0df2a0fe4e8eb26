"""Checkpoints stay what they were saved as, however late and out of order copies happen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from placement.errors import RankError
from rank_worker.late_streams import LateStreams
from rank_worker.state_store import CopyLedger, StateStore, Verb
from rank_worker.streams import AcceleratorStreams, Fence, HostStreams, Queue, Streams

SLOTS, CELLS, HOST_CELLS = 3, 2, 2
SHAPES = [
    ((3, 5), torch.float32), ((7,), torch.bfloat16), ((), torch.int64), ((2, 0, 4), torch.float32),
    ((1, 3, 3), torch.float16), ((5,), torch.bool), ((2, 2), torch.float32), ((3,), torch.uint8),
]  # fmt: skip
CELL_BYTES = 15 * 4 + 7 * 2 + 8 + 9 * 2 + 5 + 4 * 4 + 3

Content = tuple[bytes, ...]  # of one slot: the bytes of each tensor's row
ZEROS: Content = tuple(bytes(dtype.itemsize * torch.Size(shape).numel()) for shape, dtype in SHAPES)


def slot_tensors() -> list[Tensor]:
    return [torch.zeros(SLOTS, *shape, dtype=dtype) for shape, dtype in SHAPES]


def random_content(random: Random) -> Content:
    return tuple(
        bytes(random.randrange(2) for _ in row)
        if dtype is torch.bool
        else random.randbytes(len(row))
        for row, (_, dtype) in zip(ZEROS, SHAPES, strict=True)
    )


def read(tensors: list[Tensor], slot: int) -> Content:
    return tuple(t[slot].reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)


def write(tensors: list[Tensor], slot: int, content: Content) -> None:
    for tensor, row in zip(tensors, content, strict=True):
        if row:
            new = torch.frombuffer(bytearray(row), dtype=tensor.dtype)
            tensor[slot].copy_(new.view(tensor.shape[1:]))


def host_only(seed: int) -> Streams:
    return HostStreams()


def late_copies(seed: int) -> Streams:
    return LateStreams(seed)


def late_device(seed: int) -> Streams:
    return LateStreams(seed, late_compute=True)


class StoreMachine(RuleBasedStateMachine):
    """Random steps of a model and a scheduler, beside dictionaries that copy at once."""

    slots, cells, host_cells = (st.integers(0, n - 1) for n in (SLOTS, CELLS, HOST_CELLS))
    store_class: type[StateStore]
    streams_of: Callable[[int], Streams]

    @initialize(seed=st.integers(0, 2**32 - 1))
    def start(self, seed: int) -> None:
        self.random = Random(seed)
        self.tensors = slot_tensors()
        self.streams = type(self).streams_of(seed)
        self.store = self.store_class(self.tensors, CELLS, HOST_CELLS, self.streams)
        self.slots = [ZEROS] * SLOTS
        self.cells = [ZEROS] * CELLS
        self.host_cells = [ZEROS] * HOST_CELLS
        self.counts = dict.fromkeys(Verb, 0)
        self.seen: list[tuple[Content, Content]] = []  # (in a slot, expected there)
        for cell in range(CELLS):
            self.compute_writes(0)
            self.save(0, cell)
        for host_cell in range(HOST_CELLS):
            self.spill(0, host_cell)
        self.drain()

    def compute(self, work: Callable[[], object]) -> None:
        if isinstance(self.streams, LateStreams):
            self.streams.run(Queue.COMPUTE, work)
        else:
            work()

    def put(self, slot: int, content: Content) -> None:
        self.slots[slot] = content
        self.compute(lambda: write(self.tensors, slot, content))

    @rule(slot=slots)
    def compute_writes(self, slot: int) -> None:
        self.put(slot, random_content(self.random))

    @rule(slot=slots)
    def compute_zeroes(self, slot: int) -> None:
        self.put(slot, ZEROS)

    @rule(giver=slots, taker=slots)
    def compute_reads_and_writes(self, giver: int, taker: int) -> None:
        self.slots[taker] = self.slots[giver]
        self.compute(lambda: write(self.tensors, taker, read(self.tensors, giver)))

    @rule(slot=slots)
    def compute_reads(self, slot: int) -> None:
        expected = self.slots[slot]
        self.compute(lambda: self.seen.append((read(self.tensors, slot), expected)))

    @rule(slot=slots, cell=cells)
    def save(self, slot: int, cell: int) -> None:
        self.store.save(slot, cell)
        self.cells[cell] = self.slots[slot]
        self.counts[Verb.SAVE] += 1

    @rule(cell=cells, slot=slots)
    def restore(self, cell: int, slot: int) -> None:
        self.store.restore(cell, slot)
        self.slots[slot] = self.cells[cell]
        self.counts[Verb.RESTORE] += 1
        self.compute_reads(slot)

    @rule(cell=cells, host_cell=host_cells)
    def spill(self, cell: int, host_cell: int) -> None:
        self.store.spill(cell, host_cell)
        self.host_cells[host_cell] = self.cells[cell]
        self.counts[Verb.SPILL] += 1

    @rule(host_cell=host_cells, slot=slots)
    def fetch(self, host_cell: int, slot: int) -> None:
        self.store.fetch(host_cell, slot)
        self.slots[slot] = self.host_cells[host_cell]
        self.counts[Verb.FETCH] += 1
        self.compute_reads(slot)

    def teardown(self) -> None:
        """Once all is done, every slot, cell and host cell holds what it should."""
        self.drain()
        for slot, content in enumerate(self.slots):
            assert read(self.tensors, slot) == content
        for verb, held in ((self.store.restore, self.cells), (self.store.fetch, self.host_cells)):
            for cell, content in enumerate(held):
                verb(cell, 0)
                self.drain()
                assert read(self.tensors, 0) == content
        for found, expected in self.seen:
            assert found == expected
        self.counts[Verb.RESTORE] += len(self.cells)
        self.counts[Verb.FETCH] += len(self.host_cells)
        for verb, count in self.counts.items():
            ledger = self.store.ledger(verb)
            assert (ledger.count, ledger.bytes) == (count, count * CELL_BYTES)
            assert ledger.untimed == 0

    def drain(self) -> None:
        if isinstance(self.streams, LateStreams):
            self.streams.drain()


def run_machine(
    streams_of: Callable[[int], Streams], store: type[StateStore] = StateStore, examples: int = 100
) -> None:
    """The same examples in every run; AssertionError when one goes wrong."""
    machine = type("Machine", (StoreMachine,), {"store_class": store, "streams_of": streams_of})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=50, derandomize=True, deadline=None,
            phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip


@pytest.mark.parametrize("streams_of", [host_only, late_copies, late_device])
def test_checkpoints_hold_under_random_programs(streams_of: Callable[[int], Streams]) -> None:
    run_machine(streams_of)


def without_wait(queue: Queue, after: Queue) -> type[StateStore]:
    """A store in which `queue` never waits for what stands in queue `after`."""

    class Faulty(StateStore):
        def _wait(self, waiting: Queue, standing: Queue, fence: Fence | None) -> None:
            if (waiting, standing) != (queue, after):
                super()._wait(waiting, standing, fence)

    return Faulty


WAITS = [
    pytest.param(Queue.COMPUTE, Queue.ARCHIVE, id="a save overwrites what is being spilled"),
    pytest.param(Queue.ARCHIVE, Queue.COMPUTE, id="a spill reads what is being saved"),
    pytest.param(Queue.ARCHIVE, Queue.RESTORE, id="a spill overwrites what is being fetched"),
    pytest.param(Queue.RESTORE, Queue.ARCHIVE, id="a fetch reads what is being spilled"),
    pytest.param(Queue.RESTORE, Queue.COMPUTE, id="a fetch overwrites a slot in use"),
    pytest.param(Queue.COMPUTE, Queue.RESTORE, id="a slot is used before it is fetched"),
]


@pytest.mark.parametrize(("queue", "after"), WAITS)
def test_a_missing_fence_is_found(queue: Queue, after: Queue) -> None:
    with pytest.raises(AssertionError):
        run_machine(late_device, without_wait(queue, after), examples=300)


@pytest.mark.parametrize(("queue", "after"), [WAITS[0], WAITS[3], WAITS[5]])
def test_a_missing_fence_is_found_when_the_host_computes(queue: Queue, after: Queue) -> None:
    """The waits for and of COMPUTE that a host keeps by itself can't be missed there."""
    with pytest.raises(AssertionError):
        run_machine(late_copies, without_wait(queue, after), examples=300)


def test_the_ledger_counts_and_times_each_verb_without_waiting() -> None:
    """A simulated second a tensor: a slot has two, a cell one of their one dtype."""
    streams = LateStreams(0)
    streams.eagerness = 0.0
    store = StateStore([torch.zeros(3, 10), torch.zeros(3, 4, 2)], 2, 2, streams)
    nothing = CopyLedger(0, 0, 0.0, 0)
    assert [store.ledger(verb) for verb in Verb] == [nothing] * 4
    store.save(0, 0)
    store.save(1, 1)
    store.spill(0, 0)
    store.spill(1, 1)
    assert store.ledger(Verb.SAVE) == CopyLedger(2, 2 * 72, 4.0, 0)
    assert store.ledger(Verb.SPILL) == CopyLedger(2, 2 * 72, 0.0, 2)
    store.fetch(0, 2)
    assert store.ledger(Verb.SPILL) == CopyLedger(2, 2 * 72, 1.0, 1)
    assert store.ledger(Verb.FETCH) == CopyLedger(1, 72, 2.0, 0)
    streams.drain()
    assert store.ledger(Verb.SPILL) == CopyLedger(2, 2 * 72, 1.0 + 3.0, 0), "a fetch came between"
    assert store.ledger(Verb.RESTORE) == nothing


def test_the_store_tells_its_bytes() -> None:
    store = StateStore(slot_tensors(), CELLS, 5, HostStreams())
    assert store.cell_bytes() == CELL_BYTES
    assert store.nbytes() == CELLS * CELL_BYTES
    assert store.host_nbytes() == 5 * CELL_BYTES


def test_a_rank_without_state_follows_the_same_plan() -> None:
    store = StateStore([torch.zeros(SLOTS, 0, 8)], CELLS, HOST_CELLS, HostStreams())
    store.save(2, 1)
    store.spill(1, 0)
    store.fetch(0, 0)
    store.restore(1, 1)
    assert store.ledger(Verb.FETCH).count == 1
    assert store.cell_bytes() == store.nbytes() == store.host_nbytes() == 0


@pytest.mark.parametrize(
    ("verb", "numbers", "message"),
    [
        ("save", (3, 0), "save names slot 3, and there are 3"),
        ("save", (0, 2), "save names cell 2, and there are 2"),
        ("spill", (-1, 0), "spill names cell -1, and there are 2"),
        ("spill", (0, 4), "spill names host cell 4, and there are 4"),
        ("restore", (7, 0), "restore names cell 7, and there are 2"),
        ("restore", (0, -3), "restore names slot -3, and there are 3"),
        ("fetch", (-4, 0), "fetch names host cell -4, and there are 4"),
        ("fetch", (0, 3), "fetch names slot 3, and there are 3"),
    ],
)
def test_a_number_out_of_range_is_refused_before_anything_is_copied(
    verb: str, numbers: tuple[int, int], message: str
) -> None:
    store = StateStore(slot_tensors(), CELLS, 4, LateStreams(0))
    with pytest.raises(RankError, match=message):
        getattr(store, verb)(*numbers)
    assert [store.ledger(verb).count for verb in Verb] == [0] * 4


def test_a_late_copy_sees_its_source_when_it_happens() -> None:
    streams = LateStreams(0)
    streams.eagerness = 0.0
    source, target = torch.zeros(3), torch.zeros(3)
    streams.copy(Queue.ARCHIVE, source, target)
    source.fill_(1)
    assert target.tolist() == [0, 0, 0]
    streams.drain()
    assert target.tolist() == [1, 1, 1]


def test_waiting_completes_what_the_fence_needs_and_nothing_else() -> None:
    streams = LateStreams(0)
    streams.eagerness = 0.0
    done: list[str] = []
    streams.run(Queue.ARCHIVE, lambda: done.append("needed spill"))
    spilled = streams.record(Queue.ARCHIVE)
    streams.run(Queue.ARCHIVE, lambda: done.append("later spill"))
    streams.wait(Queue.RESTORE, spilled)
    streams.run(Queue.RESTORE, lambda: done.append("fetch"))
    fetched = streams.record(Queue.RESTORE)
    streams.run(Queue.RESTORE, lambda: done.append("later fetch"))
    assert streams.seconds(spilled, fetched) is None
    streams.wait(Queue.COMPUTE, fetched)
    assert done == ["needed spill", "fetch"]
    assert streams.seconds(spilled, fetched) == 1.0


def test_late_queues_keep_their_order_and_overtake_each_other() -> None:
    def happened(seed: int) -> tuple[str, ...]:
        streams = LateStreams(seed)
        done: list[str] = []
        for number in "012":
            for queue in (Queue.ARCHIVE, Queue.RESTORE):
                streams.run(queue, lambda name=queue.name[0] + number: done.append(name))
        streams.drain()
        return tuple(done)

    orders = {happened(seed) for seed in range(40)}
    assert len(orders) > 8
    for order in orders:
        for queue in "AR":
            assert [name for name in order if name[0] == queue] == [queue + n for n in "012"]
    assert happened(7) == happened(7)


class Recorder:
    """The calls of a torch backend module, written down."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []
        self.current, self.num_streams = "current", 0

    def Stream(self) -> Any:
        self.num_streams += 1
        return RecordedStream(self, f"side {self.num_streams}")

    def Event(self, enable_timing: bool) -> Any:
        assert enable_timing
        return RecordedEvent(self)

    def current_stream(self) -> Any:
        return RecordedStream(self, self.current)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    def copy_(self, source: str, non_blocking: bool) -> None:
        self.log.append((self.current, "copies", source, non_blocking))


class RecordedStream:
    def __init__(self, backend: Recorder, name: str) -> None:
        self.backend, self.name = backend, name

    def wait_event(self, event: Any) -> None:
        self.backend.log.append((self.name, "waits for", event.stream))


class RecordedEvent:
    def __init__(self, backend: Recorder) -> None:
        self.backend, self.is_done = backend, False

    def record(self, stream: RecordedStream) -> None:
        self.stream = stream.name
        self.backend.log.append((self.stream, "records"))

    def query(self) -> bool:
        return self.is_done

    def elapsed_time(self, end: RecordedEvent) -> float:
        assert end.is_done
        return 2500.0


def test_accelerator_queues_are_streams_of_the_backend() -> None:
    backend: Any = Recorder()
    streams: Any = AcceleratorStreams(backend)
    begin = streams.record(Queue.ARCHIVE)
    streams.copy(Queue.ARCHIVE, "a cell", backend)
    streams.copy(Queue.COMPUTE, "a slot", backend)
    end = streams.record(Queue.ARCHIVE)
    streams.wait(Queue.COMPUTE, end)
    streams.wait(Queue.RESTORE, end)
    assert backend.log == [
        ("side 1", "records"),
        ("side 1", "copies", "a cell", True),
        ("current", "copies", "a slot", True),
        ("side 1", "records"),
        ("current", "waits for", "side 1"),
        ("side 2", "waits for", "side 1"),
    ]
    assert streams.seconds(begin, end) is None
    end.is_done = True
    assert streams.seconds(begin, end) == 2.5
