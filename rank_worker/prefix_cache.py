"""Reuse of prompt prefixes: pages and recurrent states of tokens that were computed before.

A hit ends where a recurrent state was kept, and every page up to there is cached: no kind of cache
lengthens another's hit. States are kept at page boundaries: at every `interval_tokens`, at the last
one inside a prompt, and where a prompt left the path that an earlier one took. The scheduler is the
only caller, so it alone evicts. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rank_worker.pages import PagePool
from rank_worker.prefix_tree import Node, PrefixTree
from rank_worker.sequence import Sequence
from rank_worker.state_cells import StateCells
from rank_worker.step_plan import StateCopy

# Why a prompt's tokens were not found, in the order of their places in it.
MISS_REASONS = (
    "state_dropped",  # their pages are here, but the state made room for others
    "no_state",  # their pages are here, but no state was ever kept there
    "evicted",  # their pages made room for others
    "new",  # never seen
    "scored",  # their log-probabilities were asked for
    "open_page",  # behind the last boundary that a hit of the prompt can end at
)


@dataclass
class PrefixCounts:
    """Tokens of all lookups: hits and misses by reason add up to queries."""

    queries: int = 0
    hits: int = 0
    misses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MISS_REASONS, 0))
    evicted_pages: int = 0


class PrefixCache:
    """Pages of the pool, free or cached, and the states that make cached ones worth something."""

    def __init__(
        self,
        pool: PagePool,
        page_tokens: int,
        interval_tokens: int,
        num_cells: int,
        num_host_cells: int,
    ) -> None:
        """Without cells nothing is kept, and pages are the pool's alone."""
        self.pool, self.page_tokens = pool, page_tokens
        self.interval_tokens = -(-interval_tokens // page_tokens) * page_tokens
        self.is_on = num_cells > 0
        self.tree = PrefixTree(page_tokens, num_ghosts=pool.num_pages)
        self.cells = StateCells(num_cells, num_host_cells)
        self.counts = PrefixCounts()

    @property
    def num_available(self) -> int:
        """Pages that are free or can be made so."""
        return self.pool.num_free + self.tree.num_unused

    def take_page(self) -> int | None:
        """A free page, or that of the least recently used prefix; None when all are in use."""
        page = self.pool.take()
        if page is None:
            node = self.tree.evict()
            if node is None:
                return None
            self.cells.drop(node)
            self.counts.evicted_pages += 1
            page = node.page
        return page

    def open(self, sequence: Sequence) -> None:
        """Gives `sequence` the pages of the longest hit; `admit` or `release` has to follow."""
        if not self.is_on:
            return
        tokens = sequence.tokens
        # The last token is always computed: it is what the next one is sampled from.
        last = (len(tokens) - 1) // self.page_tokens
        path = self.tree.match(tokens, last)
        hit = max((n.depth for n in path if self.cells.has(n)), default=0)
        if sequence.wants_scores:  # what was computed before left no log-probabilities
            hit = 0
        sequence.nodes = path[:hit]
        sequence.pages = [node.page for node in sequence.nodes]
        sequence.num_computed = sequence.num_hit = hit * self.page_tokens
        sequence.boundaries = sorted({len(path), last} - {0})
        self.tree.enter(sequence.nodes)

    def admit(self, sequence: Sequence) -> list[StateCopy]:
        """Counts the hit that `open` found; returns the copies that fill the sequence's slot."""
        if not self.is_on:
            return []
        self._count(sequence)
        self.plan_next_save(sequence)
        if not sequence.nodes:
            return []
        return [self.cells.load(sequence.nodes[-1], sequence.slot)]

    def publish(self, sequence: Sequence) -> None:
        """Full pages of the sequence that have been computed become findable."""
        if not self.is_on:
            return
        nodes, size = sequence.nodes, self.page_tokens
        computed = min(sequence.num_computed, len(sequence.tokens))
        while (len(nodes) + 1) * size <= computed:
            parent = nodes[-1] if nodes else None
            if parent is not None and not parent.is_cached:
                return
            index = len(nodes)
            tokens = sequence.tokens[index * size : (index + 1) * size]
            node = self.tree.extend(parent, tokens, sequence.pages[index])
            if node.page == sequence.pages[index]:
                node.is_drafted = sequence.is_drafting
            self.tree.enter([node])
            nodes.append(node)

    def save(self, sequence: Sequence) -> list[StateCopy]:
        """Copies that keep the sequence's state, when it is at a boundary where one is wanted."""
        if sequence.next_save != sequence.num_computed or not sequence.num_computed:
            return []
        index = sequence.num_computed // self.page_tokens - 1
        self.plan_next_save(sequence)
        if index >= len(sequence.nodes) or not sequence.nodes[index].is_cached:
            return []
        return self.cells.save(sequence.nodes[index], sequence.slot)

    def plan_next_save(self, sequence: Sequence) -> None:
        """Sets the next boundary where a state is wanted; prefill and drafts don't cross it."""
        done = sequence.num_computed
        wanted = [(done // self.interval_tokens + 1) * self.interval_tokens]
        wanted += [b * self.page_tokens for b in sequence.boundaries]
        sequence.next_save = min(boundary for boundary in wanted if boundary > done)

    def release(self, sequence: Sequence) -> None:
        """The sequence leaves; its published pages stay cached, the others are free."""
        self.pool.give_back(self._own_pages(sequence))
        self.pool.give_back(self.tree.leave(sequence.nodes))
        sequence.pages, sequence.nodes = [], []
        sequence.next_save = 0

    def forget(self, sequence: Sequence, with_hit: bool) -> None:
        """Cuts off all that `sequence` has added: its values can't be trusted.

        Nor can what it found, when the first row after that was not finite already.
        """
        found = 0 if with_hit else min(sequence.num_hit, sequence.cached_tokens)
        added = sequence.nodes[found // self.page_tokens :]
        if not added or not added[0].is_cached:
            return
        for node in self.tree.cut(added[0]):
            self.cells.drop(node)
            if not node.users:
                self.pool.give_back([node.page])

    def spare_pages(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Takes back what `sequence` has beyond `num_tokens` tokens."""
        keep = max(-(-num_tokens // self.page_tokens), len(sequence.nodes))
        spare = sequence.pages[keep:]
        del sequence.pages[keep:]
        self.pool.give_back(spare)
        return spare

    def drop_copies(self, sequences: Iterable[Sequence]) -> bool:
        """Frees cached pages that a sequence alone uses and has computed again itself.

        Its own page takes the place. False when there was none.
        """
        copies = []
        for sequence in sequences:
            for node, page in zip(sequence.nodes, sequence.pages, strict=False):
                if node.page != page and node.users == 1:
                    copies.append(node.page)
                    node.page, node.is_drafted = page, sequence.is_drafting
        self.pool.give_back(copies)
        return bool(copies)

    @staticmethod
    def _own_pages(sequence: Sequence) -> list[int]:
        """Pages that the tree doesn't have."""
        published = {node.page for node in sequence.nodes}
        return [page for page in sequence.pages if page not in published]

    def _count(self, sequence: Sequence) -> None:
        tokens, size, counts = sequence.tokens, self.page_tokens, self.counts
        last = (len(tokens) - 1) // size
        path = self.tree.match(tokens, last)
        counts.queries += len(tokens)
        counts.hits += sequence.num_hit
        counts.misses["open_page"] += len(tokens) - last * size
        if len(path) < last:
            reason = "evicted" if self.tree.was_evicted(path, tokens) else "new"
            counts.misses[reason] += (last - len(path)) * size
        lost = path[sequence.num_hit // size :]
        if sequence.wants_scores:
            counts.misses["scored"] += len(lost) * size
            return
        reason = "state_dropped" if any(node.lost_state for node in lost) else "no_state"
        counts.misses[reason] += len(lost) * size

    def check(self, running: Iterable[Sequence]) -> None:
        """Raises AssertionError when a page, a node or a cell is lost, doubled or nobody's."""
        sequences = list(running)
        self.tree.check()
        self.cells.check()
        users: dict[Node, int] = {}
        for sequence in sequences:
            for node in sequence.nodes:
                users[node] = users.get(node, 0) + 1
        nodes = set(self.tree.nodes()) | users.keys()
        for node in nodes:
            assert node.users == users.get(node, 0), "a page is used by a sequence that left"
        own = [page for sequence in sequences for page in self._own_pages(sequence)]
        self.pool.check([node.page for node in nodes] + own)
