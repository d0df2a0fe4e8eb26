"""Picks the next token of every sampling row, the same one on every rank.

Each rank holds a part of the vocabulary. Greedy and plain temperature need one (max, id) a rank;
rows with top-k, top-p or min-p need all logits, which are then gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.registry import OpSet
from rank_worker.comm import Comm
from rank_worker.scheduler import NON_FINITE
from rank_worker.step_plan import Admit


class Sampler:
    """Holds the sampling parameters of every slot."""

    def __init__(
        self, ops: OpSet, comm: Comm, vocab_ranges: tuple[tuple[int, int], ...], slots: int
    ) -> None:
        self.ops, self.comm, self.vocab_ranges = ops, comm, vocab_ranges
        self.first_vocab, self.last_vocab = vocab_ranges[comm.rank]
        self.temperature = torch.zeros(slots)
        self.top_k = torch.zeros(slots, dtype=torch.int64)
        self.top_p = torch.ones(slots)
        self.min_p = torch.zeros(slots)
        self.seed = torch.zeros(slots, dtype=torch.int64)
        self.choice = torch.zeros(slots, dtype=torch.int64)
        self._is_greedy = [True] * slots  # on the host: picks the path without a device read
        self._is_filtered = [False] * slots

    def admit(self, a: Admit) -> None:
        self.temperature[a.slot] = a.temperature
        self.top_k[a.slot] = a.top_k
        self.top_p[a.slot] = a.top_p
        self.min_p[a.slot] = a.min_p
        self.seed[a.slot] = a.seed - (1 << 64) if a.seed >= 1 << 63 else a.seed
        self.choice[a.slot] = a.choice
        self._is_greedy[a.slot] = a.temperature == 0
        self._is_filtered[a.slot] = a.temperature > 0 and (
            a.top_k > 0 or a.top_p < 1 or a.min_p > 0
        )

    def sample(
        self, logits: Tensor, slots: Tensor, host_slots: tuple[int, ...], positions: Tensor
    ) -> Tensor:
        """logits [S, local vocab] -> ids [S]; NON_FINITE where a row's logits aren't finite."""
        if not host_slots:
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        bad = self.ops.nonfinite_rows(logits)
        if any(self._is_filtered[s] for s in host_slots):
            ids, bad = self._sample_gathered(logits, bad, slots, positions)
        elif self.comm.world_size == 1 and all(self._is_greedy[s] for s in host_slots):
            ids = self.ops.greedy(logits)
        else:
            ids, bad = self._sample_split(logits, bad, slots, host_slots, positions)
        return torch.where(bad, NON_FINITE, ids)

    def draft(
        self, logits: Tensor, slots: Tensor, host_slots: tuple[int, ...], positions: Tensor
    ) -> Tensor:
        """A guess [S] at what `sample` gives: the same choice, and any id for a bad row."""
        if self.comm.world_size == 1 and all(self._is_greedy[s] for s in host_slots):
            ids: Tensor = self.ops.greedy(logits)
            return ids
        return self.sample(logits, slots, host_slots, positions).clamp_(min=0)

    def _sample_gathered(
        self, logits: Tensor, bad: Tensor, slots: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        full = self._gather(logits.float())
        temperature, top_k, top_p, min_p, seed, choice = (
            values.index_select(0, slots)
            for values in (
                self.temperature, self.top_k, self.top_p, self.min_p, self.seed, self.choice
            )
        )  # fmt: skip
        ids = self.ops.sample(full, temperature, top_k, top_p, min_p, seed, choice, positions)
        return ids, bad if self.comm.world_size == 1 else self.ops.nonfinite_rows(full)

    def _gather(self, logits: Tensor) -> Tensor:
        """All ranks' logits [S, vocab]; parts are padded to the widest one for the exchange."""
        if self.comm.world_size == 1:
            return logits
        width = max(stop - start for start, stop in self.vocab_ranges)
        padded = torch.nn.functional.pad(logits, (0, width - logits.shape[1]))
        parts = self.comm.all_gather(padded)  # [world, S, width]
        return torch.cat(
            [
                part[:, : stop - start]
                for part, (start, stop) in zip(parts, self.vocab_ranges, strict=True)
            ],
            dim=1,
        )

    def _needs_no_noise(self, logits: Tensor, host_slots: tuple[int, ...]) -> bool:
        """Noise is some 300 launches on a chip; a kernel of the CPU has it built in."""
        return not logits.is_cpu and all(self._is_greedy[slot] for slot in host_slots)

    def _sample_split(
        self,
        logits: Tensor,
        bad: Tensor,
        slots: Tensor,
        host_slots: tuple[int, ...],
        positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        rows = logits.shape[0]
        if self.last_vocab > self.first_vocab and self._needs_no_noise(logits, host_slots):
            best = self.ops.greedy(logits)
            score, ids = logits.gather(1, best[:, None])[:, 0].float(), best + self.first_vocab
        elif self.last_vocab > self.first_vocab:
            temperature, seed, choice = (
                values.index_select(0, slots)
                for values in (self.temperature, self.seed, self.choice)
            )
            score, ids = self.ops.sample_local(
                logits.float(), temperature, seed, choice, positions, self.first_vocab
            )
        else:
            score = torch.full((rows,), float("-inf"), device=logits.device)
            ids = torch.zeros(rows, dtype=torch.int64, device=logits.device)
        # Token ids stay below 2^24, so fp32 carries them exactly.
        mine = torch.stack([torch.where(bad, 0.0, score), ids.float(), bad.float()], dim=1)
        parts = self.comm.all_gather(mine)  # [world, S, 3]
        best = self.ops.greedy(parts[:, :, 0].t())  # lowest rank holds the lowest ids
        ids = parts[best, torch.arange(rows, device=best.device), 1].to(torch.int64)
        return ids, parts[:, :, 2].amax(0) > 0
