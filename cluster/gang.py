"""One gang: its ranks from placement to their end, start phases with deadlines, who is missing.

Owns the order of a start and the watch over ranks that run. Knows no Ray, no threads and no
device: a `Launcher` makes the ranks, a `RankHandle` talks to one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from cluster.load_watch import LoadWatch
from placement.config import EngineConfig
from placement.errors import NrankError, PeerError, RankError
from rank_worker.device_sensors.reading import NodeReading
from rank_worker.guard_word import Order
from rank_worker.load_progress import rank_text, slowest
from rank_worker.messages import (
    EngineRequest,
    LoadProgress,
    RankIdentity,
    RankSnapshot,
    TokenBatch,
)
from rank_worker.time_limit import TimeLimit

T = TypeVar("T")

LOADING = "loading"  # the phase in which ranks tell their progress
SETTLE_S = 1.0  # after a first failure: time for peers to fail too, so that the silent ones show


class RankDied(RankError):
    """The process of a rank is gone; the message carries what is known of the cause."""


class PhaseTimeout(RankError):
    """A start phase reached its deadline with ranks still at work and none failed."""


class RankHandle(Protocol):
    """One rank as its coordinator sees it. Every call raises RankDied once the rank is gone."""

    @property
    def identity(self) -> RankIdentity: ...

    async def assign(self, rank: int, world_size: int) -> None: ...

    async def listen(self) -> int:
        """Rank 0 only: opens the rendezvous store and returns its port."""

    async def open(self, port: int) -> None: ...

    async def load(self) -> None: ...

    async def run(self) -> None:
        """Returns after stop(); raises RankError or RankDied when the rank fails."""

    async def stop(self) -> None: ...

    async def obey(self, order: Order) -> None:
        """What the heat guard wants; may come at any time, also before assign()."""

    async def reading(self) -> NodeReading | None:
        """The last reading of the sensors of the rank's node; None while there is none."""

    async def submit(self, requests: Sequence[EngineRequest]) -> None: ...

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def poll_outputs(self, timeout_s: float) -> tuple[TokenBatch, ...]: ...

    async def snapshot(self) -> RankSnapshot: ...

    async def progress(self) -> LoadProgress: ...

    async def expert_counts(self) -> list[list[int]]: ...


class Launcher(Protocol):
    """Makes the ranks of one gang, once, and ends them."""

    async def place(self) -> tuple[RankHandle, ...]:
        """Places all ranks, in the order in which they are to be numbered.

        Raises ConfigError when the cluster lacks what the gang needs, RankError on a failure.
        """

    async def kill(self) -> None:
        """Ends every rank without asking and returns when all are gone. May be called twice."""


@dataclass
class _Outcome:
    """How the calls of one phase went."""

    results: dict[int, object] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)


async def run_phase(
    phase: str,
    calls: Mapping[int, Awaitable[T]],
    timeout_s: float,
    setting: str,
    grace_s: float = 0.0,
    is_slowed: Callable[[], bool] = lambda: False,
) -> dict[int, T]:
    """Awaits one call a rank. The first failure or the deadline ends the phase.

    Ranks that keep the same deadline themselves know more: they get `grace_s` to tell it. Time in
    which the phase `is_slowed` on purpose does not count.

    Raises RankError that names the failed rank and those that did not answer, with `setting`,
    the configuration key of the deadline.
    """
    tasks: dict[asyncio.Future[T], int] = {
        asyncio.ensure_future(call): rank for rank, call in calls.items()
    }
    try:
        outcome = await _gather(tasks, TimeLimit(timeout_s + grace_s, is_slowed))
    finally:
        for task in tasks:
            task.cancel()
    if outcome.errors or outcome.missing:
        raise _phase_error(phase, outcome, len(tasks), timeout_s, setting)
    return {rank: task.result() for task, rank in tasks.items()}


async def _gather(tasks: Mapping[asyncio.Future[T], int], limit: TimeLimit) -> _Outcome:
    done: set[asyncio.Future[T]] = set()
    pending = set(tasks)
    while pending and limit.left_s() > 0 and not any(task.exception() for task in done):
        more, pending = await asyncio.wait(
            pending, timeout=limit.next_look_s(), return_when=asyncio.FIRST_EXCEPTION
        )
        done |= more
    if pending and any(task.exception() for task in done):
        more, pending = await asyncio.wait(pending, timeout=SETTLE_S)
        done |= more
    outcome = _Outcome(missing=sorted(tasks[task] for task in pending))
    for task in done:
        error = task.exception()
        if error is not None:
            outcome.errors[tasks[task]] = error
    return outcome


