"""Decode graphs on a device that records and replays, played on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rank_worker.rank as rank_module
from rank_worker.decode_graphs import FALLBACKS, DecodeGraphs, GraphSize, graph_sizes
from rank_worker.launch import Engine
from rank_worker.messages import EngineRequest
from tests.conftest import Golden
from tests.rank_worker.replaying_device import (
    Fault,
    Replay,
    ReplayingDevice,
    ReplayingRank,
    StaleReplay,
)


@pytest.mark.parametrize(
    ("max_rows", "num_drafts", "max_graphs", "expected"),
    [
        (1, 0, None, [(1, 1)]),
        (8, 0, None, [(1, 1), (1, 2), (1, 4), (1, 8)]),
        (6, 0, None, [(1, 1), (1, 2), (1, 4), (1, 6)]),
        (8, 0, 2, [(1, 1), (1, 8)]),
        (8, 0, 1, [(1, 8)]),
        (1, 0, 2, [(1, 1)]),
        (8, 0, 0, []),
        (3, 2, None, [(1, 1), (1, 2), (1, 3), (3, 1), (3, 2), (3, 3)]),
        (8, 2, 2, [(1, 8), (3, 8)]),
        (8, 3, 3, [(1, 8), (4, 1), (4, 8)]),
        (8, 3, 1, [(4, 8)]),
        (8, 3, 0, []),
    ],
)
def test_sizes_of_graphs(
    max_rows: int, num_drafts: int, max_graphs: int | None, expected: list[tuple[int, int]]
) -> None:
    assert list(graph_sizes(max_rows, num_drafts, max_graphs)) == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"widths": (3,)}, ""),
        ({"decisions": []}, "check"),
        ({"widths": (1, 3)}, "mixed"),
        ({"rows": 3}, "rows"),
        ({"rows": 2, "widths": (3,)}, "rows"),
        ({"widths": (2,)}, "rows"),
        ({"all_sampled": False}, "unsampled"),
        ({"refused": "event resources"}, "refused"),
    ],
)
def test_a_decode_step_outside_graphs_has_one_reason(changes: dict[str, Any], reason: str) -> None:
    step: dict[str, Any] = {"rows": 1, "widths": (1,), "decisions": None, "all_sampled": True}
    step |= {"prefill": (), **changes}
    starts = (0,) * step.pop("rows")
    groups = [SimpleNamespace(starts=starts, width=width) for width in step.pop("widths")]
    nothing: Any = None
    graphs = DecodeGraphs(nothing, nothing, nothing, 64)
    batch: Any = SimpleNamespace(groups=groups, **step)
    assert not graphs.takes(batch)  # nothing is asked for, and nothing counted
    assert sum(graphs.counts.eager.values()) == graphs.counts.replayed == 0
    graphs.counts.refused = changes.get("refused", "")
    sizes = [GraphSize(1, 1), GraphSize(1, 2), GraphSize(3, 1)]
    graphs._recorded = {} if graphs.counts.refused else dict.fromkeys(sizes, nothing)
    assert graphs.takes(batch) == (not reason)
    assert set(graphs.counts.eager) == set(FALLBACKS)
    assert {name for name, count in graphs.counts.eager.items() if count} == ({reason} - {""})


@pytest.fixture
def replaying(
    launched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[[ReplayingDevice], Any]:
    def launch(device: ReplayingDevice, **config: Any) -> Any:
        monkeypatch.setattr(rank_module, "open_device", lambda name: device)
        return launched("embedded", check_contracts=False, check_interval_steps=64, **config)

    return launch


def check(engine: Engine, golden: Golden) -> None:
    """Three answers of different lengths at once."""
    cases = [golden.cases[length] for length in sorted(golden.cases)[:3]]
    requests = [
        EngineRequest(case.name, case.prompt_ids, len(case.token_ids) - index, ignore_eos=True)
        for index, case in enumerate(cases)
    ]
    for case, result in zip(cases, engine.generate(requests), strict=True):
        case.check_ids(result.token_ids)


@pytest.mark.parametrize("graphs", [None, 2])
def test_replayed_steps_give_the_reference_ids(
    replaying: Callable[..., Any], golden: Callable[[str], Golden], graphs: int | None
) -> None:
    """Steps of fewer rows than a graph has repeat their last row and change nothing by it."""
    device = ReplayingDevice(graphs=graphs)
    with replaying(device, max_sequences=8) as engine:
        check(engine, golden("embedded"))
        counts = engine.rank0.runner.graphs.counts
        assert device.recorded == (4 if graphs is None else 2)
        assert not counts.refused
        assert counts.replayed > 20
        assert {name for name, count in counts.eager.items() if count} <= {"check"}


@pytest.mark.parametrize("graphs", [None, 2])
def test_rows_with_drafts_are_replayed_and_committed(
    replaying: Callable[..., Any], golden: Callable[[str], Golden], graphs: int | None
) -> None:
    """Most drafts are kept, some are not, and rows fill graphs up: ids stay the reference's."""
    device = ReplayingDevice(graphs=graphs)
    with replaying(device, mtp=2, mtp_auto=False, max_sequences=4) as engine:
        check(engine, golden("embedded"))
        runner = engine.rank0.runner
        counts = runner.graphs.counts
        assert device.recorded == (6 if graphs is None else 2)
        assert not counts.refused
        assert counts.replayed > 20
        told = engine.rank0.snapshot().eager_fallbacks
        assert told == counts.eager
        assert told["refused"] == told["rows"] == told["unsampled"] == 0
        assert told["check"] + told["mixed"] < counts.replayed / 2


