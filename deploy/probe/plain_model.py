"""The model once more, plainly: the whole sequence at once, one layer in memory, all in float32.

What `nrank probe` compares a gang with. It shares with the engine the adapter and the loader (so
the same numbers of the checkpoint, low-bit ones as the values that they stand for) and the
elementary functions of `ops.reference`, and nothing else: no ranks, reductions, caches, slots,
pages, chunks, faster operators or packed layouts; the delta rule runs token by token, experts one
by one, attention over a full mask. Tests compare its logits with those of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from ops.lowbit.packed import Packed, dequantised
from ops.reference.conv import causal_conv_chunk
from ops.reference.delta import delta_gates, delta_update, per_value_head
from ops.reference.hyper import hyper_mix
from ops.reference.moe import route, swiglu_mlp
from ops.reference.ngram import ngram_gate, ngram_ids
from ops.reference.norm import gated_rms_norm, rms_norm, unit_offset
from ops.reference.rope import apply_rope, rope_tables
from ops.reference.select import index_keys
from ops.reference.topk import stable_top_k
from placement.config import EngineConfig
from placement.ledger import loaded_scales, loaded_tensors
from placement.models.registry import load_model_spec, require_runnable
from placement.partition import make_shares
from placement.reads import plan_reads
from placement.spec import GatedDeltaSpec, LayerSpec, ModelSpec, MoeSpec, SparseAttentionSpec
from rank_worker.layer_tap import ALL_BLOCKS
from rank_worker.loader import LoadCounter, Loader
from rank_worker.packed_weights import PackedReader
from rank_worker.weights import WeightSource

Weights = Mapping[str, Tensor | Packed]
NOISE_ROWS = 4  # inputs that experts are compared on


@dataclass(frozen=True)
class Heads:
    """What a mixer does, by head: `out` [T, heads, dim] before the gate, `gated` behind it.

    `weight` [H, heads * dim] turns gated heads into the block's output; g and beta [T, heads] are
    the gates of the delta rule, None for attention.
    """

    out: Tensor
    gated: Tensor
    weight: Tensor
    inject: Tensor  # [T, S]
    g: Tensor | None = None
    beta: Tensor | None = None
    other_blocks: int = 0  # queries that were told to see other blocks than it would have chosen

    def part(self, first: int, last: int) -> Tensor:
        """[T, H]: what the heads `first:last` add to the block's output."""
        dim = self.gated.shape[-1]
        weight = self.weight[:, first * dim : last * dim]
        return linear(self.gated[:, first:last].flatten(1), weight)

    def into(self, streams: Tensor) -> Tensor:
        """`streams` [T, S, H] with the whole block's output."""
        y = self.part(0, self.gated.shape[1])
        return streams + self.inject[:, :, None] * y[:, None, :]


@dataclass(frozen=True)
class Routed:
    """What a mixture of experts does: `outputs` [T, k, H] of the routes, times their weights.

    `ids` [T, k] are those that it was told to take, `own_ids` those that it would have taken.
    `shared` [T, I] is the shared expert before `shared_down` [H, I].
    """

    ids: Tensor
    own_ids: Tensor
    outputs: Tensor
    shared: Tensor
    shared_down: Tensor
    inject: Tensor  # [T, S]

    def shared_part(self, first: int, last: int) -> Tensor:
        """[T, H]: what units `first:last` of the shared expert add."""
        return linear(self.shared[:, first:last], self.shared_down[:, first:last])

    def into(self, streams: Tensor) -> Tensor:
        y = self.outputs.sum(dim=1) + self.shared_part(0, self.shared.shape[1])
        return streams + self.inject[:, :, None] * y[:, None, :]


