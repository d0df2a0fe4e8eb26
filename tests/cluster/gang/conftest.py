"""A scripted gang on one event loop: real handles' contract, no threads, no device."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cluster.coordinator import Coordinator, CoordinatorSettings
from cluster.gang import RankDied, RankHandle
from cluster.supervisor import RestartPolicy
from placement.config import EngineConfig
from rank_worker.device_sensors.reading import NodeReading
from rank_worker.guard_word import Order
from rank_worker.messages import (
    EngineRequest,
    FinishReason,
    LoadProgress,
    RankIdentity,
    RankSnapshot,
    TokenBatch,
)

MAX_SEQUENCES = 4
CONTEXT_TOKENS = 1000


@dataclass(frozen=True)
class FakeContext:
    configured_tokens: int = CONTEXT_TOKENS
    allocated_tokens: int = CONTEXT_TOKENS
    certified_tokens: int = 0


@dataclass(frozen=True)
class FakeRankPlan:
    rows: dict[str, int] = field(
        default_factory=lambda: {"dense": 3000, "kv_pages": 1000, "workspace": 96}
    )
    usable_bytes: int = 5000


@dataclass(frozen=True)
class FakeEstimate:
    """3 ms of reads, a third of them caches at full context, and 1 ms of collectives."""

    read_s: float = 0.003
    collective_s: float = 0.001
    bytes_per_step: int = 300
    bytes_by_class: dict[str, int] = field(
        default_factory=lambda: {"dense": 200, "kv_pages": 60, "index_pages": 40}
    )


@dataclass(frozen=True)
class FakePlan:
    """The fields of a Plan that the coordinator reads."""

    plan_id: str = "plan-1"
    world_size: int = 2
    max_sequences: int = MAX_SEQUENCES
    context: FakeContext = FakeContext()
    ranks: tuple[FakeRankPlan, ...] = (FakeRankPlan(),) * 3
    estimate: FakeEstimate = FakeEstimate()


@dataclass
class Script:
    """What the gangs of one test are to do. Faults are keyed (life, phase, rank)."""

    faults: dict[tuple[int, str, int], BaseException] = field(default_factory=dict)
    reading: NodeReading | None = None
    hangs: set[tuple[int, str, int]] = field(default_factory=set)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    stepless: set[int] = field(default_factory=set)  # ranks that commit no step
    loaded: dict[int, int] = field(
        default_factory=dict
    )  # rank -> bytes read of 2000, while loading
    entered: dict[int, int] = field(default_factory=dict)  # rank -> exchanges begun
    reached: list[tuple[int, str, int]] = field(default_factory=list)
    gangs: list[FakeGang] = field(default_factory=list)

    async def phase(self, life: int, phase: str, rank: int) -> None:
        key = (life, phase, rank)
        self.reached.append(key)
        if key in self.hangs:
            await self.released.wait()
        await asyncio.sleep(0)
        if key in self.faults:
            raise self.faults[key]

    def release(self) -> None:
        """What hangs goes on, and nothing hangs any more."""
        self.hangs.clear()
        self.released.set()

    def count(self, phase: str) -> int:
        """Calls of it in all lives, by all ranks."""
        return sum(reached == phase for _, reached, _ in self.reached)

    @property
    def gang(self) -> FakeGang:
        return self.gangs[-1]


class FakeGang:
    """Launcher and engine of one life: each step gives every running request one token."""

    def __init__(self, script: Script, config: EngineConfig) -> None:
        script.gangs.append(self)
        self.script, self.config, self.life = script, config, len(script.gangs)
        self.ranks = [FakeRank(self, index) for index in range(config.ranks)]
        self.waiting: deque[EngineRequest] = deque()
        self.running: dict[str, int] = {}  # request id -> tokens made
        self.requests: dict[str, EngineRequest] = {}
        self.outputs: deque[TokenBatch] = deque()
        self.go = asyncio.Event()  # cleared: the loop stands between two steps
        self.go.set()
        self.cool = asyncio.Event()  # cleared by an order to rest
        self.cool.set()
        self.work, self.output_ready = asyncio.Event(), asyncio.Event()
        self.stopped, self.killed = asyncio.Event(), asyncio.Event()
        self.step = 0
        self.aborts: list[str] = []
        self.max_running = 0

    async def place(self) -> tuple[RankHandle, ...]:
        for rank in self.ranks:
            await self.script.phase(self.life, "place", rank.index)
        return tuple(self.ranks)

    async def kill(self) -> None:
        self.killed.set()
        for rank in self.ranks:
            rank.die("killed")

    async def lead(self) -> None:
        while not self.stopped.is_set():
            await self.work.wait()
            await self.go.wait()
            await self.cool.wait()
            await asyncio.sleep(0)
            self.take_step()
            if not self.running and not self.waiting and not self.stopped.is_set():
                self.work.clear()
        for rank in self.ranks:
            rank.ended.set()

    def take_step(self) -> None:
        while self.waiting and len(self.running) < MAX_SEQUENCES:
            self.running[self.waiting.popleft().request_id] = 0
        self.max_running = max(self.max_running, len(self.running))
        self.step += bool(self.running)
        for name in list(self.running):
            self.give_token(self.requests[name])

    def give_token(self, request: EngineRequest) -> None:
        name, made = request.request_id, self.running[request.request_id]
        last = made + 1 == request.max_tokens
        reason = FinishReason.LENGTH if last else None
        token = request.prompt_ids[0] + made
        self.outputs.append(
            TokenBatch(name, (token,), reason, time.time(), prompt_tokens=len(request.prompt_ids))
        )
        self.running[name] = made + 1
        if last:
            del self.running[name]
        self.output_ready.set()

    def drop(self, name: str) -> None:
        self.aborts.append(name)
        self.running.pop(name, None)
        self.waiting = deque(r for r in self.waiting if r.request_id != name)


class FakeRank:
    def __init__(self, gang: FakeGang, index: int) -> None:
        self.gang, self.index = gang, index
        self.identity = RankIdentity(1000 + index, "node", index, "127.0.0.1")
        self.orders: list[Order] = []
        self.ended = asyncio.Event()
        self.silent = False
        self.error: BaseException | None = None
        self.loop_task: asyncio.Task[None] | None = None

    def die(self, cause: str = "process gone") -> None:
        self.fail(RankDied(f"rank {self.index} died: {cause}", rank=self.index))

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.ended.set()
        self.gang.output_ready.set()
        if self.loop_task is not None:
            self.loop_task.cancel()

    async def phase(self, phase: str) -> None:
        if isinstance(self.error, RankDied):
            raise self.error
        await self.gang.script.phase(self.gang.life, phase, self.index)

    async def assign(self, rank: int, world_size: int) -> None:
        assert (rank, world_size) == (self.index, self.gang.config.ranks)
        await self.phase("assign")

    async def listen(self) -> int:
        assert self.index == 0, "only rank 0 listens"
        await self.phase("listen")
        return 4711

    async def open(self, port: int) -> None:
        assert port == 4711
        await self.phase("open")

    async def load(self) -> None:
        await self.phase("load")

    async def run(self) -> None:
        await self.phase("run")
        if self.index == 0:
            self.loop_task = asyncio.ensure_future(self.gang.lead())
        await self.ended.wait()
        if self.error is not None:
            raise self.error

    async def stop(self) -> None:
        await self.phase("stop")
        self.gang.stopped.set()
        self.gang.work.set()

    async def obey(self, order: Order) -> None:
        await self.phase("obey")
        self.orders.append(order)
        if self.index == 0:
            (self.gang.cool.clear if order.is_still else self.gang.cool.set)()

    async def reading(self) -> NodeReading | None:
        await self.phase("reading")
        assert self.index == 0, "one rank speaks for the node"
        return self.gang.script.reading

    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        await self.phase("submit")
        for request in requests:
            assert request.request_id not in self.gang.requests, "request ids are used once"
            self.gang.requests[request.request_id] = request
            self.gang.waiting.append(request)
        self.gang.work.set()

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self.phase("abort")
        for name in request_ids:
            assert name in self.gang.requests, "an abort never overtakes its request"
            self.gang.drop(name)

    async def poll_outputs(self, timeout_s: float) -> tuple[TokenBatch, ...]:
        await self.phase("poll")
        try:
            async with asyncio.timeout(timeout_s):
                await self.gang.output_ready.wait()
        except TimeoutError:
            return ()
        if isinstance(self.error, RankDied):
            raise self.error
        self.gang.output_ready.clear()
        batches, self.gang.outputs = tuple(self.gang.outputs), deque()
        return batches

    async def snapshot(self) -> RankSnapshot:
        await self.phase("snapshot")
        if self.silent:
            await asyncio.Event().wait()
        gang = self.gang
        return RankSnapshot(
            self.index,
            0,
            time.time(),
            0 if self.index in gang.script.stepless else gang.step,
            len(gang.running),
            len(gang.waiting),
            weights_planned_bytes=2000,
            weights_read_bytes=2000,
            load_seconds=4.0,
            entered=gang.script.entered.get(self.index, 0),
            warm_step_seconds=0.005 + self.index / 1000,
            memory_bytes={"dense": 3000, "kv_pages": 1001},
        )

    async def progress(self) -> LoadProgress:
        await self.phase("progress")
        return LoadProgress(
            self.index, "loading", self.gang.script.loaded.get(self.index, 10), 2000, 1.0
        )

    async def expert_counts(self) -> list[list[int]]:
        await self.phase("counts")
        return [[self.gang.step, 2], [3, 4]]


class Desk:
    """A coordinator over a scripted gang, and what tests do with it."""

    def __init__(self, **changes: Any) -> None:
        engine = {k: v for k, v in changes.items() if k in EngineConfig.__dataclass_fields__}
        policy = {k: v for k, v in changes.items() if k in RestartPolicy.__dataclass_fields__}
        self.config = replace(EngineConfig("model", ranks=2, max_sequences=MAX_SEQUENCES), **engine)
        self.script = Script()
        self.settings = CoordinatorSettings(
            max_queue_requests=changes.get("max_queue_requests", 3),
            request_timeout_s=changes.get("request_timeout_s", 0.0),
            heat=changes.get("heat"),
            restart=RestartPolicy(**{"backoff_s": 0.001, **policy}),
            snapshot_interval_s=0.005,
            model_id="fake",
        )
        self.coordinator = Coordinator(
            self.config,
            FakePlan(),
            lambda: FakeGang(self.script, self.config),
            self.settings,
        )

    async def __aenter__(self) -> Desk:
        self.coordinator.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.coordinator.close()

    def request(self, name: str = "r", max_tokens: int = 5, first: int = 100) -> EngineRequest:
        return EngineRequest(name, (first, 1, 2), max_tokens)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Lets the loop go on until `condition` holds."""
        async with asyncio.timeout(20):
            while True:
                self.coordinator.check_alive()
                if condition():
                    return
                await asyncio.sleep(0.001)

    async def serving(self) -> None:
        await self.until(lambda: self.coordinator.state.value == "serving")

    async def collect(self, request: EngineRequest) -> list[TokenBatch]:
        return [batch async for batch in self.coordinator.generate(request)]

    async def tokens(self, request: EngineRequest) -> list[int]:
        return [token for batch in await self.collect(request) for token in batch.token_ids]


@pytest.fixture
def desk() -> Callable[..., Desk]:
    """Makes a Desk; keyword arguments change engine configuration, policy or queue bound."""
    return Desk


@pytest.fixture
def drive() -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs one test body on a fresh event loop, with a limit that only a hang reaches."""

    def run(body: Awaitable[None]) -> None:
        async def limited() -> None:
            async with asyncio.timeout(60):
                await body

        asyncio.run(limited())

    return run
