"""What differs between Ascend chips: number types, weight layout, graphs. Chosen by SoC name."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from placement.errors import ConfigError

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True)
class SocProfile:
    """One family of chips. `max_graphs_in_gang` is for more than one rank; 0: no limit.
    `has_int8_rows`: products of int8 matrices that quantise their input rows themselves
    (npu_quant_grouped_matmul_dequant, documented for this family alone).

    Types beside `dtypes` are refused: on a 310P bf16 and fp8 do not exist in the operator packages
    or in HCCL, and fp64 has no native arithmetic. Two graphs with more than one rank: a third one
    was reported to run out of event resources there.
    """

    name: str
    prefixes: tuple[str, ...]  # of the SoC name that the runtime tells
    dtypes: tuple[torch.dtype, ...]
    weights_in_tiles: bool  # FRACTAL_NZ pays for fp16 operands of matrix products
    max_graphs_in_gang: int = 0
    has_int8_rows: bool = False

    def refuses(self, dtype: torch.dtype) -> str | None:
        """Why a tensor of `dtype` can't be used here; None when it can."""
        if dtype in self.dtypes:
            return None
        return f"{str(dtype).removeprefix('torch.')} does not run on {self.name}"


ATLAS_310P = SocProfile(
    "Ascend 310P",
    ("Ascend310P",),
    (torch.float16, torch.float32, *_INTEGERS),
    weights_in_tiles=True,
    max_graphs_in_gang=2,
    has_int8_rows=True,
)
ATLAS_A2 = SocProfile(
    "Ascend 910B",
    ("Ascend910B", "Ascend910_93"),
    (torch.float16, torch.bfloat16, torch.float32, *_INTEGERS),
    weights_in_tiles=False,
)
PROFILES = (ATLAS_310P, ATLAS_A2)


def find_soc(name: str) -> SocProfile:
    """The profile of an SoC by the name that the runtime tells, "Ascend310P3" for one."""
    for profile in PROFILES:
        if name.startswith(profile.prefixes):
            return profile
    known = ", ".join(f"{prefix}*" for profile in PROFILES for prefix in profile.prefixes)
    raise ConfigError(f"chip {name!r} is not supported; known are {known}")
