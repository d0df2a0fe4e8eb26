"""Ascend chips, through torch_npu: number types, weights in tiles, streams, graphs.

torch_npu is imported when the device begins and nowhere earlier: where CANN is missing, its import
fails. What differs between chips is in `ops.npu.soc`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ops.npu import library
from ops.npu.soc import SocProfile, find_soc
from ops.npu.variants import COMPONENT
from ops.spec import REFERENCE, Capability, OpInfo
from placement.errors import ConfigError
from rank_worker.device_accelerator import AcceleratorDevice

FRACTAL_NZ = 29
# The task queue of 2 was reported to break captures and to cost 0.7 GiB of pages on a 310P.
ENVIRONMENT = {"TASK_QUEUE_ENABLE": "1"}


class NpuDevice(AcceleratorDevice):
    """One chip of an Ascend card."""

    name = "npu"

    def __init__(self) -> None:
        super().__init__()
        self.soc_name = ""
        self.soc: SocProfile | None = None
        self._banks_in_tiles = False

    def begin(self, rank: int, dtype: torch.dtype) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        super().begin(rank, dtype)
        self.soc_name = self.backend.get_device_name(self.device.index)
        self.soc = find_soc(self.soc_name)
        reason = self.soc.refuses(dtype)
        if reason is not None:
            raise ConfigError(
                f"--dtype {str(dtype).removeprefix('torch.')}: {reason}; use float16 or float32"
            )

    def _load(self) -> Any:
        try:
            importlib.import_module("torch_npu")
        except Exception as error:  # a bare one where CANN's variables point to nothing
            cause = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"--device npu: torch_npu can't be loaded ({cause}); install nrank[npu] and CANN, "
                "source its set_env.sh, and see nrank doctor"
            ) from error
        return torch.npu  # type: ignore[attr-defined]

    def _graph(self) -> Any:
        return self.backend.NPUGraph()

    def capability(self, dtype: torch.dtype) -> Capability:
        version = importlib.import_module("torch_npu").__version__
        versions = (("torch", torch.__version__), (COMPONENT, version), ("CANN", self._cann()))
        return Capability(self.name, self.soc_name, dtype, versions)

    def _cann(self) -> str:
        """The version of CANN, whose kernels the operators are; empty where it can't be told."""
        try:
            return str(self.backend.utils.get_cann_version())
        except (AttributeError, RuntimeError):
            return ""

    def prepare(self, chosen: Sequence[OpInfo]) -> None:
        """Banks lie in tiles for the grouped product; the reference indexes them in rows."""
        by_op = {one.op: one.backend for one in chosen}
        self._banks_in_tiles = by_op.get("moe_experts", REFERENCE) != REFERENCE

    def pack_linear(self, weight: Tensor) -> Tensor:
        """In tiles of 16 x 16, where the chip multiplies from them; a size of 1 stays in rows."""
        weight = weight.contiguous()
        if not self._lies_in_tiles(weight):
            return weight
        packed: Tensor = library.library().npu_format_cast(weight, FRACTAL_NZ)
        return packed

    def pack_bank(self, bank: Tensor) -> Tensor:
        """A bank [experts, out, in] as the grouped product wants it: in first, in tiles.

        What comes back has the shape of `bank`, over memory [experts, in, out].
        """
        turned = bank.transpose(1, 2).contiguous()
        if self._banks_in_tiles and self._lies_in_tiles(turned):
            turned = library.library().npu_format_cast(turned, FRACTAL_NZ)
        return turned.transpose(1, 2)

    def _lies_in_tiles(self, weight: Tensor) -> bool:
        assert self.soc is not None, "begin() comes first"
        if not self.soc.weights_in_tiles or weight.dtype is not torch.float16:
            return False
        return weight.numel() > 0 and weight.dim() > 1 and 1 not in weight.shape[-2:]

    def max_graphs(self, world_size: int) -> int | None:
        assert self.soc is not None, "begin() comes first"
        return self.soc.max_graphs_in_gang or None if world_size > 1 else None
