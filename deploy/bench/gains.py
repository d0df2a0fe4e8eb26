"""What reuse and drafts bring: the second section of `nrank bench`, on the engine alone.

Each figure is measured beside what it is compared with, in the same turn, so a ratio is that of
two runs next to each other. No figure is given unless all systems made the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from deploy.bench.measure import TokenIds, require_same_ids, take_turns, with_progress
from deploy.bench.workloads import Run, Spread, StreamRun, StreamWorkload, System, Workload


class Gang(System, Protocol):
    """A System of the engine, which can also compute a prompt beside a stream."""

    def run_beside(self, workload: StreamWorkload) -> StreamRun: ...


@dataclass(frozen=True)
class Gangs:
    """Engines of one rank count that differ in one setting. `drafting`: None without drafts."""

    plain: Gang
    drafting: Gang | None
    reusing: Gang


@dataclass(frozen=True)
class GainWorkloads:
    """`prefixes` are alike but for their ids: each is used in one turn only."""

    drafts: Sequence[Workload] = ()
    prefixes: Sequence[Workload] = ()
    streams: Sequence[StreamWorkload] = ()
    left_out: Sequence[str] = ()  # a line for each kind of workload that can't run

    def all(self) -> list[Workload | StreamWorkload]:
        """One of each id."""
        return [*self.drafts, *self.prefixes[:1], *self.streams]

    def within(self, context_tokens: int) -> GainWorkloads:
        """Those that fit into a context; the others are left out with a line."""
        too_long = {w.id: w.context_tokens for w in self.all() if w.context_tokens > context_tokens}
        lines = [
            f"{name}: needs a context of {needed} tokens, the model has {context_tokens}"
            for name, needed in too_long.items()
        ]
        return GainWorkloads(
            [workload for workload in self.drafts if workload.id not in too_long],
            [workload for workload in self.prefixes if workload.id not in too_long],
            [workload for workload in self.streams if workload.id not in too_long],
            [*self.left_out, *lines],
        )


@dataclass(frozen=True)
class DraftRow:
    """Decode rate without and with drafts. Tokens are those of one run, drafts those of all."""

    id: str
    ranks: int
    concurrency: int
    prompts: int
    prompt_tokens: int
    answer_tokens: int
    plain_tokens_per_s: Spread
    drafted_tokens_per_s: Spread
    speedup: Spread
    draft_tokens: int
    accepted_tokens: int

    @classmethod
    def of(
        cls, workload: Workload, ranks: int, plain: Sequence[Run], drafted: Sequence[Run]
    ) -> DraftRow:
        slow = [run.decode_tokens_per_s() for run in plain]
        fast = [run.decode_tokens_per_s() for run in drafted]
        return cls(
            workload.id,
            ranks,
            workload.concurrency,
            len(workload.prompts),
            sum(map(len, workload.prompts)),
            sum(map(len, plain[0].token_ids)),
            Spread.of(slow),
            Spread.of(fast),
            Spread.of([b / a for a, b in zip(slow, fast, strict=True)]),
            sum(run.draft_tokens for run in drafted),
            sum(run.accepted_tokens for run in drafted),
        )

    @property
    def acceptance(self) -> float | None:
        """Accepted of the verified drafts; None where none was verified."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None


@dataclass(frozen=True)
class PrefixRow:
    """Time to the first token of a prompt that is new, and of the same one again."""

    id: str
    ranks: int
    prompt_tokens: int
    cached_tokens: int  # of the repeated prompt, the fewest of all turns
    cold_ttft_s: Spread
    warm_ttft_s: Spread
    speedup: Spread

    @classmethod
    def of(
        cls, workload: Workload, ranks: int, cold: Sequence[Run], warm: Sequence[Run]
    ) -> PrefixRow:
        return cls(
            workload.id,
            ranks,
            len(workload.prompts[0]),
            min(run.cached_tokens for run in warm),
            Spread.of([run.ttft_s for run in cold]),
            Spread.of([run.ttft_s for run in warm]),
            Spread.of([a.ttft_s / b.ttft_s for a, b in zip(cold, warm, strict=True)]),
        )


