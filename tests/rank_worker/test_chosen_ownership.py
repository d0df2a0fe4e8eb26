"""Experts anywhere, some on several ranks: the same ids, every route computed exactly once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from placement.config import EngineConfig, RankShare
from placement.errors import ConfigError
from rank_worker.launch import launch_engine
from rank_worker.messages import EngineRequest
from rank_worker.moe import local_experts

SCATTERED = [[0, 3, 5, 8, 13], [1, 3, 4, 9, 13], [2, 3, 6, 7, 10, 11, 12, 13]]  # 3 and 13 thrice
REPLICAS = [3, 13]


def write_ownership(path: Path, layers: int, owned: list[list[int]], replicas: list[int]) -> str:
    copies = {str(e): [r for r, ids in enumerate(owned) if e in ids] for e in replicas}
    path.write_text(json.dumps({"experts": [owned] * layers, "replicas": [copies] * layers}))
    return str(path)


def test_each_route_has_exactly_one_rank_in_every_turn() -> None:
    holders = tuple(tuple(r for r in range(3) if e in SCATTERED[r]) for e in range(14))
    tables = [
        local_experts(RankShare(rank, 3, {}, (tuple(SCATTERED[rank]),)), holders, 0)
        for rank in range(3)
    ]
    owners = torch.stack([table >= 0 for table in tables])
    assert owners.shape == (3, 3, 14)
    assert (owners.sum(0) == 1).all()
    assert [bool(owners[r, r, 3]) for r in range(3)] == [True] * 3
    for rank, table in enumerate(tables):
        for expert in SCATTERED[rank]:
            found = table[:, expert]
            assert set(found[found >= 0].tolist()) == {SCATTERED[rank].index(expert)}


def test_ids_do_not_depend_on_who_owns_what(
    embedded_model_dir: Path, golden: Callable[[str], Any], tmp_path: Path
) -> None:
    file = write_ownership(tmp_path / "owned.json", 8, SCATTERED, REPLICAS)
    config = EngineConfig(
        str(embedded_model_dir), ranks=3, ownership_file=file, context_tokens=2048,
        kv_pool_tokens=8192, page_tokens=16, check_interval_steps=1, check_contracts=True,
        step_timeout_s=60.0,
    )  # fmt: skip
    cases = [golden("embedded").cases[n] for n in (1, 65, 300)]
    requests = [EngineRequest(c.name, c.prompt_ids, 12, ignore_eos=True) for c in cases]
    with launch_engine(config) as engine:
        results = engine.generate(requests)
        counts = engine.stats()["expert_counts"]
        assert engine.rank0.plan is not None
        held = [len(rank.share.experts[0]) for rank in engine.rank0.plan.ranks]
    for case, result in zip(cases, results, strict=True):
        case.check_ids(result.token_ids)
    assert held == [5, 5, 8]
    tokens = sum(len(c.prompt_ids) + 12 - 1 for c in cases)
    assert [sum(layer) for layer in counts] == [tokens * 4] * 8


@pytest.mark.parametrize(
    ("owned", "replicas", "named"),
    [
        ([[0, 1, 2, 3, 4, 5, 6], [6, 7, 8, 9, 10, 11, 12, 13]], [], "6"),
        ([[0, 1, 2, 3, 4, 5], [7, 8, 9, 10, 11, 12, 13]], [], "6"),
        ([[0, 1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 14]], [], "14"),
    ],
)
def test_an_ownership_that_is_not_whole_is_refused_with_the_expert(
    embedded_model_dir: Path, tmp_path: Path, owned: list[list[int]], replicas: list[int],
    named: str,
) -> None:  # fmt: skip
    file = write_ownership(tmp_path / "owned.json", 8, owned, replicas)
    config = EngineConfig(str(embedded_model_dir), ranks=2, ownership_file=file)
    with pytest.raises(ConfigError, match=named), launch_engine(config):
        pass
