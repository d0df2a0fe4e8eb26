"""A server over a real engine in this process: sockets, HTTP app, coordinator, one rank.

Owns its event loop, on a thread of its own, and the gate through which every step of the rank
goes. Knows nothing of requests and answers.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvicorn

from cluster.coordinator import Coordinator, CoordinatorSettings
from cluster.ingress import make_app
from cluster.local_gang import LocalLauncher
from cluster.model_card import load_model_card
from cluster.tokens import Tokenizer
from placement.config import EngineConfig
from placement.models.registry import load_model_spec
from placement.plan import make_plan
from rank_worker.rank import Rank

MODEL = "scripted"
LIMIT_S = 60.0  # of any wait; only a fault reaches it

T = TypeVar("T")


class Gate:
    """Where a rank waits before each step, while it is held."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._allowed: int | None = None  # None: all
        self._begun = 0

    def enter(self) -> None:
        """The rank is about to run a step."""
        with self._changed:
            self._begun += 1
            is_open = self._changed.wait_for(
                lambda: self._allowed is None or self._begun <= self._allowed, LIMIT_S
            )
            assert is_open, f"step {self._begun} was never let through"

    def hold(self) -> None:
        with self._changed:
            self._allowed = self._begun = 0

    def let_one_through(self) -> None:
        with self._changed:
            assert self._allowed is not None, "the gate is open"
            self._allowed += 1
            self._changed.notify_all()

    def open(self) -> None:
        with self._changed:
            self._allowed = None
            self._changed.notify_all()


class GatedRank(Rank):
    def __init__(self, config: EngineConfig, rank: int, world_size: int, gate: Gate) -> None:
        super().__init__(config, rank, world_size)
        self._gate = gate

    def load(self) -> None:
        super().load()
        assert self.runner is not None
        execute = self.runner.execute

        def step(plan: Any) -> Any:
            self._gate.enter()
            return execute(plan)

        self.runner.execute = step


class GatedServer:
    """Use as a context manager. Methods are for the test's thread, clients for the loop's."""

    def __init__(self, config: EngineConfig) -> None:
        self.gate = Gate()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server", daemon=True)
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        plan = make_plan(config, *load_model_spec(config.model_dir))
        card = load_model_card(config.model_dir, MODEL, 0, plan.context.configured_tokens)
        settings = CoordinatorSettings(
            max_queue_requests=256, snapshot_interval_s=0.05, model_id=MODEL
        )
        self._coordinator = Coordinator(
            config, plan, lambda: LocalLauncher(config, self._make_rank), settings
        )
        app = make_app(self._coordinator, card, Tokenizer.load(config.model_dir))
        self._http = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))

    def __enter__(self) -> GatedServer:
        self._thread.start()
        self.run(self._begin())
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.open()
        self.run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of `work`, which runs on the server's loop."""

        async def limited() -> T:
            async with asyncio.timeout(LIMIT_S):
                return await work

        return asyncio.run_coroutine_threadsafe(limited(), self._loop).result()

    def hold(self) -> None:
        """Holds the gate once nothing of earlier requests is left to compute."""
        assert self._rank.scheduler is not None
        deadline = time.monotonic() + LIMIT_S
        while self._rank.scheduler.has_work:
            assert time.monotonic() < deadline, "the rank still has work"
            time.sleep(0.001)
        self.gate.hold()

    def _make_rank(self, config: EngineConfig, rank: int, world_size: int) -> GatedRank:
        self._rank = GatedRank(config, rank, world_size, self.gate)
        return self._rank

    async def _begin(self) -> None:
        self._coordinator.start()
        self._serving = asyncio.create_task(self._http.serve([self._socket]))
        while self._coordinator.state.value != "serving" or not self._http.started:
            self._coordinator.check_alive()
            await asyncio.sleep(0.005)

    async def _end(self) -> None:
        self._http.should_exit = True
        await self._serving
        await self._coordinator.close()
