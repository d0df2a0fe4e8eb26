"""The layer driver: runs one step through all layers and is the only place that reduces.

Reductions of a step: the embedding, the n-gram embedding, and two a layer (token mixer; routed
plus shared experts). The draft head (`rank_worker.draft`) runs its layer through the same
functions. Dispatches on mixer kinds; knows no model by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from placement.spec import Axis, GatedDeltaSpec, LayerSpec, ModelSpec, MoeSpec, SparseAttentionSpec
from rank_worker.batch import DecodeGroup, Noted, StepBatch, Uncommitted
from rank_worker.comm import Comm
from rank_worker.gated_delta import GatedDeltaMixer
from rank_worker.moe import MoeChannel
from rank_worker.ngram import NgramInjection
from rank_worker.parts import Parts
from rank_worker.projection import Projection
from rank_worker.residual import StreamSite
from rank_worker.sparse_attention import SparseAttentionMixer
from rank_worker.step_clock import StepClock, StepPart
from rank_worker.weights import WeightSource


class Layer:
    """One layer's parts, built from this rank's weights. Draft layers follow the model's own in
    the ownership of experts.
    """

    def __init__(
        self, parts: Parts, spec: LayerSpec, source: WeightSource, is_draft: bool = False
    ) -> None:
        prefix = f"{'draft.' if is_draft else ''}layers.{spec.index}"
        expert_layer = spec.index + (len(parts.spec.layers) if is_draft else 0)
        weights = source.take(f"{prefix}.")
        self.mixer_site = StreamSite(parts, weights, f"{prefix}.mixer_site")
        self.channel_site = StreamSite(parts, weights, f"{prefix}.channel_site")
        self.mixer: GatedDeltaMixer | SparseAttentionMixer
        if isinstance(spec.mixer, GatedDeltaSpec):
            self.mixer = GatedDeltaMixer(parts, spec.mixer, weights, f"{prefix}.mixer")
        else:
            assert isinstance(spec.mixer, SparseAttentionSpec), "a kind that nobody runs yet"
            self.mixer = SparseAttentionMixer(parts, spec.mixer, weights, f"{prefix}.mixer")
        assert isinstance(spec.channel, MoeSpec), "a kind that nobody runs yet"
        self.channel = MoeChannel(parts, spec.channel, weights, f"{prefix}.channel", expert_layer)
        self.ngram: NgramInjection | None = None
        if spec.ngram is not None:
            self.ngram = NgramInjection(parts, spec.ngram, weights, f"{prefix}.ngram")
        assert not weights, f"unused weights {sorted(weights)}"
        is_recurrent = isinstance(self.mixer, GatedDeltaMixer)
        self.mixer_part = StepPart.RECURRENT if is_recurrent else StepPart.ATTENTION


class Model:
    """All layers of one rank. `forward` returns this rank's logits of the rows asked for."""

    def __init__(self, parts: Parts, source: WeightSource, comm: Comm) -> None:
        spec = parts.spec
        weights = source.take("embed", "head", "final_mixer.")
        self.ops, self.spec, self.comm = parts.ops, spec, comm
        self.clock = StepClock(comm)
        self.first_vocab, _ = parts.share.ranges[Axis.VOCAB]
        self.embed = weights.pop("embed")
        self.head = Projection(parts, [weights.pop("head")])
        self.final_site = StreamSite(parts, weights, "final_mixer")
        self.layers = [Layer(parts, layer, source) for layer in spec.layers]
        self.rope = _rope_of(spec)

    def forward(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        """Logits [S, local vocab] of `batch.sample_rows`, and the streams of all rows [T, S, H].

        State of rows with drafts stays as it is until `commit`.
        """
        hidden = self.embed_tokens(batch.token_ids)
        streams = hidden.unsqueeze(1).repeat(1, self.spec.residual.num_streams, 1)
        rope = self.rope_tables(batch.positions, streams.dtype)
        self.clock.mark(StepPart.HOST)
        for layer in self.layers:
            self._layer(layer, streams, batch, rope)
        sampled = streams
        if not batch.all_sampled:
            sampled = streams.index_select(0, batch.sample_rows)
        return self.logits(self.final_site, sampled), streams

    def commit(self, counts: Tensor) -> None:
        """Row b of the step's draft group keeps its first counts[b] tokens, in every state.

        K/V, pooled index keys and the ring of raw ones need none: they are addressed by position,
        and a rejected position is written again before anything sees it.
        """
        for part in self._committers():
            part.commit(counts)
        self.clock.mark(StepPart.RECURRENT)

    def uncommitted(self) -> list[tuple[Tensor, ...]]:
        """Inputs of the next commit by layer that has a part in it; rows of the group first."""
        held = [part.uncommitted for part in self._committers()]
        return [() if one is None else one.inputs for one in held]

    def hold_uncommitted(self, group: DecodeGroup, inputs: Sequence[tuple[Tensor, ...]]) -> None:
        """The next commit is that of `group`, by the first rows of what `uncommitted` gave."""
        rows = len(group.starts)
        for part, own in zip(self._committers(), inputs, strict=True):
            part.uncommitted = Uncommitted(group, tuple(x[:rows] for x in own)) if own else None

    def _committers(self) -> Iterator[GatedDeltaMixer | NgramInjection]:
        for layer in self.layers:
            if isinstance(layer.mixer, GatedDeltaMixer):
                yield layer.mixer
            if layer.ngram is not None:
                yield layer.ngram

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """[T, H] of token ids [T]."""
        rows = self.ops.table_rows(self.embed, token_ids, self.first_vocab)
        return self.comm.all_reduce_(rows)

    def rope_tables(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        cos, sin = self.ops.rope_tables(positions, *self.rope, dtype)
        return cos, sin

    def logits(self, site: StreamSite, streams: Tensor) -> Tensor:
        """This rank's logits [T, local vocab] of streams [T, S, H]."""
        mixed, _ = site.mix(streams)
        return self.head(mixed)

    def _layer(
        self, layer: Layer, streams: Tensor, batch: StepBatch, rope: tuple[Tensor, Tensor]
    ) -> None:
        if layer.ngram is not None:
            embedding = self.comm.all_reduce_(layer.ngram.rows(batch))
            layer.ngram.inject_(streams, embedding, batch)
        x, inject = layer.mixer_site.mix(streams)
        if isinstance(layer.mixer, SparseAttentionMixer):
            y = layer.mixer.forward(x, batch, rope)
        else:
            y = layer.mixer.forward(x, batch)
        self.finish_layer(layer, streams, inject, y, batch.positions, batch)

    def finish_layer(
        self, layer: Layer, streams: Tensor, inject: Tensor | None, mixed: Tensor,
        positions: Tensor, noted: Noted,
    ) -> None:  # fmt: skip
        """Reduces and injects the mixer's partial sum, then the whole channel half of a layer."""
        layer.mixer_site.inject_(streams, inject, self.comm.all_reduce_(mixed))
        self.clock.mark(layer.mixer_part)
        x, inject = layer.channel_site.mix(streams)
        y = layer.channel.forward(x, positions, noted)
        layer.channel_site.inject_(streams, inject, self.comm.all_reduce_(y))
        self.clock.mark(StepPart.EXPERTS)

    def reset_slot(self, slot: int) -> None:
        """Zeroes everything that a new sequence in `slot` would otherwise inherit."""
        for layer in self.layers:
            layer.mixer.state.reset(slot)
            if layer.ngram is not None:
                layer.ngram.state.reset(slot)

    def slot_tensors(self) -> list[Tensor]:
        """What a sequence has beside its pages at a page boundary, each [slots, ...].

        Without the rings of raw index keys: a page ends with a block, so none is open there.
        """
        tensors: list[Tensor] = []
        for layer in self.layers:
            if isinstance(layer.mixer, GatedDeltaMixer):
                tensors += [layer.mixer.state.recurrent, layer.mixer.state.conv]
            if layer.ngram is not None:
                tensors += [layer.ngram.state.history, layer.ngram.state.conv]
        return tensors

    def expert_counts(self) -> list[list[int]]:
        """Routes to each expert of each layer since the last reset; reads the device."""
        return [layer.channel.counts.tolist() for layer in self.layers]

    def reset_counts(self) -> None:
        for layer in self.layers:
            layer.channel.counts.zero_()

    def state_bytes(self) -> dict[str, int]:
        """Allocated bytes of caches and states by ledger row."""
        total: dict[str, int] = {}
        for layer in self.layers:
            states = [layer.mixer.state] + ([layer.ngram.state] if layer.ngram else [])
            for state in states:
                for row, tensors in state.tensors().items():
                    total[row] = total.get(row, 0) + sum(t.nbytes for t in tensors)
        return total


def _rope_of(spec: ModelSpec) -> tuple[int, float]:
    """(rotary dim, theta), one for the whole model."""
    kinds = {
        (layer.mixer.rotary_dim, layer.mixer.rope_theta)
        for layer in spec.layers
        if isinstance(layer.mixer, SparseAttentionSpec)
    }
    assert len(kinds) <= 1, "one rotary embedding a model"
    return kinds.pop() if kinds else (0, 1.0)


def parameter_dtype(name: str) -> torch.dtype:
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