@dataclass(frozen=True)
class StreamRow:
    """Decode rate of one stream alone and while a prompt is computed, and how long that takes."""

    id: str
    ranks: int
    prompt_tokens: int
    alone_tokens_per_s: Spread
    beside_tokens_per_s: Spread
    share: Spread
    prefill_s: Spread

    @classmethod
    def of(cls, workload: StreamWorkload, ranks: int, runs: Sequence[StreamRun]) -> StreamRow:
        return cls(
            workload.id,
            ranks,
            len(workload.prompt),
            Spread.of([run.alone_tokens_per_s for run in runs]),
            Spread.of([run.beside_tokens_per_s for run in runs]),
            Spread.of([run.beside_tokens_per_s / run.alone_tokens_per_s for run in runs]),
            Spread.of([run.prefill_s for run in runs]),
        )


@dataclass(frozen=True)
class Gains:
    """All rows, and what was left out and why."""

    drafts: list[DraftRow] = field(default_factory=list)
    prefixes: list[PrefixRow] = field(default_factory=list)
    streams: list[StreamRow] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def measure_gains(gangs: Sequence[Gangs], workloads: GainWorkloads, repeats: int) -> Gains:
    """Rows of each workload and rank count; NrankError when ids differ."""
    gains = Gains(left_out=list(workloads.left_out))
    for workload in with_progress(workloads.drafts, "drafts"):
        gains.drafts.extend(measure_drafts(gangs, workload, repeats, gains.left_out))
    if workloads.prefixes:
        gains.prefixes.extend(measure_prefixes(gangs, workloads.prefixes))
    for stream in workloads.streams:
        gains.streams.extend(measure_stream(gangs, stream, repeats))
    return gains


def measure_drafts(
    gangs: Sequence[Gangs], workload: Workload, repeats: int, left_out: list[str]
) -> list[DraftRow]:
    """A row for each rank count; none where answers end with their first token."""
    pairs = [(g.plain, g.drafting) for g in gangs if g.drafting is not None]
    runs = take_turns(list(chain.from_iterable(pairs)), workload, repeats)
    if not runs[0][0].decoded_tokens:
        left_out.append(f"{workload.id}: the model ends its answers with the first token")
        return []
    return [
        DraftRow.of(workload, plain.ranks, runs[2 * index], runs[2 * index + 1])
        for index, (plain, _) in enumerate(pairs)
    ]


def measure_prefixes(gangs: Sequence[Gangs], workloads: Sequence[Workload]) -> list[PrefixRow]:
    """A row for each rank count; the first prompt only warms up.

    The engine without reuse answers each prompt too: its ids are those that count.
    """
    cold: list[list[Run]] = [[] for _ in gangs]
    warm: list[list[Run]] = [[] for _ in gangs]
    for workload in with_progress(workloads, "prefixes"):
        first, expected = gangs[0].plain, None
        for index, gang in enumerate(gangs):
            made = [(s, s.run(workload)) for s in (gang.plain, gang.reusing, gang.reusing)]
            expected = expected or made[0][1].token_ids
            for system, run in made:
                require_same_ids(workload.id, system, run.token_ids, first, expected)
            cold[index].append(made[1][1])
            warm[index].append(made[2][1])
    return [
        PrefixRow.of(workloads[0], gang.plain.ranks, cold[index][1:], warm[index][1:])
        for index, gang in enumerate(gangs)
    ]


def measure_stream(
    gangs: Sequence[Gangs], workload: StreamWorkload, repeats: int
) -> list[StreamRow]:
    """A row for each rank count; streams are compared as far as both of two have got."""
    runs: list[list[StreamRun]] = [[] for _ in gangs]
    for _ in with_progress(range(1 + repeats), "streams"):
        for gang, made in zip(gangs, runs, strict=True):
            made.append(gang.plain.run_beside(workload))
            found, expected = common(made[-1].token_ids, runs[0][0].token_ids)
            require_same_ids(workload.id, gang.plain, found, gangs[0].plain, expected)
    return [
        StreamRow.of(workload, gang.plain.ranks, made[1:])
        for gang, made in zip(gangs, runs, strict=True)
    ]


def common(found: TokenIds, expected: TokenIds) -> tuple[TokenIds, TokenIds]:
    """Both, each answer cut to the length of the shorter one."""
    pairs = list(zip(found, expected, strict=True))
    lengths = [min(len(mine), len(theirs)) for mine, theirs in pairs]
    return (
        [mine[:length] for (mine, _), length in zip(pairs, lengths, strict=True)],
        [theirs[:length] for (_, theirs), length in zip(pairs, lengths, strict=True)],
    )
