"""The coordinator's end of the sockets to its ingresses: serves what they ask for.

Owns the listening socket, its key, and who answers for the requests that run: an ingress that goes,
or that is silent for too long, loses them. Nothing is unpickled before the key was heard; the key
travels over Ray, so who may call the coordinator may connect. Knows no Ray and no HTTP.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from dataclasses import replace
from typing import Any

from cluster.channel_wire import (
    Abort,
    Ask,
    ChannelAddress,
    Item,
    Message,
    Refusal,
    StopReached,
    frame,
    receive,
)
from cluster.client import EngineClient, NotServing
from placement.errors import ClientError, ErrorKind
from rank_worker.messages import TokenBatch

logger = logging.getLogger("nrank.channel")

KEY_BYTES = 32
HELLO_S = 5.0  # who has connected sends the key in this time
LEASE_S = 30.0  # an ingress that lives may be busy for long; a dead one holds slots for so long


class ChannelServer:
    """The coordinator's end. `close()` ends all connections; whoever reads gets an error."""

    def __init__(self, engine: EngineClient, lease_s: float = LEASE_S) -> None:
        self._engine, self._lease_s = engine, lease_s
        self.address = ChannelAddress("", 0, secrets.token_bytes(KEY_BYTES))
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def start(self, host: str) -> ChannelAddress:
        """Listens on a free port of `host` only."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        port = int(self._server.sockets[0].getsockname()[1])
        self.address = replace(self.address, host=host, port=port)
        return self.address

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            async with asyncio.timeout(HELLO_S):
                key = await reader.readexactly(KEY_BYTES)
            if hmac.compare_digest(key, self.address.key):
                await _Connection(self._engine, reader, writer, self._lease_s).run()
        except (EOFError, OSError):  # TimeoutError is an OSError
            pass
        finally:
            self._open.discard(writer)
            writer.transport.abort()


class _Connection:
    """One ingress, as the coordinator serves it."""

    def __init__(
        self,
        engine: EngineClient,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        lease_s: float,
    ) -> None:
        self._engine, self._reader, self._writer = engine, reader, writer
        self._lease_s = lease_s
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._items: list[Item] = []
        self._wake = asyncio.Event()
        self._sent = asyncio.Event()  # set once `_items` has left; a new one for each message

    async def run(self) -> None:
        """Until the ingress goes, or is silent for too long; what it asked for is aborted."""
        writing = asyncio.create_task(self._write())
        try:
            while True:
                async with asyncio.timeout(self._lease_s):
                    message = await receive(self._reader)
                await self._take(message)
        except TimeoutError:
            logger.warning(
                "an ingress has been silent for %g s: its %d requests are taken back",
                self._lease_s, len(self._tasks),
            )  # fmt: skip
        finally:
            writing.cancel()
            for task in self._tasks.values():
                task.cancel()

    async def _take(self, message: Message) -> None:
        if isinstance(message, Ask):
            number, task = message.number, asyncio.create_task(self._answer(message))
            self._tasks[number] = task
            # Not by the task itself: one that is aborted before its first step never runs.
            task.add_done_callback(lambda _: self._tasks.pop(number, None))
        elif isinstance(message, StopReached):
            await self._engine.stop_reached(message.request_id)
        elif isinstance(message, Abort) and message.number in self._tasks:
            self._tasks[message.number].cancel()

    async def _answer(self, ask: Ask) -> None:
        batches: Any = self._engine.generate(ask.request)
        try:
            async for batch in batches:
                await self._send(ask.number, batch)
        except (ClientError, NotServing) as error:
            await self._send(ask.number, Refusal.of(error))
        except Exception:
            logger.exception("request %s failed in the coordinator", ask.request.request_id)
            text = "the coordinator failed; see its log"
            await self._send(ask.number, Refusal(text, ErrorKind.RANK_FAILURE, False))
        finally:
            await batches.aclose()

    async def _send(self, number: int, item: TokenBatch | Refusal) -> None:
        """Returns when it has left: what comes meanwhile is merged where it comes from."""
        self._items.append((number, item))
        self._wake.set()
        await self._sent.wait()

    async def _write(self) -> None:
        """Until cancelled. When it can't go on the connection ends, and so does whoever waits."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                items, self._items = self._items, []
                sent, self._sent = self._sent, asyncio.Event()
                self._writer.write(frame(items))
                await self._writer.drain()
                sent.set()
        except OSError:
            pass  # the reader finds the end, too
        except Exception:
            logger.exception("an answer could not be sent")
        finally:
            self._writer.transport.abort()
