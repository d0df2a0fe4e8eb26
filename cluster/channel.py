"""The ingress's end of its socket to the coordinator: all of its requests share it.

A streaming call of Serve's costs each process milliseconds a request and a batch; here all that
is ready goes out in one message. Batches wait in the ingress, merged, until their reader takes
them. Knows no Ray and no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator

from cluster.channel_wire import (
    Abort,
    Ask,
    ChannelAddress,
    Message,
    Refusal,
    Renewal,
    StopReached,
    frame,
    receive,
)
from cluster.client import NotServing
from cluster.streams import Stream
from placement.errors import ClientError, ErrorKind
from rank_worker.messages import EngineRequest, TokenBatch

RENEW_S = 5.0
LOST = "the coordinator of the gang is gone and is replaced"


class _Answer:
    """One request as the ingress waits for it."""

    def __init__(self, request: EngineRequest) -> None:
        self.stream = Stream(request, request.request_id)
        self.refusal: ClientError | NotServing | None = None  # instead of any batch

    def take(self, item: TokenBatch | Refusal) -> None:
        if isinstance(item, TokenBatch):
            self.stream.put(item)
        else:
            self.refuse(item.error())

    def refuse(self, error: ClientError | NotServing) -> None:
        self.refusal = error
        self.stream.fail(ErrorKind.RANK_FAILURE, str(error))  # wakes the reader

    def lose(self, text: str) -> None:
        """The connection is gone: an error before the first batch, an error batch after it."""
        if self.stream.num_tokens or self.stream.delivered:
            self.stream.fail(ErrorKind.RANK_FAILURE, text)
        elif not self.stream.finished:
            self.refuse(NotServing(text, ErrorKind.RANK_FAILURE))


class Channel:
    """The ingress's end of one connection; when it `is_lost`, another has to be opened."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.is_lost = False
        self._reader, self._writer = reader, writer
        self._answers: dict[int, _Answer] = {}
        self._numbers = itertools.count()
        self._tasks = (asyncio.create_task(self._read()), asyncio.create_task(self._renew()))

    @staticmethod
    async def connect(address: ChannelAddress) -> Channel:
        """OSError when nobody listens there (any more)."""
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(address.key)
        return Channel(reader, writer)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenBatch, None]:
        """As EngineClient.generate. NotServing when the coordinator is lost before a batch."""
        number, answer = next(self._numbers), _Answer(request)
        if self.is_lost:
            answer.lose(LOST)
        self._answers[number] = answer
        self._tell(Ask(number, request))
        try:
            while True:
                batch = await answer.stream.get()
                if answer.refusal is not None:
                    raise answer.refusal
                yield batch
                if batch.finish_reason is not None:
                    return
        finally:
            del self._answers[number]
            if not answer.stream.finished:
                self._tell(Abort(number))

    def stop_reached(self, request_id: str) -> None:
        self._tell(StopReached(request_id))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._writer.transport.abort()

    def _tell(self, message: Message) -> None:
        if not self.is_lost:
            self._writer.write(frame(message))

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            self._tell(Renewal())

    async def _read(self) -> None:
        try:
            while True:
                for number, item in await receive(self._reader):
                    answer = self._answers.get(number)
                    if answer is not None:
                        answer.take(item)
        except (EOFError, OSError):
            pass
        finally:
            self.is_lost = True
            for answer in self._answers.values():
                answer.lose(LOST)
            self.close()
