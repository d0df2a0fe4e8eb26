"""Log-probabilities of tokens and of the most probable others, the same on every rank.

They are the model's own: before temperature, filters and drafts. Each rank holds a part of the
vocabulary, so sums and candidates are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rank_worker.comm import Comm

SCORE_TILE = 32  # prompt tokens whose logits are held at once


class LogprobReader:
    """Reads log-probabilities off this rank's logits [N, local vocab]."""

    def __init__(self, comm: Comm, first_vocab: int) -> None:
        self.comm, self.first_vocab = comm, first_vocab

    def read(self, logits: Tensor, targets: Tensor, top: int) -> Tensor:
        """[N, 1 + 2 * top] fp32: that of targets [N], then `top` ids and theirs, best first.

        Equal ones stand by id. A missing candidate (a small vocabulary) has the id -1.
        """
        x = logits.float()
        rows, width = x.shape
        least = x.new_full((rows,), float("-inf"))
        highest = x.amax(1) if width else least
        total = (x - highest[:, None]).exp().sum(1) if width else torch.zeros_like(least)
        local = targets - self.first_vocab
        is_here = (local >= 0) & (local < width)
        own = least
        if width:
            found = x.gather(1, local.clamp(0, width - 1)[:, None])[:, 0]
            own = torch.where(is_here, found, least)
        best, ids = x.sort(dim=1, descending=True, stable=True)
        best, ids = best[:, :top], ids[:, :top]
        missing = top - best.shape[1]
        best = torch.nn.functional.pad(best, (0, missing), value=float("-inf"))
        ids = torch.nn.functional.pad(ids + self.first_vocab, (0, missing), value=-1)
        # Token ids stay below 2^24, so fp32 carries them exactly.
        mine = torch.cat([torch.stack([highest, total, own], 1), ids.float(), best], 1)
        parts = self.comm.all_gather(mine)  # [world, N, 3 + 2 * top]
        peak = parts[:, :, 0].amax(0)
        weights = torch.where(parts[:, :, 1] > 0, (parts[:, :, 0] - peak).exp(), 0.0)
        norm = peak + (parts[:, :, 1] * weights).sum(0).log()
        every_id, every = (
            (part.transpose(0, 1).reshape(rows, -1) for part in parts[:, :, 3:].split(top, dim=2))
            if top
            else (parts.new_empty(rows, 0), parts.new_empty(rows, 0))
        )
        by_id = every_id.argsort(dim=1)
        every_id, every = every_id.gather(1, by_id), every.gather(1, by_id)
        order = every.argsort(dim=1, descending=True, stable=True)[:, :top]
        logprobs = every.gather(1, order) - norm[:, None]
        target = parts[:, :, 2].amax(0) - norm
        return torch.cat([target[:, None], every_id.gather(1, order), logprobs], 1)

    def score(
        self, count: int, logits_of: Callable[[int, int], Tensor], targets: Tensor, top: int
    ) -> Tensor:
        """The same for `count` tokens whose logits are made tile by tile: logits_of(begin, end)."""
        tiles = [
            self.read(logits_of(at, at + SCORE_TILE), targets[at : at + SCORE_TILE], top)
            for at in range(0, count, SCORE_TILE)
        ]
        return torch.cat(tiles)
