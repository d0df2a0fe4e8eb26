"""`nrank bench --ops`: equal first, then timed; a wrong variant is named and never timed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deploy import cli
from deploy.bench import op_cases, op_packed_cases
from deploy.bench.op_cases import CASES, EXPERTS, OWNED, TOP_K, OpCase
from deploy.bench.op_times import difference, measure_ops, without_inputs
from ops.contracts import CONTRACTS
from ops.registry import REFERENCES, register, variants_of
from ops.spec import Capability, Implementation
from placement.errors import NrankError

SWIGLU = OpCase(
    "gated_swiglu", "3",
    lambda dtype: [{"gate_up": torch.randn(3, 8).to(dtype), "gate": torch.randn(3, 1).to(dtype)}],
    1,
)  # fmt: skip
KV = OpCase(
    "write_kv_", "1",
    lambda dtype: [
        {
            "k_pool": torch.zeros(2, 4, 1, 2), "v_pool": torch.zeros(2, 4, 1, 2),
            "slots": torch.tensor([5]), "k": torch.ones(1, 1, 2), "v": torch.ones(1, 1, 2),
        }
    ],
    1,
)  # fmt: skip


def variant(case: OpCase, function: Callable[..., Any], priority: int = 1) -> Implementation:
    return register(case.op, function, "cpu", priority)


def gated_swiglu(gate_up: Tensor, gate: Tensor) -> Tensor:
    result: Tensor = REFERENCES["gated_swiglu"].function(gate_up, gate)
    return result


def slow_swiglu(gate_up: Tensor, gate: Tensor) -> Tensor:
    time.sleep(0.01)
    return gated_swiglu(gate_up, gate)


def wrong_swiglu(gate_up: Tensor, gate: Tensor) -> Tensor:
    return gated_swiglu(gate_up, gate) * 1.0001


def write_kv_nowhere_(
    k_pool: Tensor, v_pool: Tensor, slots: Tensor, k: Tensor, v: Tensor
) -> None: ...


def test_each_variant_is_timed_against_the_reference() -> None:
    variants = [variant(SWIGLU, gated_swiglu, 1), variant(SWIGLU, slow_swiglu, 2)]
    rows = measure_ops([SWIGLU], 3, is_quick=True, variants=variants)
    assert [(row.id, row.dtype) for row in rows] == [
        (f"gated_swiglu 3 {dtype}", dtype) for dtype in ("float32", "float16") for _ in range(3)
    ]
    first, slow, same = rows[:3]
    assert [row.system.rpartition(".")[2] for row in (first, slow, same)] == [
        "gated_swiglu", "slow_swiglu", "gated_swiglu",
    ]  # fmt: skip
    assert [row.is_in_use for row in (first, slow, same)] == [False, True, False]
    assert first.system == REFERENCES["gated_swiglu"].name
    assert all(row.is_equal and row.difference == 0 for row in rows)
    assert slow.seconds is not None
    assert slow.seconds.min >= 0.01
    assert slow.speedup is not None
    assert slow.speedup.median < 0.1  # a round of three may have stood still
    assert first.speedup is not None
    assert (first.speedup.min, first.speedup.max) == (1, 1)


@pytest.mark.parametrize(
    ("case", "function", "off"),
    [(SWIGLU, wrong_swiglu, 1e-4), (KV, write_kv_nowhere_, 1.0)],
)
def test_a_wrong_variant_is_named_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    case: OpCase, function: Callable[..., Any], off: float,
) -> None:  # fmt: skip
    known = [variant(case, function)]
    rows = measure_ops([case], 1, is_quick=True, variants=known)
    right, wrong = rows[:2]
    assert (right.is_equal, wrong.is_equal, wrong.seconds, wrong.speedup) == (
        True, False, None, None,
    )  # fmt: skip
    assert wrong.difference == pytest.approx(off, rel=0.02)
    monkeypatch.setattr(
        "deploy.bench.op_times.measure_ops", lambda cases, repeats, is_quick: rows[:2]
    )
    assert cli.main(["bench", "--ops", "--json"]) == 1
    table, _, line = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    assert f"WRONG: {case.id} float32: " in table
    assert json.loads(line)["ops"][1]["seconds"] is None


def test_a_variant_that_fails_is_named_in_one_line() -> None:
    def gated_swiglu(gate_up: Tensor, gate: Tensor) -> Tensor:
        raise RuntimeError("no such\nkernel")

    with pytest.raises(NrankError, match=r"gated_swiglu 3: .*gated_swiglu failed \(RuntimeError"):
        measure_ops([SWIGLU], 1, True, [variant(SWIGLU, gated_swiglu)])


def test_the_file_is_there_when_the_reader_of_the_table_has_gone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def gone(measured: object) -> None:
        raise BrokenPipeError

    rows = measure_ops([SWIGLU], 1, True, [variant(SWIGLU, gated_swiglu)])
    monkeypatch.setattr("deploy.bench.op_times.measure_ops", lambda cases, repeats, is_quick: rows)
    monkeypatch.setattr("deploy.bench.op_report.print_ops", gone)
    monkeypatch.setattr("sys.stdout", (tmp_path / "stdout").open("w"))
    assert cli.main(["bench", "--ops", "--out", str(tmp_path / "ops.json")]) == 0
    assert len(json.loads((tmp_path / "ops.json").read_text())["ops"]) == 4


@pytest.mark.parametrize(
    ("got", "expected", "off"),
    [
        (torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0]), 0.2),
        (torch.tensor([1, 4]), torch.tensor([1, 4]), 0.0),
        (torch.tensor([1, 4]), torch.tensor([1, 5]), float("inf")),
        (torch.tensor([1.0]), torch.tensor([1.0, 2.0]), float("inf")),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), float("inf")),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), float("inf")),
        (torch.tensor([1.0]), torch.tensor([0.0]), float("inf")),
        (torch.zeros(0), torch.zeros(0), 0.0),
    ],
)
def test_a_difference_is_a_share_of_the_largest_value(
    got: Tensor, expected: Tensor, off: float
) -> None:
    assert difference(got, expected) == pytest.approx(off)


def test_variants_are_taken_where_they_can_run() -> None:
    def never(capability: Capability) -> str | None:
        return None if capability.dtype == torch.float32 else "made for float32"

    only = register("gated_swiglu", gated_swiglu, "cpu", 1, never)
    assert {r.dtype for r in measure_ops([SWIGLU], 1, True, [only])} == {"float32"}
    assert measure_ops([SWIGLU], 1, True, []) == []
    assert without_inputs([SWIGLU], [only, variant(KV, write_kv_nowhere_)]) == ["write_kv_"]


def cheap(cases: Sequence[OpCase]) -> list[OpCase]:
    """One row, without experts and large projections."""
    large = {"moe_experts", "linear", "ngram_gate", "table_rows", "swiglu_mlp", "sample"}
    return [case for case in cases if case.rows == 1 and case.op not in large]


def test_arguments_keep_the_contracts_of_their_operators() -> None:
    for case in cheap(CASES):
        for arguments in case.make(torch.float32):
            defaults = {"dilation": 1, "chunk": 64, "vocab_start": 0}
            CONTRACTS[case.op].check(case.op, defaults | arguments)


@pytest.mark.slow
def test_variants_of_this_machine_are_equal_at_production_shapes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ops = {case.op for case in cheap(CASES)}
    expected = {v.name for v in variants_of("cpu") if v.op in ops and runs_here(v)}
    monkeypatch.setattr(op_cases, "CASES", tuple(cheap(CASES)))
    monkeypatch.setattr(op_packed_cases, "PACKED_CASES", ())
    assert cli.main(["bench", "--ops", "--quick", "--repeats", "1", "--json"]) == 0
    table, _, line = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    found = json.loads(line)
    label = "ops alone: decides nothing; the end-to-end rows decide"
    assert (found["kind"], found["label"]) == ("ops", label)
    assert table.count(label) == 2
    assert {row["system"] for row in found["ops"]} >= expected
    assert all(row["is_equal"] for row in found["ops"])


def runs_here(one: Implementation) -> bool:
    return one.requires(Capability("cpu")) is None


def test_routes_are_those_of_one_rank_and_distinct() -> None:
    torch.manual_seed(0)
    local = op_cases.routes(64)
    assert local.shape == (64, TOP_K)
    share = float((local >= 0).float().mean())
    assert abs(share - OWNED / EXPERTS) < 0.05
    for row in local.tolist():
        mine = [index for index in row if index >= 0]
        assert len(set(mine)) == len(mine)
        assert all(index < OWNED for index in mine)
