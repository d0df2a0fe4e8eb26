"""Gated attention over indexer-selected blocks: paged K/V of this rank's heads, index keys of all.

The indexer is replicated: every rank selects the same blocks from the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.reference.norm import unit_offset
from placement.config import RankShare
from placement.spec import Axis, SparseAttentionSpec
from rank_worker.batch import DecodeGroup, DraftRows, Noted, PrefillRow, StepBatch
from rank_worker.parts import Parts
from rank_worker.projection import Projection


class SparseAttentionCache:
    """Pages of one layer: K, V, pooled index keys; and a ring of raw index keys a slot."""

    def __init__(
        self, spec: SparseAttentionSpec, kv_heads: int, parts: Parts, dtype: torch.dtype
    ) -> None:
        pages, slots = parts.num_pages, parts.num_slots
        shape = (pages, parts.page_tokens, kv_heads, spec.head_dim)
        blocks = parts.page_tokens // spec.block_tokens
        # Never read before they are written, so the pools are left uninitialised.
        self.k = torch.empty(shape, dtype=dtype)
        self.v = torch.empty(shape, dtype=dtype)
        self.index = torch.empty(pages, blocks, spec.index_dim, dtype=dtype)
        self.ring = torch.zeros(slots, spec.ring_rows, spec.index_dim, dtype=dtype)

    def reset(self, slot: int) -> None:
        self.ring[slot].zero_()

    def tensors(self) -> dict[str, list[Tensor]]:
        return {"kv_pages": [self.k, self.v], "index_pages": [self.index, self.ring]}


def kv_groups(spec: SparseAttentionSpec, share: RankShare) -> tuple[int, ...]:
    """Query heads of this rank that each of its K/V heads serves."""
    first, last = share.ranges[Axis.QUERY_HEADS]
    first_kv, last_kv = share.ranges[Axis.KV_HEADS]
    group = spec.num_heads // spec.num_kv_heads
    return tuple(
        min(last, (kv + 1) * group) - max(first, kv * group) for kv in range(first_kv, last_kv)
    )


@dataclass(frozen=True)
class Projected:
    """What a layer makes of T tokens before attention, this rank's heads."""

    q: Tensor  # [T, heads, head_dim], normed and rotated
    gate: Tensor  # [T, heads, head_dim]
    k: Tensor  # [T, kv_heads, head_dim]
    v: Tensor  # [T, kv_heads, head_dim]
    index_q: Tensor  # [T, index_heads, index_dim], normed and rotated
    index_k: Tensor  # [T, index_dim], raw

    def queries(self, at: Tensor) -> Projected:
        """Only the queries of the tokens `at` [B]; their keys and values have been written."""
        q, gate, index_q = (x.index_select(0, at) for x in (self.q, self.gate, self.index_q))
        return Projected(q, gate, self.k[:0], self.v[:0], index_q, self.index_k[:0])


