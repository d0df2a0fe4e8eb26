"""The draft head: guesses the tokens after the sampled one from the streams of the last layer.

Entry t of its cache is the pair (streams of token t, token t + 1), at position t; its output there
predicts token t + 2. It has one attention layer, so only the query of the last entry is computed,
and keys and values of all. Embedding and output head are the model's. Drafts decide nothing: a
wrong one costs time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ops.reference.norm import unit_offset
from rank_worker.batch import BatchBuilder, DraftRows, StepBatch
from rank_worker.model import Layer, Model
from rank_worker.parts import Parts
from rank_worker.projection import Projection
from rank_worker.residual import StreamSite
from rank_worker.sampler import Sampler
from rank_worker.sparse_attention import Projected, SparseAttentionMixer
from rank_worker.step_clock import StepPart
from rank_worker.step_plan import Row, RowFlag
from rank_worker.weights import WeightSource

AHEAD = 2  # entry t predicts token t + 2


@dataclass(frozen=True)
class _Entries:
    """Entries in the cache, on their way through the layer; one row each."""

    streams: Tensor  # [T, S, H]
    inject: Tensor | None  # [T, S]
    seen: Projected

    def last(self, at: Tensor) -> _Entries:
        inject = None if self.inject is None else self.inject.index_select(0, at)
        return _Entries(self.streams.index_select(0, at), inject, self.seen.queries(at))


class DraftHead:
    """Weights and cache of the head on this rank. Runs its passes through the model's functions."""

    def __init__(self, parts: Parts, source: WeightSource, model: Model) -> None:
        spec = parts.spec
        (layer,) = spec.draft_layers
        weights = source.take("draft.fc_", "draft.norm_", "draft.final_mixer.")
        self.model, self.ops, self.eps = model, parts.ops, spec.norm_eps
        self.end_ids = frozenset(spec.eos_token_ids)
        self.fc_embedding = Projection(parts, [weights.pop("draft.fc_embedding")])
        self.fc_hidden = Projection(parts, [weights.pop("draft.fc_hidden")])
        self.embedding_scale = unit_offset(weights.pop("draft.norm_embedding"))
        self.hidden_scale = unit_offset(weights.pop("draft.norm_hidden"))
        self.norm_per_stream = spec.draft_norm_per_stream
        self.final_site = StreamSite(parts, weights, "draft.final_mixer")
        self.layer = Layer(parts, layer, source, is_draft=True)
        assert isinstance(self.layer.mixer, SparseAttentionMixer), "a kind that nobody runs yet"
        self.mixer = self.layer.mixer

    def reset_slot(self, slot: int) -> None:
        self.mixer.state.reset(slot)

    def state_bytes(self) -> int:
        return sum(t.nbytes for row in self.mixer.state.tensors().values() for t in row)

    def enter(self, streams: Tensor, next_ids: Tensor, batch: StepBatch) -> _Entries:
        """Writes the entries of all rows of `batch`: streams [T, S, H] with next_ids [T]."""
        entries = self._entries(streams, next_ids, batch.positions)
        self.mixer.write(entries.seen, batch)
        return entries

    def enter_rows(self, streams: Tensor, next_ids: Tensor, rows: DraftRows) -> _Entries:
        """The same for one entry a row: what the head made of the entry before and its guess."""
        entries = self._entries(streams, next_ids, rows.positions)
        self.mixer.write_rows(entries.seen, rows)
        return entries

    def predict(self, entries: _Entries, rows: DraftRows) -> tuple[Tensor, Tensor]:
        """Logits [B, local vocab] after one entry a row, and its streams [B, S, H]."""
        streams, positions = entries.streams, rows.positions
        y = self.mixer.attend_rows(entries.seen, rows)
        self.model.finish_layer(self.layer, streams, entries.inject, y, positions, rows)
        return self.model.logits(self.final_site, streams), streams

    def _entries(self, streams: Tensor, next_ids: Tensor, positions: Tensor) -> _Entries:
        streams = self._combine(streams, self.model.embed_tokens(next_ids))
        x, inject = self.layer.mixer_site.mix(streams)
        rope = self.model.rope_tables(positions, streams.dtype)
        return _Entries(streams, inject, self.mixer.project(x, rope))

    def _combine(self, streams: Tensor, embedding: Tensor) -> Tensor:
        """fc_hidden(norm(streams)) a stream + fc_embedding(norm(embedding)), the same to each.

        The hidden norm's statistics span all streams together, or each alone, as the checkpoint
        was trained.
        """
        if self.norm_per_stream:
            scale = self.hidden_scale.view(streams.shape[1:])
            normed = self.ops.grouped_rms_norm(streams, scale, self.eps)
        else:
            flat = self.ops.rms_norm(streams.flatten(1), self.hidden_scale, self.eps)
            normed = flat.view(streams.shape)
        token = self.ops.rms_norm(embedding, self.embedding_scale, self.eps)
        hidden = self.fc_hidden(normed.flatten(0, 1)).view(streams.shape)
        embedded = self.fc_embedding(token)
        return hidden.add_(embedded.unsqueeze(1))


