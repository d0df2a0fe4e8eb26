"""Bytes of tensors beyond weights and pools: while loading, and at long prompts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from placement.config import EngineConfig
from placement.errors import ConfigError
from placement.models.registry import load_model_spec
from placement.partition import make_shares
from placement.reads import plan_reads
from placement.spec import Axis
from rank_worker import loader
from rank_worker.launch import launch_engine
from rank_worker.loader import LoadCounter, Loader
from rank_worker.messages import EngineRequest
from rank_worker.rank import Rank
from rank_worker.step_plan import Opcode

LONG_CONTEXT = 8192


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators made since the start and that still live.

    Storages that already existed when an operator saw them first don't count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for value in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                self._note(value, counts=False)
        result = func(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(result):
            if isinstance(value, Tensor):
                self._note(value, counts=True)
        return result

    def _note(self, tensor: Tensor, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is not None and known() is storage:
            return
        nbytes = storage.nbytes() if counts else 0

        def gone(_: Any) -> None:
            self.live -= nbytes

        self._known[key] = weakref.ref(storage, gone)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, nbytes)


def test_the_probe_sees_what_lives() -> None:
    kept = torch.ones(1000)
    with LiveBytes() as probe:
        made = [kept * 2, kept + 1]
        assert probe.live == 8000
        kept.mul_(2)
        made.append(made[0].view(10, 100).t())
        assert probe.live == 8000
        del made[1]
        assert probe.live == 4000
        sum((made[0] + i).sum() for i in range(5))
    assert 8000 <= probe.peak <= 12100
    assert probe.largest == 4000


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("experts", ["split", "fused"])
def test_a_load_holds_the_owned_bytes_and_little_more(
    random_checkpoint: Callable[..., Path], experts: str, rank: int
) -> None:
    """No bank of all experts, and no second copy of what was read."""
    spec, headers = load_model_spec(str(random_checkpoint(layers=4, experts=experts)))
    reads = plan_reads(spec.tensors, make_shares(spec, 3)[rank], headers)
    with LiveBytes() as probe:
        weights = Loader(torch.float32, LoadCounter()).load(reads)
    owned = sum(tensor.nbytes for tensor in weights.values())
    assert probe.live == owned == sum(r.nbytes for r in reads)
    assert probe.peak <= owned + max(r.nbytes for r in reads)
    assert probe.largest == max(r.nbytes for r in reads)
    banks = [t for t in spec.tensors if t.role.endswith("experts_gate_up")]
    assert probe.largest < max(4 * torch.Size(t.shape).numel() for t in banks)


def test_staging_is_bounded_whatever_the_run(
    random_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half-precision values on their way to fp32 exist in the staging buffer only."""
    monkeypatch.setattr(loader, "STAGING_BYTES", 4096)
    spec, headers = load_model_spec(str(random_checkpoint(layers=4, experts="fused")))
    reads = plan_reads(spec.tensors, make_shares(spec, 2)[0], headers)
    with LiveBytes() as probe:
        weights = Loader(torch.bfloat16, LoadCounter()).load(reads)
    owned = sum(tensor.nbytes for tensor in weights.values())
    assert probe.peak <= owned + 2 * 4096


def test_a_started_rank_holds_weights_once_and_the_planned_pools(embedded_model_dir: Path) -> None:
    rank = Rank(EngineConfig(str(embedded_model_dir), context_tokens=4096), 0, 1)
    with LiveBytes() as probe:
        rank.load()
    measured = sum(rank.snapshot().memory_bytes.values())
    assert rank.plan is not None
    rows = rank.plan.ranks[0].rows
    # Those of no tensor, and what ranks don't tell: their tables, counted under `make test-npu`.
    overhead = ("workspace", "reserve", "graph", "collective", "scales", "padding", "tables")
    assert measured == sum(size for row, size in rows.items() if row not in overhead)
    assert probe.live <= 1.03 * measured, "weights that were packed stay a second time"
    head = rank.plan.ranks[0].share.ranges[Axis.VOCAB][1] * 192 * 4  # the largest one packed
    assert probe.peak <= probe.live + head + rows["workspace"]


@pytest.fixture(scope="module")
def long_rank(random_checkpoint: Callable[..., Path]) -> Iterator[Rank]:
    folder = random_checkpoint(layers=4, max_position=LONG_CONTEXT)
    config = EngineConfig(str(folder), max_sequences=2, kv_pool_tokens=2 * LONG_CONTEXT)
    rank = Rank(config, 0, 1)
    rank.load()
    yield rank
    rank.close()


def peak_of_prompt(rank: Rank, length: int, step_tokens: int) -> int:
    """Most bytes beyond weights and pools while a prompt and two decode steps run."""
    scheduler, runner = rank.scheduler, rank.runner
    assert scheduler is not None
    assert runner is not None
    scheduler.limits = replace(scheduler.limits, step_tokens=step_tokens)
    prompt = tuple((i * i + 7 * i) % 500 for i in range(length))
    scheduler.add(EngineRequest("long", prompt, 3, ignore_eos=True))
    num_tokens = 0
    with LiveBytes() as probe:
        while (plan := scheduler.schedule()).opcode is Opcode.STEP:
            batches = scheduler.update(runner.execute(plan).tolist())
            num_tokens += sum(len(batch.token_ids) for batch in batches)
    assert num_tokens == 3
    return probe.peak


def test_memory_of_a_prompt_in_one_step_grows_linearly(long_rank: Rank) -> None:
    short, long = (peak_of_prompt(long_rank, n, LONG_CONTEXT) for n in (3000, 6000))
    assert long <= 2.1 * short, (short, long)


def test_memory_of_a_prompt_in_small_steps_is_smaller_and_grows_no_faster(long_rank: Rank) -> None:
    short, long = (peak_of_prompt(long_rank, n, 256) for n in (3000, 6000))
    assert long <= 2.1 * short, (short, long)
    assert long < peak_of_prompt(long_rank, 6000, LONG_CONTEXT) / 2


def test_the_longest_context_starts_and_generates(random_checkpoint: Callable[..., Path]) -> None:
    folder = str(random_checkpoint(layers=4, max_position=262_144))
    config = EngineConfig(folder, context_tokens=262_144, max_sequences=1)
    with launch_engine(config) as engine:
        (result,) = engine.generate([EngineRequest("a", (1, 2, 3), 2, ignore_eos=True)])
        assert len(result.token_ids) == 2
        assert engine.rank0.snapshot().pages_total * config.page_tokens == 262_144
    too_long = replace(config, context_tokens=262_145)
    with (
        pytest.raises(ConfigError, match=r"context_tokens = 262145, .* goes to 262144"),
        launch_engine(too_long),
    ):
        raise AssertionError("it can't start")
