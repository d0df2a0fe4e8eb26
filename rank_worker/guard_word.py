"""What the heat guard wants of a gang, in one byte that a rank reads between steps and reads.

Owns the orders. One byte, so that it can lie in memory that processes share. Decides nothing.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum


class Order(IntEnum):
    """The greater one wins where two are given."""

    RUN = 0
    PACE = 1  # a load rests as long as it reads; steps go on
    HOLD = 2  # no step and no read; all state stays
    CUT = 3  # the same, and the coordinator ends what runs

    @property
    def is_still(self) -> bool:
        """True when no step may begin."""
        return self >= Order.HOLD

    @property
    def slows_loads(self) -> bool:
        """True when a load that is late has a reason."""
        return self is not Order.RUN


class GuardWord:
    """The byte. `cell` may be one of `multiprocessing.sharedctypes`."""

    def __init__(self, cell: ctypes.c_byte | None = None) -> None:
        self.cell = ctypes.c_byte(Order.RUN) if cell is None else cell

    @property
    def order(self) -> Order:
        return Order(self.cell.value)

    def give(self, order: Order) -> None:
        self.cell.value = order
