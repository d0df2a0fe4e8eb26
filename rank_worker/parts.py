"""What every part of a rank's model is built with."""

from __future__ import annotations

from dataclasses import dataclass

from ops.registry import OpSet
from placement.config import RankShare
from placement.experts import LayerHolders
from placement.spec import ModelSpec
from rank_worker.device import Device


@dataclass(frozen=True)
class Parts:
    """Shared by all layers of one rank; `weights` are handed to each part on their own."""

    ops: OpSet
    device: Device
    spec: ModelSpec
    share: RankShare
    holders: tuple[LayerHolders, ...]  # [layer][expert] -> ranks that have it
    num_pages: int
    page_tokens: int
    num_slots: int
    int8_activations: bool = False  # inputs of products with packed weights in 8 bits
