"""What would be launched on a chip: the same operators in the same order as when last looked at.

A change here is no fault by itself: look at the difference, then put the new list in place of the
old one. The lists differ between chips, because torch_npu's own host code does.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"


def listing(told: dict[str, Any]) -> str:
    """Operators of a prefill chunk with their numbers, and those of a decode step in order."""
    counts = Counter(told["prefill"]["trace"])
    lines = [f"{count} {name}" for name, count in sorted(counts.items())]
    return "\n".join(["prefill", *lines, "", "decode", *told["steps"][1]["trace"], ""])


@pytest.mark.parametrize("soc", ["Ascend310P3", "Ascend910B3"])
def test_the_operators_of_a_step_are_the_known_ones(
    engines: Callable[..., list[dict[str, Any]]], soc: str
) -> None:
    (told,) = engines(soc=soc, ranks=1)
    assert "error" not in told, told
    assert told["soc"] == soc
    found, golden = listing(told), GOLDEN / f"{soc}.txt"
    if not golden.exists() or found != golden.read_text():
        new = Path(sys.prefix) / "standin" / golden.name
        new.write_text(found)
        pytest.fail(f"other operators than in {golden}: compare it with {new}")


def test_the_chips_differ_where_torch_npu_does(
    engines: Callable[..., list[dict[str, Any]]],
) -> None:
    """Weights lie in tiles on a 310P only, and the routing operator has a form of its own."""
    small, large = (set(engines(soc=s, ranks=1)[0]["steps"][1]["trace"])
                    for s in ("Ascend310P3", "Ascend910B3"))  # fmt: skip
    assert "aclnnGroupedMatmulWeightNz" in small - large
    assert "aclnnMoeInitRoutingV2" in small - large
    assert "aclnnMoeInitRoutingV3" in large - small