class PlainLayer:
    """One layer over a whole sequence that begins at position 0."""

    def __init__(self, model: ModelSpec, spec: LayerSpec, weights: Weights) -> None:
        prefix = f"layers.{spec.index}."
        self.model, self.spec = model, spec
        own = {role.removeprefix(prefix): weight for role, weight in weights.items()}
        banks = ("channel.experts_gate_up", "channel.experts_down")
        self._gate_up, self._down = (own.pop(name) for name in banks)
        self._table = own.pop("ngram.table", None)
        self._w = {role: values_of(weight) for role, weight in own.items()}

    def inject_ngrams(self, streams: Tensor, token_ids: Tensor) -> Tensor:
        """`streams` [T, S, H] with the embedding of the last tokens, where the layer has one."""
        spec, w = self.spec.ngram, self._w
        if spec is None:
            return streams
        start = torch.full((spec.context_tokens,), spec.eos_token_id, dtype=torch.int64)
        hashed = ngram_ids(
            torch.cat([start, token_ids])[None], spec.eos_token_id,
            torch.tensor(spec.multipliers), torch.tensor(spec.head_vocab_sizes),
            torch.tensor(spec.head_offsets),
        )  # fmt: skip
        embedding = self._rows(hashed[0]).flatten(1)
        scales = [
            unit_offset(w[f"ngram.norm_{name}"]).view(streams.shape[1:])
            for name in ("key", "query", "conv")
        ]
        gated, conv_in = ngram_gate(
            embedding, streams, w["ngram.key"], w["ngram.value"],
            scales[0], scales[1], scales[2], self.model.norm_eps,
        )  # fmt: skip
        conv = w["ngram.conv"].flatten(1)
        window = torch.zeros(spec.conv_window, conv_in.shape[1])
        y, _ = causal_conv_chunk(conv_in, conv, window, spec.ngram_size)
        return streams + gated + y.view(streams.shape)

    def _rows(self, ids: Tensor) -> Tensor:
        """[..., w] of the n-gram table, which has one scale where it is low-bit."""
        assert self._table is not None
        if isinstance(self._table, Packed):
            return self._table.codes[ids].float() * self._table.scale.float()
        return self._table[ids]

    def mix(self, streams: Tensor, blocks: Tensor | None = None) -> Heads:
        """With the blocks of tokens `blocks` [T, K] that queries see (-1: none, ALL_BLOCKS), or
        with those that the indexer chooses.
        """
        x, inject = self._enter("mixer_site", streams)
        if isinstance(self.spec.mixer, GatedDeltaSpec):
            return self._delta(x, inject, self.spec.mixer)
        assert isinstance(self.spec.mixer, SparseAttentionSpec), "a kind that nobody runs yet"
        return self._attention(x, inject, self.spec.mixer, blocks)

    def route(self, streams: Tensor, ids: Tensor | None = None) -> Routed:
        """With the experts `ids` [T, k], or with those that the router chooses."""
        spec, w = self.spec.channel, self._w
        assert isinstance(spec, MoeSpec), "a kind that nobody runs yet"
        x, inject = self._enter("channel_site", streams)
        logits = linear(x, w["channel.router"])
        _, own_ids = route(logits, spec.top_k, spec.normalise_top_k)
        ids = own_ids if ids is None else ids
        weights = torch.softmax(logits, dim=-1).gather(1, ids)
        if spec.normalise_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        outputs = torch.zeros(*ids.shape, x.shape[1])
        for expert in sorted(set(ids.flatten().tolist())):
            row, at = (ids == expert).nonzero(as_tuple=True)
            outputs[row, at] = self._expert(expert, x[row]) * weights[row, at, None]
        gate, up = (linear(x, w[f"channel.shared_{name}_proj"]) for name in ("gate", "up"))
        shared = silu(gate) * up * torch.sigmoid(linear(x, w["channel.shared_gate"]))
        return Routed(ids, own_ids, outputs, shared, w["channel.shared_down"], inject)

    def expert_gains(self) -> Tensor:
        """[experts]: RMS of each expert's output for the same inputs of RMS 1."""
        generator = torch.Generator().manual_seed(1)
        noise = torch.randn(NOISE_ROWS, self.model.hidden, generator=generator)
        experts = range(len(self._down))
        return torch.stack([self._expert(e, noise).square().mean().sqrt() for e in experts])

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        return swiglu_mlp(x, values_of(self._gate_up[expert]), values_of(self._down[expert]))

    def _enter(self, site: str, streams: Tensor) -> tuple[Tensor, Tensor]:
        x, inject = enter_site(self.model, self._w, site, streams)
        assert inject is not None
        return x, inject

    def _delta(self, x: Tensor, inject: Tensor, spec: GatedDeltaSpec) -> Heads:
        w, heads = self._w, spec.num_value_heads
        mixed, _ = causal_conv_chunk(
            linear(x, w["mixer.qkv"]), w["mixer.conv"].flatten(1),
            torch.zeros(spec.conv_kernel - 1, w["mixer.conv"].shape[0]),
        )  # fmt: skip
        keys = spec.num_key_heads * spec.key_dim
        widths = [keys, keys, heads * spec.value_dim]
        q, k, v = torch.split_with_sizes(mixed, widths, dim=-1)
        key_head = torch.arange(heads) // (heads // spec.num_key_heads)
        key_shape = (len(x), spec.num_key_heads, spec.key_dim)
        query, key = per_value_head(q.view(key_shape), k.view(key_shape), key_head)
        value = v.view(len(x), heads, spec.value_dim)
        g, beta = delta_gates(
            linear(x, w["mixer.a"]), linear(x, w["mixer.b"]), w["mixer.a_log"], w["mixer.dt_bias"]
        )
        state = torch.zeros(1, heads, spec.key_dim, spec.value_dim)
        out = torch.empty(len(x), heads, spec.value_dim)
        for t in range(len(x)):
            row = slice(t, t + 1)
            state = delta_update(state, key[row], value[row], g[row], beta[row])
            out[t] = torch.matmul(query[t, :, None, :], state[0])[:, 0, :]
        gate = linear(x, w["mixer.z"]).view(out.shape)
        eps, activation = self.model.norm_eps, spec.gate_activation
        gated = gated_rms_norm(out, w["mixer.norm"], gate, eps, activation)
        return Heads(out, gated, w["mixer.out"], inject, g, beta)

    def _attention(
        self, x: Tensor, inject: Tensor, spec: SparseAttentionSpec, blocks: Tensor | None
    ) -> Heads:
        w, tokens, eps = self._w, len(x), self.model.norm_eps
        rope = rope_tables(torch.arange(tokens), spec.rotary_dim, spec.rope_theta, x.dtype)

        def heads_of(values: Tensor, scale: str) -> Tensor:
            return apply_rope(rms_norm(values, unit_offset(w[f"mixer.{scale}"]), eps), *rope)

        q, gate = linear(x, w["mixer.q"]).view(tokens, spec.num_heads, -1).chunk(2, dim=-1)
        q = heads_of(q, "q_norm")
        kv_shape = (tokens, spec.num_kv_heads, spec.head_dim)
        k = heads_of(linear(x, w["mixer.k"]).view(kv_shape), "k_norm")
        v = linear(x, w["mixer.v"]).view(kv_shape)
        index = linear(x, w["mixer.index_qk"]).view(tokens, spec.index_heads + 1, spec.index_dim)
        index_q = heads_of(index[:, :-1], "index_q_norm")
        visible = own = seen_tokens(self._own_blocks(index_q, index[:, -1], spec), spec)
        if blocks is not None:
            visible = seen_tokens(blocks, spec)
        out = torch.empty_like(q)
        for head in range(spec.num_heads):
            kv = head * spec.num_kv_heads // spec.num_heads
            scores = q[:, head] @ k[:, kv].T * spec.head_dim**-0.5
            weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
            out[:, head] = weights @ v[:, kv]
        others = int((visible != own).any(dim=1).sum())
        gated = out * torch.sigmoid(gate)
        return Heads(out, gated, w["mixer.o"], inject, other_blocks=others)

    def _own_blocks(self, index_q: Tensor, index_k: Tensor, spec: SparseAttentionSpec) -> Tensor:
        """[T, K]: the best complete blocks of each query."""
        tokens, size = len(index_k), spec.block_tokens
        blocks, at = tokens // size, torch.arange(tokens)
        if blocks <= spec.max_blocks:
            return torch.full((tokens, spec.max_blocks), ALL_BLOCKS)
        scale = unit_offset(self._w["mixer.index_k_norm"])
        keys = index_keys(
            index_k[: blocks * size].view(blocks, size, -1), scale, self.model.norm_eps,
            size * torch.arange(blocks), spec.rotary_dim, spec.rope_theta,
        )  # fmt: skip
        scores = torch.einsum("qhd,bd->qhb", index_q, keys).relu().sum(1) * spec.index_dim**-0.5
        complete = torch.arange(blocks) < ((at + 1) // size)[:, None]
        best, valid = stable_top_k(scores.contiguous(), spec.max_blocks, complete)
        assert valid is not None
        return best.masked_fill(~valid, -1)


def seen_tokens(blocks: Tensor, spec: SparseAttentionSpec) -> Tensor:
    """[T, T]: which tokens a query (row) sees: those of its blocks [T, K] and of none so far."""
    tokens, size = len(blocks), spec.block_tokens
    at = torch.arange(tokens)
    count = -(-tokens // size)
    chosen = torch.zeros(tokens, count + 1, dtype=torch.bool)
    chosen.scatter_(1, torch.where(blocks < 0, count, blocks), True)
    in_block = chosen[:, :count][:, at // size] | (blocks == ALL_BLOCKS).any(dim=1)[:, None]
    tail = at >= ((at + 1) // size * size)[:, None]
    causal: Tensor = at <= at[:, None]
    return causal & (in_block | tail)


class PlainModel:
    """Reads a checkpoint layer by layer, in order; no layer twice."""

    def __init__(self, model_dir: str) -> None:
        """CheckpointError or ConfigError for what can't be read."""
        self.spec, headers = load_model_spec(model_dir)
        require_runnable(self.spec)
        config, share = EngineConfig(model_dir), make_shares(self.spec, 1)[0]
        scales = loaded_scales(config, self.spec)
        tensors = loaded_tensors(config, self.spec) + scales
        reads = plan_reads(tensors, share, headers)
        loader = Loader(torch.float32, LoadCounter())
        self._source = WeightSource(loader, tensors, reads, PackedReader(share, scales))
        taken: Weights = self._source.take("embed", "head", "final_mixer.")
        self._ends = {role: values_of(weight) for role, weight in taken.items()}

    def embed(self, token_ids: Tensor) -> Tensor:
        """Streams [T, S, H] before the first layer."""
        hidden = self._ends["embed"][token_ids]
        return hidden[:, None].repeat(1, self.spec.residual.num_streams, 1)

    def layers(self) -> Iterator[PlainLayer]:
        for layer in self.spec.layers:
            yield PlainLayer(self.spec, layer, self._source.take(f"layers.{layer.index}."))

    def logits(self, streams: Tensor) -> Tensor:
        """[T, vocab] of streams [T, S, H] behind the last layer."""
        mixed, _ = enter_site(self.spec, self._ends, "final_mixer", streams)
        return linear(mixed, self._ends["head"])


def values_of(weight: Tensor | Packed) -> Tensor:
    """fp32 of a weight, or of each of its matrices."""
    if not isinstance(weight, Packed):
        return weight
    if len(weight.shape) == 2:
        return dequantised(weight)
    return torch.stack([dequantised(weight[index]) for index in range(len(weight))])


def enter_site(
    model: ModelSpec, weights: Mapping[str, Tensor], site: str, streams: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Block input [T, H] and injection weights [T, S], None at the final site."""
    count, residual = streams.shape[1], model.residual
    rows = [weights[f"{site}.{name}"] for name in ("down", "inject") if f"{site}.{name}" in weights]
    scale = unit_offset(weights[f"{site}.norm"]).view(streams.shape[1:])
    return hyper_mix(
        streams, scale, torch.cat(rows) / count, weights[f"{site}.up"], model.norm_eps,
        residual.low_rank,
    )  # fmt: skip
