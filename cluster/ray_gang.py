"""Ranks as Ray actors, one per chip, packed on one node by a placement group of ours.

Owns placement, the reading of physical chips and the killing of what it placed. Ray's job is
processes: it is never called inside a step. Knows no supervision policy.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.failure import last_words, own_log_path
from cluster.gang import RankDied, RankHandle, run_phase
from cluster.output_window import OutputWindow
from cluster.rank_factory import RankEngine, RankFactory, make_rank
from cluster.rank_orders import RankOrders
from cluster.ray_chips import logical_chip, rank_environment
from placement.config import EngineConfig
from placement.errors import ConfigError, NrankError, RankError
from placement.topology import ChipProfile, emulated_topology, number_ranks
from rank_worker.affinity import pin_thread
from rank_worker.device_sensors.reading import NodeReading
from rank_worker.guard_word import Order
from rank_worker.messages import (
    EngineRequest,
    LoadProgress,
    RankIdentity,
    RankSnapshot,
    TokenBatch,
)

logger = logging.getLogger("nrank.placement")

T = TypeVar("T")

GONE_S = 30.0  # a killed rank in a device wait takes this long at most to be gone


class RankWorker:
    """The actor of one rank. The default group runs load and the step loop on one thread."""

    def __init__(self, config: EngineConfig, resource: str, bundle: int) -> None:
        self._config = config
        self._resource = resource
        self._bundle = bundle
        self._engine: RankEngine | None = None
        self._name = f"rank on bundle {bundle}"
        self._window = OutputWindow()
        self._orders = RankOrders()

    @property
    def engine(self) -> RankEngine:
        assert self._engine is not None, "a rank is assigned before it is used"
        return self._engine

    @ray.method(concurrency_group="control")
    def identity(self) -> RankIdentity:
        context = ray.get_runtime_context()
        ids = context.get_accelerator_ids().get(self._resource, [])
        # Custom resources have no ids: there the bundle's number stands for the chip.
        chip = self._bundle
        if ids and str(ids[0]).isdigit():
            chip = int(ids[0])
            logical_chip(self._resource, chip, os.environ)  # the only one that it sees
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        return RankIdentity(os.getpid(), context.get_node_id(), chip, address, own_log_path())

    def assign(
        self, factory: RankFactory, rank: int, world_size: int, share: tuple[int, int]
    ) -> None:
        """On the thread that will run the rank. `share`: its chip, and the chips of the node."""
        self._name = f"rank {rank} of {world_size}"
        with self._last_words():
            if self._config.pin_cpus and (reason := pin_thread(*share)):
                self._log(f"not pinned to cores: {reason}")
            self._engine = factory(self._config, rank, world_size)
        self._orders.attach(self._engine)

    def listen(self) -> int:
        with self._last_words():
            return self.engine.listen()

    def open(self, port: int) -> None:
        with self._last_words():
            self.engine.open(port)

    def load(self) -> None:
        self._log(f"loading, pid {os.getpid()}")
        with self._last_words():
            self.engine.load()
        done = self.engine.progress()
        self._log(f"loaded {done.read_bytes} bytes in {done.seconds:.1f} s, warm-up steps made")

    def run(self) -> None:
        with self._last_words():
            self.engine.run()
        self._log("stopped as asked")

    def _log(self, text: str) -> None:
        """A line that /status shows of a rank that failed: see cluster.failure."""
        print(f"nrank: {self._name}: {text}", file=sys.stderr, flush=True)

    @contextmanager
    def _last_words(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._log(last_words(error))
            raise

    @ray.method(concurrency_group="control")
    def stop(self) -> None:
        self.engine.stop()

    @ray.method(concurrency_group="control")
    def obey(self, order: Order) -> None:
        self._orders.obey(order)

    @ray.method(concurrency_group="control")
    def reading(self) -> NodeReading | None:
        return self._orders.reading()

    @ray.method(concurrency_group="control")
    def submit(self, requests: Sequence[EngineRequest]) -> None:
        self._window.announce(requests)
        self.engine.submit(requests)

    @ray.method(concurrency_group="control")
    def abort(self, request_ids: Sequence[str]) -> None:
        self._window.forget(request_ids)
        self.engine.abort(request_ids)

    @ray.method(concurrency_group="out")
    def poll_outputs(self, timeout_s: float) -> tuple[TokenBatch, ...]:
        return self._window.collect(self.engine.poll_outputs, timeout_s)

    @ray.method(concurrency_group="control")
    def snapshot(self) -> RankSnapshot:
        return self.engine.snapshot()

    @ray.method(concurrency_group="control")
    def progress(self) -> LoadProgress:
        return self.engine.progress()

    @ray.method(concurrency_group="control")
    def expert_counts(self) -> list[list[int]]:
        return self.engine.expert_counts()


class RayRank:
    """RankHandle of one actor; Ray's errors become ours."""

    def __init__(self, actor: Any, name: str, factory: RankFactory) -> None:
        self.actor = actor
        self.name = name
        self._rank = -1
        self._factory = factory
        self.identity = RankIdentity(0, "", -1, "")
        self.share = (0, 1)  # its chip, and how many the node has

    async def _ask(self, reference: Awaitable[T]) -> T:
        try:
            return await reference
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, NrankError):
                raise cause from None
            text = f"{self.name}: {type(cause).__name__}: {cause}"
            raise RankError(text, rank=self._rank) from error
        except RayActorError as error:
            raise RankDied(f"{self.name} died: {_cause(error)}", rank=self._rank) from None

    async def identify(self) -> RankIdentity:
        self.identity = await self._ask(self.actor.identity.remote())
        return self.identity

    async def assign(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self.name = f"rank {rank} (pid {self.identity.pid}, chip {self.identity.physical_chip})"
        await self._ask(self.actor.assign.remote(self._factory, rank, world_size, self.share))

    async def listen(self) -> int:
        return await self._ask(self.actor.listen.remote())

    async def open(self, port: int) -> None:
        await self._ask(self.actor.open.remote(port))

    async def load(self) -> None:
        await self._ask(self.actor.load.remote())

    async def run(self) -> None:
        await self._ask(self.actor.run.remote())

    async def stop(self) -> None:
        await self._ask(self.actor.stop.remote())

    async def obey(self, order: Order) -> None:
        await self._ask(self.actor.obey.remote(order))

    async def reading(self) -> NodeReading | None:
        return await self._ask(self.actor.reading.remote())

    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        await self._ask(self.actor.submit.remote(requests))

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._ask(self.actor.abort.remote(request_ids))

    async def poll_outputs(self, timeout_s: float) -> tuple[TokenBatch, ...]:
        return await self._ask(self.actor.poll_outputs.remote(timeout_s))

    async def snapshot(self) -> RankSnapshot:
        return await self._ask(self.actor.snapshot.remote())

    async def progress(self) -> LoadProgress:
        return await self._ask(self.actor.progress.remote())

    async def expert_counts(self) -> list[list[int]]:
        return await self._ask(self.actor.expert_counts.remote())

    async def wait_dead(self) -> None:
        """Returns once Ray answers that the actor is dead, after a kill."""
        while True:
            try:
                await self._ask(self.actor.identity.remote())
            except RankDied:
                return
            await asyncio.sleep(0.05)


class RayLauncher:
    """Launcher of one gang of actors. Not detached: all of it ends with its owner's process."""

    def __init__(
        self,
        config: EngineConfig,
        resource: str,
        profile: ChipProfile,
        factory: RankFactory = make_rank,
    ) -> None:
        self._config = config
        self._resource = resource
        self._profile = profile
        self._factory = factory
        self._group: PlacementGroup | None = None
        self._ranks: list[RayRank] = []

    async def place(self) -> tuple[RankHandle, ...]:
        """Asks Ray for the chips, starts the actors and numbers them by card."""
        count, timeout_s = self._config.ranks, self._config.start_timeout_s
        await asyncio.to_thread(check_resources, self._resource, count)
        self._group = group = placement_group([{self._resource: 1}] * count, "STRICT_PACK")
        if not await asyncio.to_thread(group.wait, timeout_s):
            raise RankError(self._waiting_for(timeout_s), phase="place")
        self._ranks = [self._make(group, bundle) for bundle in range(count)]
        calls = {index: rank.identify() for index, rank in enumerate(self._ranks)}
        identities = await run_phase("place", calls, timeout_s, "start_timeout_s")
        chips = [identities[index].physical_chip for index in range(count)]
        on_node = max(chips_of_node(self._resource, identities[0].node), max(chips) + 1)
        for rank, chip in zip(self._ranks, chips, strict=True):
            rank.share = (chip, on_node)
        topology = emulated_topology(max(chips) + 1, self._profile)
        order = number_ranks(chips, topology)
        for note in order.notes:
            logger.warning("%s", note)
        self._ranks = [self._ranks[index] for index in order.order]
        return tuple(self._ranks)

    def _make(self, group: PlacementGroup, bundle: int) -> RayRank:
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_restarts": 0,
            "max_task_retries": 0,
            "concurrency_groups": {"control": 4, "out": 1},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle),
            "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1", **rank_environment()}},
        }
        if self._resource == "GPU":  # Ray's own name: not a custom resource
            options["num_gpus"] = 1
        else:
            options["resources"] = {self._resource: 1}
        actor = ray.remote(**options)(RankWorker).remote(self._config, self._resource, bundle)
        return RayRank(actor, f"rank on bundle {bundle}", self._factory)

    def _waiting_for(self, timeout_s: float) -> str:
        available = ray.available_resources()  # type: ignore[no-untyped-call]
        free = available.get(self._resource, 0)
        return (
            f"placing: {self._config.ranks} x {self._resource} on one node were not free within "
            f"start_timeout_s={timeout_s:g} ({free:g} are free in the cluster); "
            "end what holds them, or ask for fewer ranks"
        )

    async def kill(self) -> None:
        """Kills the actors, waits until Ray and the system agree, and gives the chips back."""
        ranks, self._ranks = self._ranks, []
        group, self._group = self._group, None
        try:
            for rank in ranks:
                ray.kill(rank.actor)
            await self._wait_gone(ranks)
        except RayError as error:
            raise RankError(f"killing the ranks failed: {_one_line(error)}") from error
        finally:
            if group is not None:
                remove_placement_group(group)

    async def _wait_gone(self, ranks: Sequence[RayRank]) -> None:
        here = ray.get_runtime_context().get_node_id()
        try:
            async with asyncio.timeout(GONE_S):
                await asyncio.gather(*(rank.wait_dead() for rank in ranks))
                local = [rank.identity.pid for rank in ranks if rank.identity.node == here]
                await asyncio.to_thread(_wait_exit, local, GONE_S)
        except TimeoutError:
            names = ", ".join(rank.name for rank in ranks if _exists(rank.identity.pid))
            raise RankError(f"still there {GONE_S:g} s after being killed: {names}") from None


