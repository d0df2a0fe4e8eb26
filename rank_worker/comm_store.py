"""How the ranks of a gang find each other: a key-value store that rank 0 serves.

Owns the store, the roll-call and its deadline. Several gangs live on one machine, and several
ranks in one process, because each gang has its own store on a port that the system picked and
nothing is registered globally.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from placement.errors import RankError
from rank_worker.time_limit import TimeLimit

BACKLOG = 1024
POLL_S = 0.01


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Meeting:
    """A rank's seat at a gang's store, after every rank has taken its own."""

    rank: int
    world_size: int
    host: str
    store: TCPStore
    deadline: float  # time.monotonic() by which the gang must be complete: start_timeout_s
    is_over: Callable[[], bool] = _never  # True once this rank is told to stop

    @property
    def remaining(self) -> timedelta:
        return timedelta(seconds=max(0.05, self.deadline - time.monotonic()))

    def roll_call(self, phase: str, load_limit: TimeLimit | None = None) -> None:
        """Wait until all ranks reached `phase`; RankError names the ones that did not.

        `load_limit` is that of a load (load_timeout_s), in place of the deadline of a start.
        RankError also when this rank is told to stop meanwhile.
        """
        setting = "start_timeout_s" if load_limit is None else "load_timeout_s"
        self.store.set(f"{phase}/{self.rank}", "1")
        missing = list(range(self.world_size))
        while missing := [r for r in missing if not self._arrived(phase, r)]:
            if self.is_over():
                raise RankError(
                    f"rank {self.rank}: told to stop while it waited for ranks {missing} in phase "
                    f"{phase!r}",
                    rank=self.rank,
                    phase=phase,
                )
            if self._is_late(load_limit):
                raise RankError(
                    f"rank {self.rank}: ranks {missing} did not arrive in phase {phase!r} before "
                    f"the deadline; see their logs or raise {setting}",
                    rank=missing[0],
                    phase=phase,
                )
            time.sleep(POLL_S)

    def _is_late(self, load_limit: TimeLimit | None) -> bool:
        if load_limit is not None:
            return load_limit.left_s() <= 0
        return time.monotonic() > self.deadline

    def _arrived(self, phase: str, rank: int) -> bool:
        # check() instead of wait(): a wait that times out writes a C++ stack trace to stderr.
        try:
            return bool(self.store.check([f"{phase}/{rank}"]))
        except DistError as error:
            raise _lost_store(self.rank, phase) from error


def listen(host: str, timeout_s: float) -> tuple[TCPStore, int]:
    """Rank 0: serve the store on a free port of `host` only; returns it with the port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind((host, 0))
        server.listen(BACKLOG)
        port = int(server.getsockname()[1])
        store = TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )
    return store, port


def join(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    timeout_s: float,
    store: TCPStore | None = None,
    is_over: Callable[[], bool] = _never,
) -> Meeting:
    """Connect to rank 0's store (rank 0 passes its own) and wait for all ranks to be there."""
    deadline = time.monotonic() + timeout_s
    if store is None:
        try:
            store = TCPStore(
                host,
                port,
                is_master=False,
                timeout=timedelta(seconds=timeout_s),
                wait_for_workers=False,
            )
        except DistError as error:
            raise RankError(
                f"rank {rank}: no rendezvous store of rank 0 at {host}:{port} within "
                f"{timeout_s:g} s; is rank 0 running?",
                rank=0,
                phase="rendezvous",
            ) from error
    meeting = Meeting(rank, world_size, host, store, deadline, is_over)
    meeting.roll_call("rendezvous")
    return meeting


def _lost_store(rank: int, phase: str) -> RankError:
    return RankError(
        f"rank {rank}: lost the rendezvous store of rank 0 in phase {phase!r}; see rank 0's log",
        rank=0,
        phase=phase,
    )
