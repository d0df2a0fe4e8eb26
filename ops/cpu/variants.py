"""What the CPU offers beside the reference: C++ decode kernels, then torch in fewer calls."""

from __future__ import annotations

import torch

from ops.cpu import (
    native,
    native_attention,
    native_delta,
    native_packed,
    native_sampling,
    torch_variants,
)
from ops.cpu.library import available
from ops.registry import register
from ops.spec import Capability, Implementation

_BACKEND = "cpu"


def _float32_only(capability: Capability) -> str | None:
    return None if capability.dtype == torch.float32 else "made for float32"


_NATIVE = (
    *native.OPERATORS,
    *native_attention.OPERATORS,
    *native_delta.OPERATORS,
    *native_sampling.OPERATORS,
)
VARIANTS: tuple[Implementation, ...] = (
    *(register(f.__name__, f, _BACKEND, 2, available) for f in _NATIVE),
    *(
        register(f.__name__, f, _BACKEND, 2, native_packed.available_for_packed)
        for f in native_packed.OPERATORS
    ),
    *(register(f.__name__, f, _BACKEND, 1, _float32_only) for f in torch_variants.OPERATORS),
)
