"""A step plan being put together: parts of sequences, admits, pages and copies, before encoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rank_worker.sequence import Sequence
from rank_worker.step_plan import INTO_SLOT, Admit, PageUpdate, Row, RowFlag, StateCopy

LEAST_TEMPERATURE = 1e-5  # below it the best token is all but certain; vLLM's bound, too
INT32_MAX = (1 << 31) - 1


@dataclass
class Part:
    """`count` tokens of a sequence; flags that its row gets besides those that follow from it."""

    sequence: Sequence
    count: int
    flags: RowFlag = RowFlag.NONE


@dataclass
class Outline:
    """`budget`: tokens that the step may still take."""

    budget: int
    copies: list[StateCopy] = field(default_factory=list)
    admits: list[Admit] = field(default_factory=list)
    pages: list[PageUpdate] = field(default_factory=list)
    decode: list[Part] = field(default_factory=list)
    prefill: list[Part] = field(default_factory=list)

    def admit(self, sequence: Sequence) -> None:
        """Hands `sequence` its slot and the pages that it has already."""
        p, slot, logprobs = sequence.request.sampling, sequence.slot, sequence.request.logprobs
        temperature = p.temperature if p.temperature >= LEAST_TEMPERATURE else 0.0
        top_k = min(p.top_k, INT32_MAX)
        self.admits.append(
            Admit(slot, temperature, top_k, p.top_p, p.min_p, p.seed, p.choice, logprobs)
        )
        self.pages += [PageUpdate(slot, i, page) for i, page in enumerate(sequence.pages)]

    def withdraw(self, sequence: Sequence) -> None:
        """Takes out all that was meant for `sequence`; its state may still be kept in a cell."""
        slot = sequence.slot
        self.decode = [part for part in self.decode if part.sequence is not sequence]
        self.prefill = [part for part in self.prefill if part.sequence is not sequence]
        self.admits = [a for a in self.admits if a.slot != slot]
        self.pages = [u for u in self.pages if u.slot != slot]
        self.copies = [c for c in self.copies if c.kind not in INTO_SLOT or c.target != slot]

    def parts(self) -> Iterator[Part]:
        """In row order: decode rows first, equal widths together."""
        yield from sorted(self.decode, key=lambda part: part.count)
        yield from self.prefill


def row_of(part: Part) -> tuple[Row, list[int]]:
    """The row of `part`, and its tokens where the plan carries them."""
    sequence, flags, next_token, token_ids = part.sequence, part.flags, 0, list[int]()
    start, end = sequence.num_computed, sequence.num_computed + part.count
    if end >= len(sequence.tokens):
        flags |= RowFlag.SAMPLE
    else:
        next_token = sequence.tokens[end]
    if not sequence.is_decode:
        flags |= RowFlag.PREFILL
        if sequence.wants_scores:
            flags |= RowFlag.SCORE
        token_ids = sequence.tokens[start:end]
    return Row(sequence.slot, start, part.count, flags, next_token), token_ids
