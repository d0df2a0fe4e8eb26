"""The coordinator of one gang: admission, streams, the state that /health and /ready tell, drain.

A plain class for one event loop; a Serve deployment and an in-process form wrap it. Owns the
only count of admitted requests. Touches no device and knows no Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cluster.client import EngineState, EngineStatus, HeatStatus, NotServing, RankStatus
from cluster.engine_metrics import BuildInfo, EngineMetrics
from cluster.failure import public_text
from cluster.gang import LOADING, Gang, Launcher
from cluster.heat_watch import HeatListener, HeatWatch
from cluster.holds import Holds
from cluster.rank_status import rank_status
from cluster.session import GangListener, Session
from cluster.streams import Stream, StreamTable
from cluster.supervisor import RestartPolicy, Supervisor
from cluster.thermal_guard import HeatLimits, ThermalGuard, Verdict
from placement.config import EngineConfig
from placement.errors import ClientError, ErrorKind, NrankError, RankError
from placement.evidence import Claim
from placement.plan import Plan
from rank_worker.device_sensors.reading import ChipReading, NodeReading
from rank_worker.guard_word import Order
from rank_worker.load_progress import slowest
from rank_worker.messages import EngineRequest, LoadProgress, RankSnapshot, TokenBatch
from rank_worker.start_report import StartReport, start_report

logger = logging.getLogger("nrank.coordinator")

QUEUE_RETRY_S = 1.0
START_RETRY_S = 5.0
ASK_S = 5.0  # a rank that runs answers a question in this time
CLOSE_S = 5.0  # readers get this long to take the last batch of a stream that we ended
# Error batches that we make ourselves: before the first token they are refusals.
OWN_KINDS = (
    ErrorKind.RANK_FAILURE, ErrorKind.DRAINING, ErrorKind.HELD, ErrorKind.DEADLINE,
)  # fmt: skip


@dataclass(frozen=True)
class CoordinatorSettings:
    """What the coordinator needs beyond the engine's configuration."""

    max_queue_requests: int = 64  # admitted beyond those that can run at once
    drain_timeout_s: float = 30.0
    request_timeout_s: float = 0.0  # from admission to the last token; 0: none
    restart: RestartPolicy = field(default_factory=RestartPolicy)
    heat: HeatLimits | None = None  # None: no sensors are asked
    snapshot_interval_s: float = 1.0
    model_id: str = ""
    config_hash: str = ""
    config: dict[str, Any] = field(default_factory=dict)  # as resolved, for /status
    build: BuildInfo = field(default_factory=BuildInfo)
    claim: Claim | None = None  # None: no evidence of a context length was given