class SparseAttentionMixer:
    """x [T, H] -> partial sum [T, H] over this rank's query heads."""

    def __init__(
        self, parts: Parts, spec: SparseAttentionSpec, weights: dict[str, Tensor], prefix: str
    ) -> None:
        self.ops, self.spec, self.eps = parts.ops, spec, parts.spec.norm_eps
        self.has_queues = parts.device.has_queues
        self.groups = kv_groups(spec, parts.share)
        self.heads, self.kv_heads = sum(self.groups), len(self.groups)
        names = ("q", "k", "v", "index_qk")
        self.in_proj = Projection(parts, [weights.pop(f"{prefix}.{name}") for name in names])
        self.o = Projection(parts, [weights.pop(f"{prefix}.o")])
        self.q_scale = unit_offset(weights.pop(f"{prefix}.q_norm"))
        self.k_scale = unit_offset(weights.pop(f"{prefix}.k_norm"))
        self.index_q_scale = unit_offset(weights.pop(f"{prefix}.index_q_norm"))
        self.index_k_scale = unit_offset(weights.pop(f"{prefix}.index_k_norm"))
        d = spec.head_dim
        self.widths = [self.heads * 2 * d, self.kv_heads * d, self.kv_heads * d]
        self.widths += [spec.index_heads * spec.index_dim, spec.index_dim]
        self.cache = SparseAttentionCache(spec, self.kv_heads, parts, parts.ops.dtype)

    @property
    def state(self) -> SparseAttentionCache:
        return self.cache

    def forward(self, x: Tensor, batch: StepBatch, rope: tuple[Tensor, Tensor]) -> Tensor:
        seen = self.project(x, rope)
        self.write(seen, batch)
        return self._output(self._attend(seen.q, seen.index_q, batch), seen.gate)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Projected:
        spec, tokens = self.spec, x.shape[0]
        q_gate, k, v, index_q, index_k = torch.split_with_sizes(
            self.in_proj(x), self.widths, dim=-1
        )
        q_gate = q_gate.view(tokens, self.heads, 2 * spec.head_dim)
        q, gate = q_gate.chunk(2, dim=-1)
        q = self._rope_norm(q, self.q_scale, rope)
        k = self._rope_norm(k.view(tokens, self.kv_heads, spec.head_dim), self.k_scale, rope)
        v = v.view(tokens, self.kv_heads, spec.head_dim)
        index_q = index_q.view(tokens, spec.index_heads, spec.index_dim)
        index_q = self._rope_norm(index_q, self.index_q_scale, rope)
        return Projected(q, gate, k, v, index_q, index_k)

    def write(self, seen: Projected, batch: StepBatch) -> None:
        """Puts keys, values and index keys of all rows where the step's queries find them."""
        self.ops.write_kv_(self.cache.k, self.cache.v, batch.kv_slots, seen.k, seen.v)
        write_index = self._write_index_rows if self.has_queues else self._write_index_decode
        for group in batch.groups:
            write_index(group.of(seen.index_k), group, batch.kv_slots)
        for row in batch.prefill:
            self._write_index_prefill(seen.index_k[row.begin : row.end], row, batch)

    def write_rows(self, seen: Projected, rows: DraftRows) -> None:
        """The same for one token a row at positions that only the device knows.

        The key of the open block is pooled each time, from whatever its later entries hold: nobody
        sees it before the token that completes the block has written it anew.
        """
        spec = self.spec
        r, ring = spec.block_tokens, self.cache.ring
        self.ops.write_kv_(self.cache.k, self.cache.v, rows.kv_slots, seen.k, seen.v)
        ring[rows.slots, rows.positions % spec.ring_rows] = seen.index_k
        first = rows.positions // r * r
        members = (first[:, None] + torch.arange(r, device=first.device)) % spec.ring_rows
        self._store_blocks(ring[rows.slots[:, None], members], first, rows.kv_slots)

    def attend_rows(self, seen: Projected, rows: DraftRows) -> Tensor:
        """Partial sum [B, H] of one query a row; all that it sees has been written."""
        out = self._select_and_attend(
            seen.q.unsqueeze(1), seen.index_q.unsqueeze(1), rows.positions[:, None], rows.tables,
            rows.context, rows,
        )  # fmt: skip
        return self._output(out.squeeze(1), seen.gate)

    def _output(self, attended: Tensor, gate: Tensor) -> Tensor:
        gated = (attended * torch.sigmoid(gate)).flatten(1)
        return self.o(gated)

    def _rope_norm(self, x: Tensor, scale: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        return self.ops.apply_rope(self.ops.rms_norm(x, scale, self.eps), *rope)

    def _attend(self, q: Tensor, index_q: Tensor, batch: StepBatch) -> Tensor:
        parts = []
        for group in batch.groups:
            context = max(group.starts) + group.width
            out = self._select_and_attend(
                group.of(q), group.of(index_q), group.positions, group.tables, context, batch
            )
            parts.append(out.flatten(0, 1))
        for row in batch.prefill:
            s = slice(row.begin, row.end)
            parts.append(
                self._select_and_attend(
                    q[s].unsqueeze(0), index_q[s].unsqueeze(0), batch.positions[None, s],
                    batch.table_of(row), row.start + row.end - row.begin, batch,
                ).squeeze(0)
            )  # fmt: skip
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _select_and_attend(
        self, q: Tensor, index_q: Tensor, positions: Tensor, table: Tensor, context: int,
        noted: Noted,
    ) -> Tensor:  # fmt: skip
        """q [B, Q, heads, d]; `context`: tokens that the longest row sees."""
        spec, blocks = self.spec, None
        if context // spec.block_tokens > spec.max_blocks:
            blocks = self.ops.select_blocks(
                index_q, self.cache.index, table, positions, spec.block_tokens, spec.max_blocks
            )
            noted.note_decision(blocks)
        return self.ops.paged_attention(
            q, self.cache.k, self.cache.v, table, positions, blocks, spec.block_tokens,
            self.groups, spec.head_dim**-0.5,
        )  # fmt: skip

    def _write_index_decode(self, raw: Tensor, group: DecodeGroup, kv_slots: Tensor) -> None:
        """Raw keys [B, Q, dim] go to the ring; a token that completes its block pools its key."""
        r, ring = self.spec.block_tokens, self.cache.ring
        ring[group.slots[:, None], group.positions % self.spec.ring_rows] = raw
        done = [
            (row, start + at)
            for row, start in enumerate(group.starts)
            for at in range(group.width)
            if (start + at + 1) % r == 0
        ]
        if not done:
            return
        rows = torch.tensor([row for row, _ in done])
        first = torch.tensor([position + 1 - r for _, position in done])
        members = (first[:, None] + torch.arange(r)) % self.spec.ring_rows
        keys = ring[group.slots[rows][:, None], members]
        last = [group.begin + row * group.width + at - group.starts[row] for row, at in done]
        self._store_blocks(keys, first, kv_slots[last])

    def _write_index_rows(self, raw: Tensor, group: DecodeGroup, kv_slots: Tensor) -> None:
        """The same with shapes that depend on no position, as `write_rows` does it."""
        r, ring, slots = self.spec.block_tokens, self.cache.ring, group.slots[:, None]
        ring[slots, group.positions % self.spec.ring_rows] = raw
        first = group.positions // r * r
        inside = torch.arange(r, device=first.device)
        members = (first[..., None] + inside) % self.spec.ring_rows  # [B, Q, r]
        keys = ring[slots[..., None], members].flatten(0, 1)
        self._store_blocks(keys, first.flatten(), kv_slots[group.begin : group.end])

    def _write_index_prefill(self, raw: Tensor, row: PrefillRow, batch: StepBatch) -> None:
        r, ring = self.spec.block_tokens, self.cache.ring[row.slot]
        device = ring.device
        open_tokens = row.start % r
        first_block = row.start - open_tokens
        if open_tokens:
            held = torch.arange(first_block, row.start, device=device) % self.spec.ring_rows
            raw = torch.cat([ring[held], raw])
        num_blocks = raw.shape[0] // r
        if num_blocks:
            block = torch.arange(num_blocks, device=device)
            first = first_block + r * block
            last_tokens = row.begin - open_tokens + r * (block + 1) - 1
            keys = raw[: num_blocks * r].view(num_blocks, r, -1)
            self._store_blocks(keys, first, batch.kv_slots[last_tokens])
        rest = raw[num_blocks * r :]
        at = first_block + num_blocks * r
        ring[torch.arange(at, at + rest.shape[0], device=device) % self.spec.ring_rows] = rest

    def _store_blocks(self, keys: Tensor, first: Tensor, last_slots: Tensor) -> None:
        """Pools raw keys [N, r, dim] and writes them where each block's last token lives."""
        spec = self.spec
        pooled = self.ops.index_keys(
            keys, self.index_k_scale, self.eps, first, spec.rotary_dim, spec.rope_theta
        )
        flat = self.cache.index.view(-1, spec.index_dim)
        flat[last_slots // spec.block_tokens] = pooled
