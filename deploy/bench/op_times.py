"""Operators alone: each variant against the reference, first for equality, then for time.

What wins here decides nothing: a step has other costs, caches that other operators have filled,
and batches of other sizes. The end-to-end rows of `nrank bench` decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from deploy.bench.measure import with_progress
from deploy.bench.op_cases import SEED, Arguments, OpCase
from deploy.bench.workloads import Spread
from ops.registry import REFERENCES, resolve, variants_of
from ops.spec import Capability, Implementation
from placement.errors import NrankError

BACKEND = "cpu"
# Largest difference from the reference, of the largest value of a result: sums in another order.
TOLERANCES = {torch.float32: 5e-6, torch.float16: 2e-3}
ROUND_S, QUICK_ROUND_S = 0.01, 0.001  # each variant's part of a round is no shorter
SHARED_BYTES = 64 << 20  # a larger argument is a weight that no operator changes


@dataclass(frozen=True)
class OpRow:
    """One variant of an operator on one case. `seconds` a call is None where nothing was timed:
    the result was not the reference's, by `difference`, a share of its largest value.
    """

    id: str
    system: str
    dtype: str
    is_reference: bool
    is_in_use: bool  # it is what a rank takes
    is_equal: bool
    difference: float
    tolerance: float
    seconds: Spread | None
    speedup: Spread | None = None  # times faster than the reference, in rounds side by side


def measure_ops(
    cases: Sequence[OpCase],
    repeats: int,
    is_quick: bool = False,
    variants: Sequence[Implementation] | None = None,
) -> list[OpRow]:
    """Rows of all cases that a variant can run. Quick: those of one row, and short rounds."""
    torch.set_num_threads(1)
    known = variants_of(BACKEND) if variants is None else tuple(variants)
    chosen = [case for case in cases if not is_quick or case.rows == 1]
    round_s = QUICK_ROUND_S if is_quick else ROUND_S
    rows: list[OpRow] = []
    with torch.inference_mode():
        for case in with_progress(chosen, "operators alone"):
            for dtype in case.dtypes:
                if able := runnable(case.op, dtype, known):
                    rows += _measure_case(case, dtype, able, known, repeats, round_s)
    return rows


def runnable(op: str, dtype: torch.dtype, known: Sequence[Implementation]) -> list[Implementation]:
    """Variants that can run here, the preferred one first."""
    capability = Capability(BACKEND, dtype=dtype)
    mine = [v for v in known if v.op == op and v.requires(capability) is None]
    return sorted(mine, key=lambda variant: -variant.priority)


def without_inputs(
    cases: Sequence[OpCase], variants: Sequence[Implementation] | None = None
) -> list[str]:
    """Operators that have a variant here and no case."""
    known = variants_of(BACKEND) if variants is None else variants
    return sorted({v.op for v in known} - {case.op for case in cases})


def _measure_case(
    case: OpCase, dtype: torch.dtype, able: Sequence[Implementation],
    known: Sequence[Implementation], repeats: int, round_s: float,
) -> list[OpRow]:  # fmt: skip
    torch.manual_seed(SEED)
    sets, tolerance, reference = case.make(dtype), TOLERANCES[dtype], REFERENCES[case.op]
    used = resolve(case.op, Capability(BACKEND, dtype=dtype), known).implementation
    found = [(one, _checked(case, one, sets)) for one in (reference, *able)]
    times = _take_turns([one for one, off in found if off <= tolerance], sets, repeats, round_s)
    rows = []
    for one, off in found:
        mine = times.get(one.name, [])
        base = times[reference.name] if mine else []
        gains = [a / b for a, b in zip(base, mine, strict=True)]
        rows.append(
            OpRow(
                id=f"{case.id} {_name(dtype)}",
                system=one.name,
                dtype=_name(dtype),
                is_reference=one is reference,
                is_in_use=one.name == used.name,
                is_equal=bool(mine),
                difference=off,
                tolerance=tolerance,
                seconds=Spread.of(mine) if mine else None,
                speedup=Spread.of(gains) if gains else None,
            )
        )
    return rows


def _checked(case: OpCase, variant: Implementation, sets: Sequence[Arguments]) -> float:
    """`greatest_difference`; NrankError when the variant fails."""
    try:
        return greatest_difference(variant, sets)
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise NrankError(f"{case.id}: {variant.name} failed ({text}); correct it") from error


def greatest_difference(variant: Implementation, sets: Sequence[Arguments]) -> float:
    """From the reference, in results and in arguments that are changed; infinite where whole
    numbers, shapes or types differ.
    """
    reference, greatest = REFERENCES[variant.op], 0.0
    if variant.name == reference.name:
        return greatest
    for arguments in sets:
        mine, theirs = own_arguments(arguments), own_arguments(arguments)
        got, expected = variant.function(**mine), reference.function(**theirs)
        pairs = [*zip(_tensors(got), _tensors(expected), strict=True)]
        pairs += [
            (mine[name], value)
            for name, value in theirs.items()
            if isinstance(value, Tensor) and value is not arguments[name]
        ]
        greatest = max([greatest, *(difference(a, b) for a, b in pairs)])
    return greatest


def own_arguments(arguments: Mapping[str, Any]) -> Arguments:
    """The same with tensors that an operator may change; weights stay shared."""
    return {
        name: value.clone() if isinstance(value, Tensor) and _is_small(value) else value
        for name, value in arguments.items()
    }


def _is_small(value: Tensor) -> bool:
    return value.numel() * value.element_size() <= SHARED_BYTES


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [one for one in result or () if isinstance(one, Tensor)]


def difference(got: Tensor, expected: Tensor) -> float:
    """Greatest absolute difference over the largest expected value; infinite for other values of
    whole numbers, another shape or type, and for NaNs in other places.
    """
    if (got.dtype, got.shape) != (expected.dtype, expected.shape):
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(got, expected) else float("inf")
    if not torch.equal(got.isnan(), expected.isnan()):
        return float("inf")
    off = (got.float() - expected.float()).nan_to_num(0).abs()
    largest = float(expected.float().nan_to_num(0).abs().max()) if expected.numel() else 0.0
    furthest = float(off.max()) if off.numel() else 0.0
    return furthest / largest if largest else (0.0 if not furthest else float("inf"))


def _take_turns(
    able: Sequence[Implementation], sets: Sequence[Arguments], repeats: int, round_s: float
) -> dict[str, list[float]]:
    """Seconds a call of each round; one more round comes first and only warms up."""
    turns = {one.name: cycle([own_arguments(arguments) for arguments in sets]) for one in able}
    times: dict[str, list[float]] = {one.name: [] for one in able}
    for turn in range(1 + repeats):
        for one in able if turn % 2 else reversed(able):
            seconds = _seconds_a_call(one.function, turns[one.name], round_s)
            if turn:
                times[one.name].append(seconds)
    return times


def _seconds_a_call(
    function: Callable[..., Any], turns: Iterator[Arguments], round_s: float
) -> float:
    calls, began = 0, time.perf_counter()
    while True:
        function(**next(turns))
        calls += 1
        passed_s = time.perf_counter() - began
        if passed_s >= round_s:
            return passed_s / calls


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
