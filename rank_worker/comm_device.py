"""Collectives between chips: NCCL or HCCL for data, gloo for plans.

One communicator a gang carries all traffic, because HCCL takes twice its buffer for each. Sums are
gathered and added in rank order, as in `comm_gloo`: all ranks get equal bits, and no reduction of
the library is needed, whose list of types is short on a 310P (no int64, no bf16). A collective
returns before it is done, so once a step is launched rank 0 tells where it is, how many collectives
it has asked for, and which: a rank that asked for others says so before anybody waits for a chip,
unless an operator of the step did.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from placement.config import EngineConfig
from placement.errors import RankError
from placement.topology import MIB, find_profile
from rank_worker.comm import collective_word
from rank_worker.comm_gloo import GlooComm, Group, broken
from rank_worker.comm_store import Meeting

_log = logging.getLogger(__name__)

HCCL_TIMEOUT_STEP_S = 68  # HCCL_EXEC_TIMEOUT is rounded down to a multiple of it
HCCL_TIMEOUT_MAX_S = 17340
_DIGEST_MODULUS = (1 << 31) - 1
_HCCL_DTYPES = (
    torch.float16, torch.float32, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip
GATHERED: Mapping[str, tuple[torch.dtype, ...]] = {
    "hccl": _HCCL_DTYPES,
    "nccl": (*_HCCL_DTYPES, torch.bfloat16),
}


def hccl_environment(config: EngineConfig) -> dict[str, str]:
    """What HCCL is told before its first call, once a process.

    The time limit is the step's, up to whole steps of HCCL. Unrolling on the host is the form
    that takes every operator; the AI CPU's takes all-reduce alone, and only on one machine.
    """
    steps = math.ceil(config.step_timeout_s / HCCL_TIMEOUT_STEP_S)
    limit_s = min(HCCL_TIMEOUT_MAX_S, HCCL_TIMEOUT_STEP_S * max(1, steps))
    connect_s = min(7200, max(120, math.ceil(config.start_timeout_s)))
    return {
        "HCCL_BUFFSIZE": str(buffer_bytes(config) // MIB),
        "HCCL_EXEC_TIMEOUT": str(limit_s),
        "HCCL_CONNECT_TIMEOUT": str(connect_s),
        "HCCL_OP_EXPANSION_MODE": "HOST",
        "HCCL_DETERMINISTIC": "true",
    }


def buffer_bytes(config: EngineConfig) -> int:
    """Of the communicator, as the plan's ledger has it."""
    return find_profile(config.device, config.chip_profile).collective_buffer_bytes


def _nccl_group(meeting: Meeting, config: EngineConfig) -> Group:
    from torch._C._distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=config.step_timeout_s)
    store = PrefixStore("data", meeting.store)
    return cast(Group, ProcessGroupNCCL(store, meeting.rank, meeting.world_size, options))


def _hccl_group(meeting: Meeting, config: EngineConfig) -> Group:
    from torch_npu._C._distributed_c10d import ProcessGroupHCCL

    for name, value in hccl_environment(config).items():
        _log.info("%s=%s", name, os.environ.setdefault(name, value))
    options = ProcessGroupHCCL.Options()
    options.op_timeout = timedelta(seconds=config.step_timeout_s)
    options.is_high_priority_stream = False  # reported to abort captures on a 310P
    options.hccl_config = {"hccl_buffer_size": buffer_bytes(config) // MIB}
    store = PrefixStore("data", meeting.store)
    return cast(Group, ProcessGroupHCCL(store, meeting.rank, meeting.world_size, options))


GROUPS: dict[str, Callable[[Meeting, EngineConfig], Group]] = {
    "nccl": _nccl_group,
    "hccl": _hccl_group,
}


class DeviceComm(GlooComm):
    """Collectives on the stream of the model: they return before they are done."""

    def __init__(self, meeting: Meeting, config: EngineConfig, name: str) -> None:
        super().__init__(
            meeting, config.step_timeout_s, name, lambda: GROUPS[name](meeting, config)
        )
        self._name, self._dtypes = name, GATHERED[name]
        self._digest = 0

    def check_order(self, epoch: int, step: int) -> None:
        mine = np.asarray([epoch, step, self._collectives, self._digest], dtype=np.int32)
        if self.rank == 0:
            self._control.send(mine)
            return
        theirs = self._control.receive()
        if not np.array_equal(mine, theirs):
            here, there = (
                f"epoch {words[0]} step {words[1]} after {words[2]} collectives (digest {words[3]})"
                for words in (mine, theirs)
            )
            raise RankError(
                f"rank {self.rank} is in {here} and rank 0 in {there}: collectives in another order"
                ", the gang is out of step and is restarted",
                rank=self.rank, step=step, phase="collective",
            )  # fmt: skip

    @contextmanager
    def recording(self) -> Iterator[None]:
        before = self._collectives, self._digest
        try:
            yield
        finally:
            self._collectives, self._digest = before

    def barrier(self) -> None:
        """On the host: work on the chips may go on."""
        self._control.barrier()

    def _gather(self, flat: Tensor, out: Tensor, kind: int) -> None:
        if flat.dtype not in self._dtypes:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in self._dtypes)
            raise RankError(
                f"rank {self.rank}: {self._name} gathers {known}, not "
                f"{str(flat.dtype).removeprefix('torch.')}; convert before the collective",
                rank=self.rank, phase="collective",
            )  # fmt: skip
        self._collectives = (self._collectives + 1) % _DIGEST_MODULUS
        word = collective_word(kind, flat.numel()) * 64 + self._dtypes.index(flat.dtype)
        self._digest = (self._digest * 1_000_003 + word) % _DIGEST_MODULUS
        try:
            cast(Any, self._data)._allgather_base(out.view(-1), flat).wait()
        except RuntimeError as error:
            raise broken(self.rank, "collective", error) from error


def open_device_comm(meeting: Meeting, config: EngineConfig, name: str) -> DeviceComm:
    comm = DeviceComm(meeting, config, name)
    meeting.roll_call("groups")
    return comm
