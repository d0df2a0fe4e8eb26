"""Answers about a gang before it loads: how many sequences, how long, what other ranks would give.

Also the cheapest changes that make a plan fit, found by trying them. Owns no ledger arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice

from placement.config import EngineConfig
from placement.formats import FORMATS, parse_format
from placement.headers import CheckpointHeaders
from placement.ledger import TablePlace
from placement.models.quantised import with_format
from placement.plan import (
    Plan,
    PlanOptions,
    checked_topology,
    host_shortfall,
    make_plan,
    size_gang,
)
from placement.sizing import PrefixStates, Sizing
from placement.spec import Component, ModelSpec

MAX_SEQUENCES = 1 << 16
MAX_TRIED_RANKS = 64
NUM_REMEDIES = 2
# Formats that a remedy may propose, in the order of what they lose; none of 2 bits, which needs
# more care than a remedy can promise.
SMALLER_FORMATS = ("w8_sym", "w4g32", "w4g128")


@dataclass(frozen=True)
class Question:
    """A gang that is asked about: everything `make_plan` takes, on the default topology.

    `load_format` gives the model with routed experts in a named format, for who reads the model
    anew then; `spec` with other experts by default. A format may change more than the experts:
    a config.json that says FP8 says nothing about a converted checkpoint.
    """

    config: EngineConfig
    spec: ModelSpec
    headers: CheckpointHeaders | None = None
    options: PlanOptions = field(default_factory=PlanOptions)
    load_format: Callable[[str], ModelSpec] | None = None

    def in_format(self, name: str) -> Question:
        if self.load_format is not None:
            return replace(self, spec=self.load_format(name))
        return replace(self, spec=with_format(self.spec, parse_format(name)))

    def plan(self) -> Plan:
        return make_plan(self.config, self.spec, self.headers, options=self.options)

    def sizing(self) -> Sizing:
        chips = checked_topology(self.config, self.spec, None, self.options)
        return size_gang(self.config, self.spec, chips, self.options)[1]


@dataclass(frozen=True)
class Capacity:
    """What a gang holds at a time, every sequence at its full length.

    `sequences` of the configured context, and `context_tokens` for each of the configured number
    of sequences; 0 where not even one page fits.
    """

    sequences: int
    context_tokens: int


def capacity(question: Question, sizing: Sizing | None = None) -> Capacity:
    found = sizing or question.sizing()
    return Capacity(
        max_sequences(found, question.config, found.context_tokens(question.config)),
        max_context(found, question.config, question.config.max_sequences),
    )


def max_sequences(sizing: Sizing, config: EngineConfig, tokens: int) -> int:
    """How many sequences can all be `tokens` long at a time; 0 when not even one can."""
    return _largest(MAX_SEQUENCES, lambda count: sizing.holds(config, count, tokens))


def max_context(sizing: Sizing, config: EngineConfig, sequences: int) -> int:
    """The longest context that so many sequences can have at a time, at most the model's."""
    pages = -(-sizing.spec.max_context // config.page_tokens)

    def tokens(count: int) -> int:
        return min(count * config.page_tokens, sizing.spec.max_context)

    found = _largest(pages, lambda count: sizing.holds(config, sequences, tokens(count)))
    return tokens(found)


def _largest(most: int, holds: Callable[[int], bool]) -> int:
    """Largest n in 1..most that holds, 0 for none; whatever holds for n holds for less."""
    low, high = 0, 1
    while high <= most and holds(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class WhatIf:
    """The same gang on another number of ranks."""

    plan: Plan
    capacity: Capacity
    moved_experts: int


def what_if(question: Question, ranks: int) -> WhatIf:
    """An exact ownership is for its own number of ranks: here it becomes the current one."""
    request = question.options.ownership
    now = question.plan().ownership
    request = replace(request, exact=None, replicas=(), current=now.layers)
    options = replace(question.options, ownership=request)
    other = replace(
        question, config=replace(question.config, ranks=ranks, chips=0), options=options
    )
    plan = other.plan()
    return WhatIf(plan, capacity(other), len(plan.ownership.moves))


@dataclass(frozen=True)
class Change:
    """One change to a gang, and the gang after it."""

    kind: str  # ngram_table, prefix_cache, sequences, context, format or ranks
    text: str
    after: Question


def remedies(question: Question) -> list[tuple[Change, ...]]:
    """The two cheapest ways to make a plan fit, each one change or, failing that, two.

    Cheapest first, by what is lost: the n-gram table on the host (host memory and a copy a step),
    fewer states of prefixes (prompts are computed again), fewer sequences (others wait), a smaller
    context (long requests are refused), a smaller format of the routed experts (quality, and a
    conversion), more ranks (chips). All were tried.
    """
    singles = list(islice(_changes(question), NUM_REMEDIES))
    found: list[tuple[Change, ...]] = [(change,) for change in singles]
    if len(found) < NUM_REMEDIES:
        alone = {change.kind for change in singles}
        found += islice(_pairs(question, alone), NUM_REMEDIES - len(found))
    return found


def _pairs(question: Question, alone: Collection[str]) -> Iterator[tuple[Change, ...]]:
    """Two changes that fit together, where neither does alone; `alone` are the kinds that do."""
    firsts = [change for change in _first_steps(question) if change.kind not in alone]
    for first in firsts:
        for second in _changes(first.after):
            if second.kind not in alone and second.kind != first.kind:
                yield (first, second)
                break


def _first_steps(question: Question) -> Iterator[Change]:
    """Changes as far as they go, whether or not they are enough."""
    if (moved := _table_on_host(question)) is not None:
        yield moved
    states = question.sizing().prefix_states(question.config)
    if states.device:
        yield _fewer_states(question, states, 0)
    if question.config.max_sequences > 1:
        yield _fewer_sequences(question, 1)
    yield from reversed(list(_smaller_formats(question)))


def _changes(question: Question) -> Iterator[Change]:
    """Single changes that fit, cheapest first."""
    table = _table_on_host(question)
    if table is not None and _fits(table.after):
        yield table
    sizing = question.sizing()
    config = question.config

    def holds(change: Change) -> bool:
        return _fits(change.after, sizing)

    states = sizing.prefix_states(config)
    on_host = partial(_fewer_host_states, question, states)
    on_chips = partial(_fewer_states, question, states)
    kept = _most(on_host, states.host, holds) or _most(on_chips, states.device, holds)
    if kept is not None:
        yield kept
    count = _largest(config.max_sequences - 1, lambda n: holds(_fewer_sequences(question, n)))
    if count:
        yield _fewer_sequences(question, count)
    tokens = max_context_of_pool(question, sizing)
    if tokens:
        yield _smaller_context(question, tokens)
    yield from islice((one for one in _smaller_formats(question) if _fits(one.after)), 1)
    yield from _more_ranks(question)


def _most(
    change_to: Callable[[int], Change], now: int, holds: Callable[[Change], bool]
) -> Change | None:
    """The change to the largest number from 0 to below `now` that holds; None without any."""
    if not now or not holds(change_to(0)):
        return None
    return change_to(_largest(now - 1, lambda count: holds(change_to(count))))


def _fits(question: Question, sizing: Sizing | None = None) -> bool:
    """On the chips and beside them; `sizing` serves all questions that differ in `config` only."""
    config, sizing = question.config, sizing or question.sizing()
    states = sizing.prefix_states(config)
    return sizing.fits(config) and not host_shortfall(
        config, question.spec, states, question.options
    )


def max_context_of_pool(question: Question, sizing: Sizing) -> int:
    """The longest context below the configured one of which the gang holds at least one."""
    page = question.config.page_tokens
    pages = (sizing.context_tokens(question.config) - 1) // page
    return page * _largest(
        pages, lambda count: _fits(_smaller_context(question, count * page).after, sizing)
    )


def _table_on_host(question: Question) -> Change | None:
    ledger = question.options.ledger
    has_table = any(t.component is Component.NGRAM_TABLE for t in question.spec.tensors)
    if not has_table or ledger.ngram_table is not TablePlace.DEVICE:
        return None
    options = replace(question.options, ledger=replace(ledger, ngram_table=TablePlace.HOST))
    text = "n-gram table on the host (--ngram-table host)"
    return Change("ngram_table", text, replace(question, options=options))


def _fewer_states(question: Question, states: PrefixStates, count: int) -> Change:
    """Those on the host become fewer with them, unless their bytes were asked for."""
    after = replace(question.config, prefix_bytes=count * states.state_bytes)
    text = (
        f"{count} states of prefixes on each chip instead of {states.device} "
        f"(--prefix-bytes {after.prefix_bytes})"
    )
    return Change("prefix_cache", text, replace(question, config=after))


def _fewer_host_states(question: Question, states: PrefixStates, count: int) -> Change:
    after = replace(question.config, prefix_host_bytes=count * states.state_bytes)
    text = (
        f"{count} states of prefixes of each rank in host memory instead of {states.host} "
        f"(--prefix-host-bytes {after.prefix_host_bytes})"
    )
    return Change("prefix_cache", text, replace(question, config=after))


def _fewer_sequences(question: Question, count: int) -> Change:
    """A page pool that was asked for by size shrinks with them, to one context at least."""
    config = question.config
    pool = config.kv_pool_tokens * count // config.max_sequences
    if config.kv_pool_tokens:
        pool = max(pool, config.context_tokens or question.spec.max_context)
    after = replace(config, max_sequences=count, kv_pool_tokens=pool)
    text = f"{count} sequences instead of {config.max_sequences} (--sequences {count})"
    return Change("sequences", text, replace(question, config=after))


def _smaller_context(question: Question, tokens: int) -> Change:
    config = question.config
    before = config.context_tokens or question.spec.max_context
    after = replace(config, context_tokens=tokens, kv_pool_tokens=0)
    text = f"a context of {tokens} tokens instead of {before} (--context {tokens})"
    return Change("context", text, replace(question, config=after))


def _smaller_formats(question: Question) -> Iterator[Change]:
    banks = [t for t in question.spec.tensors if t.component is Component.ROUTED_EXPERTS]
    bits = min(t.format.bits if t.format else 16 for t in banks)
    for name in SMALLER_FORMATS:
        if FORMATS[name].bits < bits:
            text = f"routed experts in {name} (--format {name}, needs a converted checkpoint)"
            yield Change("format", text, question.in_format(name))


def _more_ranks(question: Question) -> Iterator[Change]:
    """The fewest ranks above the present ones that fit; only where the number may change."""
    if question.options.ownership.exact is not None:
        return
    start = question.config.ranks
    most = min(question.spec.num_experts, max(MAX_TRIED_RANKS, start))

    def on(ranks: int) -> Question:
        return replace(question, config=replace(question.config, ranks=ranks, chips=0))

    low, high = start, min(2 * start, most)
    while high < most and not _fits(on(high)):
        low, high = high, min(2 * high, most)
    if high <= low or not _fits(on(high)):
        return
    while high - low > 1:
        middle = (low + high) // 2
        if _fits(on(middle)):
            high = middle
        else:
            low = middle
    yield Change("ranks", f"{high} ranks instead of {start} (--ranks {high})", on(high))