def _phase_error(
    phase: str, outcome: _Outcome, world_size: int, timeout_s: float, setting: str
) -> NrankError:
    """A death explains the other failures, so it is told first."""
    parts = []
    ranked = sorted(
        outcome.errors.items(), key=lambda item: (not isinstance(item[1], RankDied), item[0])
    )
    rank = ranked[0][0] if ranked else outcome.missing[0]
    if ranked:
        if not isinstance(ranked[0][1], RankError) and isinstance(ranked[0][1], NrankError):
            return ranked[0][1]  # the user's to mend: a checkpoint, a plan, a flag
        parts.append(f"rank {rank} failed: {_text(ranked[0][1])}")
    if outcome.missing:
        names = ", ".join(map(str, outcome.missing))
        arrived = world_size - len(outcome.missing) - len(outcome.errors)
        parts.append(
            f"no answer from rank(s) {names} ({arrived} of {world_size} done, "
            f"{setting}={timeout_s:g})"
        )
    kind = RankError if ranked else PhaseTimeout
    return kind(f"start phase {phase}: " + "; ".join(parts), rank=rank, phase=phase)


def _text(error: BaseException) -> str:
    return str(error) if isinstance(error, NrankError) else f"{type(error).__name__}: {error}"


class ProgressWatch:
    """Tells a live gang from a dead one by what its ranks report.

    A rank that does not answer for `timeout_s` is silent. A gang with queued work whose slowest
    step counter has not moved for `timeout_s` is stuck; idle time does not count. The peers of a
    stuck rank wait for it as long and know which it is, so they get SETTLE_S to tell.
    """

    def __init__(self, world_size: int, timeout_s: float, now_s: float) -> None:
        self._timeout_s = timeout_s
        self._heard_s = [now_s] * world_size
        self._steps = [-1] * world_size
        self._entered = [0] * world_size
        self._moved_s = now_s

    def heard(self, snapshot: RankSnapshot, now_s: float) -> None:
        slowest = min(self._steps)
        self._heard_s[snapshot.rank] = now_s
        self._steps[snapshot.rank] = snapshot.step
        self._entered[snapshot.rank] = snapshot.entered
        if min(self._steps) != slowest:
            self._moved_s = now_s

    def age_s(self, rank: int, now_s: float) -> float:
        return now_s - self._heard_s[rank]

    def verdict(self, now_s: float, work_queued: bool) -> RankError | None:
        """The failure that the figures show, or None."""
        limit = f"step_timeout_s={self._timeout_s:g}"
        heard_s = min(self._heard_s)
        if now_s - heard_s > self._timeout_s:
            rank = self._heard_s.index(heard_s)
            text = f"rank {rank} has been silent for {now_s - heard_s:.0f} s ({limit})"
            return RankError(text, rank=rank, step=self._steps[rank], phase="run")
        if not work_queued:
            self._moved_s = now_s
        elif now_s - self._moved_s > self._timeout_s + SETTLE_S:
            rank = self._last()
            step = self._steps[rank]
            text = (
                f"step {step} has not ended for {now_s - self._moved_s:.0f} s with requests "
                f"queued ({limit})"
            )
            return RankError(text, rank=rank, step=step, phase="run")
        return None

    def blame(self, error: PeerError) -> RankError:
        """The rank that is behind all others, where one is: `error` came from who waited for it."""
        rank = self._last()
        if self._entered.count(self._entered[rank]) > 1:
            return error
        text = f"rank {rank} keeps its peers waiting: {error}"
        return RankError(text, rank=rank, step=self._steps[rank], phase=error.phase)

    def _last(self) -> int:
        ranks = range(len(self._steps))
        return min(ranks, key=lambda rank: (self._steps[rank], self._entered[rank]))


