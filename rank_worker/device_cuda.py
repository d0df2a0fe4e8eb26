"""NVIDIA GPUs, through what torch itself offers."""

from __future__ import annotations

from typing import Any

import torch

from ops.spec import Capability
from placement.errors import ConfigError
from rank_worker.device_accelerator import AcceleratorDevice


class CudaDevice(AcceleratorDevice):
    """One GPU. float32 products are exact: TF32 stays off, as torch has it by default."""

    name = "cuda"

    def _load(self) -> Any:
        if not torch.cuda.is_available():
            raise ConfigError(
                "--device cuda: torch finds no GPU here; install a CUDA build of torch and a "
                "driver, or use --device cpu"
            )
        return torch.cuda

    def _graph(self) -> Any:
        return torch.cuda.CUDAGraph()

    def capability(self, dtype: torch.dtype) -> Capability:
        major, minor = torch.cuda.get_device_capability(self.device)
        return Capability(self.name, f"sm_{major}{minor}", dtype, (("torch", torch.__version__),))
