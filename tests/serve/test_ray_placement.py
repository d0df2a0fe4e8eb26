"""Placing actors on emulated chips: physical ids, numbering by card, refusals, nothing left."""

from __future__ import annotations

import asyncio
import os

import pytest

from placement.config import EngineConfig
from placement.errors import ConfigError, RankError
from placement.topology import find_profile

pytestmark = pytest.mark.ray

NUM_CHIPS = 6  # of the cluster


@pytest.fixture
def launcher(cluster, server):
    """Makes launchers next to the running server, which holds chips of its own."""
    from cluster.ray_gang import RayLauncher

    def make(ranks, resource="NPU", **changes):
        config = EngineConfig("unused", ranks=ranks, **changes)
        return RayLauncher(config, resource, find_profile("cpu"))

    return make


def test_ranks_get_chips_of_their_own_and_give_them_back(launcher):
    """Pairs share a card. Four chips are free: a second gang needs those of the first."""

    async def body():
        gang = launcher(4)
        try:
            ranks = await gang.place()
            chips = [rank.identity.physical_chip for rank in ranks]
            assert len(set(chips)) == 4
            pids = {rank.identity.pid for rank in ranks}
            assert len(pids) == 4
            mine = os.getpriority(os.PRIO_PROCESS, 0)
            assert {os.getpriority(os.PRIO_PROCESS, pid) for pid in pids} == {mine}
            cards = [chip // 2 for chip in chips]
            assert cards[0] == cards[1]
            assert cards[2] == cards[3]
            return [rank.identity.pid for rank in ranks]
        finally:
            await gang.kill()
            await gang.kill()  # a second time is allowed

    async def again():
        gang = launcher(4, start_timeout_s=60.0)
        await gang.place()
        await gang.kill()

    pids = asyncio.run(body())
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    asyncio.run(again())


def test_more_ranks_than_chips_are_refused_with_both_numbers(launcher):
    with pytest.raises(ConfigError, match=r"7 ranks need 7 x NPU .* has 6"):
        asyncio.run(launcher(7).place())


def test_a_resource_that_no_node_has_is_refused(launcher):
    with pytest.raises(ConfigError, match=r"2 x abacus on one node, but .* has 0"):
        asyncio.run(launcher(2, resource="abacus").place())


def test_chips_that_others_hold_are_told_after_the_deadline(launcher):
    async def body():
        gang = launcher(5, start_timeout_s=1.0)
        try:
            with pytest.raises(RankError, match=r"5 x NPU .*start_timeout_s=1 \(4 are free"):
                await gang.place()
        finally:
            await gang.kill()

    asyncio.run(body())


def test_a_parent_that_sees_all_chips_does_not_pass_that_on(launcher):
    """`ray job submit` starts its driver with Ray's isolation off, and what it starts inherits."""
    import ray

    async def placed():
        gang = launcher(1)
        try:
            [rank] = await gang.place()
            return rank.identity.physical_chip, rank.share
        finally:
            await gang.kill()

    switch = {"RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES": "1"}

    @ray.remote(num_cpus=0, runtime_env={"env_vars": switch})
    def parent():
        return os.environ[next(iter(switch))], asyncio.run(placed())

    inherited, (chip, share) = ray.get(parent.remote(), timeout=60)
    assert inherited == "1"
    assert share == (chip, NUM_CHIPS)
