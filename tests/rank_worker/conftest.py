"""Gangs for the engine tests, started once a session and shared by its cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from placement.config import EngineConfig
from rank_worker.launch import Engine, launch_engine
from rank_worker.messages import TokenBatch
from rank_worker.rank import Rank
from rank_worker.step_plan import Opcode, StepPlan, decode, encode


@pytest.fixture(scope="session")
def engine_of(
    embedded_model_dir: Path, random_checkpoint: Callable[..., Path]
) -> Iterator[Callable[..., Engine]]:
    """engine_of("embedded" | "random-8", ranks=N, **config): every step is checked."""
    started: dict[Any, Engine] = {}
    with ExitStack() as stack:

        def get(model: str, ranks: int = 1, **config: Any) -> Engine:
            key = (model, ranks, tuple(sorted(config.items())))
            if key not in started:
                folder = embedded_model_dir if model == "embedded" else random_checkpoint(layers=8)
                settings: dict[str, Any] = {
                    "page_tokens": 16,
                    "context_tokens": 2048,
                    "kv_pool_tokens": 16384,
                    "check_interval_steps": 1,
                    "check_contracts": True,
                    "step_timeout_s": 60.0,
                }
                made = EngineConfig(str(folder), ranks=ranks, **{**settings, **config})
                started[key] = stack.enter_context(launch_engine(made))
            return started[key]

        yield get


class Driver:
    """A loaded rank, driven step by step in the test's own thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.rank = Rank(config, 0, 1)
        self.rank.load()
        assert self.rank.runner is not None
        assert self.rank.scheduler is not None
        self.runner, self.scheduler = self.rank.runner, self.rank.scheduler
        self.plans: list[StepPlan] = []

    def plant(self, slot: int, drafts: Sequence[int]) -> None:
        """Replaces what the draft head made for `slot`."""
        self.runner.builder.drafts[slot] = torch.tensor(drafts)

    def step(self, abort: Sequence[str] = ()) -> list[TokenBatch]:
        """One step; `abort` are cancelled while it runs."""
        plan = self.scheduler.schedule()
        assert plan.opcode is Opcode.STEP
        self.plans.append(plan)
        new_tokens = self.runner.execute(decode(encode(plan))).tolist()
        self.scheduler.abort(abort)
        batches = self.scheduler.update(new_tokens)
        self.scheduler.check_integrity()
        return batches

    def finish(self) -> dict[str, list[int]]:
        """Steps until nothing is left; tokens by request of these steps."""
        ids: dict[str, list[int]] = {}
        while self.scheduler.has_work:
            for batch in self.step():
                ids.setdefault(batch.request_id, []).extend(batch.token_ids)
        return ids


@pytest.fixture(scope="module")
def driver(random_checkpoint: Callable[..., Path]) -> Iterator[Callable[..., Driver]]:
    """driver(mtp, folder=None, **config): a rank of a random model of 8 layers, pages of 16."""
    started: list[Driver] = []

    def start(mtp: int, folder: Path | None = None, **config: Any) -> Driver:
        settings: dict[str, Any] = {
            "page_tokens": 16, "context_tokens": 512, "kv_pool_tokens": 4096,
            "check_contracts": True, "check_interval_steps": 1, "mtp_auto": False,
        }  # fmt: skip
        path = str(folder or random_checkpoint(layers=8))
        started.append(Driver(EngineConfig(path, mtp=mtp, **{**settings, **config})))
        return started[-1]

    yield start
    for one in started:
        one.rank.close()
