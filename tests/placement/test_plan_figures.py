"""Planned bytes of real models against figures that others published or measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from placement.config import EngineConfig
from placement.ledger import LedgerOptions, TablePlace
from placement.models.registry import spec_from_config
from placement.plan import Plan, PlanOptions, make_plan
from placement.spec import ModelSpec

CONFIGS = Path(__file__).parent / "configs"
GIB = 1 << 30
HOST = PlanOptions(ledger=LedgerOptions(TablePlace.HOST))
WEIGHTS = ("routed_experts", "shared_experts", "dense", "embedding", "scales")


def planned(spec: ModelSpec, ranks: int, options: PlanOptions = HOST, mtp: int = 0) -> Plan:
    config = EngineConfig(
        "unused", ranks=ranks, device="npu", dtype="float16", mtp=mtp, context_tokens=4096
    )
    return make_plan(config, spec, None, options=options)


def spec_of(name: str, form: str) -> ModelSpec:
    return spec_from_config(str(CONFIGS / name / "config.json"), format=form)


@pytest.mark.parametrize(
    ("form", "ranks", "low", "high"),
    [
        ("w4g128", 4, 14.45, 14.55),
        ("w4g128_asym", 4, 14.65, 14.75),
        ("w4g128", 6, 9.65, 9.75),
        ("w4g128_asym", 6, 9.75, 9.9),
        ("w4g32", 4, 15.75, 15.85),
        ("fp8", 4, 28.05, 28.2),
        ("w8_sym", 6, 18.75, 18.95),
        ("bf16", 4, 56.2, 56.3),
    ],
)
def test_routed_experts_of_flash_next(form: str, ranks: int, low: float, high: float) -> None:
    """120,795.96 M parameters (512 experts of 4.9152 M in 48 layers): W4 g128 14.5 to 14.7 GiB a
    rank at 4 ranks and 9.7 to 9.8 at 6; mean over the ranks, 512 / 6 being uneven."""
    plan = planned(spec_of("Qwen3.8-Flash-Next", form), ranks)
    total = sum(rank.rows["routed_experts"] + rank.rows["scales"] for rank in plan.ranks)
    assert low <= total / ranks / GIB <= high


def test_loaded_weights_of_flash_next_in_w4() -> None:
    """Measured on the four-chip box: 18.69 GiB a rank without drafts, table on the host. Ours
    lacks the vision weights (0.9 GB) and the workspace that the reading counts."""
    plan = planned(spec_of("Qwen3.8-Flash-Next", "w4g128_asym"), 4)
    found = max(sum(rank.rows[row] for row in WEIGHTS) for rank in plan.ranks) / GIB
    assert 17.7 <= found <= 18.69


def test_mixed_formats_of_glm_at_four_ranks(tmp_path: Path) -> None:
    """Header audit of a published checkpoint, W4 in layers 3-32 and W2 in 33-44: 32,912,179,200
    expert bytes a rank at 4 ranks; 35.1 GiB with the rest in 16 bits and split evenly. Every rank
    holds the down-projections of the latent and the indexer whole here: 0.2 GiB more."""
    config = json.loads((CONFIGS / "GLM-5.3-Flash" / "config.json").read_text())
    config.pop("quantization_config", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = str(tmp_path / "config.json")
    plan = planned(spec_from_config(path, format="w4b32:3-32,w2:33-44"), 4)
    for rank in plan.ranks:
        experts = rank.rows["routed_experts"] + rank.rows["scales"]
        assert experts == pytest.approx(32_912_179_200, rel=1e-4)  # 512 B a tensor are rounded
        weights = sum(rank.rows[row] for row in WEIGHTS)
        assert 35.1 <= weights / GIB < 35.1 + 0.2
    assert plan.fits


@pytest.mark.parametrize(("ranks", "gib"), [(4, 41.0), (6, 27.4)])
def test_glm_in_w4_g128(tmp_path: Path, ranks: int, gib: float) -> None:
    """Arithmetic of its shapes, all dense weights split evenly: 41.0 GiB a rank at 4 ranks, 27.4 at
    6. The parts that every rank holds whole come on top, mean over the ranks."""
    config = json.loads((CONFIGS / "GLM-5.3-Flash" / "config.json").read_text())
    config.pop("quantization_config", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    plan = planned(spec_from_config(str(tmp_path / "config.json"), format="w4g128"), ranks)
    weights = [sum(rank.rows[row] for row in WEIGHTS) for rank in plan.ranks]
    assert gib <= sum(weights) / ranks / GIB < gib + 0.3


def test_state_and_pages_of_glm() -> None:
    """136 MiB of KDA state a sequence; 11.0 KiB of latent and 704 B of pooled keys a token."""
    plan = planned(spec_of("GLM-5.3-Flash", "w4b32:3-32,w2:33-44"), 1)
    (rank,) = plan.ranks
    assert rank.rows["recurrent_slots"] == 8 * 136 * (1 << 20)
    tokens = plan.num_pages * plan.page_tokens
    assert rank.rows["kv_pages"] == tokens * 11 * 1024
    open_blocks = 8 * 11 * 8 * 2 * 128 * 2  # 8 sequences, 11 layers, key and gate of 8 tokens
    assert rank.rows["index_pages"] == tokens * 704 + open_blocks


def test_latent_pages_are_whole_on_every_rank() -> None:
    spec = spec_of("GLM-5.3-Flash", "w2")
    one, six = planned(spec, 1), planned(spec, 6)
    per_token = [plan.ranks[0].rows["kv_pages"] / plan.num_pages for plan in (one, six)]
    assert per_token[0] == per_token[1]


def test_the_small_model_fits_one_chip_as_published() -> None:
    """37.5 GB of FP8 checkpoint, 43 GiB a chip."""
    path = str(CONFIGS / "Qwen3.6-35B-A3B-FP8" / "config.json")
    plan = planned(spec_from_config(path), 1)
    weights = sum(plan.ranks[0].rows[row] for row in WEIGHTS)
    assert 34.5e9 < weights < 37.5e9
    assert plan.fits
    assert plan.ranks[0].rows["recurrent_slots"] == 8 * 60 * (1 << 20)  # 60 MiB a sequence
