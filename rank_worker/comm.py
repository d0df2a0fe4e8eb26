"""Collectives of one gang: what every implementation offers, and which one a run gets.

Owns the protocol, the single-rank form and the choice. Knows nothing about models or steps. The
other forms are `comm_gloo` (sockets) and `comm_shm` (shared memory of one host); both meet through
`comm_store`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from placement.config import EngineConfig
from placement.errors import ConfigError, RankError
from rank_worker.time_limit import TimeLimit

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

DEVICE_LIBRARIES = {"cuda": "nccl", "npu": "hccl"}
REDUCE, GATHER, BARRIER = 1, 2, 3  # what a collective is, in the low bits of its word
TOTAL_STORE_ORDER_MACHINES = ("x86_64", "AMD64")  # the shared-memory flags need it


class Comm(Protocol):
    """Collectives that all ranks of a gang call in the same order.

    Every method raises RankError, naming the ranks that are missing where that is known, when a
    peer is dead or does not arrive within the deadline. One thread a rank may use it.
    """

    rank: int
    world_size: int
    seconds: float  # spent in all_reduce_, all_gather and barrier since the start

    @property
    def wait_seconds(self) -> float | None:
        """Of `seconds`, for peers to arrive; None where that can't be told apart."""

    @property
    def entered(self) -> int:
        """Exchanges begun, plans included: fewer than its peers' when a rank keeps them waiting."""

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks in place, the same bits on every rank.

        float32, bfloat16, float16 and integers; 16-bit types add up in float32 in rank order.
        """

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`: [world_size, *x.shape]."""

    def send_plan(self, words: np.ndarray) -> None:
        """Rank 0: hand an int32 step plan to all other ranks."""

    def receive_plan(self) -> np.ndarray:
        """Other ranks: wait for rank 0's next plan, int32 words."""

    def barrier(self) -> None: ...

    def check_order(self, epoch: int, step: int) -> None:
        """After a step was launched: RankError when this rank's collectives aren't rank 0's.

        For libraries whose collectives return before they are done. The others compare each
        exchange as it is made, and have nothing left to do here.
        """

    def recording(self) -> AbstractContextManager[None]:
        """Collectives inside are recorded and not done, so `check_order` leaves them out: where a
        recording fails, this rank has asked for fewer of them than its peers.
        """

    def roll_call(self, phase: str, limit: TimeLimit) -> None:
        """Wait, at length and without a collective, until all ranks have loaded.

        RankError when `limit` (load_timeout_s) is over, naming who has not reached `phase`.
        """

    def close(self) -> None: ...


class LocalComm:
    """A gang of one: every collective is the identity and no group is opened."""

    rank = 0
    world_size = 1
    seconds = 0.0
    wait_seconds: float | None = 0.0
    entered = 0

    def all_reduce_(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0).clone()

    def send_plan(self, words: np.ndarray) -> None:
        pass

    def receive_plan(self) -> np.ndarray:
        raise AssertionError("a gang of one rank has nobody to receive a plan from")

    def barrier(self) -> None:
        pass

    def check_order(self, epoch: int, step: int) -> None:
        pass

    def recording(self) -> AbstractContextManager[None]:
        return nullcontext()

    def roll_call(self, phase: str, limit: TimeLimit) -> None:
        pass

    def close(self) -> None:
        pass


def choose_comm(config: EngineConfig) -> str:
    """Resolve `auto`: a chip's own library; shared memory for CPU ranks where its flags are sound,
    else sockets.
    """
    if config.comm != "auto":
        return config.comm
    if config.device in DEVICE_LIBRARIES:
        return DEVICE_LIBRARIES[config.device]
    if config.device == "cpu" and platform.machine() in TOTAL_STORE_ORDER_MACHINES:
        return "shm"
    return "gloo"


def make_comm(
    config: EngineConfig,
    rank: int,
    world_size: int,
    port: int = 0,
    store: TCPStore | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> Comm:
    """Join the gang's groups; returns when every rank has joined.

    `port` is the rendezvous port that rank 0's `comm_store.listen` returned; rank 0 passes the
    `store` itself. Waits `config.start_timeout_s` for the others, then `config.step_timeout_s`
    for each collective. Raises RankError naming the ranks that did not arrive, and when `is_over`
    tells that this rank is to stop.
    """
    if world_size == 1:
        return LocalComm()
    from rank_worker import comm_gloo, comm_shm, comm_store

    name = choose_comm(config)
    libraries = tuple(DEVICE_LIBRARIES.values())
    if name not in ("shm", "gloo", *libraries):
        raise ConfigError(f"comm {name!r} is not built in; use auto, shm or gloo")
    if (name if name in libraries else None) != DEVICE_LIBRARIES.get(config.device):
        raise ConfigError(f"comm {name!r} does not carry tensors of {config.device}; use auto")
    if name == "shm" and platform.machine() not in TOTAL_STORE_ORDER_MACHINES:
        raise ConfigError(
            f"comm 'shm' needs an x86-64 CPU, this is {platform.machine()}; use gloo or auto"
        )
    meeting = comm_store.join(
        rank, world_size, config.master_address, port, config.start_timeout_s, store, is_over
    )
    if name in libraries:
        from rank_worker.comm_device import open_device_comm

        return open_device_comm(meeting, config, name)
    open_comm = comm_shm.open_shm if name == "shm" else comm_gloo.open_gloo
    return open_comm(meeting, config.step_timeout_s)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type that sums over ranks are taken in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def collective_word(kind: int, num_bytes: int) -> int:
    """What a collective is, in one integer: equal on all ranks that are in the same one."""
    return kind | num_bytes << 2


def out_of_order(rank: int, number: int, mine: int, peer: int, theirs: int) -> RankError:
    """Two ranks met in collectives whose words differ."""
    return RankError(
        f"rank {rank}: collective {number} is {_describe(mine)} here and {_describe(theirs)} on "
        f"rank {peer}; the ranks ran different steps",
        rank=peer,
        phase="collective",
    )


def _describe(word: int) -> str:
    kind = {REDUCE: "a sum", GATHER: "a gather", BARRIER: "a barrier"}.get(word & 3, "unknown")
    return f"{kind} of {word >> 2} bytes"
