"""Where the recurrent states of prefixes lie: cells on the device, spilled to cells on the host.

The least recently used state makes room. Owns numbers only: the copies that it asks for are made
by every rank (`rank_worker.state_store`).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from rank_worker.prefix_tree import Node
from rank_worker.step_plan import CopyKind, StateCopy


class _Tier:
    """Cells of one kind of memory, and whose state they hold: least recently used first."""

    def __init__(self, num_cells: int) -> None:
        self.num_cells = num_cells
        self.free = list(range(num_cells - 1, -1, -1))
        self.held: OrderedDict[Node, int] = OrderedDict()

    def hold(self, node: Node) -> int:
        cell = self.free.pop()
        self.held[node] = cell
        return cell

    def oldest(self) -> Node:
        return next(iter(self.held))

    def drop(self, node: Node) -> int:
        cell = self.held.pop(node)
        self.free.append(cell)
        return cell

    def check(self) -> None:
        cells = sorted(self.free + list(self.held.values()))
        assert cells == list(range(self.num_cells)), "state cells lost or doubled"
        assert all(node.is_cached for node in self.held), "a state of an evicted prefix is kept"


@dataclass
class CellCounts:
    """Since the start."""

    saves: int = 0
    spills: int = 0
    drops: int = 0  # states that made room and are on neither tier any more
    restores: int = 0  # from the device
    fetches: int = 0  # from the host


class StateCells:
    """A node's state lies in one cell of one tier, or nowhere."""

    def __init__(self, num_cells: int, num_host_cells: int) -> None:
        self.device, self.host = _Tier(num_cells), _Tier(num_host_cells)
        self.counts = CellCounts()

    def has(self, node: Node) -> bool:
        return node in self.device.held or node in self.host.held

    def save(self, node: Node, slot: int) -> list[StateCopy]:
        """Copies that put the state of `slot` into a device cell for `node`, in this order.

        None where `node` has a state already, which counts as a use of it.
        """
        if self.has(node):
            self.touch(node)
            return []
        copies = [] if self.device.free else self._make_room()
        if not self.device.free:
            return copies
        cell = self.device.hold(node)
        node.lost_state = False
        self.counts.saves += 1
        return [*copies, StateCopy(CopyKind.SAVE, slot, cell)]

    def load(self, node: Node, slot: int) -> StateCopy:
        """The copy that puts the state of `node` into `slot`."""
        self.touch(node)
        if node in self.device.held:
            self.counts.restores += 1
            return StateCopy(CopyKind.RESTORE, self.device.held[node], slot)
        self.counts.fetches += 1
        return StateCopy(CopyKind.FETCH, self.host.held[node], slot)

    def touch(self, node: Node) -> None:
        for tier in (self.device, self.host):
            if node in tier.held:
                tier.held.move_to_end(node)

    def drop(self, node: Node) -> None:
        """Forgets the state of `node`, if it has one."""
        for tier in (self.device, self.host):
            if node in tier.held:
                tier.drop(node)
                self.counts.drops += 1

    def _make_room(self) -> list[StateCopy]:
        """Frees one device cell: its state goes to the host, or nowhere where none has room."""
        if not self.device.held:
            return []
        node = self.device.oldest()
        cell = self.device.drop(node)
        if not self.host.num_cells:
            self._lose(node)
            return []
        if not self.host.free:
            oldest = self.host.oldest()
            self.host.drop(oldest)
            self._lose(oldest)
        self.counts.spills += 1
        return [StateCopy(CopyKind.SPILL, cell, self.host.hold(node))]

    def _lose(self, node: Node) -> None:
        node.lost_state = True
        self.counts.drops += 1

    def check(self) -> None:
        """Raises AssertionError when cells are lost, doubled, or hold what is not cached."""
        self.device.check()
        self.host.check()
        both = self.device.held.keys() & self.host.held.keys()
        assert not both, "a state lies on both tiers"
