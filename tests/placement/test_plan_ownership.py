"""Ownership in a plan: files, balance, few moves, replicas, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from placement.config import EngineConfig
from placement.errors import ConfigError
from placement.experts import holders
from placement.explain import explain
from placement.headers import CheckpointHeaders
from placement.ownership import OwnershipRequest, choose_ownership
from placement.ownership_files import read_counts, read_ownership
from placement.plan import Plan, PlanOptions, make_plan
from placement.spec import ModelSpec

Loaded = tuple[ModelSpec, CheckpointHeaders]
BASE = EngineConfig("unused", ranks=4, context_tokens=1024, max_sequences=2)
RISING = tuple(tuple(float((e + 1) ** 2) for e in range(14)) for _ in range(8))
HOT = tuple(tuple(300.0 if e == 0 else 1.0 + e for e in range(14)) for _ in range(8))


@pytest.fixture
def written(tmp_path: Path) -> Callable[[Any], str]:
    def write(data: Any) -> str:
        path = tmp_path / "file.json"
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return str(path)

    return write


def planned(spec: ModelSpec, request: OwnershipRequest, **changes: Any) -> Plan:
    options = PlanOptions(ownership=request)
    return make_plan(replace(BASE, **changes), spec, None, options=options)


def test_the_table_says_for_each_expert_who_holds_it(tiny: Loaded) -> None:
    plan = planned(tiny[0], OwnershipRequest())
    assert len(plan.replica_table) == 9  # eight layers and one of the draft head
    for layer, table in enumerate(plan.replica_table):
        for expert, ranks in enumerate(table):
            assert ranks == tuple(
                share.rank for share in plan.shares if expert in share.experts[layer]
            )
    assert plan.ownership.reason.startswith("contiguous")
    assert plan.to_json()["replicas"] == []


def test_counts_balance_the_layers_that_have_some(tiny: Loaded) -> None:
    plain, balanced = (planned(tiny[0], OwnershipRequest(counts=c)) for c in ((), RISING))
    assert plain.ownership.imbalance is None
    assert balanced.ownership.imbalance is not None
    exact = [[share.experts[layer] for share in plain.shares] for layer in range(8)]
    contiguous = planned(tiny[0], OwnershipRequest(exact=exact, counts=RISING)).ownership.imbalance
    assert contiguous is not None
    assert contiguous > 1.9
    assert balanced.ownership.imbalance < 1.1
    assert balanced.plan_id != plain.plan_id
    assert balanced.ranks[0].rows == plain.ranks[0].rows  # balance costs no bytes
    assert "busiest rank" in explain(balanced)


def test_replicas_are_planned_where_bytes_allow(tiny: Loaded) -> None:
    expert = 3 * 192 * 64 * 4  # one expert of the tiny model in fp32
    plan = planned(tiny[0], OwnershipRequest(counts=HOT, replicas_bytes=3 * expert))
    plain = planned(tiny[0], OwnershipRequest(counts=HOT))
    copies = [len(share.experts[layer]) for share in plan.shares for layer in range(8)]
    assert sum(copies) > 8 * 14
    for rank, before in zip(plan.ranks, plain.ranks, strict=True):
        grown = rank.rows["routed_experts"] - before.rows["routed_experts"]
        assert 0 <= grown <= 3 * expert
        assert grown % expert == 0
    assert plan.ownership.imbalance is not None
    assert plain.ownership.imbalance is not None
    assert plan.ownership.imbalance < plain.ownership.imbalance
    several = [table[0] for table in plan.replica_table if len(table[0]) > 1]
    assert several
    assert "copies of hot experts" in plan.ownership.reason
    assert "replicas: layer" in explain(plan)
    assert plan.plan_id != plain.plan_id


def test_replicas_stop_at_the_memory_of_the_chip(tiny: Loaded) -> None:
    full = planned(tiny[0], OwnershipRequest(counts=HOT), kv_pool_tokens=1024)
    usable = max(rank.planned_bytes for rank in full.ranks)
    plan = planned(
        tiny[0], OwnershipRequest(counts=HOT, replicas_bytes=1 << 40),
        kv_pool_tokens=1024, usable_bytes=usable,
    )  # fmt: skip
    assert plan.fits
    widest = next(r for r in full.ranks if r.planned_bytes == usable).share.rank
    assert plan.shares[widest].experts == full.shares[widest].experts


def test_a_printed_plan_is_read_back_as_it_was(tiny: Loaded, written: Callable[..., str]) -> None:
    plan = planned(tiny[0], OwnershipRequest(counts=HOT, replicas_bytes=1 << 20), mtp=1)
    assert plan.to_json()["replicas"]
    file = read_ownership(written(plan.to_json()))
    again = planned(tiny[0], OwnershipRequest(exact=file.layers, replicas=file.replicas), mtp=1)
    assert [share.experts for share in again.shares] == [share.experts for share in plan.shares]
    assert again.plan_id == plan.plan_id


def test_a_change_of_ranks_moves_only_what_it_must(tiny: Loaded) -> None:
    now = planned(tiny[0], OwnershipRequest()).ownership.layers
    plan = planned(tiny[0], OwnershipRequest(current=now), ranks=6)
    sizes = [[len(share.experts[layer]) for share in plan.shares] for layer in range(9)]
    assert sizes == [[3, 3, 2, 2, 2, 2]] * 9
    assert len(plan.ownership.moves) == 9 * 4
    assert {move.rank for move in plan.ownership.moves} == {4, 5}
    assert plan.to_json()["ownership"]["moved_experts"] == 36


def test_an_unchanged_gang_moves_nothing(tiny: Loaded) -> None:
    now = planned(tiny[0], OwnershipRequest(counts=HOT)).ownership.layers
    plan = planned(tiny[0], OwnershipRequest(current=now, counts=HOT))
    assert plan.ownership.moves == ()
    assert plan.ownership.layers == now


def test_copies_of_replicas_count_as_moves(tiny: Loaded) -> None:
    now = planned(tiny[0], OwnershipRequest(counts=HOT)).ownership.layers
    request = OwnershipRequest(current=now, counts=HOT, replicas_bytes=1 << 20)
    plan = planned(tiny[0], request)
    copies = sum(len(ranks) - 1 for table in plan.replica_table for ranks in table)
    assert copies == len(plan.ownership.moves) > 0


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ([[0, 1, 2, 3, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12, 13]], "duplicate 3"),
        ([[0, 1, 2, 3], [3, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13]], "duplicate 3"),
        ([[0, 1, 2], [4, 5, 6], [7, 8, 9], [10, 11, 12, 13]], "missing 3"),
        ([[0, 1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12, 13, 14]], "out of range 14"),
        ([[*range(14)]], "names 1 ranks, there are 4"),
    ],
)
def test_a_file_that_can_not_be_is_refused_with_the_list(
    tiny: Loaded, written: Callable[..., str], layer: list[list[int]], words: str
) -> None:
    file = read_ownership(written([layer]))
    with pytest.raises(ConfigError, match=f"layer 0.*{words}"):
        planned(tiny[0], OwnershipRequest(exact=file.layers, replicas=file.replicas))


def test_a_replica_may_not_be_twice_on_one_rank(tiny: Loaded) -> None:
    layer = [[0, 0, 1, 2, 3], [0, 4, 5, 6], [7, 8, 9], [10, 11, 12, 13]]
    with pytest.raises(ConfigError, match="duplicate 0"):
        planned(tiny[0], OwnershipRequest(exact=[layer], replicas=[{0}]))
    layer[0] = [0, 1, 2, 3]
    plan = planned(tiny[0], OwnershipRequest(exact=[layer], replicas=[{0}]))
    assert plan.replica_table[0][0] == (0, 1)
    assert holders(plan.ownership.layers[1], 14)[0] == (0,)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("[", "bad JSON"),
        ({"layers": []}, "has no 'experts'"),
        (3, "must be a list of layers"),
        ([[0, 1]], "layer 0 must be a list of ranks"),
        ([[["a"]]], "layer 0, rank 0: 'a' is no expert id"),
        ([[[True]]], "True is no expert id"),
        ({"plan_id": "x", "ranks": [{}]}, "no ranges of experts"),
        ({"experts": [[[0], [0]]], "replicas": [{"0": [0]}]}, "expert 0 on ranks"),
        ({"experts": [[[0], [1]]], "replicas": [{"0": [0]}]}, "two ranks or more"),
        ({"experts": [[[0], [1]]], "replicas": {"0": [0]}}, "replicas must be a list"),
    ],
)
def test_a_file_that_is_no_ownership(written: Callable[..., str], data: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_ownership(written(data))
    assert "file.json" in str(caught.value)


@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: {"expert_counts": c},
                                  lambda c: {"stats": {"expert_counts": c}}])  # fmt: skip
def test_counts_in_every_accepted_form(
    tiny: Loaded, written: Callable[..., str], wrap: Callable[[Any], Any]
) -> None:
    assert read_counts(written(wrap(HOT)), tiny[0]) == HOT


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([[1] * 14] * 7, "counts have 7 layers, .* needs .* 8 layers"),
        ({"stats": {}}, "no list of layers"),
        ([[1] * 13] + [[1] * 14] * 7, "layer 0 have 13 entries, needs 14"),
        ([[1] * 14] * 7 + [[1] * 13 + [-1]], "expert 13 in layer 7 is -1"),
        ([[1] * 14] * 7 + [[True] * 14], "expert 0 in layer 7 is True"),
    ],
)
def test_counts_that_are_none(
    tiny: Loaded, written: Callable[..., str], data: Any, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        read_counts(written(data), tiny[0])


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"can't read /no/where\.json"):
        read_ownership("/no/where.json")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (OwnershipRequest(exact=[], current=[]), "leaves nothing to choose"),
        (OwnershipRequest(exact=[], counts=HOT, replicas_bytes=1), "leaves nothing to choose"),
        (OwnershipRequest(replicas_bytes=1), "without routing counts"),
        (OwnershipRequest(replicas_bytes=-1, counts=HOT), "replicas_bytes = -1"),
        (OwnershipRequest(current=[]), "names 0 ranks"),
        (OwnershipRequest(exact=[[list(range(14)), [], [], []]] * 10), "has 10 layers"),
    ],
)
def test_requests_that_contradict_themselves(
    tiny: Loaded, request_: OwnershipRequest, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(tiny[0], request_)


def test_the_real_size_is_balanced(real: Loaded) -> None:
    counts = tuple(
        tuple(1e6 / ((e * 37 + layer) % 512 + 20) for e in range(512)) for layer in range(48)
    )
    chosen = choose_ownership(OwnershipRequest(counts=counts), real[0], 6)
    assert chosen.imbalance is not None
    assert chosen.imbalance < 1.01
