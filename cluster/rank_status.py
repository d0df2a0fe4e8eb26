"""One rank as /status shows it, put together from what it and its placement told.

Owns no state and asks only for load progress, with a limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cluster.client import RankStatus
from cluster.gang import RankHandle
from placement.errors import RankError
from rank_worker.messages import LoadProgress, RankIdentity, RankSnapshot


async def load_progress(ranks: Sequence[RankHandle], timeout_s: float) -> dict[int, LoadProgress]:
    """How far each rank has loaded; ranks that do not answer within `timeout_s` are left out."""
    tasks = {asyncio.ensure_future(rank.progress()): i for i, rank in enumerate(ranks)}
    done, pending = await asyncio.wait(tasks, timeout=timeout_s)
    for task in pending:
        task.cancel()
    answers = {}
    for task in done:
        error = task.exception()
        if error is None:
            answers[tasks[task]] = task.result()
        elif not isinstance(error, RankError):
            raise error
    return answers


def rank_status(
    identity: RankIdentity,
    progress: LoadProgress,
    snapshot: RankSnapshot | None,
    heartbeat_age_s: float,
    planned_bytes: int,
) -> RankStatus:
    """Measured bytes are those of all ledger rows once it runs, those read before."""
    measured = sum(snapshot.memory_bytes.values()) if snapshot else progress.read_bytes
    return RankStatus(
        rank=progress.rank,
        phase=progress.phase,
        pid=identity.pid,
        node=identity.node,
        physical_chip=identity.physical_chip,
        step=snapshot.step if snapshot else 0,
        heartbeat_age_s=heartbeat_age_s,
        planned_bytes=planned_bytes,
        measured_bytes=measured,
    )
