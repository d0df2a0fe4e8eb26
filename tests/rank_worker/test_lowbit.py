"""Checkpoints in each low-bit format answer like their dequantised twins, on any number of ranks.

The weights stay packed: what a rank holds is what the plan says, to the byte.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from placement.config import EngineConfig
from placement.errors import ConfigError
from placement.ledger import WEIGHT_ROWS
from placement.prepare import prepare
from rank_worker.launch import launch_engine
from rank_worker.messages import EngineRequest
from tests.golden import lowbit_checkpoint
from tests.golden.lowbit_checkpoint import RECIPES, Pair

PROMPT = tuple((7 * i * i + 3 * i) % 500 for i in range(70))
TOKENS = 12
MARGIN = 2e-4
# Of the largest logit. FP8 becomes 8-bit integers while it is loaded, the others are exact up to
# the order of sums.
EXACT, AS_INTEGERS = 1e-5, 0.02
INT8_ACTIVATIONS = 0.1
QUICK = ("w4g32-asym", "fp8", "nvfp4", "w4-w2")
# 12 value heads of 16 columns: three of them are no whole groups of 32.
CUTS = {("w4-dense", 4)}
GRID = [
    pytest.param(name, ranks, marks=() if ranks == 3 and name in QUICK else pytest.mark.slow)
    for name in RECIPES
    for ranks in (1, 2, 3, 4, 6)
    if (name, ranks) not in CUTS
]


@dataclass(frozen=True)
class Run:
    """Answer to PROMPT: ids, rank 0's logits of each, and the weights' bytes by rank and row."""

    token_ids: tuple[int, ...]
    logits: np.ndarray
    rows: list[dict[str, int]]
    planned: list[dict[str, int]]

    def margins(self) -> np.ndarray:
        best = np.sort(self.logits, axis=1)
        return np.asarray(best[:, -1] - best[:, -2])


def settings(folder: Path, **options: Any) -> EngineConfig:
    base: dict[str, Any] = {
        "context_tokens": 128, "kv_pool_tokens": 512, "page_tokens": 16, "max_sequences": 2,
        "check_interval_steps": 1, "check_contracts": True,
    }  # fmt: skip
    return EngineConfig(str(folder), **{**base, **options})


def run(folder: Path, **options: Any) -> Run:
    config = settings(folder, **options)
    with launch_engine(config) as engine:
        runner = engine.rank0.runner
        assert runner is not None
        runner.logits_log = []
        request = EngineRequest("a", PROMPT, TOKENS, ignore_eos=True)
        (result,) = engine.generate([request])
        rows = [only_weights(snapshot.memory_bytes) for snapshot in engine.snapshots]
        logits = torch.cat(runner.logits_log).float().numpy()
    planned = [only_weights(dict(rank.rows)) for rank in prepare(config).plan.ranks]
    return Run(result.token_ids, logits, rows, planned)


def only_weights(rows: dict[str, int]) -> dict[str, int]:
    return {row: rows[row] for row in WEIGHT_ROWS if rows.get(row)}


@pytest.fixture(scope="module")
def pair_of(
    tiny_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Pair]:
    made: dict[str, Pair] = {}

    def get(name: str) -> Pair:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = lowbit_checkpoint.write(tiny_checkpoint, name, folder)
        return made[name]

    return get


@pytest.fixture(scope="module")
def twin_of(pair_of: Callable[[str], Pair]) -> Callable[[str], Run]:
    """What the dequantised twin of a recipe answers, at one rank."""
    known: dict[str, Run] = {}

    def get(name: str) -> Run:
        if name not in known:
            known[name] = run(pair_of(name).twin)
        return known[name]

    return get


def check_logits(got: Run, expected: Run, bound: float) -> None:
    """Rank 0's part of the vocabulary, as long as both chose the same tokens."""
    largest = np.abs(expected.logits).max()
    for step, row in enumerate(got.logits):
        spread = np.abs(row - expected.logits[step][: len(row)]).max()
        assert spread < bound * largest, (step, spread / largest)
        if step < TOKENS and got.token_ids[step] != expected.token_ids[step]:
            assert bound > EXACT or expected.margins()[step] < MARGIN, step
            assert step > 0, "not even the first token is the same"
            return


def bound_of(name: str) -> float:
    return AS_INTEGERS if name == "fp8" else EXACT


@pytest.mark.parametrize(("name", "ranks"), GRID)
def test_answers_are_those_of_the_dequantised_twin(
    pair_of: Callable[[str], Pair], twin_of: Callable[[str], Run], name: str, ranks: int
) -> None:
    got = run(pair_of(name).packed, ranks=ranks)
    check_logits(got, twin_of(name), bound_of(name))
    assert got.rows == got.planned
    assert all(rows["scales"] > 0 for rows in got.rows)
    wide = sum(rows["routed_experts"] for rows in twin_of(name).rows) // 2  # as 16 bits
    packed = sum(rows["routed_experts"] + rows["scales"] for rows in got.rows)
    if name in ("w4g128", "w4g32"):
        assert wide > 3.5 * packed
    assert wide > 1.8 * packed  # 8 bits, with a scale and an offset a row in fp32


@pytest.mark.parametrize(("name", "ranks"), sorted(CUTS))
def test_what_the_grid_leaves_out_is_refused_by_the_plan(
    pair_of: Callable[[str], Pair], name: str, ranks: int
) -> None:
    cut = r"columns 0\.\.47 of 192 of .*: 48 isn't a multiple of its blocks of 32"
    with pytest.raises(ConfigError, match=cut):
        prepare(settings(pair_of(name).packed, ranks=ranks))


class LargestFloats(TorchDispatchMode):
    """Elements of the largest tensor of floats that any call gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                wide = value.element_size() > 1  # FP8 codes are as long as their bank
                self.elements = max(self.elements, value.numel() if wide else 0)
        return result


@pytest.mark.parametrize("name", ["w4g32", "fp8"])
def test_neither_load_nor_steps_hold_an_unpacked_bank(
    pair_of: Callable[[str], Pair], driver: Callable[..., Any], name: str
) -> None:
    """A prefill that keeps all experts busy, then decode; the twin shows what would be seen."""
    bank = 14 * 2 * lowbit_checkpoint.WIDTH**2
    largest = []
    for folder in (pair_of(name).packed, pair_of(name).twin):
        with LargestFloats() as probe:
            one = driver(0, folder=folder, context_tokens=128, kv_pool_tokens=512)
            one.generate([EngineRequest("a", PROMPT, 4, ignore_eos=True)])
        largest.append(probe.elements)
    assert largest[0] < bank // 2 < bank <= largest[1]