def check_resources(resource: str, count: int) -> None:
    """ConfigError unless some live node has `count` of `resource`: all ranks share one node."""
    have = {
        str(node["NodeManagerAddress"]): float(node["Resources"].get(resource, 0))
        for node in ray.nodes()  # type: ignore[no-untyped-call]
        if node["Alive"]
    }
    if max(have.values(), default=0.0) < count:
        told = ", ".join(f"{address} has {value:g}" for address, value in have.items())
        raise ConfigError(
            f"{count} ranks need {count} x {resource} on one node, but {told}; "
            "ask for fewer ranks (ranks) or start Ray with more chips (chips)"
        )


def chips_of_node(resource: str, node: str) -> int:
    """How many of `resource` a node has, used or not; 0 for a node that is gone."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return int(sum(one["Resources"].get(resource, 0) for one in nodes if one["NodeID"] == node))


def _wait_exit(pids: Sequence[int], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while any(_exists(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.02)


def _exists(pid: int) -> bool:
    return pid > 0 and os.path.exists(f"/proc/{pid}")


def _cause(error: RayActorError) -> str:
    """What Ray says about the end of a worker, without its advice on possible reasons."""
    text = _one_line(error)
    detail = text.partition("Worker exit type: ")[2].partition(" Some common causes")[0]
    return detail or text


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
