"""A prefill chunk and decode steps of the embedded model on pretend chips, by what they cost."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

Engines = Callable[..., list[dict[str, Any]]]
RANKS = [1, 2]
GRAPHS_IN_GANG = 2  # of a 310P
FIRST_STEADY = 1  # the second decode step


def problems(step: dict[str, Any], rank: int) -> set[str]:
    """What a steady decode step may not do, in words."""
    counts, reads = step["counts"], 1 if rank == 0 else 0
    found = set()
    if counts["malloc_bytes"] or counts["host_malloc_calls"] or step["kept_bytes"]:
        found.add("allocates")
    if counts["d2h_calls"] != reads:
        found.add("copies to the host")
    if counts["stream_syncs"] != reads or counts["event_syncs"] or counts["device_syncs"]:
        found.add("waits")
    if counts["refused_tensors"]:
        found.add("computes in a refused type")
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_a_steady_step_allocates_nothing_and_reads_only_the_sampled_tokens(
    engines: Engines, ranks: int
) -> None:
    for rank, told in enumerate(engines(ranks=ranks)):
        assert "error" not in told, told
        assert told["soc"] == "Ascend310P3"
        for step in told["steps"][FIRST_STEADY:]:
            assert problems(step, rank) == set()
            assert step["counts"]["launches"] == told["steps"][0]["counts"]["launches"]
        sampled_bytes = 2 * 8  # two sequences, int64
        assert told["steps"][-1]["counts"]["d2h_bytes"] == (sampled_bytes if rank == 0 else 0)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_prefill_chunk_computes_in_no_refused_type(engines: Engines, ranks: int) -> None:
    for told in engines(ranks=ranks):
        assert told["prefill"]["counts"]["refused_tensors"] == 0
        assert told["prefill"]["counts"]["launches"] > 500


@pytest.mark.parametrize("ranks", RANKS)
def test_collectives_gather_types_that_the_chip_has(engines: Engines, ranks: int) -> None:
    """Two of a layer, embedding, n-gram rows, sampling; fp16 and fp32 in HCCL's numbering."""
    for told in engines(ranks=ranks):
        lines = [line for line in told["steps"][-1]["trace"] if line.startswith("Hccl")]
        assert len(lines) == (0 if ranks == 1 else 2 * 8 + 3)
        assert set(lines) <= {"HcclAllGather type 3", "HcclAllGather type 4"}


def capture_problems(captures: list[dict[str, int]], ranks: int) -> set[str]:
    """What recording may not do on a 310P, in words."""
    found = set()
    if ranks > 1 and len(captures) > GRAPHS_IN_GANG:
        found.add("a third graph")
    for counts in captures:
        if counts["h2d_calls"] or counts["d2h_calls"]:
            found.add("copies from or to the host")
        if counts["stream_syncs"] or counts["event_syncs"] or counts["device_syncs"]:
            found.add("waits")
        if counts["refused_tensors"]:
            found.add("computes in a refused type")
    return found


@pytest.mark.parametrize("ranks", RANKS)
def test_decode_is_recorded_and_a_replay_is_one_launch(engines: Engines, ranks: int) -> None:
    """Two sequences: one graph of two rows, or of four with rows repeated where two graphs are."""
    for rank, told in enumerate(engines(ranks=ranks)):
        assert told["refused"] == ""
        assert len(told["captures"]) == (3 if ranks == 1 else GRAPHS_IN_GANG)
        assert capture_problems(told["captures"], ranks) == set()
        for step in told["graph_steps"][FIRST_STEADY:]:
            assert problems(step, rank) == set()
            assert step["counts"]["replays"] == 1
            assert step["counts"]["launches"] < 50
        assert told["steps"][-1]["counts"]["launches"] > 1000


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(1, {}), (2, {}), (2, {"model": "tiny-flash-next-w4", "int8_activations": True})],
    ids=["one rank", "two ranks", "4-bit experts"],
)
def test_a_step_with_drafts_costs_no_more_than_one_launch_of_the_model(
    engines: Engines, ranks: int, options: dict[str, Any]
) -> None:
    """Two sequences of two drafts each: one read of their tokens and of how many are kept."""
    for rank, told in enumerate(engines(ranks=ranks, mtp=2, **options)):
        assert "error" not in told, told
        assert told["refused"] == ""
        assert len(told["captures"]) == (6 if ranks == 1 else GRAPHS_IN_GANG)
        assert capture_problems(told["captures"], ranks) == set()
        for step in told["steps"][FIRST_STEADY:] + told["graph_steps"][FIRST_STEADY:]:
            assert problems(step, rank) == set()
            assert step["counts"]["d2h_bytes"] == (2 * (3 + 1) * 8 if rank == 0 else 0)
        whole = told["steps"][-1]["counts"]["launches"]
        for step in told["graph_steps"][FIRST_STEADY:]:
            assert step["counts"]["replays"] == 1
            assert step["counts"]["launches"] < whole / 2, whole


def refusals(told: dict[str, Any], name: str) -> set[str]:
    """What a rank's loop raised in a step with a seed, in words."""
    known = {"expert id out of range": "a value of local is", "another order": "in another order"}
    return {word for word, text in known.items() if text in told["refused_steps"][name]}


@pytest.mark.parametrize("ranks", RANKS)
def test_nothing_is_refused_without_a_fault(engines: Engines, ranks: int) -> None:
    """A graph that could not be recorded is none: its collectives are not in a step's order."""
    for told in engines(ranks=ranks):
        for name in ("nothing", "last_expert", "lost_recording"):
            assert told["refused_steps"][name] == ""


@pytest.mark.parametrize(
    ("fault", "ranks", "problem"),
    [
        ("host_read", 1, "copies to the host"),
        ("host_read", 1, "waits"),
        ("fresh_tensor", 1, "allocates"),
        ("refused_cast", 1, "computes in a refused type"),
        ("sentinel_expert", 1, "expert id out of range"),
        ("third_graph", 2, "a third graph"),
        ("other_order", 2, "another order"),
    ],
)
def test_each_check_fails_when_its_fault_is_seeded(
    engines: Engines, fault: str, ranks: int, problem: str
) -> None:
    told = engines(ranks=ranks)[-1]
    if fault in told["faults"]:
        assert all(problem in problems(step, 0) for step in told["faults"][fault])
    elif fault == "third_graph":
        assert problem in capture_problems(told["captures_of_three"], ranks)
    else:
        assert refusals(told, fault) == {problem}


def test_a_rank_with_collectives_in_another_order_names_both(engines: Engines) -> None:
    """Once its step is launched: nobody waits for a chip, and rank 0 goes on until it is ended."""
    first, second = (told["refused_steps"]["other_order"] for told in engines(ranks=2))
    assert first == ""
    place = r"epoch 0 step (\d+) after (\d+) collectives \(digest (\d+)\)"
    found = re.match(rf"rank 1 is in {place} and rank 0 in {place}: collectives in another", second)
    assert found is not None, second
    step, count, digest, *theirs = found.groups()
    assert [step, count] == theirs[:2]
    assert digest != theirs[2]
    assert "\n" not in second
