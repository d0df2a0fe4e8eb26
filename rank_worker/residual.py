"""Gated residual streams ("hyper-connections"): the mix before a block and the injection after.

Replicated on every rank: all ranks hold the same streams, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.reference.norm import unit_offset
from rank_worker.parts import Parts


class StreamSite:
    """One site: streams [T, S, H] -> block input [T, H] and injection weights [T, S]."""

    def __init__(self, parts: Parts, weights: dict[str, Tensor], prefix: str) -> None:
        spec = parts.spec
        streams, hidden = spec.residual.num_streams, spec.hidden
        self.ops = parts.ops
        self.eps = spec.norm_eps
        self.rank = spec.residual.low_rank
        self.scale = unit_offset(weights.pop(f"{prefix}.norm")).view(streams, hidden)
        rows = [weights.pop(f"{prefix}.down")]
        if f"{prefix}.inject" in weights:
            rows.append(weights.pop(f"{prefix}.inject"))
        # Both projections read the normed streams divided by the stream count.
        self.down_inject = parts.device.pack_linear(torch.cat(rows) / streams)
        self.up = parts.device.pack_linear(weights.pop(f"{prefix}.up"))

    def mix(self, streams: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.ops.hyper_mix(
            streams, self.scale, self.down_inject, self.up, self.eps, self.rank
        )

    def inject_(self, streams: Tensor, inject: Tensor | None, block_output: Tensor) -> None:
        assert inject is not None, "the final site injects nothing"
        self.ops.hyper_inject_(streams, inject, block_output)
