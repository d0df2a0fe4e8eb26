"""`nrank probe` on real gangs: nothing is flagged where nothing is wrong, and each seeded fault is
found at its layer and rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import rank_worker.rank as rank_module
from deploy.cli import main
from tests.deploy.probe.conftest import PROMPT_IDS, Probe
from tests.deploy.probe.faulty_ranks import (
    FaultyRank,
    LoudExpert,
    NoNumbers,
    OtherHead,
    OtherNgrams,
    OtherRouter,
    OwnSum,
    UnreducedShared,
    WrongGates,
)
from tests.golden import lowbit_checkpoint
from tests.rank_worker.test_decode_graphs import ReplayingDevice, StaleReplay

Found = set[tuple[str, int, int]]
slow = pytest.mark.slow


def found(report: dict[str, Any]) -> Found:
    return {(f["kind"], f["layer"], f["rank"]) for f in report["findings"]}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=slow), pytest.param(2, marks=slow), 3])
def test_nothing_is_flagged_where_nothing_is_wrong(
    probed: Probe, random_checkpoint: Callable[..., Path], ranks: int
) -> None:
    code, report = probed(random_checkpoint(layers=4), ranks)
    assert (code, report["findings"]) == (0, [])
    assert [row["layer"] for row in report["rows"]] == [0, 1, 2, 3]
    assert report["tokens"] == 64
    for row in report["rows"]:
        assert len(row["part_errors"]) == ranks
        assert 0 < max(row["part_errors"]) < 1e-5
        assert row["cosine"] > 1 - 1e-6
        assert row["rms"] < row["absmax"]


def test_no_step_of_a_probe_is_replayed(
    probed: Probe, random_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph replays kernels, not the Python that listens."""
    device = ReplayingDevice(StaleReplay)
    monkeypatch.setattr(rank_module, "open_device", lambda name: device)
    code, report = probed(random_checkpoint(layers=4), 1)
    assert (code, report["findings"]) == (0, [])
    assert device.recorded == 0


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=slow), 2, pytest.param(3, marks=slow)])
def test_an_over_scaled_expert_of_the_checkpoint_is_named_with_its_rank(
    loud_expert: Callable[..., Path], capsys: pytest.CaptureFixture[str], ranks: int
) -> None:
    folder = loud_expert(layer=2, expert=9, factor=8.0)
    line = ["probe", "--model", str(folder), "--ranks", str(ranks), "--prompt-ids", PROMPT_IDS]
    assert main(line) == 1
    out = capsys.readouterr().out
    owner = {1: 0, 2: 1, 3: 1}[ranks]  # of 14 experts: 7,7 and 5,5,4
    assert f"layer 2, rank {owner}: expert 9 of the checkpoint is" in out
    flagged = [text for text in out.splitlines() if text.startswith("  layer")]
    assert all(text.startswith("  layer 2") for text in flagged)


@slow
def test_a_residual_that_grows_at_once_is_flagged(
    probed: Probe, loud_expert: Callable[..., Path]
) -> None:
    code, report = probed(loud_expert(layer=2, expert=9, factor=500.0), 2)
    assert code == 1
    assert found(report) == {("loud_expert", 2, 1), ("growth", 2, -1)}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=slow), pytest.param(2, marks=slow), 3])
def test_gate_vectors_that_are_wrong_at_48_heads_are_named(
    probed: Probe, production_heads: Path, ranks: int
) -> None:
    code, report = probed(production_heads, ranks, WrongGates, faulty=(ranks - 1,))
    assert code == 1
    assert found(report) == {("g", 1, ranks - 1)}
    assert "heads 32-47" in report["findings"][0]["text"]


@slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_same_fault_sleeps_at_12_heads_and_48_heads_are_clean_without_it(
    probed: Probe, production_heads: Path, random_checkpoint: Callable[..., Path], ranks: int
) -> None:
    code, _ = probed(random_checkpoint(layers=4), ranks, WrongGates, faulty=(ranks - 1,))
    assert code == 0
    assert probed(production_heads, ranks)[0] == 0


