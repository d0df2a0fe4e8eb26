"""How far the ranks of a gang have loaded, asked for while they load.

Owns the polling and the last answers. Knows no deadline and no metrics.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from placement.errors import RankError
from rank_worker.messages import LoadProgress

if TYPE_CHECKING:
    from cluster.gang import RankHandle

ASK_S = 0.5  # a rank that does not answer for so long is left out of this round
INTERVAL_S = 0.5


class LoadWatch:
    """run() asks all ranks again and again until it is cancelled; `last` has the last answers."""

    def __init__(
        self,
        ranks: Sequence[RankHandle],
        on_progress: Callable[[Sequence[LoadProgress]], None],
    ) -> None:
        self._ranks = ranks
        self._on_progress = on_progress
        self.last: Mapping[int, LoadProgress] = {}

    async def run(self) -> None:
        while True:
            await self.ask()
            await asyncio.sleep(INTERVAL_S)

    async def ask(self) -> list[LoadProgress]:
        """One round. Ranks that fail are left out: their load tells why."""
        tasks = {asyncio.ensure_future(rank.progress()): i for i, rank in enumerate(self._ranks)}
        try:
            done, _ = await asyncio.wait(tasks, timeout=ASK_S)
        finally:
            for task in tasks:
                task.cancel()
        answers = {tasks[task]: _answer(task) for task in done}
        self.last = {**self.last, **{i: a for i, a in answers.items() if a is not None}}
        found = [self.last[index] for index in sorted(self.last)]
        self._on_progress(found)
        return found


def _answer(task: asyncio.Future[LoadProgress]) -> LoadProgress | None:
    error = task.exception()
    if error is None:
        return task.result()
    if isinstance(error, RankError):
        return None
    raise error
