"""Which request runs in which slot, on every rank: for error messages, nothing depends on it.

Rank 0 sends the names of a step's admitted requests after its plan, as int32 words like the plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np

from rank_worker.sequence import Sequence
from rank_worker.step_plan import Admit, StepPlan

SHOWN = 8  # names in one message


class SlotNames:
    """Names of the requests that slots were last handed to."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}

    def tell(self, admits: Iterable[Admit], running: Iterable[Sequence]) -> np.ndarray:
        """Rank 0: takes the names of the admitted and returns the message for the others."""
        names = {sequence.slot: sequence.request.request_id for sequence in running}
        told = [names[admit.slot] for admit in admits]
        text = json.dumps(told).encode()
        words = np.frombuffer(text + b" " * (-len(text) % 4), dtype=np.int32)
        self.hear(admits, words)
        return words

    def hear(self, admits: Iterable[Admit], words: np.ndarray) -> None:
        """Other ranks: takes the message that follows a plan with `admits`."""
        names = json.loads(words.tobytes())
        self._names |= {admit.slot: name for admit, name in zip(admits, names, strict=True)}

    def text(self, plan: StepPlan) -> str:
        """The requests that `plan` computes, in row order."""
        names = [self._names.get(row.slot, f"in slot {row.slot}") for row in plan.rows]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        return f"request{'s' * (len(names) > 1)} {', '.join(names[:SHOWN])}{more}"
