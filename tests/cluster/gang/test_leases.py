"""Requests of a caller that died are taken back, those of one that answers are not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.leases import Leases


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_only_the_tasks_of_a_silent_caller_are_cancelled(drive: Callable[..., None]) -> None:
    async def body() -> None:
        clock = Clock()
        leases = Leases(10.0, clock)

        async def serve(caller: str) -> None:
            with leases.hold(caller):
                await asyncio.Event().wait()

        tasks = [asyncio.ensure_future(serve(name)) for name in ("dead", "dead", "alive")]
        await asyncio.sleep(0)
        clock.now_s = 8.0
        leases.renew("alive")
        leases.end_lapsed()
        clock.now_s = 11.0
        leases.end_lapsed()
        await asyncio.wait(tasks[:2])
        assert [task.cancelled() for task in tasks] == [True, True, False]
        clock.now_s = 30.0
        leases.end_lapsed()
        await asyncio.wait(tasks)
        assert tasks[2].cancelled()

    drive(body())


def test_a_caller_without_requests_is_forgotten_and_may_come_back(
    drive: Callable[..., None],
) -> None:
    async def body() -> None:
        clock = Clock()
        leases = Leases(10.0, clock)
        with leases.hold("a"), leases.hold("a"):
            clock.now_s = 9.0
        clock.now_s = 100.0
        leases.renew("a")  # late: it has nothing here
        leases.end_lapsed()
        with leases.hold("a"):
            leases.end_lapsed()
            await asyncio.sleep(0)

    drive(body())
