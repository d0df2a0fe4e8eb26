"""What `nrank bench` measures: workloads with exact token prompts, one run of them, its spread.

Prompts here are made from the size of the vocabulary alone, so every system gets the same ids and
no tokenizer takes part. Knows no system that runs them.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Protocol

from deploy.bench.steps import StepSplit, StepTimes
from placement.errors import ConfigError

CONCURRENCIES = (1, 4)


@dataclass(frozen=True)
class Sizes:
    """How large the workloads are, in tokens where nothing else is said."""

    prompt: int = 128
    new: int = 64  # of an answer that runs over end tokens
    prefills: tuple[int, ...] = (128, 1000)
    text_new: int = 128  # at most, of an answer that has an end
    in_turn: int = 4  # prompts of a text that are answered one after the other
    passage_sentences: int = 3  # to find a code in; four such prompts fit into one step
    prefix: int = 1500
    beside: int = 4000  # of the prompt that is computed beside a stream
    alone: int = 256  # of the stream before and after that

    @property
    def context_tokens(self) -> int:
        """What the workloads that are measured beside the peer need."""
        return max(self.prompt + self.new, *(length + 1 for length in self.prefills))


FULL = Sizes()
QUICK = Sizes(
    prompt=24, new=8, prefills=(24, 70), text_new=8, in_turn=1, passage_sentences=1,
    prefix=140, beside=540, alone=8,
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """`prompts` run at the same time, or one after the other. Each is answered with exactly
    `max_tokens` tokens; where end tokens are given, an answer may end before that.
    """

    id: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int
    end_token_ids: tuple[int, ...] = ()
    in_turn: bool = False

    @property
    def concurrency(self) -> int:
        return 1 if self.in_turn else len(self.prompts)

    @property
    def context_tokens(self) -> int:
        return max(map(len, self.prompts)) + self.max_tokens

    @property
    def is_decode(self) -> bool:
        return self.max_tokens > 1


@dataclass(frozen=True)
class Run:
    """One run of a workload. `ttft_s` is that of the request whose first token came last;
    `decode_s` lies between the first token of any request and the last one of all that run at the
    same time, and is the sum of that where they run in turn."""

    token_ids: tuple[tuple[int, ...], ...]  # one a prompt, in order
    ttft_s: float
    decode_s: float = 0.0
    cached_tokens: int = 0  # of all prompts
    draft_tokens: int = 0
    accepted_tokens: int = 0
    steps: StepTimes | None = None  # of the engine's rank 0

    @property
    def decoded_tokens(self) -> int:
        """Tokens after each request's first one."""
        return sum(len(ids) - 1 for ids in self.token_ids)

    def decode_tokens_per_s(self) -> float:
        """Decoded tokens over the time in which they were made."""
        return self.decoded_tokens / self.decode_s


@dataclass(frozen=True)
class StreamWorkload:
    """A stream that runs until `alone_tokens` after `prompt` was computed beside it; `prompt` goes
    in when the stream has made as many. `max_tokens`: how long the stream may become meanwhile.
    """

    id: str
    stream: tuple[int, ...]
    prompt: tuple[int, ...]
    alone_tokens: int
    max_tokens: int

    @property
    def context_tokens(self) -> int:
        """The least that leaves the stream as many tokens as the prompt has."""
        return len(self.stream) + len(self.prompt) + 2 * self.alone_tokens


@dataclass(frozen=True)
class StreamRun:
    """Rates of the stream alone (before and after) and while the prompt was computed, which is
    from its submission to its first token and took `prefill_s`.
    """

    token_ids: tuple[tuple[int, ...], ...]  # the stream's, the prompt's
    alone_tokens_per_s: float
    beside_tokens_per_s: float
    prefill_s: float


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
    max_celsius: float | None = None  # of the chips while all systems ran; None: no sensor
    step_split: StepSplit | None = None

    @classmethod
    def of(
        cls,
        workload: Workload,
        system: System,
        runs: Sequence[Run],
        max_celsius: float | None = None,
    ) -> Row:
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
            max_celsius,
            StepSplit.of([r.steps for r in runs]),
        )

    @property
    def rate(self) -> float:
        """What the workload is about: median tokens a second of decode, else of prefill."""
        return (self.decode_tokens_per_s or self.prefill_tokens_per_s).median


def usable_ids(vocab: int, end_token_ids: Sequence[int]) -> list[int]:
    """Ids that prompts are drawn from; ConfigError when the vocabulary is too small for any."""
    # Tokenizers keep special ids at either end of the vocabulary.
    usable = [i for i in range(vocab // 4, vocab * 3 // 4) if i not in set(end_token_ids)]
    if not usable:
        raise ConfigError(f"a vocabulary of {vocab} leaves no ids for prompts; bench another model")
    return usable


def make_workloads(usable: Sequence[int], sizes: Sizes) -> list[Workload]:
    """The workloads that are measured beside the peer."""
    p, n = sizes.prompt, sizes.new
    decode = [
        Workload(f"decode-{c}x{p}+{n}", tuple(random_prompt(usable, i, p) for i in range(c)), n)
        for c in CONCURRENCIES
    ]
    prefill = [Workload(f"prefill-{p}", (random_prompt(usable, 0, p),), 1) for p in sizes.prefills]
    return decode + prefill


def random_prompt(usable: Sequence[int], index: int, length: int) -> tuple[int, ...]:
    """The first `length` ids of stream `index`; random() is the same in every Python release."""
    stream = random.Random(index)
    return tuple(usable[int(stream.random() * len(usable))] for _ in range(length))


def fingerprints(workloads: Sequence[Workload | StreamWorkload]) -> dict[str, str]:
    """Of each id what is asked: prompts, lengths, end tokens. Of those that share an id the first
    counts: the others differ from it by the index of their random ids.
    """
    found: dict[str, str] = {}
    for workload in workloads:
        if workload.id not in found:
            text = json.dumps(asdict(workload), sort_keys=True, separators=(",", ":"))
            found[workload.id] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found
