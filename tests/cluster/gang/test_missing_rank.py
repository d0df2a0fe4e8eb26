"""A rank of the real engine that does not come to the rendezvous is named, and nothing waits on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.failure import Failure
from cluster.gang import Gang, RankDied
from cluster.local_gang import LocalLauncher
from placement.config import EngineConfig
from placement.errors import RankError
from rank_worker.messages import RankIdentity
from rank_worker.rank import Rank


@pytest.mark.parametrize("late", [0, 2])
def test_only_the_rank_that_never_arrives_is_named(
    drive: Callable[..., None], embedded_model_dir: Path, late: int
) -> None:
    config = EngineConfig(
        str(embedded_model_dir), ranks=3, context_tokens=512, start_timeout_s=1.0,
        step_timeout_s=5.0,
    )  # fmt: skip
    gate = threading.Event()

    class Late(Rank):
        def open(self, port: int) -> None:
            gate.wait(60)
            raise RankError("came too late", rank=self.rank)

    def make(config: EngineConfig, rank: int, world_size: int) -> Rank:
        return (Late if rank == late else Rank)(config, rank, world_size)

    async def body() -> None:
        gang = Gang(LocalLauncher(config, make), config)
        try:
            with pytest.raises(RankError, match=rf"ranks \[{late}\] did not arrive") as caught:
                await gang.start(lambda _: None, lambda _: None)
            assert f"no answer from rank(s) {late} (" in str(caught.value)
            assert "start_timeout_s" in str(caught.value)
        finally:
            gate.set()
            await gang.end()

    drive(body())


def test_a_death_without_a_word_is_one_while_running() -> None:
    failure = Failure.of(RankDied("gone", rank=0), 1, [RankIdentity(1, "n", 0, "a")])
    assert (failure.rank, failure.phase) == (0, "run")
