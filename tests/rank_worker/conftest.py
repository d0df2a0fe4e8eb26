"""Gangs for the engine tests, started once a session and shared by its cases."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from placement.config import EngineConfig
from rank_worker.launch import Engine, GenerationResult, RankMaker, launch_engine
from rank_worker.messages import EngineRequest, TokenBatch
from rank_worker.rank import Rank
from rank_worker.step_plan import Opcode, StepPlan, decode, encode
from tests.rank_worker.test_reuse_truth import Prompts, Truth

EngineMaker = Callable[..., Engine]
Launched = AbstractContextManager[Engine]


@pytest.fixture(scope="session")
def launched(
    embedded_model_dir: Path, random_checkpoint: Callable[..., Path]
) -> Callable[..., Launched]:
    """launched("embedded" | "random-8", ranks=N, **config): every step is checked."""

    def launch(model: str, ranks: int = 1, make_rank: RankMaker = Rank, **config: Any) -> Launched:
        folder = embedded_model_dir if model == "embedded" else random_checkpoint(layers=8)
        settings: dict[str, Any] = {
            "page_tokens": 16,
            "context_tokens": 2048,
            "kv_pool_tokens": 16384,
            "check_interval_steps": 1,
            "check_contracts": True,
            "step_timeout_s": 60.0,
        }
        engine = EngineConfig(str(folder), ranks=ranks, **{**settings, **config})
        return launch_engine(engine, make_rank=make_rank)

    return launch


@pytest.fixture(scope="session")
def engine_of(launched: Callable[..., Launched]) -> Iterator[EngineMaker]:
    """The same, kept for the whole run."""
    started: dict[Any, Engine] = {}
    with ExitStack() as stack:

        def get(model: str, ranks: int = 1, **config: Any) -> Engine:
            key = (model, ranks, tuple(sorted(config.items())))
            if key not in started:
                started[key] = stack.enter_context(launched(model, ranks, **config))
            return started[key]

        yield get


def drafting(k: int) -> dict[str, Any]:
    """Drafts, whatever they gain, and room for prefixes."""
    return {"mtp": k, "mtp_auto": False, "prefix_cache": True}


@pytest.fixture(scope="session")
def reusing(engine_of: EngineMaker) -> EngineMaker:
    """reusing(model, ranks, k): a gang that drafts and keeps prefixes, for the whole run."""

    def get(model: str, ranks: int = 1, k: int = 0, **config: Any) -> Engine:
        return engine_of(model, ranks, **drafting(k), **config)

    return get


@pytest.fixture(scope="session")
def reusing_alone(launched: Callable[..., Launched]) -> Callable[..., Launched]:
    """The same for as long as it is wanted."""

    def launch(model: str, ranks: int, k: int, **config: Any) -> Launched:
        return launched(model, ranks, **drafting(k), **config)

    return launch


@pytest.fixture(scope="session")
def chat(embedded_model_dir: Path) -> Callable[[str], tuple[int, ...]]:
    """Ids of a user's message in the template of the embedded model."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model_dir)

    def ids(text: str) -> tuple[int, ...]:
        messages = [{"role": "user", "content": text}]
        made: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        return tuple(made["input_ids"])

    return ids


@pytest.fixture(scope="session")
def prompts_of(
    golden: Callable[[str], Any], chat: Callable[[str], tuple[int, ...]]
) -> Callable[[str], Prompts]:
    """prompts_of("embedded" | "random-8"): what to ask that model."""

    def get(model: str) -> Prompts:
        text = golden("embedded").cases[1100].prompt_ids if model == "embedded" else ()
        return Prompts(text, chat)

    return get


class Driver:
    """A loaded rank, driven step by step in the test's own thread."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.rank = self.rank0 = Rank(config, 0, 1)
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

    def generate(self, requests: Sequence[EngineRequest], every: int = 0) -> list[GenerationResult]:
        """As `Engine.generate`, without times. Each request arrives `every` steps after another."""
        ids: dict[str, tuple[int, ...]] = {request.request_id: () for request in requests}
        ends: dict[str, TokenBatch] = {}
        arrivals, step = deque(requests), 0
        while arrivals or self.scheduler.has_work:
            while arrivals and len(ids) - len(arrivals) <= (step // every if every else len(ids)):
                self.scheduler.add(arrivals.popleft())
            for batch in self.step() if self.scheduler.has_work else ():
                ids[batch.request_id] += batch.token_ids
                ends[batch.request_id] = batch
            step += 1
        return [self._result(ids[name], ends[name]) for name in ids]

    @staticmethod
    def _result(ids: tuple[int, ...], end: TokenBatch) -> GenerationResult:
        assert end.finish_reason is not None
        return GenerationResult(
            end.request_id, ids, end.finish_reason, end.prompt_tokens, end.cached_tokens,
            end.draft_tokens, end.accepted_tokens, 0.0, 0.0, end.error_message,
        )  # fmt: skip


@pytest.fixture(scope="session")
def truth_of(
    embedded_model_dir: Path, random_checkpoint: Callable[..., Path]
) -> Iterator[Callable[[str], Truth]]:
    """truth_of("embedded" | "random-8"): right answers of all tests."""
    known: dict[str, Truth] = {}

    def get(model: str) -> Truth:
        if model not in known:
            folder = embedded_model_dir if model == "embedded" else random_checkpoint(layers=8)
            known[model] = fresh_truth(folder)
        return known[model]

    yield get
    for truth in known.values():
        truth.driver.rank.close()


def fresh_truth(folder: Path) -> Truth:
    config = EngineConfig(
        str(folder), page_tokens=16, context_tokens=2048, kv_pool_tokens=2048, step_tokens=2048,
        max_sequences=1,
    )  # fmt: skip
    return Truth(Driver(config))


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
