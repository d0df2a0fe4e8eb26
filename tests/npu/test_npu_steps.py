"""A prefill chunk and decode steps of the embedded model on pretend chips, by what they cost."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("host_read", "copies to the host"),
        ("host_read", "waits"),
        ("fresh_tensor", "allocates"),
        ("refused_cast", "computes in a refused type"),
    ],
)
def test_each_check_fails_when_its_fault_is_seeded(
    engines: Engines, fault: str, problem: str
) -> None:
    (told,) = engines(ranks=1)
    assert all(problem in problems(step, 0) for step in told["faults"][fault])


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


def test_a_third_graph_would_be_noticed(engines: Engines) -> None:
    for told in engines(ranks=2):
        assert "a third graph" in capture_problems(told["captures_of_three"], 2)
