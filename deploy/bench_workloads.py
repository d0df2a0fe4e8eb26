"""What `nrank bench` measures: workloads with exact token prompts, one run of them, its spread.

Prompts are made from the size of the vocabulary alone, so every system gets the same ids and no
tokenizer takes part. Knows no system that runs them. Standard library only.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from placement.errors import ConfigError

CONCURRENCIES = (1, 4)


@dataclass(frozen=True)
class Sizes:
    """Tokens of the workloads: prompt and answer of decode, prompts of prefill."""

    prompt: int = 128
    new: int = 64
    prefills: tuple[int, ...] = (128, 1000)

    @property
    def context_tokens(self) -> int:
        return max(self.prompt + self.new, *(length + 1 for length in self.prefills))


FULL = Sizes()
QUICK = Sizes(prompt=24, new=8, prefills=(24, 70))


@dataclass(frozen=True)
class Workload:
    """`prompts` run at the same time; each is answered with exactly `max_tokens` tokens."""

    id: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int

    @property
    def concurrency(self) -> int:
        return len(self.prompts)

    @property
    def is_decode(self) -> bool:
        return self.max_tokens > 1


@dataclass(frozen=True)
class Run:
    """One run of a workload. `ttft_s` is that of the request whose first token came last;
    `decode_s` lies between the first token of any request and the last one of all."""

    token_ids: tuple[tuple[int, ...], ...]  # one a prompt, in order
    ttft_s: float
    decode_s: float = 0.0

    def decode_tokens_per_s(self) -> float:
        """Tokens after each request's first one over the time in which they were made."""
        return sum(len(ids) - 1 for ids in self.token_ids) / self.decode_s


class System(Protocol):
    """Something that runs workloads; `name` and `ranks` are what the table calls it."""

    @property
    def name(self) -> str: ...

    @property
    def ranks(self) -> int: ...

    def run(self, workload: Workload) -> Run: ...


@dataclass(frozen=True)
class Spread:
    """Median of the repeats with the least and the greatest of them."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Row:
    """One workload on one system; `decode_tokens_per_s` is None where one token is made."""

    id: str
    system: str
    ranks: int
    concurrency: int
    decode_tokens_per_s: Spread | None
    prefill_tokens_per_s: Spread
    ttft_s: Spread

    @classmethod
    def of(cls, workload: Workload, system: System, runs: Sequence[Run]) -> Row:
        """Prefill rate = prompt tokens of all requests over the last request's TTFT."""
        prompt_tokens = sum(map(len, workload.prompts))
        return cls(
            workload.id,
            system.name,
            system.ranks,
            workload.concurrency,
            Spread.of([r.decode_tokens_per_s() for r in runs]) if workload.is_decode else None,
            Spread.of([prompt_tokens / r.ttft_s for r in runs]),
            Spread.of([r.ttft_s for r in runs]),
        )

    @property
    def rate(self) -> float:
        """What the workload is about: median tokens a second of decode, else of prefill."""
        return (self.decode_tokens_per_s or self.prefill_tokens_per_s).median


def make_workloads(vocab: int, end_token_ids: Sequence[int], sizes: Sizes) -> list[Workload]:
    """All workloads of a model; ConfigError when its vocabulary is too small for prompts."""
    # Tokenizers keep special ids at either end of the vocabulary.
    usable = [i for i in range(vocab // 4, vocab * 3 // 4) if i not in set(end_token_ids)]
    if not usable:
        raise ConfigError(f"a vocabulary of {vocab} leaves no ids for prompts; bench another model")
    p, n = sizes.prompt, sizes.new
    decode = [
        Workload(f"decode-{c}x{p}+{n}", tuple(_prompt(usable, i, p) for i in range(c)), n)
        for c in CONCURRENCIES
    ]
    prefill = [Workload(f"prefill-{p}", (_prompt(usable, 0, p),), 1) for p in sizes.prefills]
    return decode + prefill


def _prompt(usable: Sequence[int], index: int, length: int) -> tuple[int, ...]:
    """The first `length` ids of stream `index`; random() is the same in every Python release."""
    stream = random.Random(index)
    return tuple(usable[int(stream.random() * len(usable))] for _ in range(length))
