"""What Ascend chips offer beside the reference, and on which they do."""

from __future__ import annotations

import torch

from ops.npu import attention, custom, delta, experts, norms, packed, rope
from ops.npu.manifest import TORCH_NPU_VERSIONS
from ops.npu.soc import find_soc
from ops.registry import register
from ops.spec import Capability, Implementation
from placement.errors import ConfigError

_BACKEND = "npu"
COMPONENT = "torch_npu"


def _runs_there(capability: Capability) -> str | None:
    try:
        soc = find_soc(capability.soc)
    except ConfigError:
        return f"chip {capability.soc!r} is not known"
    if (reason := soc.refuses(capability.dtype)) is not None:
        return reason
    if capability.dtype is not torch.float16:
        return "made for float16"
    return _version_fits(capability.version(COMPONENT))


def _multiplies_int8_rows(capability: Capability) -> str | None:
    reason = _runs_there(capability)
    if reason is None and not find_soc(capability.soc).has_int8_rows:
        return f"int8 products that quantise their input are not for {capability.soc}"
    return reason


def _version_fits(version: str | None) -> str | None:
    low, high = (tuple(map(int, text.split("."))) for text in TORCH_NPU_VERSIONS)
    if version is None:
        return "no torch_npu"
    found = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if low <= found <= high:
        return None
    return f"torch_npu {version} is outside {' to '.join(TORCH_NPU_VERSIONS)}"


_OPERATORS = (
    *norms.OPERATORS,
    *rope.OPERATORS,
    *experts.OPERATORS,
    *attention.OPERATORS,
    *delta.OPERATORS,
)
VARIANTS: tuple[Implementation, ...] = (
    *(register(f.__name__, f, _BACKEND, 1, _runs_there) for f in _OPERATORS),
    *(register(f.__name__, f, _BACKEND, 1, _multiplies_int8_rows) for f in packed.OPERATORS),
    *(custom.variant_of(path, _multiplies_int8_rows) for path in [custom.find()] if path),
)
