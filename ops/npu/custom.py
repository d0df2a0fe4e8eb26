"""Grouped products of packed codes in a library that others build: found, pinned, never shipped.

Forks of vllm-ascend have an operator for 310P that multiplies codes in blocks of 32 x 32 as they
lie in memory, so that nothing is widened. It is taken when its schema is a known one and when
`nrank doctor --ops` found it right in this very file: the result is kept under the SHA-256 of the
library, so one of another build has none and does not count.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ops.lowbit.packed import Packed
from ops.npu import library, packed
from ops.npu.experts import combine, dispatch
from ops.registry import register
from ops.spec import PASSED, PROBED, Capability, Implementation, Requirement
from placement.formats import Code

PACKAGE, FILES = "vllm_ascend", "vllm_ascend_C*.so"  # a package is looked at, never imported
NAMESPACE, NAME = "_C_ascend", "npu_w2_grouped_blocked_dequant_matmul_310"
_ARGUMENTS = "Tensor x, Tensor codes, Tensor block_scale, Tensor group_ends"
SCHEMAS = tuple(
    f"{NAMESPACE}::{NAME}({_ARGUMENTS}{more}) -> Tensor"
    for more in ("", ", bool initialize_output=True")
)
BLOCK = 32
DIGEST_DIGITS = 16


def find() -> Path | None:
    """The library of an installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((path for folder in folders for path in sorted(Path(folder).glob(FILES))), None)


@functools.cache
def operator(path: Path) -> Callable[..., Tensor]:
    """Loads the library. OSError where that fails, AttributeError where it lacks the operator."""
    torch.ops.load_library(str(path))
    found: Callable[..., Tensor] = getattr(getattr(torch.ops, NAMESPACE), NAME)
    return found


def variant_of(path: Path, runs_there: Requirement) -> Implementation:
    """`packed_experts` on the operator of the library `path`; other formats are widened."""

    def packed_experts(
        x: Tensor, weights: Tensor, local: Tensor, gate_up: Packed, down: Packed,
        int8_activations: bool,
    ) -> Tensor:  # fmt: skip
        owned = len(gate_up)
        is_taken = not int8_activations and takes(gate_up) and takes(down)
        if not (is_taken and owned and x.shape[0]):
            return packed.packed_experts(x, weights, local, gate_up, down, int8_activations)
        product = operator(path)
        rows, row_of, ends, is_ours = dispatch(x, local, owned)
        hidden = library.library().npu_swiglu(product(rows, gate_up.codes, gate_up.scale, ends))
        out = product(hidden, down.codes, down.scale, ends)
        return combine(out, row_of, ends, weights, is_ours)

    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:DIGEST_DIGITS]
    packed_experts.__name__ = f"packed_experts_{digest}"
    name = f"{packed_experts.__module__}.{packed_experts.__name__}"
    requires = functools.partial(_is_proven, path, PROBED + name, runs_there)
    return register("packed_experts", packed_experts, "npu", 2, requires)


def _is_proven(
    path: Path, result: str, runs_there: Requirement, capability: Capability
) -> str | None:
    if (reason := runs_there(capability)) is not None:
        return reason
    if capability.version(result) != PASSED:
        return f"{path} was not found right here: run nrank doctor --ops and set ops_file"
    try:
        schema = str(_schema(operator(path)))
    except (OSError, RuntimeError, AttributeError) as error:
        return f"{path} can't be used: {(str(error).splitlines() or [''])[0]}"
    return None if schema in SCHEMAS else f"{path} has {schema}, known is {SCHEMAS[-1]}"


def _schema(found: Any) -> Any:
    return found.default._schema


def takes(bank: Packed) -> bool:
    """True for integers of 2 or 4 bits in whole blocks of 32 x 32 under an fp32 scale."""
    form, (rows, columns) = bank.form, bank.shape[-2:]
    is_known = form.code is Code.INTEGER and form.bits in (2, 4) and bank.zero is None
    is_blocked = (form.group, form.block_rows) == (BLOCK, BLOCK) and bank.whole is None
    is_whole = columns % BLOCK == 0 and rows // bank.stacked % BLOCK == 0
    return is_known and is_blocked and is_whole and bank.scale.dtype is torch.float32
