"""Every CPU variant gives the reference's results, also in the arguments that it changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ops.registry import REFERENCES, OpSet, variants_of
from ops.spec import Capability, Implementation
from tests.ops.variant_cases import CASES, GEOMETRIES, Arguments, attention, moe_experts

VARIANTS = variants_of("cpu")
NAMES = [f"{v.function.__module__.rpartition('.')[2]}-{v.op}" for v in VARIANTS]
BATCHES = (1, 2, 5, 40)
FEW = {"production": (1, 2), "whole": (3,)}  # batches of the large geometries
SPREAD = 5e-6  # of the largest value of a result: sums in another order


@pytest.fixture(autouse=True)
def _unwritten_memory_is_nan() -> Iterator[None]:
    """Memory that an operator asks for and does not write shows up in its result."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


def copied(arguments: Arguments) -> Arguments:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in arguments.items()}


def packed(weight: Tensor) -> Tensor:
    """Column-major, as the CPU keeps its projections and each expert."""
    return weight.transpose(-1, -2).contiguous().transpose(-1, -2)


def rows_of_wider(x: Tensor) -> Tensor:
    """Rows that lie apart, like a slice of a projection's output."""
    wide = torch.full((x.shape[0], x[0].numel() + 12), float("nan")).to(x.dtype)
    part = wide[:, 5 : 5 + x[0].numel()].view(x.shape)
    return part.copy_(x)


def tokens_of_wider(x: Tensor) -> Tensor:
    """The same for tokens in rows [B, Q, ...]."""
    return rows_of_wider(x.flatten(0, 1)).unflatten(0, x.shape[:2])


Layout = Callable[[Tensor], Tensor]
ENGINE_LAYOUTS: dict[str, dict[str, Layout]] = {
    "rms_norm": {"x": rows_of_wider},
    "apply_rope": {"x": rows_of_wider},
    "gated_swiglu": {"gate_up": rows_of_wider, "gate": rows_of_wider},
    "linear": {"x": rows_of_wider, "weight": packed},
    "hyper_mix": {"down_inject": packed, "up": packed},
    "moe_experts": {"gate_up": packed, "down": packed},
    "ngram_gate": {"key": packed, "value": packed},
    "causal_conv_step": {"x": rows_of_wider, "weight": packed},
    "causal_conv_chunk": {"x": rows_of_wider},
    "delta_gates": {"a": rows_of_wider, "b": rows_of_wider},
    "gated_delta_step": dict.fromkeys("qkv", rows_of_wider),
    "causal_conv_verify": {"x": tokens_of_wider, "weight": packed},
    "window_commit_": {"x": tokens_of_wider},
    "gated_delta_verify": dict.fromkeys("qkv", tokens_of_wider),
    "gated_delta_commit_": dict.fromkeys("kv", tokens_of_wider),
    "gated_rms_norm": {"gate": rows_of_wider},
    "route": {"logits": rows_of_wider},
    "greedy": {"logits": rows_of_wider},
    "nonfinite_rows": {"logits": rows_of_wider},
    "sample": {"logits": rows_of_wider},
    "sample_local": {"logits": rows_of_wider},
}


def compare(what: str, got: Any, expected: Any) -> None:
    """Integers and bools exactly, floats within SPREAD of the largest one."""
    if isinstance(expected, tuple):
        assert len(got) == len(expected), what
        for index, (one, other) in enumerate(zip(got, expected, strict=True)):
            compare(f"{what}[{index}]", one, other)
    elif not isinstance(expected, Tensor):
        assert got == expected, what
    else:
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape), what
        if not expected.is_floating_point():
            assert torch.equal(got, expected), what
        elif expected.numel():
            largest = float(expected.nan_to_num(0).abs().max())
            torch.testing.assert_close(
                got, expected, rtol=0, atol=SPREAD * largest, equal_nan=True, msg=lambda m: what + m
            )


def check(variant: Implementation, arguments: Arguments, layout: dict[str, Layout]) -> None:
    mine, theirs = copied(arguments), copied(arguments)
    for name, change in layout.items():
        mine[name] = change(mine[name])
    got = variant.function(**mine)
    expected = REFERENCES[variant.op].function(**theirs)
    compare(f"{variant.name}: ", got, expected)
    for name, value in theirs.items():
        compare(f"{variant.name}, argument {name} afterwards: ", mine[name], value)


def variants(op: str) -> list[Implementation]:
    return [v for v in VARIANTS if v.op == op]


def test_each_operator_with_a_variant_runs_it_in_float32_and_none_in_bfloat16() -> None:
    ops = {v.op for v in VARIANTS}
    taken = {i.op for i in OpSet(Capability("cpu")).op_info() if i.backend == "cpu"}
    assert taken == ops
    half = OpSet(Capability("cpu", dtype=torch.bfloat16)).op_info()
    widened = {op for op in ops if op.startswith("packed_")}  # inputs of any type
    assert {i.op for i in half if i.backend == "cpu"} == widened


