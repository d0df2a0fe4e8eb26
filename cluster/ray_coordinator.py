"""The coordinator as a Serve deployment, and the client of it that an ingress holds.

Requests and batches pass through a channel of their own, questions through Ray's calls. Refusals
cross as values: an exception would cross with a traceback and a log line of its own. One replica is
one gang.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Mapping
from typing import Any, TypeVar

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.channel import LOST, Channel
from cluster.channel_server import ChannelServer
from cluster.channel_wire import ChannelAddress, Refusal
from cluster.client import EngineStatus, NotServing
from cluster.coordinator import Coordinator, CoordinatorSettings
from cluster.rank_factory import RankFactory, make_rank
from cluster.ray_gang import RayLauncher
from placement.config import EngineConfig
from placement.errors import ErrorKind
from placement.plan import Plan
from placement.prepare import prepare
from placement.topology import find_profile
from rank_worker.messages import EngineRequest, RankSnapshot, TokenBatch

logger = logging.getLogger("nrank.coordinator")

T = TypeVar("T")

# Serve kills a replica that misses three health checks in a row: it stands still.
HEALTH_CHECKS = {"health_check_period_s": 5.0, "health_check_timeout_s": 10.0}
COUNT_S = 1.0  # finished HTTP requests are told together, this long after the first
ASK_S = 10.0  # a coordinator that does not answer a question for this long is not there
TRANSPORT = (RayError, RayServeException)


def plan_of(config: EngineConfig) -> Plan:
    """The plan of a gang. Raises CheckpointError, ConfigError, or PlanError when it doesn't fit."""
    return prepare(config).plan


class CoordinatorReplica:
    """Serve's side of a Coordinator: forwards, and ends the gang with the replica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits a constructor
        self,
        config: EngineConfig,
        settings: CoordinatorSettings,
        resource: str,
        factory: RankFactory = make_rank,
    ) -> None:
        profile = find_profile(config.device, config.chip_profile)
        plan = await asyncio.to_thread(plan_of, config)
        self._coordinator = Coordinator(
            config, plan, lambda: RayLauncher(config, resource, profile, factory), settings
        )
        self._channels = ChannelServer(self._coordinator)
        await self._channels.start(_node_address())
        self._coordinator.start()

    async def channel(self) -> ChannelAddress:
        """Where an ingress has its requests answered."""
        return self._channels.address

    async def status(self) -> EngineStatus:
        return await self._coordinator.status()

    async def snapshots(self) -> tuple[RankSnapshot, ...]:
        return await self._coordinator.snapshots()

    async def expert_counts(self) -> list[list[int]] | Refusal:
        try:
            return await self._coordinator.expert_counts()
        except NotServing as error:
            return Refusal.of(error)

    async def metrics_text(self) -> bytes:
        return await self._coordinator.metrics_text()

    async def record_http(self, counts: Mapping[tuple[str, int], int]) -> None:
        """Finished HTTP requests by endpoint and code."""
        for (endpoint, code), count in counts.items():
            for _ in range(count):
                await self._coordinator.record_http(endpoint, code)

    async def hold(self, reason: str) -> None:
        await self._coordinator.hold(reason)

    async def resume(self) -> None:
        await self._coordinator.resume()

    async def drain(self, timeout_s: float | None = None) -> bool:
        return await self._coordinator.drain(timeout_s)

    async def close(self) -> None:
        await self._coordinator.close()

    def check_health(self) -> None:
        """Serve replaces the replica when this raises: only when supervision itself is gone.

        A failed gang is the coordinator's to restart, with a cap that a new replica would forget.
        """
        self._coordinator.check_alive()

    async def __del__(self) -> None:
        """Serve calls this when it ends the replica: streams that run may finish, as in a drain."""
        await self._coordinator.drain()
        self._channels.close()
        await self._coordinator.close()


def _node_address() -> str:
    """Of this replica, as Ray's other processes reach it."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


class RemoteEngine:
    """EngineClient over a deployment handle; faults of the transport become NotServing."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle: Any = handle
        self._channel: Channel | None = None
        self._connecting: asyncio.Task[Channel] | None = None
        self._http: Counter[tuple[str, int]] = Counter()  # finished requests, not told yet
        self._telling: asyncio.Task[None] | None = None

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenBatch, None]:
        channel = await self._connected()
        batches = channel.generate(request)
        try:
            async for batch in batches:
                yield batch
        finally:
            await batches.aclose()

    async def _connected(self) -> Channel:
        """The channel to the coordinator that lives now; all who wait for it share one attempt."""
        if self._channel is not None and not self._channel.is_lost:
            return self._channel
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
        return await asyncio.shield(self._connecting)

    async def _connect(self) -> Channel:
        address = await self._ask(self._handle.channel.remote())
        try:
            async with asyncio.timeout(ASK_S):
                channel = await Channel.connect(address)
        except OSError as error:
            raise self._gone(error) from error
        self._channel = channel  # here: who asked first may have left meanwhile
        return channel

    def _gone(self, error: Exception) -> NotServing:
        return NotServing(f"{LOST} ({type(error).__name__})", ErrorKind.RANK_FAILURE)

    async def _ask(self, response: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(ASK_S):
                return await response
        except TRANSPORT as error:
            raise self._gone(error) from error
        except TimeoutError:
            raise NotServing(f"the coordinator did not answer within {ASK_S:g} s") from None

    async def stop_reached(self, request_id: str) -> None:
        if self._channel is not None:
            self._channel.stop_reached(request_id)

    async def status(self) -> EngineStatus:
        return await self._ask(self._handle.status.remote())

    async def snapshots(self) -> tuple[RankSnapshot, ...]:
        return await self._ask(self._handle.snapshots.remote())

    async def expert_counts(self) -> list[list[int]]:
        answer = await self._ask(self._handle.expert_counts.remote())
        if isinstance(answer, Refusal):
            raise answer.error()
        return answer  # type: ignore[no-any-return]

    async def hold(self, reason: str) -> None:
        await self._ask(self._handle.hold.remote(reason))

    async def resume(self) -> None:
        await self._ask(self._handle.resume.remote())

    async def metrics_text(self) -> bytes:
        await self._tell_http()
        return await self._ask(self._handle.metrics_text.remote())

    async def record_http(self, endpoint: str, code: int) -> None:
        """Returns at once: a call of its own would cost a request as much as its tokens do."""
        self._http[endpoint, code] += 1
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell_http_later())

    async def _tell_http_later(self) -> None:
        while self._http:
            await asyncio.sleep(COUNT_S)
            try:
                await self._tell_http()
            except NotServing as error:
                logger.warning("the counts of finished HTTP requests are lost: %s", error)

    async def _tell_http(self) -> None:
        counts, self._http = dict(self._http), Counter()
        if counts:
            await self._ask(self._handle.record_http.remote(counts))


def coordinator_deployment(
    config: EngineConfig,
    settings: CoordinatorSettings,
    resource: str,
    factory: RankFactory = make_rank,
    replica: type[CoordinatorReplica] = CoordinatorReplica,
) -> Any:
    """The bound deployment. Serve's own bounds stand far above ours: it queues nothing."""
    options: dict[str, Any] = {
        "name": "Coordinator",
        "num_replicas": 1,
        "max_ongoing_requests": 1_000_000,
        "ray_actor_options": {"num_cpus": 0},
        **HEALTH_CHECKS,
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": settings.drain_timeout_s + config.step_timeout_s + 30.0,
    }
    return serve.deployment(**options)(replica).bind(config, settings, resource, factory)
