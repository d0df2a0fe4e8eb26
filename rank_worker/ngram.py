"""Hashed n-gram embedding: this rank's rows of the table, and the injection into the streams."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.lowbit.packed import Packed
from ops.reference.norm import unit_offset
from placement.errors import CheckpointError
from placement.spec import Axis, NgramSpec
from rank_worker.batch import DecodeGroup, StepBatch, Uncommitted
from rank_worker.parts import Parts


class NgramState:
    """Past token ids and past inputs of the dilated convolution, a slot."""

    def __init__(self, spec: NgramSpec, channels: int, slots: int, dtype: torch.dtype) -> None:
        self.eos = spec.eos_token_id
        self.history = torch.full((slots, spec.context_tokens), self.eos, dtype=torch.int64)
        self.conv = torch.zeros(slots, spec.conv_window, channels, dtype=dtype)

    def reset(self, slot: int) -> None:
        self.history[slot].fill_(self.eos)
        self.conv[slot].zero_()

    def tensors(self) -> dict[str, list[Tensor]]:
        return {"conv_state": [self.history, self.conv]}


class NgramInjection:
    """`rows` gathers this rank's part of the embedding; `inject_` adds the reduced one."""

    def __init__(
        self, parts: Parts, spec: NgramSpec, weights: dict[str, Tensor], prefix: str
    ) -> None:
        pack = parts.device.pack_linear
        self.ops, self.spec, self.eps = parts.ops, spec, parts.spec.norm_eps
        streams, hidden = parts.spec.residual.num_streams, parts.spec.hidden
        self.first_row = parts.share.ranges[Axis.NGRAM_ROWS][0]
        self.table = weights.pop(f"{prefix}.table")
        self.table_scale: Tensor | None = None
        if isinstance(self.table, Packed):
            self.table, self.table_scale = self.table.codes.view(torch.uint8), self.table.scale
        self.key = pack(weights.pop(f"{prefix}.key"))
        self.value = pack(weights.pop(f"{prefix}.value"))
        self.scales = tuple(
            unit_offset(weights.pop(f"{prefix}.{name}")).view(streams, hidden)
            for name in ("norm_key", "norm_query", "norm_conv")
        )
        conv = weights.pop(f"{prefix}.conv")
        self.conv_weight = parts.device.pack_taps(conv.reshape(conv.shape[0], conv.shape[-1]))
        self.multipliers = self._constant(weights, f"{prefix}.multipliers", spec.multipliers)
        self.vocab_sizes = self._constant(weights, f"{prefix}.vocab_sizes", spec.head_vocab_sizes)
        self.offsets = self._constant(weights, f"{prefix}.offsets", spec.head_offsets)
        self.state = NgramState(spec, streams * hidden, parts.num_slots, self.key.dtype)
        self.uncommitted: Uncommitted | None = None

    @staticmethod
    def _constant(weights: dict[str, Tensor], role: str, computed: tuple[int, ...]) -> Tensor:
        """The hash constants that the config implies; the checkpoint's copy must agree."""
        stored = weights.pop(role, None)
        if stored is not None and tuple(stored.tolist()) != computed:
            raise CheckpointError(
                f"tensor {role} of the checkpoint holds {stored.tolist()}, but config.json "
                f"implies {list(computed)}: the config and the weights don't belong together"
            )
        return torch.tensor(computed, dtype=torch.int64)

    def rows(self, batch: StepBatch) -> Tensor:
        """Partial embedding [T, embed_dim]: zeros where another rank owns the row."""
        parts = []
        for group in batch.groups:
            ids = group.of(batch.token_ids)
            held = self.state.history.index_select(0, group.slots)
            history = torch.cat([held, ids], dim=1)
            if not group.is_draft:
                self.state.history[group.slots] = history[:, 1:]
            parts.append(self._hash(history).flatten(0, 1))
        for row in batch.prefill:
            ids = batch.token_ids[None, row.begin : row.end]
            history = torch.cat([self.state.history[row.slot : row.slot + 1], ids], dim=1)
            self.state.history[row.slot] = history[0, -self.spec.context_tokens :]
            parts.append(self._hash(history).flatten(0, 1))
        hashed = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self.table_scale is None:
            return self.ops.table_rows(self.table, hashed, self.first_row).flatten(1)
        rows = self.ops.packed_table_rows(
            self.table, self.table_scale, hashed, self.first_row, self.ops.dtype
        )
        return rows.flatten(1)

    def _hash(self, history: Tensor) -> Tensor:
        return self.ops.ngram_ids(
            history, self.spec.eos_token_id, self.multipliers, self.vocab_sizes, self.offsets
        )

    def inject_(self, streams: Tensor, embedding: Tensor, batch: StepBatch) -> None:
        """streams [T, S, H] += gated value + its short convolution."""
        gated, conv_in = self.ops.ngram_gate(
            embedding, streams, self.key, self.value, *self.scales, self.eps
        )
        dilation, parts = self.spec.ngram_size, []
        for group in batch.groups:
            parts.append(self._convolve(group.of(conv_in), group))
        for row in batch.prefill:
            window = self.state.conv[row.slot]
            y, new_window = self.ops.causal_conv_chunk(
                conv_in[row.begin : row.end], self.conv_weight, window, dilation
            )
            window.copy_(new_window)
            parts.append(y)
        conv = parts[0] if len(parts) == 1 else torch.cat(parts)
        streams += gated
        streams += conv.view(streams.shape)
        if batch.drafts is not None:
            inputs = batch.drafts.of(batch.token_ids), batch.drafts.of(conv_in)
            self.uncommitted = Uncommitted(batch.drafts, inputs)

    def _convolve(self, rows: Tensor, group: DecodeGroup) -> Tensor:
        """rows [B, Q, C] -> [B * Q, C]; windows move on unless the rows carry drafts."""
        window, dilation = self.state.conv, self.spec.ngram_size
        if not group.is_draft:
            return self.ops.causal_conv_step(
                rows[:, 0], self.conv_weight, window, group.slots, dilation
            )
        y: Tensor = self.ops.causal_conv_verify(
            rows, self.conv_weight, window, group.slots, dilation
        )
        return y.flatten(0, 1)

    def commit(self, counts: Tensor) -> None:
        """The first counts[b] tokens of row b of the step's draft group enter the state."""
        held, self.uncommitted = self.uncommitted, None
        assert held is not None, "no draft group went through this layer"
        state, slots, (token_ids, conv_in) = self.state, held.group.slots, held.inputs
        self.ops.window_commit_(conv_in, state.conv, slots, counts)
        self.ops.window_commit_(token_ids[..., None], state.history[..., None], slots, counts)
