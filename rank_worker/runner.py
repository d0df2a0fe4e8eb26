"""Executes step plans on one rank: plan -> batch -> model -> sampled ids -> state -> drafts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from placement.errors import RankError
from placement.ledger import SLOT_ROWS
from rank_worker.batch import BatchBuilder, StepBatch
from rank_worker.comm import Comm
from rank_worker.decode_graphs import DecodeGraphs, graph_sizes
from rank_worker.draft import Drafter, DraftHead
from rank_worker.logprobs import LogprobReader
from rank_worker.model import Model
from rank_worker.parts import Parts
from rank_worker.sampler import Sampler
from rank_worker.state_store import StateStore
from rank_worker.step_clock import StepPart
from rank_worker.step_logprobs import StepLogprobs
from rank_worker.step_plan import INTO_SLOT, CopyKind, RowFlag, StateCopy, StepPlan
from rank_worker.weights import WeightSource


@dataclass(frozen=True)
class Sampled:
    """New tokens of R sampled rows, on the device: the first accepted[r] + 1 ids of row r.

    Log-probabilities are there when a row of the step asks for them.
    """

    ids: Tensor  # [R, tokens] int64
    accepted: Tensor  # [R] int64, drafts of the row that the model would have sampled itself
    logprobs: Tensor | None = None  # [S, 1 + 2 * top], of every sampled token, drafts included
    scores: Tensor | None = None  # [P, 1 + 2 * top], of the prompt tokens that are scored

    def tolist(self) -> list[list[int]]:
        """New tokens of each row; reads the device once."""
        if self.ids.shape[1] == 1:
            return [[token] for token in self.ids.flatten().tolist()]
        packed = torch.cat([self.ids, self.accepted[:, None]], dim=1).tolist()
        return [row[: row[-1] + 1] for row in packed]

    def read_logprobs(self) -> StepLogprobs:
        """On the host; reads the device where there is something."""
        sampled, scores = self.logprobs, self.scores
        return StepLogprobs(
            None if sampled is None else sampled.tolist(),
            None if scores is None else scores.tolist(),
        )


class Runner:
    """Owns the model, the caches of every slot, the sampler and the draft head of one rank."""

    def __init__(
        self,
        parts: Parts,
        source: WeightSource,
        comm: Comm,
        vocab_ranges: tuple[tuple[int, int], ...],
        context_tokens: int,
        num_drafts: int = 0,
        num_cells: int = 0,
        num_host_cells: int = 0,
    ) -> None:
        self.comm = comm
        self.model = Model(parts, source, comm)
        self.store = StateStore(
            self.model.slot_tensors(), num_cells, num_host_cells, parts.device.open_streams()
        )
        max_pages = -(-context_tokens // parts.page_tokens)
        self.builder = BatchBuilder(
            parts.num_slots, max_pages, parts.page_tokens, num_drafts, parts.device.upload
        )
        self.sampler = Sampler(parts.ops, comm, vocab_ranges, parts.num_slots)
        self.logprobs = LogprobReader(comm, vocab_ranges[comm.rank][0])
        self._num_logprobs = [-1] * parts.num_slots  # on the host, by slot
        self.drafter: Drafter | None = None
        if num_drafts:
            head = DraftHead(parts, source, self.model)
            self.drafter = Drafter(head, self.builder, self.sampler, context_tokens)
        source.check_taken()
        self.graphs = DecodeGraphs(parts.device, self.model, self.builder, context_tokens)
        self.logits_log: list[Tensor] | None = None  # a list here collects every step's logits

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Sampled:
        """Runs one step; its new tokens stay on the device."""
        self._start_sequences(plan)
        batch = self.builder.build(plan)
        passes = self.graphs if self.graphs.takes(batch) else self.model
        logits, streams = passes.forward(batch)
        if self.logits_log is not None:
            self.logits_log.append(logits.clone())
        ids = self.sampler.sample(
            logits, batch.sample_slots, batch.sample_slots_host, batch.sample_positions
        )
        logprobs, scores = self._read_logprobs(batch, logits, streams, ids)
        self.model.clock.mark(StepPart.SAMPLING)
        settled = self._settle(batch, ids)
        sampled = replace(settled, logprobs=logprobs, scores=scores)
        if self.drafter is not None:
            self.drafter.propose(plan.rows, batch, streams, ids, sampled.accepted)
        if plan.check:
            self._check_decisions(batch, ids, plan.step)
        return sampled

    @torch.inference_mode()
    def record_graphs(self) -> None:
        """Decode graphs, where the device has them. Leaves slot 0 as it is for a new sequence."""
        limit = self.graphs.device.max_graphs(self.comm.world_size)
        drafts = self.builder.num_drafts
        if drafts >= self.graphs.context_tokens:
            drafts = 0  # no row is ever that long
        sizes = graph_sizes(self.store.num_slots, drafts, limit)
        self.graphs.record(sizes, self.comm)

    def _start_sequences(self, plan: StepPlan) -> None:
        """Keeps states of slots that go on or end, then readies those of new sequences."""
        into_slots = []
        for copy in plan.copies:
            if copy.kind in INTO_SLOT:
                into_slots.append(copy)
            else:
                self._copy(copy)
        for admit in plan.admits:
            self._reset_slot(admit.slot)
            self.sampler.admit(admit)
            self._num_logprobs[admit.slot] = admit.num_logprobs
        for copy in into_slots:
            self._copy(copy)

    def _copy(self, copy: StateCopy) -> None:
        verbs = {
            CopyKind.SAVE: self.store.save, CopyKind.SPILL: self.store.spill,
            CopyKind.RESTORE: self.store.restore, CopyKind.FETCH: self.store.fetch,
        }  # fmt: skip
        verbs[copy.kind](copy.source, copy.target)

    def _reset_slot(self, slot: int) -> None:
        self.model.reset_slot(slot)
        if self.drafter is not None:
            self.drafter.head.reset_slot(slot)

    def _read_logprobs(
        self, batch: StepBatch, logits: Tensor, streams: Tensor, ids: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        top = max((self._num_logprobs[slot] for slot in batch.sample_slots_host), default=-1)
        logprobs = self.logprobs.read(logits, ids, top) if top >= 0 else None
        count = batch.score_rows.shape[0]
        if not count:
            return logprobs, None

        def logits_of(begin: int, end: int) -> Tensor:
            rows = streams.index_select(0, batch.score_rows[begin:end])
            return self.model.logits(self.model.final_site, rows)

        top = max(0, *(self._num_logprobs[row.slot] for row in batch.prefill))
        return logprobs, self.logprobs.score(count, logits_of, batch.score_targets, top)

    def _settle(self, batch: StepBatch, ids: Tensor) -> Sampled:
        """Decides which drafts stay, commits them to the state, and keeps each row's last token.

        A draft stays when it and all before it equal the model's own sample at their position.
        """
        group = batch.drafts
        if group is None:
            self.builder.last_tokens[batch.sample_slots] = ids.clamp(min=0)
            return Sampled(ids[:, None], torch.zeros_like(ids))
        width, rows = group.width, len(group.starts)
        first = next(i for i, row in enumerate(batch.sampled) if row.flags & RowFlag.DRAFT)
        before, drafted, after = ids.tensor_split([first, first + rows * width])
        verified = drafted.view(rows, width)
        matches = group.of(batch.token_ids)[:, 1:] == verified[:, :-1]
        kept = matches.long().cumprod(dim=1).sum(dim=1)
        self.model.commit(kept + 1)
        batch.note_decision(kept)
        single = [part[:, None].expand(-1, width) for part in (before, after)]
        table = torch.cat([single[0], verified, single[1]])
        accepted = ids.new_zeros(table.shape[0])
        accepted[first : first + rows] = kept
        slots = self.builder.upload([row.slot for row in batch.sampled])
        last = table.gather(1, accepted[:, None])[:, 0]
        self.builder.last_tokens[slots] = last.clamp(min=0)
        return Sampled(table, accepted)

    def state_bytes(self) -> dict[str, int]:
        """Allocated bytes of caches and states by ledger row."""
        total = self.model.state_bytes()
        slots, cells = self.store.num_slots, self.store.num_cells
        kept = {row: total.get(row, 0) // slots * cells for row in SLOT_ROWS}
        assert sum(kept.values()) == self.store.nbytes(), "a cell is not one slot"
        for row, nbytes in kept.items():
            total[row] = total.get(row, 0) + nbytes
        if self.drafter is not None:
            total["mtp_state"] = self.drafter.head.state_bytes()
        return total

    def expert_counts(self) -> list[list[int]]:
        """Routes to each expert of each layer since the last reset, the draft head's last."""
        counts = self.model.expert_counts()
        if self.drafter is not None:
            counts.append(self.drafter.head.layer.channel.counts.tolist())
        return counts

    def reset_counts(self) -> None:
        self.model.reset_counts()
        self.model.clock.reset()
        if self.drafter is not None:
            self.drafter.head.layer.channel.counts.zero_()

    def _check_decisions(self, batch: StepBatch, ids: Tensor, step: int) -> None:
        """RankError when the ranks routed, selected, sampled or drafted differently in a step."""
        batch.note_decision(ids)
        mine = torch.stack(batch.decisions or [])
        parts = self.comm.all_gather(mine)  # [world, decisions]
        wrong = (parts != parts[0]).any(dim=1).nonzero().flatten().tolist()
        if wrong:
            raise RankError(
                f"rank {wrong[0]} decided otherwise than rank 0 in step {step}: the gang is out "
                "of step and is restarted",
                rank=wrong[0], step=step, phase="check",
            )  # fmt: skip
