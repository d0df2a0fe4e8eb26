"""The way to rank 0: requests and aborts in the order in which they were made.

One call at a time: two concurrent calls to a rank may overtake each other, and an abort that
overtakes its request would be forgotten. Knows no streams.
"""

from __future__ import annotations

import asyncio

from cluster.gang import RankHandle
from rank_worker.messages import EngineRequest


class Outbox:
    """What has still to be sent; a request aborted before it was sent never leaves."""

    def __init__(self) -> None:
        self._requests: dict[str, EngineRequest] = {}
        self._aborts: list[str] = []
        self._held = False
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._requests)

    def submit(self, request: EngineRequest) -> None:
        self._requests[request.request_id] = request
        self._wake.set()

    def abort(self, request_id: str) -> None:
        if self._requests.pop(request_id, None) is None:
            self._aborts.append(request_id)
            self._wake.set()

    def hold(self, held: bool) -> None:
        """While held, requests stay here; aborts still go out."""
        self._held = held
        self._wake.set()

    async def run(self, leader: RankHandle) -> None:
        """Sends until cancelled; raises RankDied when rank 0 is gone."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            # Every abort is of a request that has left already: those still here were dropped.
            if self._aborts:
                aborts, self._aborts = tuple(self._aborts), []
                await leader.abort(aborts)
            if self._requests and not self._held:
                requests, self._requests = tuple(self._requests.values()), {}
                await leader.submit(requests)
