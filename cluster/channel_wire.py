"""What crosses the socket between an ingress and the coordinator.

A message is its length (4 bytes, big-endian) and a pickle. Refusals cross as values. Knows no
connection.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from dataclasses import dataclass
from typing import Any

from cluster.client import NotServing
from placement.errors import ClientError, ErrorKind
from rank_worker.messages import EngineRequest, TokenBatch

LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class ChannelAddress:
    """Where a coordinator listens, and the key that it wants to hear first."""

    host: str
    port: int
    key: bytes


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


@dataclass(frozen=True)
class Ask:
    """Ingress to coordinator: `number` names the request on this connection."""

    number: int
    request: EngineRequest


@dataclass(frozen=True)
class Abort:
    number: int


@dataclass(frozen=True)
class StopReached:
    request_id: str


@dataclass(frozen=True)
class Renewal:
    """The ingress lives."""


Message = Ask | Abort | StopReached | Renewal
Item = tuple[int, TokenBatch | Refusal]  # coordinator to ingress, in lists


def frame(message: Message | list[Item]) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


async def receive(reader: asyncio.StreamReader) -> Any:
    """The next message. Raises EOFError or OSError when the connection has ended."""
    (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return pickle.loads(await reader.readexactly(size))