@pytest.mark.parametrize(("mtp", "limit"), [(0, 1), (2, 2)])
def test_rows_that_fill_a_graph_up_are_not_counted(
    replaying: Callable[..., Any], golden: Callable[[str], Golden], mtp: int, limit: int
) -> None:
    """Routes of one sequence, in graphs of eight rows and without any."""
    counted = []
    for graphs in (limit, 0):
        settings = {"max_sequences": 8, "mtp": mtp, "mtp_auto": False}
        with replaying(ReplayingDevice(graphs=graphs), **settings) as engine:
            runner = engine.rank0.runner
            runner.reset_counts()
            case = golden("embedded").cases[min(golden("embedded").cases)]
            engine.generate([EngineRequest("a", case.prompt_ids, 24, ignore_eos=True)])
            assert runner.graphs.counts.replayed > 8 or not graphs
            counted.append(runner.expert_counts())
    assert counted[0] == counted[1]


class ForgetsInputs(Replay):
    """A commit after the replay takes what the recording left."""

    def replay(self) -> None:
        for held, made in zip(self.result[:2], self._function(), strict=False):
            held.copy_(made)


def test_a_graph_whose_commit_is_that_of_another_step_is_noticed(
    replaying: Callable[..., Any],
) -> None:
    with replaying(ReplayingDevice(ForgetsInputs), mtp=2) as engine:
        refused = engine.rank0.runner.graphs.counts.refused
        assert "changes its state" in refused or "differs" in refused


def test_a_graph_that_misses_its_input_is_not_used(
    replaying: Callable[..., Any], golden: Callable[[str], Golden]
) -> None:
    with replaying(ReplayingDevice(StaleReplay)) as engine:
        counts = engine.rank0.runner.graphs.counts
        assert "differs" in counts.refused or "does not follow" in counts.refused
        check(engine, golden("embedded"))
        assert counts.replayed == 0
        assert counts.eager["refused"] > 20
        assert sum(counts.eager.values()) == counts.eager["refused"]


def test_operators_that_update_states_row_by_row_are_noticed(
    replaying: Callable[..., Any],
) -> None:
    """The CPU's own do: a row that fills a graph up would advance its state again."""
    with replaying(ReplayingDevice(backend="cpu")) as engine:
        refused = engine.rank0.runner.graphs.counts.refused
        assert refused in (
            "a replay of 8 rows differs from the pass without a graph",
            "a row that is repeated 8 times changes its state more than once",
        )


def test_a_step_that_cannot_be_recorded_leaves_all_ranks_without_graphs(
    replaying: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = ReplayingDevice()

    def refuse(function: Callable[[], Any]) -> Replay:
        raise RuntimeError("event resources are insufficient\nC++ frames")

    monkeypatch.setattr(device, "capture", refuse)
    with replaying(device) as engine:
        refused = engine.rank0.runner.graphs.counts.refused
        assert refused.endswith("recording 8 rows failed: event resources are insufficient")
        result = engine.generate([EngineRequest("a", (1, 2, 3), 4, ignore_eos=True)])[0]
        assert len(result.token_ids) == 4
        assert torch.is_inference_mode_enabled() is False


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("broken", [0, 1])
def test_a_fault_of_one_rank_leaves_all_without_graphs(
    launched: Callable[..., Any], fault: Fault, broken: int
) -> None:
    """Nobody goes on to a check whose collectives the other doesn't join."""
    make_rank = partial(ReplayingRank, fault=fault, broken=broken)
    settings = {"max_sequences": 2, "step_timeout_s": 20.0, "check_contracts": False}
    with launched("embedded", ranks=2, make_rank=make_rank, **settings) as engine:
        refused = engine.rank0.runner.graphs.counts.refused
        assert refused == "another rank could not" if broken else fault in refused
        result = engine.generate([EngineRequest("a", (1, 2, 3), 4, ignore_eos=True)])[0]
        assert len(result.token_ids) == 4
        assert engine.rank0.runner.graphs.counts.replayed == 0


@pytest.mark.parametrize("context_tokens", [4, 5])
def test_no_graph_is_longer_than_the_context(
    replaying: Callable[..., Any], context_tokens: int
) -> None:
    """The fifth token of a row with four drafts has no page in a context of four."""
    device = ReplayingDevice()
    sizes = {"context_tokens": context_tokens, "page_tokens": 4, "kv_pool_tokens": 64}
    with replaying(device, mtp=4, max_sequences=2, **sizes) as engine:
        assert device.recorded == (2 if context_tokens == 4 else 4)
        result = engine.generate([EngineRequest("a", (1, 2), 2, ignore_eos=True)])[0]
        assert len(result.token_ids) == 2
