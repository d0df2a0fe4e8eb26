"""What the cluster asks of the engine inside one rank, and how such an engine is made.

The protocol is the contract of `rank_worker.rank.Rank`; nothing here imports torch until a rank
is really made, so that the coordinator's process stays without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from placement.config import EngineConfig
from rank_worker.guard_word import Order
from rank_worker.messages import EngineRequest, LoadProgress, RankSnapshot, TokenBatch


class RankEngine(Protocol):
    """One rank of the engine. submit, abort, stop and poll_outputs are for rank 0 only.

    listen, open, load and run are called in this order from one thread; the rest from any.
    """

    def listen(self) -> int: ...

    def open(self, port: int) -> None: ...

    def load(self) -> None: ...

    def run(self) -> None: ...

    def submit(self, requests: Sequence[EngineRequest]) -> None: ...

    def abort(self, request_ids: Sequence[str]) -> None: ...

    def stop(self) -> None: ...

    def obey(self, order: Order) -> None: ...

    def poll_outputs(self, timeout_s: float) -> tuple[TokenBatch, ...]: ...

    def snapshot(self) -> RankSnapshot: ...

    def progress(self) -> LoadProgress: ...

    def expert_counts(self) -> list[list[int]]: ...


RankFactory = Callable[[EngineConfig, int, int], RankEngine]


def make_rank(config: EngineConfig, rank: int, world_size: int) -> RankEngine:
    """The real engine of rank `rank` of `world_size`; cheap, loads nothing."""
    from rank_worker.rank import Rank

    return Rank(config, rank, world_size)
