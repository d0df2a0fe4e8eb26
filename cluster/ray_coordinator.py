"""The coordinator as a Serve deployment, and the client of it that an ingress holds.

Owns what crosses between the two: requests and batches as plain dataclasses, refusals as values
(an exception would cross with a traceback and a log line of its own). One replica is one gang.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from cluster.client import EngineStatus, NotServing
from cluster.coordinator import Coordinator, CoordinatorSettings
from cluster.leases import RENEW_S, Leases
from cluster.rank_factory import RankFactory, make_rank
from cluster.ray_gang import RayLauncher
from placement.config import EngineConfig
from placement.errors import ClientError, ErrorKind
from placement.plan import Plan
from placement.prepare import prepare
from placement.topology import find_profile
from rank_worker.messages import EngineRequest, FinishReason, RankSnapshot, TokenBatch

logger = logging.getLogger("nrank.coordinator")

T = TypeVar("T")

DELETED_S = 2.0  # between two looks at whether Serve ends the application
# Serve kills a replica that misses three health checks in a row: it stands still.
HEALTH_CHECKS = {"health_check_period_s": 5.0, "health_check_timeout_s": 10.0}
COUNT_S = 1.0  # finished HTTP requests are told together, this long after the first
ASK_S = 10.0  # a coordinator that does not answer a question for this long is not there
TRANSPORT = (RayError, RayServeException)


@dataclass(frozen=True)
class Refusal:
    """A ClientError or NotServing on its way to the ingress, sent in place of an answer."""

    message: str
    kind: ErrorKind
    is_client: bool
    param: str | None = None
    code: str | None = None
    retry_after_s: float | None = None

    @staticmethod
    def of(error: ClientError | NotServing) -> Refusal:
        if isinstance(error, ClientError):
            return Refusal(str(error), error.kind, True, error.param, error.code)
        return Refusal(str(error), error.kind, False, retry_after_s=error.retry_after_s)

    def error(self) -> ClientError | NotServing:
        if self.is_client:
            return ClientError(self.message, self.kind, self.param, self.code)
        return NotServing(self.message, self.kind, self.retry_after_s)


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
        self._coordinator.start()
        self._leases = Leases()
        self._watches = (
            asyncio.create_task(self._drain_when_deleted()),
            asyncio.create_task(self._end_lapsed()),
        )

    async def _drain_when_deleted(self) -> None:
        """Serve tells a replica nothing before it kills it: streams would be cut without a word.

        Serve waits for them, too, but longer than `drain_timeout_s`, so an error event gets out.
        Asking costs both sides tens of milliseconds, so nobody asks while there is no stream.
        """
        app = serve.get_replica_context().app_name
        while True:
            await asyncio.sleep(DELETED_S)
            if self._coordinator.admitted and await asyncio.to_thread(_is_deleted, app):
                await self._coordinator.drain()
                return

    async def _end_lapsed(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            self._leases.end_lapsed()

    async def generate(
        self, request: EngineRequest, caller: str
    ) -> AsyncGenerator[TokenBatch | Refusal, None]:
        """Ends early when `caller` does not renew its lease."""
        batches = self._coordinator.generate(request)
        with self._leases.hold(caller):
            try:
                async for batch in batches:
                    yield batch
            except (ClientError, NotServing) as error:
                yield Refusal.of(error)
            finally:
                await batches.aclose()

    async def renew(self, caller: str) -> None:
        self._leases.renew(caller)

    async def stop_reached(self, request_id: str) -> None:
        await self._coordinator.stop_reached(request_id)

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
        for watch in self._watches:
            watch.cancel()
        await self._coordinator.close()


def _is_deleted(app: str) -> bool:
    try:
        found = serve.status().applications.get(app)
    except TRANSPORT:
        return False  # no answer says nothing
    return found is not None and found.status is ApplicationStatus.DELETING


class RemoteEngine:
    """EngineClient over a deployment handle; faults of the transport become NotServing."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle: Any = handle
        self._streaming: Any = handle.options(stream=True)
        self._caller = uuid.uuid4().hex
        self._open = 0  # requests under way
        self._renewal: asyncio.Task[None] | None = None
        self._http: Counter[tuple[str, int]] = Counter()  # finished requests, not told yet
        self._telling: asyncio.Task[None] | None = None

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenBatch, None]:
        self._open += 1
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew())
        batches = self._generate(request)
        try:
            async for batch in batches:
                yield batch
        finally:
            self._open -= 1
            await batches.aclose()

    async def _renew(self) -> None:
        """Answers for the requests under way until there are none."""
        while self._open:
            await asyncio.sleep(RENEW_S)
            try:
                await self._ask(self._handle.renew.remote(self._caller))
            except NotServing as error:
                logger.warning("the lease is not renewed: %s", error)

    async def _generate(self, request: EngineRequest) -> AsyncGenerator[TokenBatch, None]:
        response = self._streaming.generate.remote(request, self._caller)
        started = finished = False
        try:
            async for item in response:
                if isinstance(item, Refusal):
                    finished = True
                    raise item.error()
                started, finished = True, item.finish_reason is not None
                yield item
        except TRANSPORT as error:
            finished = True
            if not started:
                raise self._gone(error) from error
            yield TokenBatch(
                request.request_id, (), FinishReason.ERROR, time.time(),
                error_kind=ErrorKind.RANK_FAILURE.value, error_message=str(self._gone(error)),
            )  # fmt: skip
        finally:
            if not finished:
                response.cancel()

    def _gone(self, error: Exception) -> NotServing:
        text = f"the coordinator of the gang is gone ({type(error).__name__}) and is replaced"
        return NotServing(text, ErrorKind.RANK_FAILURE)

    async def _ask(self, response: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(ASK_S):
                return await response
        except TRANSPORT as error:
            raise self._gone(error) from error
        except TimeoutError:
            raise NotServing(f"the coordinator did not answer within {ASK_S:g} s") from None

    async def stop_reached(self, request_id: str) -> None:
        await self._ask(self._handle.stop_reached.remote(request_id))

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
