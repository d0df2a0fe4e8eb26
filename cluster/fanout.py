"""Several engine requests of one HTTP request, read as one stream of batches.

Owns one reader task a choice and their orderly end: whatever happens, every engine iterator is
closed, which aborts what still runs. Knows nothing of text or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from types import TracebackType

from cluster.client import EngineClient, NotServing
from placement.errors import ErrorKind
from rank_worker.messages import EngineRequest, FinishReason, TokenBatch

_LOG = logging.getLogger("nrank.edge")

_CLOSE_TIMEOUT_S = 10.0
_UNREAD_BATCHES = 8  # of one choice; a slow client holds its streams back, memory stays bounded

Item = tuple[int, TokenBatch | Exception]


class Fanout:
    """Use as an async context manager; leaving it aborts all choices that still run."""

    def __init__(self, engine: EngineClient, requests: Sequence[EngineRequest]) -> None:
        self._engine = engine
        self._requests = tuple(requests)
        self._queue: asyncio.Queue[Item] = asyncio.Queue()  # bounded by the permits
        self._permits = [asyncio.Semaphore(_UNREAD_BATCHES) for _ in requests]
        self._readers: list[asyncio.Task[None]] = []
        self._failure: NotServing | None = None  # told after the tokens that were made before it

    async def __aenter__(self) -> Fanout:
        self._readers = [
            asyncio.create_task(self._read(index)) for index in range(len(self._requests))
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._end(self._readers)

    async def next(self) -> tuple[int, TokenBatch]:
        """The next batch of any choice. Raises what the engine raised for any of them."""
        if self._failure is not None:
            raise self._failure
        index, item = await self._queue.get()
        self._permits[index].release()
        if isinstance(item, Exception):
            raise item
        if item.finish_reason not in (FinishReason.ERROR, FinishReason.ABORT):
            return index, item
        self._failure = _batch_error(item)
        if not item.token_ids:
            raise self._failure
        return index, replace(item, finish_reason=None, error_kind=None, error_message=None)

    async def stop(self, index: int) -> None:
        """End one choice at a stop string: a success for the engine, not an abort."""
        await self._engine.stop_reached(self._requests[index].request_id)
        await self._end([self._readers[index]])

    async def _read(self, index: int) -> None:
        finished = False
        try:
            async with contextlib.aclosing(
                _closable(self._engine, self._requests[index])
            ) as batches:
                async for batch in batches:
                    await self._permits[index].acquire()
                    finished = batch.finish_reason is not None
                    self._queue.put_nowait((index, batch))
        except Exception as error:  # raised again by next(), in the consumer's task
            self._queue.put_nowait((index, error))
            return
        if not finished:
            message = "the engine ended the stream before the answer was complete; retry"
            self._queue.put_nowait((index, NotServing(message, ErrorKind.RANK_FAILURE)))

    async def _end(self, readers: Sequence[asyncio.Task[None]]) -> None:
        open_readers = [reader for reader in readers if not reader.done()]
        for reader in open_readers:
            reader.cancel()
        if not open_readers:
            return
        _, late = await asyncio.wait(open_readers, timeout=_CLOSE_TIMEOUT_S)
        if late:
            _LOG.error("%d engine streams not closed after %s s", len(late), _CLOSE_TIMEOUT_S)


async def _closable(
    engine: EngineClient, request: EngineRequest
) -> AsyncGenerator[TokenBatch, None]:
    """`generate` as an async generator: closing it closes the engine's iterator, if it can be."""
    batches = engine.generate(request)
    try:
        async for batch in batches:
            yield batch
    finally:
        close = getattr(batches, "aclose", None)
        if close is not None:
            await close()


def _batch_error(batch: TokenBatch) -> NotServing:
    fallback = ErrorKind.CANCELLED if batch.finish_reason is FinishReason.ABORT else None
    kind = ErrorKind(batch.error_kind) if batch.error_kind else fallback or ErrorKind.RANK_FAILURE
    message = batch.error_message or f"the engine ended the request: {kind.value}; retry"
    return NotServing(message, kind)