class Drafter:
    """After each step: enters its tokens into the head's cache and makes the next drafts."""

    def __init__(
        self, head: DraftHead, builder: BatchBuilder, sampler: Sampler, context_tokens: int
    ) -> None:
        self.head, self.builder, self.sampler = head, builder, sampler
        self.last_position = context_tokens - 1

    def propose(
        self, rows: tuple[Row, ...], batch: StepBatch, streams: Tensor, ids: Tensor,
        accepted: Tensor,
    ) -> None:  # fmt: skip
        """Drafts of every PROPOSE row go to its slot.

        streams [T, S, H] and ids [S] are the step's, accepted [R] has one count a sampled row.
        """
        entering = _with_flag(rows, RowFlag.ENTER)
        if not entering:
            return
        next_ids = self._next_ids(rows, batch, ids)
        if len(entering) < len(rows):
            at = self.builder.upload(_tokens_of(rows, RowFlag.ENTER))
            streams, next_ids = streams.index_select(0, at), next_ids.index_select(0, at)
            batch = self.builder.assemble(entering, next_ids, batch.decisions)
        entries = self.head.enter(streams, next_ids, batch)
        ended = self._ended(_with_flag(rows, RowFlag.SAMPLE), ids, accepted)
        makers = _with_flag(entering, RowFlag.PROPOSE)
        makers = tuple(row for row in makers if row.slot not in ended)
        if makers:
            counts = accepted
            if len(makers) < len(batch.sampled) or len(entering) < len(rows):
                at = self.builder.upload(_sampled_at(rows, makers))
                counts = accepted.index_select(0, at)
            self._chain(entering, makers, entries, counts, batch.decisions)

    def _next_ids(self, rows: tuple[Row, ...], batch: StepBatch, ids: Tensor) -> Tensor:
        """[T]: the token after each token. Sampled where a token was sampled, else known."""
        ids = ids.clamp(min=0)
        if batch.all_sampled:
            return ids
        next_ids = torch.roll(batch.token_ids, -1)
        next_ids[batch.sample_rows] = ids
        begins = _begins(rows)
        inner = [row for row in rows if RowFlag.SAMPLE not in row.flags]
        if inner:
            ends = self.builder.upload([begins[row.slot] + row.count - 1 for row in inner])
            next_ids[ends] = self.builder.upload([row.next_token for row in inner])
        return next_ids

    def _ended(self, sampled: tuple[Row, ...], ids: Tensor, accepted: Tensor) -> set[int]:
        """Slots whose new tokens have an end token among them: hardly any wants drafts any more.

        Whoever goes on has its old ones verified, and loses a round. Known where the host has the
        ids already; elsewhere it would have to wait for the device.
        """
        if not ids.is_cpu:
            return set()
        ended, tokens = set(), iter(ids.tolist())
        for row, kept in zip(sampled, accepted.tolist(), strict=True):
            new = [next(tokens) for _ in range(row.count if _is_draft(row) else 1)]
            if not self.head.end_ids.isdisjoint(new[: kept + 1]):
                ended.add(row.slot)
        return ended

    def _chain(
        self, entering: tuple[Row, ...], makers: tuple[Row, ...], entries: _Entries,
        accepted: Tensor, decisions: list[Tensor] | None,
    ) -> None:  # fmt: skip
        """accepted [B]: of each maker's drafts; its last token that stays is the one after them."""
        num_drafts = self.builder.num_drafts
        begins = _begins(entering)
        fixed = [0 if _is_draft(row) else row.count - 1 for row in makers]
        known = zip(fixed, makers, strict=True)
        places = [[begins[row.slot] + last, row.start + last] for last, row in known]
        flat = self.builder.upload([number for place in places for number in place])
        at, positions = (flat.view(-1, 2) + accepted[:, None]).unbind(1)
        longest = max(row.start + row.count for row in makers) + num_drafts - 1
        slots = tuple(row.slot for row in makers)
        context = min(longest, self.last_position + 1)
        one = self.builder.draft_rows(slots, context, decisions)
        self.builder.place(one, positions)
        entries, guesses = entries.last(at), []
        for index in range(num_drafts):
            logits, streams = self.head.predict(entries, one)
            ids = self.sampler.draft(logits, one.slots, slots, positions + AHEAD)
            self.head.model.clock.mark(StepPart.SAMPLING)
            guesses.append(ids)
            one.note_decision(ids)
            if index + 1 < num_drafts:
                positions = positions + 1
                # Beyond the context nothing is verified; the last place is written again.
                self.builder.place(one, positions.clamp(max=self.last_position))
                entries = self.head.enter_rows(streams, ids, one)
        self.builder.drafts.index_copy_(0, one.slots, torch.stack(guesses, dim=1))


def _with_flag(rows: tuple[Row, ...], flag: RowFlag) -> tuple[Row, ...]:
    return tuple(row for row in rows if flag in row.flags)


def _is_draft(row: Row) -> bool:
    return RowFlag.DRAFT in row.flags


def _sampled_at(rows: tuple[Row, ...], some: tuple[Row, ...]) -> list[int]:
    """Index among the sampled rows of each of `some`."""
    at = {row.slot: i for i, row in enumerate(_with_flag(rows, RowFlag.SAMPLE))}
    return [at[row.slot] for row in some]


def _begins(rows: tuple[Row, ...]) -> dict[int, int]:
    """Slot -> index of its row's first token in the flattened batch."""
    begins, at = {}, 0
    for row in rows:
        begins[row.slot] = at
        at += row.count
    return begins


def _tokens_of(rows: tuple[Row, ...], flag: RowFlag) -> list[int]:
    """Indices into the flattened batch of the tokens of rows with `flag`."""
    begins = _begins(rows)
    at = [range(begins[row.slot], begins[row.slot] + row.count) for row in _with_flag(rows, flag)]
    return [index for one in at for index in one]
