"""A real rank that carries out one order at a chosen moment: die, stop, raise, stand still, lie.

The order lies in a file that the test writes and the rank takes away when it obeys. So a fault
comes in the middle of a load, of a prefill or of a decode step of any process, once. What the
coordinator is to do rank 0 hands on, and waits until it is taken.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from placement.config import EngineConfig
from rank_worker.batch import StepBatch
from rank_worker.rank import Rank
from rank_worker.runner import Sampled
from rank_worker.step_plan import RowFlag, StepPlan

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
SLOW_S = 1.5  # of a slow step: less than any deadline
SLOW_STEPS = 3
STUCK_S = 600.0  # of a step that does not end: far past every deadline


def handed_on(path: str | Path) -> Path:
    """Where the coordinator finds what it is to do."""
    return Path(path).with_suffix(".coordinator")


def go_ahead(path: str | Path) -> Path:
    """What a rank waits for that is on hold."""
    return Path(path).with_suffix(".go")


@dataclass(frozen=True)
class Order:
    """What rank `rank` does when it is next in `phase`."""

    act: str  # kill, stop, raise, nan, slow, stuck, hold
    phase: str  # open, load, prefill, decode, idle
    rank: int
    pid: int = 0  # of whom to kill or stop; 0: the rank itself
    is_coordinators: bool = False  # to do by the coordinator, at that moment of the rank

    @property
    def is_handed_on(self) -> bool:
        """Signals a rank can send itself."""
        return self.is_coordinators and self.act not in SIGNALS

    def give(self, path: Path) -> None:
        written = path.with_suffix(".new")
        written.write_text(json.dumps(asdict(self)))
        written.rename(path)


@dataclass(frozen=True)
class FaultyFactory:
    """Makes the ranks that read their orders at `path`."""

    path: str

    def __call__(self, config: EngineConfig, rank: int, world_size: int) -> FaultyRank:
        return FaultyRank(config, rank, world_size, Path(self.path))


class FaultyRank(Rank):
    def __init__(self, config: EngineConfig, rank: int, world_size: int, orders: Path) -> None:
        super().__init__(config, rank, world_size)
        self._orders = orders
        self._slow_steps = 0
        self._poison = False

    def open(self, port: int) -> None:
        self._meet("open")
        super().open(port)

    def load(self) -> None:
        self.pace = lambda _: self._meet("load")
        super().load()
        runner, comm = self.runner, self.comm
        assert runner is not None
        execute, forward = runner.execute, runner.model.forward
        send, receive = comm.send_plan, comm.receive_plan

        def faulty_execute(plan: StepPlan) -> Sampled:
            is_prefill = any(row.flags & RowFlag.PREFILL for row in plan.rows)
            self._meet("prefill" if is_prefill else "decode")
            return execute(plan)

        def faulty_forward(batch: StepBatch) -> tuple[Tensor, Tensor]:
            logits, streams = forward(batch)
            if self._poison and len(logits):
                self._poison = False
                logits = torch.cat([torch.full_like(logits[:1], float("nan")), logits[1:]])
            return logits, streams

        def faulty_send(words: np.ndarray) -> None:
            self._meet("idle")
            send(words)

        def faulty_receive() -> np.ndarray:
            self._meet("idle")
            return receive()

        _replace(runner, execute=faulty_execute)
        _replace(runner.model, forward=faulty_forward)
        _replace(comm, send_plan=faulty_send, receive_plan=faulty_receive)

    def _meet(self, phase: str) -> None:
        if self._slow_steps:
            self._slow_steps -= 1
            threading.Event().wait(SLOW_S)
        order = self._take(phase)
        if order is None:
            return
        if order.act in SIGNALS:
            os.kill(order.pid or os.getpid(), SIGNALS[order.act])
        elif order.is_handed_on:
            _wait(lambda: not handed_on(self._orders).exists())
        elif order.act == "hold":
            _wait(go_ahead(self._orders).exists)
        elif order.act == "raise":
            raise ValueError("on purpose")
        elif order.act == "stuck":
            threading.Event().wait(STUCK_S)
        elif order.act == "slow":
            self._slow_steps = SLOW_STEPS
        else:
            self._poison = True

    def _take(self, phase: str) -> Order | None:
        """The order that is for this rank now; it is gone for everyone after."""
        try:
            order = Order(**json.loads(self._orders.read_text()))
            if (order.phase, order.rank) != (phase, self.rank):
                return None
            taken = self._orders.with_suffix(".taken")
            self._orders.rename(handed_on(self._orders) if order.is_handed_on else taken)
        except FileNotFoundError:
            return None
        return order


def _wait(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + STUCK_S
    while not condition() and time.monotonic() < deadline_s:
        threading.Event().wait(0.01)


def _replace(target: Any, **methods: Any) -> None:
    for name, method in methods.items():
        setattr(target, name, method)
