"""Log-probabilities of one step on the host, handed out row by row. Knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from rank_worker.messages import TokenLogprob
from rank_worker.step_plan import Row, RowFlag

Values = Sequence[Sequence[float]]  # [N, 1 + 2 * top]: the token's, ids of candidates, theirs


class StepLogprobs:
    """`sampled` has a row for each sampled token, drafts included, `scored` for prompt tokens."""

    def __init__(self, sampled: Values | None = None, scored: Values | None = None) -> None:
        self._has_sampled = sampled is not None
        self._sampled, self._scored = iter(sampled or ()), iter(scored or ())

    def take_sampled(self, row: Row, top: int) -> list[TokenLogprob]:
        """Of all tokens that were sampled for the next SAMPLE row; none if `top` is below 0."""
        count = row.count if row.flags & RowFlag.DRAFT else 1
        values = list(islice(self._sampled, count)) if self._has_sampled else []
        return [_message(value, top) for value in values] if top >= 0 else []

    def take_scored(self, count: int, top: int) -> list[TokenLogprob]:
        """Of the next `count` tokens of prompts that were scored."""
        return [_message(value, top) for value in islice(self._scored, count)]


def _message(value: Sequence[float], top: int) -> TokenLogprob:
    width = (len(value) - 1) // 2
    ids, logprobs = value[1 : 1 + width], value[1 + width :]
    best = zip(map(int, ids[:top]), logprobs[:top], strict=True)
    return TokenLogprob(value[0], tuple((token, one) for token, one in best if token >= 0))
