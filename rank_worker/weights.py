"""A rank's weights, read when a part of the model asks for them.

Layer by layer, so that what a layer makes of its tensors (fused, packed) replaces them before the
next layer is read. Owns the count of bytes by ledger row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ops.lowbit.packed import Packed
from placement.reads import TensorReads
from placement.spec import TensorSpec
from rank_worker.loader import Loader
from rank_worker.packed_weights import PARTS, PackedReader

Weight = Tensor | Packed


class WeightSource:
    """Hands out each tensor once, by the prefix of its role.

    A tensor with a low-bit format comes as `Packed`, with its scales, which `packed` checks.
    """

    def __init__(
        self,
        loader: Loader,
        tensors: Sequence[TensorSpec],
        reads: Sequence[TensorReads],
        packed: PackedReader | None = None,
    ) -> None:
        self._loader, self._packed = loader, packed
        self._reads = {tensor.role: tensor for tensor in reads}
        self._rows = {tensor.role: str(tensor.component) for tensor in tensors}
        self._low_bit = {
            tensor.role: tensor
            for tensor in tensors
            if tensor.format is not None and not tensor.format.is_plain
        }
        self.row_bytes: dict[str, int] = {}
        loader.counter.planned_bytes += sum(tensor.nbytes for tensor in reads)

    def take(self, *prefixes: str) -> dict[str, Any]:
        """Role -> Tensor or Packed of every role that begins with one of `prefixes`."""
        chosen = [role for role in self._reads if role.startswith(prefixes)]
        read = self._loader.load([self._reads.pop(role) for role in chosen], is_announced=True)
        out: dict[str, Any] = {}
        for role in [one for one in read if one in self._low_bit]:
            names = {part: f"{role}.{part}" for part in PARTS}
            parts = {part: read.pop(name) for part, name in names.items() if name in read}
            assert self._packed is not None, f"{role} is low-bit and nobody reads such weights"
            weight = self._packed.assemble(self._low_bit[role], read.pop(role), parts)
            self._count(self._rows[role], weight.codes.nbytes)
            self._count(self._rows[f"{role}.scale"], weight.nbytes - weight.codes.nbytes)
            out[role] = weight
        for role, tensor in read.items():
            self._count(self._rows[role], tensor.nbytes)
        return {**out, **read}

    def _count(self, row: str, nbytes: int) -> None:
        self.row_bytes[row] = self.row_bytes.get(row, 0) + nbytes

    def check_taken(self) -> None:
        """A bug alone leaves a planned tensor unread."""
        assert not self._reads, f"weights that nobody took: {sorted(self._reads)[:5]}"
