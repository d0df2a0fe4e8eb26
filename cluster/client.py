"""What the HTTP edge asks of an engine: generate tokens, tell its state, render its metrics.

Owns the interface between the ingress and whatever runs the gang (in-process, or behind a
deployment handle) and the types that only this interface uses. Knows nothing of HTTP or Ray.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from cluster.failure import Failure
from placement.errors import ErrorKind, NrankError
from rank_worker.device_sensors.reading import CardReading, ChipReading
from rank_worker.messages import EngineRequest, RankSnapshot, TokenBatch
from rank_worker.start_report import StartReport


class NotServing(NrankError):
    """The engine can't take or finish a request now: why (`kind`) and when to retry."""

    def __init__(
        self,
        message: str,
        kind: ErrorKind = ErrorKind.NOT_READY,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[NotServing], tuple[str, ErrorKind, float | None]]:
        return (type(self), (str(self), self.kind, self.retry_after_s))


class EngineState(StrEnum):
    """State of one gang; the HTTP edge maps it to /health and /ready."""

    STARTING = "starting"
    SERVING = "serving"
    HOLD = "hold"
    CUT = "cut"
    DRAINING = "draining"
    RESTARTING = "restarting"
    FAILED = "failed"  # restart cap reached


@dataclass(frozen=True)
class RankStatus:
    """One rank as the coordinator last saw it."""

    rank: int
    phase: str  # LoadProgress.phase, or "running", "dead"
    pid: int = 0
    node: str = ""
    physical_chip: int = -1
    step: int = 0
    heartbeat_age_s: float | None = None  # None: not heard of yet
    usable_bytes: int = 0  # of its chip: what the plan had to fit into
    planned_bytes: int = 0  # all ledger rows
    measured_bytes: int = 0  # rows that are tensors: no workspace, no reserve
    weights_planned_bytes: int = 0  # to be read from the checkpoint
    weights_read_bytes: int = 0
    load_seconds: float = 0.0  # from the first read of weights to now, or to the last
    planned_rows: dict[str, int] = field(default_factory=dict)  # ledger row -> bytes
    measured_rows: dict[str, int] = field(default_factory=dict)
    cpus: tuple[int, ...] = ()  # processors that its step loop may run on
    chip: ChipReading | None = None  # its sensors, not older than 5 s; None: nothing is known


@dataclass(frozen=True)
class HeatStatus:
    """What the heat guard and the sensors say. Unknown figures are None or empty."""

    order: str = "run"  # run, pace, hold, cut
    cause: str = ""  # of a hold or cut: heat, silence, hand
    reason: str = ""
    held_by_hand: bool = False
    silent_ranks: tuple[int, ...] = ()  # without a temperature lately
    held_s: dict[str, float] = field(default_factory=dict)  # cause -> seconds held so far
    sensor_source: str = ""  # dcmi, npu-smi, nvml; empty: none answers, or none is asked
    sensor_age_s: float | None = None
    sensor_error: str = ""
    chips: tuple[ChipReading, ...] = ()  # of the ranks' node
    cards: tuple[CardReading, ...] = ()


@dataclass(frozen=True)
class EngineStatus:
    """What /status, /ready and /v1/models show. Token counts are 0 until the plan is made."""

    state: EngineState
    ready: bool
    reason: str = ""
    public_reason: str = ""  # the same for anyone: no process ids, paths or others' requests
    model_id: str = ""
    plan_id: str = ""
    config_hash: str = ""
    config: dict[str, Any] = field(default_factory=dict)  # resolved; it holds no secrets
    revision: str = ""
    device: str = ""
    world_size: int = 0
    epoch: int = 0
    restarts: int = 0
    max_sequences: int = 0
    running: int = 0
    waiting: int = 0
    configured_tokens: int = 0
    allocated_tokens: int = 0
    certified_tokens: int = 0
    certified_warning: str = ""  # why the evidence file certifies nothing here
    last_failure: Failure | None = None  # of this server's gangs
    slowest_rank: int = -1  # while ranks load: the one that the others will wait for
    start: StartReport | None = None  # of the gang that serves now
    heat: HeatStatus = field(default_factory=HeatStatus)
    ranks: tuple[RankStatus, ...] = ()


class EngineClient(Protocol):
    """An engine seen from the ingress. Only `generate`, `status` and `expert_counts` may raise.

    Implementations behind a remote handle turn transport faults into `NotServing`.
    """

    def generate(self, request: EngineRequest) -> AsyncIterator[TokenBatch]:
        """An async generator of batches; the last carries a finish reason.

        Raises ClientError or NotServing at the first `__anext__` when the request is refused.
        `aclose()` (or dropping the consumer's task) aborts the request.
        """

    async def stop_reached(self, request_id: str) -> None:
        """The answer is complete at a stop string: end the request and count it as a success.

        The caller closes the iterator right after; that close is then not an abort.
        """

    async def status(self) -> EngineStatus: ...

    async def snapshots(self) -> tuple[RankSnapshot, ...]: ...

    async def expert_counts(self) -> list[list[int]]:
        """Tokens routed to each expert of each layer since the gang started: [layer][expert].

        Raises NotServing while no gang serves.
        """

    async def metrics_text(self) -> bytes:
        """Prometheus text format 0.0.4 of the whole gang."""

    async def hold(self, reason: str) -> None:
        """By hand: ranks rest until resume(), all state kept."""

    async def resume(self) -> None:
        """Ends a hold by hand; what the heat guard wants still holds."""

    async def record_http(self, endpoint: str, code: int) -> None:
        """Count one finished HTTP request."""
