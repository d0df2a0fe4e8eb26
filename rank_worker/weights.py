"""A rank's weights, read when a part of the model asks for them.

Layer by layer, so that what a layer makes of its tensors (fused, packed) replaces them before the
next layer is read. Owns the count of bytes by ledger row.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from placement.reads import TensorReads
from placement.spec import TensorSpec
from rank_worker.loader import Loader


class WeightSource:
    """Hands out each tensor once, by the prefix of its role."""

    def __init__(
        self, loader: Loader, tensors: Sequence[TensorSpec], reads: Sequence[TensorReads]
    ) -> None:
        self._loader = loader
        self._reads = {tensor.role: tensor for tensor in reads}
        self._rows = {tensor.role: str(tensor.component) for tensor in tensors}
        self.row_bytes: dict[str, int] = {}
        loader.counter.planned_bytes += sum(tensor.nbytes for tensor in reads)

    def take(self, *prefixes: str) -> dict[str, Tensor]:
        """Role -> tensor of every role that begins with one of `prefixes`."""
        chosen = [role for role in self._reads if role.startswith(prefixes)]
        out = self._loader.load([self._reads.pop(role) for role in chosen], is_announced=True)
        for role, tensor in out.items():
            row = self._rows[role]
            self.row_bytes[row] = self.row_bytes.get(row, 0) + tensor.nbytes
        return out

    def check_taken(self) -> None:
        """A bug alone leaves a planned tensor unread."""
        assert not self._reads, f"weights that nobody took: {sorted(self._reads)[:5]}"