class Gang:
    """One life of the ranks. Use: start(), then running() and the rank handles, then end()."""

    def __init__(
        self,
        launcher: Launcher,
        config: EngineConfig,
        is_slowed: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_slowed`: the heat guard or a hand makes loads take longer."""
        self._launcher = launcher
        self._is_slowed = is_slowed
        self._config = config
        self.world_size = config.ranks
        self.ranks: tuple[RankHandle, ...] = ()
        self._watch: LoadWatch | None = None
        self._runs: dict[asyncio.Future[None], int] = {}
        self._stopping = False

    @property
    def leader(self) -> RankHandle:
        return self.ranks[0]

    @property
    def progress(self) -> Mapping[int, LoadProgress]:
        """How far ranks had loaded when last asked; empty before they load."""
        return self._watch.last if self._watch is not None else {}

    async def start(
        self,
        on_phase: Callable[[str], None],
        on_progress: Callable[[Sequence[LoadProgress]], None],
    ) -> None:
        """Places, connects and loads the ranks and starts their loops.

        Raises NrankError: each phase has a deadline, and the death of a rank ends it at once.
        """
        config = self._config
        start = (config.start_timeout_s, "start_timeout_s")
        on_phase("placing")
        self.ranks = await self._launcher.place()
        on_phase("connecting")
        await self._phase("assign", lambda i, r: r.assign(i, self.world_size), *start)
        port = (await run_phase("listen", {0: self.leader.listen()}, *start))[0]
        calls = {i: rank.open(port) for i, rank in enumerate(self.ranks)}
        await run_phase("connect", calls, *start, grace_s=SETTLE_S)
        on_phase(LOADING)
        await self._load(on_progress)
        on_phase("warming up")
        self._runs = {asyncio.ensure_future(r.run()): i for i, r in enumerate(self.ranks)}

    async def _load(self, on_progress: Callable[[Sequence[LoadProgress]], None]) -> None:
        """At the deadline all ranks are late, since the fast ones wait: the slowest is named."""
        watch = self._watch = LoadWatch(self.ranks, on_progress)
        asking = asyncio.ensure_future(watch.run())
        timeout_s = self._config.load_timeout_s
        try:
            await self._phase("load", lambda _, rank: rank.load(), timeout_s, "load_timeout_s")
        except PhaseTimeout as error:
            late = slowest(await watch.ask())
            if late is None:
                raise
            text = f"{error}; slowest is {rank_text(late)}"
            raise RankError(text, rank=late.rank, phase=error.phase) from None
        finally:
            asking.cancel()
            await asyncio.wait({asking})
        if not asking.cancelled():
            asking.result()  # it ends by a fault only

    async def _phase(
        self,
        phase: str,
        call: Callable[[int, RankHandle], Awaitable[None]],
        timeout_s: float,
        setting: str,
    ) -> None:
        calls = {i: call(i, rank) for i, rank in enumerate(self.ranks)}
        await run_phase(phase, calls, timeout_s, setting, is_slowed=self._is_slowed)

    async def watch(self) -> None:
        """Returns when all loops ended after stop(); raises RankError on the first failure."""
        runs = set(self._runs)
        done, pending = await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
        while pending and self._stopping and not any(task.exception() for task in done):
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending and not self._died(done):
            # Peers of a dead rank often fail first, on their broken connection to it.
            more, _ = await asyncio.wait(pending, timeout=SETTLE_S)
            done |= more
        error = self._died(done) or self._failure(done)
        if error is not None:
            raise error

    def _died(self, done: set[asyncio.Future[None]]) -> RankDied | None:
        return next((e for e in (t.exception() for t in done) if isinstance(e, RankDied)), None)

    def _failure(self, done: set[asyncio.Future[None]]) -> RankError | None:
        def order(task: asyncio.Future[None]) -> tuple[bool, int]:
            """Who waited for a peer knows least."""
            return isinstance(task.exception(), PeerError), self._runs[task]

        for task in sorted(done, key=order):
            error, rank = task.exception(), self._runs[task]
            if isinstance(error, RankError):
                return error
            if error is not None:
                return RankError(f"rank {rank} failed: {_text(error)}", rank=rank, phase="run")
            if not self._stopping:
                return RankError(f"rank {rank} ended its loop unasked", rank=rank, phase="run")
        return None

    async def stop(self, timeout_s: float) -> None:
        """Asks the ranks to end after their current step; RankError names those that don't."""
        self._stopping = True
        try:
            async with asyncio.timeout(timeout_s):
                await self.leader.stop()
        except TimeoutError:
            raise RankError(f"rank 0 did not take the stop within {timeout_s:g} s", 0) from None
        _, pending = await asyncio.wait(set(self._runs), timeout=timeout_s)
        if pending:
            names = ", ".join(str(self._runs[task]) for task in pending)
            raise RankError(f"rank(s) {names} did not stop within {timeout_s:g} s")

    async def end(self) -> None:
        """Kills what is left and returns when it is gone."""
        try:
            await self._launcher.kill()
        finally:
            for task in self._runs:
                task.cancel()
            await asyncio.gather(*self._runs, return_exceptions=True)
