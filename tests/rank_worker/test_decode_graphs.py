"""Decode graphs on a device that records and replays, played on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rank_worker.rank as rank_module
from ops.spec import Capability
from rank_worker.decode_graphs import FALLBACKS, DecodeGraphs, graph_sizes
from rank_worker.device import CpuDevice
from rank_worker.launch import Engine
from rank_worker.messages import EngineRequest
from tests.conftest import Golden


class Replay:
    """Runs what was recorded again, into the tensors that it made first."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self.result = function()

    def replay(self) -> None:
        for held, made in zip(self.result, self._function(), strict=True):
            held.copy_(made)


class StaleReplay(Replay):
    """A graph that misses an input."""

    def replay(self) -> None:
        pass


class ReplayingDevice(CpuDevice):
    """Work is queued as on a chip: shapes don't follow positions, and steps can be recorded."""

    has_queues = True

    def __init__(
        self, replay: type[Replay] = Replay, graphs: int | None = None, backend: str = "played"
    ) -> None:
        """Operators are those of `backend`; one without variants runs the reference."""
        self._replay, self._graphs, self._backend = replay, graphs, backend
        self.recorded = 0

    def capability(self, dtype: torch.dtype) -> Capability:
        return Capability(self._backend, dtype=dtype)

    def max_graphs(self, world_size: int) -> int | None:
        return self._graphs

    def capture(self, function: Callable[[], Any]) -> Replay:
        self.recorded += 1
        return self._replay(function)


@pytest.mark.parametrize(
    ("max_rows", "max_graphs", "expected"),
    [
        (1, None, (1,)), (8, None, (1, 2, 4, 8)), (6, None, (1, 2, 4, 6)), (8, 2, (1, 8)),
        (8, 1, (8,)), (1, 2, (1,)), (8, 0, ()),
    ],
)  # fmt: skip
def test_sizes_of_graphs(max_rows: int, max_graphs: int | None, expected: tuple[int, ...]) -> None:
    assert graph_sizes(max_rows, max_graphs) == expected


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"decisions": []}, "check"),
        ({"drafts": True}, "drafts"),
        ({"rows": 3}, "rows"),
        ({"all_sampled": False}, "unsampled"),
        ({"refused": "event resources"}, "refused"),
    ],
)
def test_a_decode_step_outside_graphs_has_one_reason(changes: dict[str, Any], reason: str) -> None:
    step: dict[str, Any] = {"rows": 2, "decisions": None, "drafts": None, "all_sampled": True}
    step |= {"prefill": (), **changes}
    group = SimpleNamespace(starts=(0,) * step.pop("rows"))
    nothing: Any = None
    graphs = DecodeGraphs(nothing, nothing, nothing, 64)
    batch: Any = SimpleNamespace(groups=(group,), **step)
    assert not graphs.takes(batch)  # nothing is asked for, and nothing counted
    assert sum(graphs.counts.eager.values()) == graphs.counts.replayed == 0
    graphs.counts.refused = changes.get("refused", "")
    graphs._recorded = {} if graphs.counts.refused else {1: nothing, 2: nothing}
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


def test_drafts_and_checked_steps_run_without_a_graph(
    replaying: Callable[..., Any], golden: Callable[[str], Golden]
) -> None:
    with replaying(ReplayingDevice(), mtp=2, mtp_auto=False) as engine:
        check(engine, golden("embedded"))
        told = engine.rank0.snapshot().eager_fallbacks
        assert told == engine.rank0.runner.graphs.counts.eager
        assert told["drafts"] > 10
        assert told["refused"] == told["rows"] == told["unsampled"] == 0


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