class Coordinator:
    """Implements EngineClient in this process. Use: start(), generate() at any time, close()."""

    def __init__(
        self,
        config: EngineConfig,
        plan: Plan,
        make_launcher: Callable[[], Launcher],
        settings: CoordinatorSettings,
    ) -> None:
        self._config = config
        plan, self._certified_warning = certified(plan, settings.claim)
        self._plan = plan
        self._settings = settings
        self._streams = StreamTable()
        self._holds = Holds(time.monotonic)
        self._reading: NodeReading | None = None  # the last one with chips
        self._sensor_error = ""
        self._heat_task: asyncio.Task[None] | None = None
        self._draining = False
        self._start: StartReport | None = None
        build = replace(settings.build, plan_id=plan.plan_id, config_hash=settings.config_hash)
        self._metrics = EngineMetrics(settings.model_id, config.ranks, build)
        self._metrics.set_plan(plan)
        listener = GangListener(
            on_batch=self._deliver,
            on_snapshot=lambda snapshot: self._metrics.update_snapshots((snapshot,)),
            on_load=self._metrics.update_load,
            on_ready=self._gang_ready,
            on_end=self._gang_ended,
            on_restart=self._gang_restarts,
            has_work=lambda: len(self._streams) > 0,
            order=lambda: self._holds.order,
        )
        self._supervisor = Supervisor(
            config, make_launcher, settings.restart, listener, settings.snapshot_interval_s
        )
        heat = HeatListener(
            lambda: self._supervisor.gang, lambda: self._holds.order, self.observe_heat
        )
        guard = ThermalGuard(settings.heat) if settings.heat is not None else None
        self._metrics.set_heat_limits(settings.heat)
        self._heat = HeatWatch(guard, heat)

    @property
    def state(self) -> EngineState:
        """The row of the state table that holds now; a full queue is a matter of each request."""
        if self._supervisor.failed:
            return EngineState.FAILED
        if self._draining:
            return EngineState.DRAINING
        if not self._supervisor.ready:
            started = self._supervisor.restarts or self._supervisor.reason
            return EngineState.RESTARTING if started else EngineState.STARTING
        if self._holds.order is Order.CUT:
            return EngineState.CUT
        return EngineState.HOLD if self._holds.order.is_still else EngineState.SERVING

    @property
    def capacity(self) -> int:
        """Admitted requests at most: those that run and those that wait."""
        return self._plan.max_sequences + self._settings.max_queue_requests

    @property
    def admitted(self) -> int:
        return len(self._streams)

    @property
    def _session(self) -> Session | None:
        return self._supervisor.session

    def start(self) -> None:
        """Begins to place and load; returns at once. state and status() tell how it goes."""
        self._supervisor.start()
        self._heat_task = asyncio.get_running_loop().create_task(self._heat.run())

    def check_alive(self) -> None:
        """Raises when supervision itself ended by a fault: the process must be replaced."""
        self._supervisor.check()
        if self._heat_task is not None and self._heat_task.done():
            self._heat_task.result()

    @property
    def fatal(self) -> NrankError | None:
        """Why no gang can be started, when it is a matter of configuration or checkpoint."""
        return self._supervisor.fatal

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenBatch, None]:
        """Batches of one request as they come; several steps in one when the reader is behind.

        Raises ClientError or NotServing before the first batch. Closing it aborts the request.
        """
        stream = self._admit(request)
        try:
            first = True
            while True:
                batch = await self._next_batch(stream)
                if first and not batch.token_ids and batch.error_kind in OWN_KINDS:
                    raise self._refusal(ErrorKind(batch.error_kind), batch.error_message or "")
                first = False
                yield batch
                if batch.finish_reason is not None:
                    return
        finally:
            self._close(stream)

    async def _next_batch(self, stream: Stream) -> TokenBatch:
        """What comes next; past its deadline a stream ends with an error."""
        limit_s = self._settings.request_timeout_s
        if not limit_s:
            return await stream.get()
        left_s = stream.start_s + limit_s - time.monotonic()
        try:
            if left_s <= 0 and not stream.finished:  # what waits already would never time out
                raise TimeoutError
            async with asyncio.timeout(max(0.0, left_s)):
                return await stream.get()
        except TimeoutError:
            text = f"not finished within request_timeout_s={limit_s:g}: {stream.num_tokens} tokens"
            stream.fail(ErrorKind.DEADLINE, f"{text} were made; ask for fewer or retry later")
            return await stream.get()

    def _admit(self, request: EngineRequest) -> Stream:
        try:
            return self._enter(request)
        except (ClientError, NotServing) as error:
            self._metrics.observe_rejected(error.kind)
            raise

    def _enter(self, request: EngineRequest) -> Stream:
        self._check_length(request)
        state = self.state
        if state is EngineState.DRAINING:
            raise self._refusal(ErrorKind.DRAINING, "the server is shutting down")
        if state is EngineState.CUT:
            raise self._refusal(ErrorKind.HELD, f"serving is cut: {self._holds.reason}")
        session = self._session
        if session is None or state not in (EngineState.SERVING, EngineState.HOLD):
            raise self._refusal(ErrorKind.NOT_READY, f"the engine is {state}: {self._why()}")
        if self.admitted >= self.capacity:
            raise self._full(state)
        stream = self._streams.add(request)
        self._metrics.observe_started(stream.request)
        session.outbox.submit(stream.request)
        return stream

    def _check_length(self, request: EngineRequest) -> None:
        limit = self._plan.context.configured_tokens
        tokens = len(request.prompt_ids)
        if tokens < 1 or request.max_tokens < 1:
            raise ClientError(
                f"a request needs at least 1 prompt token and max_tokens of at least 1, "
                f"got {tokens} and {request.max_tokens}"
            )
        if tokens + request.max_tokens > limit:
            raise ClientError(
                f"prompt ({tokens} tokens) and max_tokens ({request.max_tokens}) exceed the "
                f"context of {limit} tokens; shorten one of them",
                kind=ErrorKind.CONTEXT_LENGTH,
            )

    def _full(self, state: EngineState) -> NotServing:
        text = (
            f"{self.admitted} requests are admitted, the limit is {self.capacity} "
            f"(max_sequences={self._plan.max_sequences} running, "
            f"max_queue_requests={self._settings.max_queue_requests} waiting)"
        )
        if state is EngineState.HOLD:
            return self._refusal(ErrorKind.HELD, f"on hold ({self._holds.reason}) and {text}")
        return NotServing(f"{text}; retry later", ErrorKind.QUEUE_FULL, QUEUE_RETRY_S)

    def _refusal(self, kind: ErrorKind, text: str) -> NotServing:
        return NotServing(text, kind, START_RETRY_S)

    def _why(self) -> str:
        """For clients; /status and the log have the cause."""
        cause = self._supervisor.cause
        text = public_text(cause) if cause is not None else self._supervisor.phase
        return self._with_hold(text)

    def _with_hold(self, text: str) -> str:
        """A gang that starts while it is held waits for that, whatever else is told."""
        return f"{text}; at rest: {self._holds.reason}" if self._holds.order.is_still else text

    def _close(self, stream: Stream) -> None:
        """The only way out of the table; tells rank 0 when it doesn't know yet."""
        name = stream.request.request_id
        self._streams.remove(stream)
        if stream.ended_by_rank:
            return
        if stream.stop_reached:
            self._metrics.observe_stopped(name)
        else:
            self._metrics.observe_aborted(name, stream.failure or ErrorKind.CANCELLED)
        if self._session is not None:
            self._session.outbox.abort(name)

    def _deliver(self, batch: TokenBatch) -> None:
        self._metrics.observe_batch(batch)
        self._streams.dispatch(batch)

    def _gang_ready(self, snapshots: tuple[RankSnapshot, ...]) -> None:
        self._start = start_report(self._plan, snapshots)
        for line in self._start.lines():
            logger.info("%s", line)

    def _gang_ended(self, error: NrankError | None) -> None:
        self._start = None
        self._metrics.end_ranks(self._supervisor.epoch)
        kind = ErrorKind.DRAINING if self._draining else ErrorKind.RANK_FAILURE
        text = f"{public_text(error)}; retry later" if error is not None else "the gang has ended"
        self._streams.fail_all(kind, text)

    def _gang_restarts(self, error: NrankError) -> None:
        """The label stays short: the phase in which it failed; the log has the whole cause."""
        rank, phase = -1, ""
        if isinstance(error, RankError):
            rank, phase = error.rank, error.phase
        self._metrics.observe_restart(phase or "run", (rank,) if rank >= 0 else ())

    async def hold(self, reason: str) -> None:
        """By hand: ranks rest with all state kept, new requests queue up to the bound.

        Stays until resume(), whatever the heat guard does.
        """
        self._holds.by_hand(reason)
        self._obey_holds()

    async def resume(self) -> None:
        """Ends a hold by hand, and a cut that would stay; what the guard wants now still holds."""
        self._holds.by_hand("")
        self._heat.release()
        self._obey_holds()

    def observe_heat(
        self, reading: NodeReading | None, verdict: Verdict, devices: Sequence[int]
    ) -> None:
        """What the sensors said and the guard wants: once a second while there are ranks."""
        before = self._holds.order
        if reading is not None:
            self._sensor_error = reading.error or ""
            self._reading = reading if reading.source is not None else self._reading
        self._holds.by_guard(verdict)
        self._metrics.observe_heat(reading, verdict, devices)
        if self._holds.order is not before:
            self._obey_holds()

    def _obey_holds(self) -> None:
        order = self._holds.order
        logger.log(
            logging.WARNING if order.is_still else logging.INFO,
            "the gang has the order %s%s", order.name, f": {self._holds.reason}" if order else "",
        )  # fmt: skip
        self._supervisor.hold(order.is_still)
        if order is Order.CUT:
            self._streams.fail_all(ErrorKind.HELD, f"serving is cut: {self._holds.reason}")
        self._heat.wake()

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Refuses new requests and lets the admitted ones finish; True when all did in time."""
        self._draining = True
        timeout_s = self._settings.drain_timeout_s if timeout_s is None else timeout_s
        finished = await self._streams.wait_empty(timeout_s)
        if not finished:
            text = f"the server is shutting down (drain_timeout_s={timeout_s:g})"
            self._streams.fail_all(ErrorKind.DRAINING, text)
            await self._streams.wait_empty(CLOSE_S)
        return finished

    async def close(self) -> None:
        """Ends the gang, whatever state it is in; returns when no rank is left."""
        self._draining = True
        await self._supervisor.stop()
        if self._heat_task is not None:
            self._heat_task.cancel()
            await asyncio.wait({self._heat_task})

    async def stop_reached(self, request_id: str) -> None:
        for stream in self._streams.named(request_id):
            stream.stop_reached = True

    async def snapshots(self) -> tuple[RankSnapshot, ...]:
        """The last snapshot of every rank of the gang at work, none between two gangs."""
        return self._session.snapshots if self._session is not None else ()

    async def expert_counts(self) -> list[list[int]]:
        """As rank 0 last counted, between two steps. Raises NotServing while no gang serves."""
        session = self._session
        if session is None or not self._supervisor.ready:
            raise self._refusal(ErrorKind.NOT_READY, f"the engine is {self.state}: {self._why()}")
        try:
            async with asyncio.timeout(ASK_S):
                return await session.expert_counts()
        except (RankError, TimeoutError) as error:
            text = "rank 0 does not tell its counts; retry later"
            raise self._refusal(ErrorKind.RANK_FAILURE, text) from error

    async def metrics_text(self) -> bytes:
        self._holds.count()
        self._metrics.set_held(self._holds.order, self._holds.seconds)
        self._metrics.set_state(self.state)
        return self._metrics.render()

    async def record_http(self, endpoint: str, code: int) -> None:
        self._metrics.observe_http(endpoint, code)

    async def status(self) -> EngineStatus:
        plan, supervisor, state = self._plan, self._supervisor, self.state
        running, waiting = self._load()
        late = slowest(list(self._loading().values()))
        return EngineStatus(
            state=state,
            ready=state is EngineState.SERVING,
            reason=self._status_reason(
                state, self._with_hold(supervisor.reason or supervisor.phase)
            ),
            public_reason=self._status_reason(state, self._why()),
            model_id=self._settings.model_id,
            plan_id=plan.plan_id,
            config_hash=self._settings.config_hash,
            config=self._settings.config,
            revision=self._settings.build.git_sha,
            device=self._config.device,
            world_size=plan.world_size,
            epoch=supervisor.epoch,
            restarts=supervisor.restarts,
            max_sequences=plan.max_sequences,
            running=running,
            waiting=waiting,
            configured_tokens=plan.context.configured_tokens,
            allocated_tokens=plan.context.allocated_tokens,
            certified_tokens=plan.context.certified_tokens,
            certified_warning=self._certified_warning,
            last_failure=supervisor.last_failure,
            slowest_rank=late.rank if late is not None else -1,
            start=self._start,
            heat=self._heat_status(),
            ranks=self._rank_statuses(),
        )

    def _load(self) -> tuple[int, int]:
        """Running and waiting requests: the admitted ones, split as rank 0 last told."""
        snapshots = self._session.snapshots if self._session is not None else ()
        running = min(snapshots[0].running if snapshots else 0, self.admitted)
        return running, self.admitted - running

    def _status_reason(self, state: EngineState, why: str) -> str:
        reasons = {
            EngineState.SERVING: "",
            EngineState.HOLD: self._holds.reason,
            EngineState.CUT: self._holds.reason,
            EngineState.DRAINING: "shutting down",
        }
        return reasons.get(state, why)

    def _heat_status(self) -> HeatStatus:
        self._holds.count()
        reading, now_s = self._reading, time.monotonic()
        return HeatStatus(
            order=self._holds.order.name.lower(),
            cause=self._holds.cause,
            reason=self._holds.reason,
            held_by_hand=self._holds.is_by_hand,
            silent_ranks=self._holds.silent_ranks,
            held_s=dict(self._holds.seconds),
            sensor_source=(reading.source or "") if reading is not None else "",
            sensor_age_s=reading.age_s(now_s) if reading is not None else None,
            sensor_error=self._sensor_error,
            chips=reading.chips if reading is not None and reading.is_fresh(now_s) else (),
            cards=reading.cards if reading is not None and reading.is_fresh(now_s) else (),
        )

    def _loading(self) -> Mapping[int, LoadProgress]:
        """What ranks that load told last; empty before and after."""
        gang, phase = self._supervisor.gang, self._supervisor.phase
        return gang.progress if gang is not None and phase == LOADING else {}

    def _rank_statuses(self) -> tuple[RankStatus, ...]:
        """Each rank as it last told."""
        gang, session = self._supervisor.gang, self._session
        if gang is None or len(gang.ranks) < gang.world_size:
            return ()
        loading = self._loading()
        snapshots = {s.rank: s for s in session.snapshots} if session is not None else {}
        chips = self._rank_chips(gang)
        return tuple(
            rank_status(
                rank.identity,
                loading.get(index) or LoadProgress(index, self._supervisor.phase),
                snapshots.get(index),
                session.heartbeat_age_s(index) if session is not None else None,
                self._plan.ranks[index],
                chips.get(index),
            )
            for index, rank in enumerate(gang.ranks)
        )

    def _rank_chips(self, gang: Gang) -> Mapping[int, ChipReading]:
        """What the sensors say of each rank's chip; they are those of rank 0's node."""
        if self._reading is None or not self._reading.is_fresh(time.monotonic()):
            return {}
        node = gang.ranks[0].identity.node
        identities = [rank.identity for rank in gang.ranks]
        devices = [who.physical_chip if who.node == node else -1 for who in identities]
        return self._reading.by_rank(devices)


def certified(plan: Plan, claim: Claim | None) -> tuple[Plan, str]:
    """The plan with the length that evidence certifies for it, and what is wrong with that."""
    if claim is None:
        return plan, ""
    tokens, warning = claim.standing(plan.plan_id)
    if warning:
        logger.warning("%s", warning)
    return replace(plan, context=replace(plan.context, certified_tokens=tokens)), warning
