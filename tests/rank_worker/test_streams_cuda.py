"""The store's fences where copies really overlap: programs that go wrong when one is missing.

Needs torch alone: `python tests/rank_worker/test_streams_cuda.py` prints a verdict a program and
exits with 1 when one is wrong. Without a CUDA device the programs run on late CPU copies only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from time import perf_counter

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from rank_worker.late_streams import LateStreams
from rank_worker.state_store import StateStore, Verb
from rank_worker.streams import AcceleratorStreams, Fence, Queue, Streams

SLOTS, CELLS, HOST_CELLS = 3, 2, 2
LAG = 12  # copies of a cell that a queue is kept busy with


class Player:
    """Plays a program on a store; `wrong` elements are those that are not what they should be.

    Every write fills a slot with a number of its own, so a cell is described by one number.
    """

    def __init__(self, store: type[StateStore], streams: Streams, device: str, num: int) -> None:
        self.streams = streams
        self.tensors = [
            torch.zeros(SLOTS, num, device=device),
            torch.zeros(SLOTS, num // 2, dtype=torch.bfloat16, device=device),
            torch.zeros(SLOTS, 3, dtype=torch.int64, device=device),
        ]
        self.store = store(self.tensors, CELLS, HOST_CELLS, streams)
        self.factor = torch.full((4096 if num > 4096 else 8,) * 2, 0.5, device=device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)
        self.slots, self.cells, self.host_cells = [0] * SLOTS, [0] * CELLS, [0] * HOST_CELLS
        self.last = 0
        self.prepare()

    def prepare(self) -> None:
        """Every cell and host cell gets a number of its own, each step after the last is done."""
        for host_cell in range(HOST_CELLS):
            self.write(0)
            self.save(0, 0)
            self.settle()
            self.spill(0, host_cell)
            self.settle()
        for cell in range(CELLS):
            self.write(0)
            self.save(0, cell)
            self.settle()

    def compute(self, work: Callable[[], object]) -> None:
        if isinstance(self.streams, LateStreams):
            self.streams.run(Queue.COMPUTE, work)
        else:
            work()

    def settle(self) -> None:
        if isinstance(self.streams, LateStreams):
            self.streams.drain()
        else:
            torch.cuda.synchronize()

    def busy(self) -> None:
        """Milliseconds of products ahead of all that is computed next."""
        for _ in range(LAG):
            self.compute(lambda: torch.matmul(self.factor, self.factor))

    def write(self, slot: int) -> None:
        self.last = self.last % 250 + 1  # exact in bfloat16
        number = self.slots[slot] = self.last
        self.compute(lambda: [tensor[slot].fill_(number) for tensor in self.tensors])

    def read(self, slot: int) -> None:
        number = self.slots[slot]
        self.compute(lambda: [self.wrong.add_((t[slot] != number).sum()) for t in self.tensors])

    def save(self, slot: int, cell: int) -> None:
        self.store.save(slot, cell)
        self.cells[cell] = self.slots[slot]

    def restore(self, cell: int, slot: int) -> None:
        self.store.restore(cell, slot)
        self.slots[slot] = self.cells[cell]

    def spill(self, cell: int, host_cell: int) -> None:
        self.store.spill(cell, host_cell)
        self.host_cells[host_cell] = self.cells[cell]

    def fetch(self, host_cell: int, slot: int) -> None:
        self.store.fetch(host_cell, slot)
        self.slots[slot] = self.host_cells[host_cell]

    def count_wrong(self) -> int:
        """Reads all there is, each once all before is done."""
        self.settle()
        for slot in range(SLOTS):
            self.read(slot)
        for verb, count in ((self.restore, CELLS), (self.fetch, HOST_CELLS)):
            for cell in range(count):
                verb(cell, 0)
                self.settle()
                self.read(0)
        self.settle()
        return int(self.wrong)


def save_over_a_late_spill(player: Player) -> None:
    for _ in range(LAG):
        player.spill(1, 1)
    player.spill(0, 0)
    player.write(0)
    player.save(0, 0)


def spill_of_a_late_save(player: Player) -> None:
    player.busy()
    player.write(0)
    player.save(0, 0)
    player.spill(0, 0)


def spill_over_a_late_fetch(player: Player) -> None:
    for _ in range(LAG):
        player.fetch(1, 2)
    player.fetch(0, 0)
    player.spill(1, 0)


def fetch_of_a_late_spill(player: Player) -> None:
    for _ in range(LAG):
        player.spill(1, 1)
    player.spill(1, 0)
    player.fetch(0, 0)


def fetch_over_a_late_write(player: Player) -> None:
    player.busy()
    player.write(0)
    player.fetch(0, 0)


def read_of_a_late_fetch(player: Player) -> None:
    for _ in range(LAG):
        player.fetch(1, 2)
    player.fetch(0, 0)
    player.read(0)


Program = Callable[[Player], None]
# The program that goes wrong when the first queue doesn't wait for the second.
PROGRAMS: dict[tuple[Queue, Queue], Program] = {
    (Queue.COMPUTE, Queue.ARCHIVE): save_over_a_late_spill,
    (Queue.ARCHIVE, Queue.COMPUTE): spill_of_a_late_save,
    (Queue.ARCHIVE, Queue.RESTORE): spill_over_a_late_fetch,
    (Queue.RESTORE, Queue.ARCHIVE): fetch_of_a_late_spill,
    (Queue.RESTORE, Queue.COMPUTE): fetch_over_a_late_write,
    (Queue.COMPUTE, Queue.RESTORE): read_of_a_late_fetch,
}


def random_program(seed: int) -> Program:
    def play(player: Player) -> None:
        random = Random(seed)
        for _ in range(120):
            slot, cell, host_cell = (random.randrange(n) for n in (SLOTS, CELLS, HOST_CELLS))
            step = random.randrange(7)
            if step == 0:
                player.write(slot)
            elif step == 1:
                player.read(slot)
            elif step == 2:
                player.save(slot, cell)
            elif step == 3:
                player.restore(cell, slot)
            elif step == 4:
                player.spill(cell, host_cell)
            elif step == 5:
                player.fetch(host_cell, slot)
            elif random.randrange(4) == 0:
                player.busy()

    return play


def without(*dropped: tuple[Queue, Queue]) -> type[StateStore]:
    """A store in which the first queue of a pair never waits for the second."""

    class Faulty(StateStore):
        def _wait(self, queue: Queue, after: Queue, fence: Fence | None) -> None:
            if (queue, after) not in dropped:
                super()._wait(queue, after, fence)

    return Faulty


def play(program: Program, store: type[StateStore], streams: Streams, device: str, num: int) -> int:
    player = Player(store, streams, device, num)
    program(player)
    return player.count_wrong()


def on_late_copies(program: Program, store: type[StateStore], seed: int) -> int:
    return play(program, store, LateStreams(seed, late_compute=True), "cpu", 4)


def on_cuda(program: Program, store: type[StateStore]) -> int:
    """A slot of 40 MiB: a millisecond or so over PCIe."""
    return play(program, store, AcceleratorStreams(torch.cuda), "cuda", 8 << 20)


def test_programs_are_right_on_late_copies() -> None:
    for seed in range(20):
        for program in (*PROGRAMS.values(), random_program(seed)):
            assert on_late_copies(program, StateStore, seed) == 0


def test_programs_show_a_missing_fence_on_late_copies() -> None:
    for dropped, program in PROGRAMS.items():
        assert any(on_late_copies(program, without(dropped), seed) for seed in range(10)), dropped
    assert on_late_copies(random_program(0), without(*PROGRAMS), 0)


def test_programs_on_a_cuda_device() -> None:
    import pytest

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    assert problems_on_cuda() == []


def problems_on_cuda() -> list[str]:
    """Prints a line a program; names of those that went wrong with fences or right without."""
    problems = []

    def judge(name: str, programs: Iterable[Program], store: type[StateStore], goes: str) -> None:
        wrong = sum(on_cuda(program, store) for program in programs)
        is_ok = ("wrong" if wrong else "right") == goes
        print(f"{'ok ' if is_ok else 'BAD'} {name}: {wrong} wrong elements", flush=True)
        if not is_ok:
            problems.append(name)

    programs = [random_program(seed) for seed in range(8)]
    judge("random programs, all fences", programs, StateStore, "right")
    judge("random programs, no fence", programs, without(*PROGRAMS), "wrong")
    for dropped, program in PROGRAMS.items():
        name = program.__name__.replace("_", " ")
        judge(f"{name}, all fences", [program], StateStore, "right")
        missing = f"{dropped[0].name} doesn't wait for {dropped[1].name}"
        judge(f"{name}, {missing}", [program], without(dropped), "wrong")
    return problems


def print_rates() -> None:
    """Bytes a second of each verb alone, and how long the host takes to ask for it."""
    player = Player(StateStore, AcceleratorStreams(torch.cuda), "cuda", 8 << 20)
    verbs = {Verb.SAVE: player.save, Verb.SPILL: player.spill}
    verbs |= {Verb.RESTORE: player.restore, Verb.FETCH: player.fetch}
    for verb, copy in verbs.items():
        before = player.store.ledger(verb)
        asked = 0.0
        for _ in range(LAG):
            begin = perf_counter()
            copy(0, 0)
            asked += perf_counter() - begin
            player.settle()
        ledger = player.store.ledger(verb)
        seconds = ledger.seconds - before.seconds
        rate = (ledger.bytes - before.bytes) / seconds / 1e9
        device_ms, host_ms = seconds / LAG * 1e3, asked / LAG * 1e3
        print(f"{verb}: {rate:.1f} GB/s, {device_ms:.3f} ms on the device, {host_ms:.3f} ms to ask")


def print_overlap() -> None:
    """Wall time of computing and of spilling, each alone and both at once."""
    player = Player(StateStore, AcceleratorStreams(torch.cuda), "cuda", 8 << 20)

    def spills() -> None:
        for _ in range(LAG):
            player.spill(1, 1)

    def wall_ms(*works: Callable[[], None]) -> float:
        player.settle()
        begin = perf_counter()
        for work in works:
            work()
        player.settle()
        return (perf_counter() - begin) * 1e3

    compute, spill, both = wall_ms(player.busy), wall_ms(spills), wall_ms(player.busy, spills)
    print(f"computing {compute:.1f} ms, spilling {spill:.1f} ms, both at once {both:.1f} ms")


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device")
        return 1
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    problems = problems_on_cuda()
    print_rates()
    print_overlap()
    print(f"verdict: {problems or 'as it should be'}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
