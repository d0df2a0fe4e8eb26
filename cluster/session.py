"""A started gang at work: requests out, batches back, snapshots, and the first sign of failure.

Lives as long as one gang does. Knows no admission, no HTTP state and no restart.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from cluster.gang import Gang, ProgressWatch, RankHandle
from cluster.outbox import Outbox
from placement.config import EngineConfig
from placement.errors import NrankError, PeerError, RankError
from rank_worker.guard_word import Order
from rank_worker.messages import EngineRequest, LoadProgress, RankSnapshot, TokenBatch
from rank_worker.time_limit import TimeLimit

POLL_S = 1.0  # an idle poll for outputs returns after this time
PROBE_ID = "nrank-first-step"
PROBE = EngineRequest(PROBE_ID, prompt_ids=(0,), max_tokens=1, ignore_eos=True)


@dataclass(frozen=True)
class GangListener:
    """Whom a gang tells, and who knows whether work is queued.

    `on_end` comes at the end of every life, with its failure; `on_restart` before the next one.
    """

    on_batch: Callable[[TokenBatch], None]
    on_snapshot: Callable[[RankSnapshot], None]
    on_load: Callable[[int, Sequence[LoadProgress]], None]  # epoch, ranks that load
    on_ready: Callable[[tuple[RankSnapshot, ...]], None]  # one snapshot a rank
    on_end: Callable[[NrankError | None], None]
    on_restart: Callable[[NrankError], None]
    has_work: Callable[[], bool]
    order: Callable[[], Order]  # by the heat guard or by hand: at rest, nothing is late


class Session:
    """run() serves until stop() or the first failure; `ready` is set by the first common step."""

    def __init__(
        self,
        gang: Gang,
        config: EngineConfig,
        epoch: int,
        listener: GangListener,
        interval_s: float,
        on_ready: Callable[[], None],
    ) -> None:
        self._gang = gang
        self._config = config
        self._epoch = epoch
        self._listener = listener
        self._interval_s = interval_s
        self._on_ready = on_ready
        self._snapshots: dict[int, RankSnapshot] = {}
        self._probe_done = asyncio.Event()
        self._watch = ProgressWatch(gang.world_size, config.step_timeout_s, time.monotonic())
        self.outbox = Outbox()
        self.ready = asyncio.Event()

    @property
    def snapshots(self) -> tuple[RankSnapshot, ...]:
        """The last one of each rank that has sent any."""
        return tuple(self._snapshots[rank] for rank in sorted(self._snapshots))

    def heartbeat_age_s(self, rank: int) -> float:
        return self._watch.age_s(rank, time.monotonic())

    async def run(self) -> None:
        """Returns when the ranks ended after stop(); raises RankError on any failure."""
        jobs: list[Awaitable[None]] = [
            self._gang.watch(),
            self._pump(),
            self.outbox.run(self._gang.leader),
            self._become_ready(),
            self._check(),
            *(self._poll(index, rank) for index, rank in enumerate(self._gang.ranks)),
        ]
        tasks = [asyncio.ensure_future(job) for job in jobs]
        watch = tasks[0]
        open_tasks = set(tasks)
        try:
            while not watch.done():
                done, open_tasks = await asyncio.wait(
                    open_tasks, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    task.result()
        except PeerError as error:
            raise self._watch.blame(error) from error
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self, timeout_s: float) -> None:
        await self._gang.stop(timeout_s)

    async def expert_counts(self) -> list[list[int]]:
        return await self._gang.leader.expert_counts()

    async def refresh(self) -> tuple[RankSnapshot, ...]:
        """Asks every rank now, instead of telling the last answers."""
        for snapshot in await asyncio.gather(*(rank.snapshot() for rank in self._gang.ranks)):
            self._heard(snapshot)
        return self.snapshots

    def _heard(self, snapshot: RankSnapshot) -> None:
        # The epoch is ours: an engine doesn't know which life of the gang it belongs to.
        snapshot = replace(snapshot, epoch=self._epoch)
        self._snapshots[snapshot.rank] = snapshot
        self._listener.on_snapshot(snapshot)
        self._watch.heard(snapshot, time.monotonic())

    async def _pump(self) -> None:
        while True:
            for batch in await self._gang.leader.poll_outputs(POLL_S):
                if batch.request_id == PROBE_ID:
                    self._probed(batch)
                else:
                    self._listener.on_batch(batch)

    def _probed(self, batch: TokenBatch) -> None:
        if batch.error_kind is not None:
            raise RankError(f"the first step failed: {batch.error_message}", phase="warm-up")
        self._probe_done.set()

    async def _become_ready(self) -> None:
        """Readiness is one step committed by every rank, made by a request of one token."""
        await self._gang.leader.submit((PROBE,))  # past the outbox, which may be on hold
        timeout_s = self._config.start_timeout_s
        step = asyncio.ensure_future(self._first_step_everywhere())
        limit = TimeLimit(timeout_s, lambda: self._listener.order().is_still)
        try:
            while limit.left_s() > 0 and not step.done():
                await asyncio.wait({step}, timeout=limit.next_look_s())
            if not step.done():
                raise RankError(self._late(timeout_s), phase="warm-up")
            step.result()
        finally:
            step.cancel()
        self.ready.set()
        self._on_ready()

    async def _first_step_everywhere(self) -> None:
        await self._probe_done.wait()
        while True:
            if all(snapshot.step >= 1 for snapshot in await self.refresh()):
                return
            await asyncio.sleep(0.05)

    def _late(self, timeout_s: float) -> str:
        steps = {snapshot.rank: snapshot.step for snapshot in self.snapshots}
        late = [str(r) for r in range(self._gang.world_size) if steps.get(r, 0) < 1]
        return (
            f"the first step was not committed by rank(s) {', '.join(late) or '0'} within "
            f"start_timeout_s={timeout_s:g}"
        )

    async def _poll(self, index: int, rank: RankHandle) -> None:
        while True:
            self._heard(await rank.snapshot())
            await asyncio.sleep(self._interval_s)

    async def _check(self) -> None:
        """The watchdog: a silent rank or a step that never ends."""
        while True:
            await asyncio.sleep(min(self._interval_s, self._config.step_timeout_s / 4))
            working = self._listener.has_work() or not self.ready.is_set()
            working = working and not self._listener.order().is_still
            error = self._watch.verdict(time.monotonic(), working)
            if error is not None:
                raise error
