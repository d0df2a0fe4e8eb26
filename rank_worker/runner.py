"""Executes step plans on one rank: plan -> batch -> model -> sampled ids."""

from __future__ import annotations

import torch
from torch import Tensor

from placement.errors import RankError
from rank_worker.batch import BatchBuilder, StepBatch
from rank_worker.comm import Comm
from rank_worker.model import Model
from rank_worker.parts import Parts
from rank_worker.sampler import Sampler
from rank_worker.step_plan import StepPlan
from rank_worker.weights import WeightSource


class Runner:
    """Owns the model, the caches of every slot and the sampler of one rank."""

    def __init__(
        self,
        parts: Parts,
        source: WeightSource,
        comm: Comm,
        vocab_ranges: tuple[tuple[int, int], ...],
        context_tokens: int,
    ) -> None:
        self.comm = comm
        self.model = Model(parts, source, comm)
        max_pages = -(-context_tokens // parts.page_tokens)
        self.builder = BatchBuilder(parts.num_slots, max_pages, parts.page_tokens)
        self.sampler = Sampler(parts.ops, comm, vocab_ranges, parts.num_slots)
        self.logits_log: list[Tensor] | None = None  # a list here collects every step's logits

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> Tensor:
        """Runs one step; returns the sampled ids [S] on the device."""
        for admit in plan.admits:
            self.model.reset_slot(admit.slot)
            self.sampler.admit(admit)
        batch = self.builder.build(plan)
        logits = self.model.forward(batch)
        if self.logits_log is not None:
            self.logits_log.append(logits.clone())
        ids = self.sampler.sample(
            logits, batch.sample_slots, batch.sample_slots_host, batch.sample_positions
        )
        self.builder.last_tokens[batch.sample_slots] = ids.clamp(min=0)
        if plan.check:
            self._check_decisions(batch, ids, plan.step)
        return ids

    def _check_decisions(self, batch: StepBatch, ids: Tensor, step: int) -> None:
        """RankError when the ranks routed, selected or sampled differently in this step."""
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