@pytest.mark.parametrize(
    ("ranks", "faulty"),
    [
        (2, (1,)),
        pytest.param(2, (0, 1), marks=slow),
        pytest.param(3, (1,), marks=slow),
        pytest.param(3, (0, 1, 2), marks=slow),
    ],
)
def test_a_shared_expert_beside_the_reduction_is_named(
    probed: Probe, random_checkpoint: Callable[..., Path], ranks: int, faulty: tuple[int, ...]
) -> None:
    folder = random_checkpoint(layers=4)
    code, report = probed(folder, ranks, UnreducedShared, faulty=faulty, layer=2)
    assert code == 1
    findings = found(report)
    assert {("shared", 2, rank) for rank in faulty} | {("ranks", 2, -1)} <= findings
    assert {layer for _, layer, _ in findings} == {2}
    assert {rank for kind, _, rank in findings if kind == "shared"} == set(faulty)
    shared = next(f for f in report["findings"] if f["kind"] == "shared")
    assert "is not in the reduction" in shared["text"]


@slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("fault", "layer", "kind"),
    [
        (LoudExpert, 1, "expert"), (OtherRouter, 3, "routes"), (OtherNgrams, 1, "entry"),
        (OtherHead, 0, "logits"), (OwnSum, 2, "sum"),
    ],
)  # fmt: skip
def test_other_faults_of_one_rank_are_named(
    probed: Probe, random_checkpoint: Callable[..., Path], ranks: int,
    fault: type[FaultyRank], layer: int, kind: str,
) -> None:  # fmt: skip
    rank = ranks - 1
    code, report = probed(random_checkpoint(layers=4), ranks, fault, faulty=(rank,), layer=layer)
    assert code == 1
    findings = {(k, at, r) for k, at, r in found(report) if k != "ranks"}
    at = -1 if kind == "logits" else layer
    named = {(k, a, r) for k, a, r in findings if r == rank or k == "entry"}
    assert (kind, at, rank) in named
    assert {a for _, a, _ in findings} == {at}


@slow
def test_the_layer_that_overflows_first_is_named_though_no_answer_comes(
    probed: Probe, random_checkpoint: Callable[..., Path]
) -> None:
    code, report = probed(random_checkpoint(layers=4), 2, NoNumbers, faulty=(1,))
    assert code == 1
    assert report["tokens"] == 60
    first = report["findings"][0]
    assert (first["kind"], first["layer"], first["rank"]) == ("channel", 1, 1)


@slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_half_precision_is_within_its_bounds(
    probed: Probe, embedded_model_dir: Path, production_heads: Path,
    random_checkpoint: Callable[..., Path], ranks: int, dtype: str,
) -> None:  # fmt: skip
    flags = ("--dtype", dtype, "--prefill-chunk", "24")
    for folder in (embedded_model_dir, production_heads, random_checkpoint(layers=4)):
        code, report = probed(folder, ranks, flags=flags)
        assert (code, report["findings"]) == (0, [])


@slow
@pytest.mark.parametrize("recipe", ["w4g128", "w4-w8-dense", "fp8", "nvfp4"])
def test_low_bit_weights_are_compared_as_what_they_stand_for(
    probed: Probe, tiny_checkpoint: ModuleType, tmp_path: Path, recipe: str
) -> None:
    pair = lowbit_checkpoint.write(tiny_checkpoint, recipe, tmp_path)
    code, report = probed(pair.packed, 2)
    assert (code, report["findings"]) == (0, [])


@slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_faults_are_found_in_half_precision(
    probed: Probe, production_heads: Path, random_checkpoint: Callable[..., Path], dtype: str
) -> None:
    flags = ("--dtype", dtype)
    _, report = probed(production_heads, 2, WrongGates, flags, faulty=(1,))
    assert found(report) == {("g", 1, 1)}
    _, report = probed(random_checkpoint(layers=4), 2, UnreducedShared, flags, faulty=(0,))
    assert ("shared", 1, 0) in found(report)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--prompt-ids", "1,2,600"], "the prompt has token id 600"),
        (["--prompt-file", "/nowhere"], "check --prompt-file"),
        (["--prompt-ids", "1", "--ranks", "99"], "ranks = 99"),
    ],
)
def test_bad_input_is_one_line(
    random_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str],
    flags: list[str], told: str,
) -> None:  # fmt: skip
    assert main(["probe", "--model", str(random_checkpoint(layers=4)), *flags]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