def test_every_variant_has_cases_here() -> None:
    assert {v.op for v in VARIANTS} <= set(CASES)


@pytest.mark.parametrize(
    ("geometry", "batch"),
    [(name, n) for name in GEOMETRIES for n in FEW.get(name, BATCHES)],
)
@pytest.mark.parametrize("variant", VARIANTS, ids=NAMES)
def test_each_variant_equals_the_reference_in_any_layout(
    variant: Implementation, geometry: str, batch: int
) -> None:
    arguments = list(CASES[variant.op](GEOMETRIES[geometry], batch))
    assert arguments
    for case in arguments:
        check(variant, case, {})
        if variant.op in ENGINE_LAYOUTS:
            check(variant, case, ENGINE_LAYOUTS[variant.op])


@pytest.mark.parametrize("variant", variants("moe_experts"), ids=lambda v: v.name)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_peers_routes_add_exact_zeros_whatever_the_input_holds(
    variant: Implementation, tokens: int
) -> None:
    """Parts of three ranks add up to the whole; a rank with peers' routes only gives zeros."""
    (whole, *_) = moe_experts(GEOMETRIES["embedded"], tokens)
    parts = []
    for owned in (range(5), range(5, 10), range(10, 14)):
        local_of = torch.full((14,), -1)
        local_of[list(owned)] = torch.arange(len(owned))
        mine = {**whole, "local": local_of[whole["local"]]}  # the whole bank: local ids are ids
        mine["gate_up"] = whole["gate_up"][list(owned)]
        mine["down"] = whole["down"][list(owned)]
        parts.append(variant.function(**mine))
    compare("sum of the ranks", sum(parts), REFERENCES["moe_experts"].function(**whole))
    weights = torch.full((tokens, 4), float("inf"))
    peers = {**whole, "local": torch.full((tokens, 4), -1), "weights": weights}
    peers["gate_up"], peers["down"] = whole["gate_up"][:1], whole["down"][:1]
    assert torch.equal(variant.function(**peers), torch.zeros(tokens, 192))


@pytest.mark.parametrize("variant", variants("paged_attention"), ids=lambda v: v.name)
def test_rows_of_one_batch_do_not_depend_on_each_other(variant: Implementation) -> None:
    """One row alone takes another path than the same row in a batch."""
    function = variant.function
    arguments = attention(GEOMETRIES["embedded"], 5, 1, 8, 0, (6, 6))
    together = function(**arguments)
    for row in range(5):
        alone = dict(arguments)
        for name in ("query", "page_table", "positions"):
            alone[name] = arguments[name][row : row + 1]
        compare(f"row {row}", function(**alone), together[row : row + 1])


@pytest.mark.parametrize("variant", variants("route"), ids=lambda v: v.name)
def test_routes_of_a_nan_row_stay_in_range_and_distinct(variant: Implementation) -> None:
    logits = torch.randn(3, 14)
    logits[1, 4] = float("nan")
    _, ids = variant.function(logits, 4, True)
    assert ids.min() >= 0
    assert ids.max() < 14
    assert all(len(set(row)) == 4 for row in ids.tolist())
    _, clean = REFERENCES["route"].function(logits[::2], 4, True)
    assert torch.equal(ids[::2], clean)


BY_ROW = {
    "hyper_mix": ("streams",),
    "moe_experts": ("x", "weights", "local"),
    "packed_experts": ("x", "weights", "local"),
    "packed_linear": ("x",),
    "ngram_gate": ("embedding", "streams"),
    "sample_local": ("logits", "temperature", "seed", "choice", "position"),
}


@pytest.mark.parametrize("op", BY_ROW)
@pytest.mark.parametrize("geometry", ["embedded", "uneven"])
def test_a_row_has_the_same_bits_alone_and_among_others(op: str, geometry: str) -> None:
    """However many rows a kernel takes at once: drafts and batches must not move an argmax."""
    (variant,) = (v for v in variants(op) if "native" in v.name)
    for batch in range(2, 10):
        case = next(iter(CASES[op](GEOMETRIES[geometry], batch)))
        if "int8_activations" in case:
            case["int8_activations"] = batch % 2 == 0
        for name, change in ENGINE_LAYOUTS.get(op, {}).items():
            case[name] = change(case[name])
        together = variant.function(**case)
        for row in range(batch):
            alone = {k: v[row : row + 1] if k in BY_ROW[op] else v for k, v in case.items()}
            for one, all_rows in zip(
                as_tuple(variant.function(**alone)), as_tuple(together), strict=True
            ):
                assert torch.equal(one, all_rows[row : row + 1]), (batch, row)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    parts = result if isinstance(result, tuple) else (result,)
    return tuple(part for part in parts if part is not None)
