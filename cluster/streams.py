"""One request's way back: batches wait here, merged, until their reader takes them.

Bounded by the request itself: at most `max_tokens` ids are ever held. Knows no ranks.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from dataclasses import replace

from placement.errors import ErrorKind
from rank_worker.messages import EngineRequest, FinishReason, TokenBatch


def merge(first: TokenBatch, second: TokenBatch) -> TokenBatch:
    """Two consecutive batches of one request as one; the counts are totals so far."""
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
        prompt_tokens=max(first.prompt_tokens, second.prompt_tokens),
        cached_tokens=max(first.cached_tokens, second.cached_tokens),
        draft_tokens=max(first.draft_tokens, second.draft_tokens),
        accepted_tokens=max(first.accepted_tokens, second.accepted_tokens),
    )


class Stream:
    """Single reader, single loop: the pump puts, the request's handler gets."""

    def __init__(self, request: EngineRequest, caller_id: str) -> None:
        self.request = request
        self.caller_id = caller_id
        self.start_s = time.monotonic()
        self.num_tokens = 0  # put so far
        self.delivered = False  # a batch has reached the reader
        self.finished = False  # the last batch has been put
        self.ended_by_rank = False  # that batch came from rank 0, which has nothing left to end
        self.failure = ""  # the kind of the error that we ended it with
        self.stop_reached = False  # the reader has all it wants: its close is no abort
        self._pending: deque[TokenBatch] = deque()
        self._wake = asyncio.Event()

    def put(self, batch: TokenBatch) -> None:
        """Adds a batch; anything after the last one is dropped.

        Where a stop string may end the answer, rounds of drafts stay apart: how many of each are
        part of it can't be told from their sum.
        """
        if self.finished:
            return
        batch = replace(batch, request_id=self.caller_id)
        last = self._pending[-1] if self._pending else None
        is_same = last is not None and last.draft_tokens == batch.draft_tokens
        if last is not None and (is_same or not self.request.rounds_apart):
            self._pending[-1] = merge(last, batch)
        else:
            self._pending.append(batch)
        self.num_tokens += len(batch.token_ids)
        self.finished = batch.finish_reason is not None
        self._wake.set()

    def fail(self, kind: ErrorKind, message: str) -> None:
        """Ends the stream with an error batch, after the tokens that were made before it."""
        if not self.finished:
            self.failure = kind.value
        self.put(
            TokenBatch(
                self.caller_id,
                (),
                FinishReason.ERROR,
                error_kind=kind.value,
                error_message=message,
            )
        )

    async def get(self) -> TokenBatch:
        """What has come since the last call, as one batch where it may; waits for a token."""
        while not self._pending:
            self._wake.clear()
            await self._wake.wait()
        self.delivered = True
        return self._pending.popleft()


class StreamTable:
    """All admitted requests of one coordinator, by a name that is never used twice.

    The caller's own request id may come back while late batches of its first use are still
    under way, so the ranks get a serial in front of it.
    """

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._serial = itertools.count(1)
        self._emptied = asyncio.Event()
        self._emptied.set()

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, request: EngineRequest) -> Stream:
        name = f"{next(self._serial)}:{request.request_id}"
        stream = Stream(replace(request, request_id=name), request.request_id)
        self._streams[name] = stream
        self._emptied.clear()
        return stream

    def remove(self, stream: Stream) -> None:
        self._streams.pop(stream.request.request_id, None)
        if not self._streams:
            self._emptied.set()

    def named(self, request_id: str) -> list[Stream]:
        """The streams whose caller named them so."""
        return [stream for stream in self._streams.values() if stream.caller_id == request_id]

    def dispatch(self, batch: TokenBatch) -> None:
        """To its stream; a batch of a request that was closed meanwhile is dropped."""
        stream = self._streams.get(batch.request_id)
        if stream is not None:
            stream.put(batch)
            stream.ended_by_rank |= batch.finish_reason is not None

    def fail_all(self, kind: ErrorKind, message: str) -> None:
        for stream in self._streams.values():
            stream.fail(kind, message)

    async def wait_empty(self, timeout_s: float) -> bool:
        """True when no request is left, False when `timeout_s` passed first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._emptied.wait()
        except TimeoutError:
            return False
        return True
