"""Prefixes in the page pool: a tree of full pages; the least recently used leaf goes first.

A node's page belongs to the tree. Sequences on a path keep its nodes from being evicted. Knows
neither the pool nor where recurrent states lie.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

HEAP_SLACK = 64  # outdated entries that are tolerated beside as many as there are nodes

Page = tuple[int, ...]  # the token ids of a full page


@dataclass(eq=False)
class Node:
    """A full page after its parent's. `key` stands for all tokens from the root on."""

    parent: Node | None = field(repr=False)
    tokens: Page
    page: int
    depth: int  # pages from the root, its own included
    key: int
    is_drafted: bool = False  # the draft head has entries of all its tokens
    children: dict[Page, Node] = field(default_factory=dict, repr=False)
    users: int = 0  # sequences whose path leads through it
    used: int = 0  # when the last of them left
    is_cached: bool = True  # False: cut off; its page is free when the last user has left
    lost_state: bool = False  # it had a recurrent state, which had to make room


class PrefixTree:
    """Paths of full pages. `num_ghosts` evicted ones are remembered, to tell why one is missed."""

    def __init__(self, page_tokens: int, num_ghosts: int) -> None:
        self.page_tokens = page_tokens
        self.root = Node(None, (), -1, 0, 0)
        self.num_nodes = 0
        self.num_unused = 0  # nodes without users: all of them can be evicted, leaves first
        self._num_ghosts = num_ghosts
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._leaves: list[tuple[int, int, Node]] = []  # heap by time of last use
        self._clock = count(1)

    def match(self, tokens: Sequence[int], num_pages: int) -> list[Node]:
        """The path of the first pages of `tokens` that are cached, at most `num_pages` long."""
        path: list[Node] = []
        node = self.root
        for index in range(num_pages):
            child = node.children.get(self._page(tokens, index))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def was_evicted(self, path: Sequence[Node], tokens: Sequence[int]) -> bool:
        """True when the page of `tokens` after `path` was here and had to make room."""
        parent = path[-1] if path else self.root
        return self._key(parent, self._page(tokens, len(path))) in self._ghosts

    def extend(self, parent: Node | None, tokens: Sequence[int], page: int) -> Node:
        """The child of `parent` (None: the root) for these tokens; a new one takes `page`."""
        above = parent or self.root
        ids = tuple(tokens)
        node = above.children.get(ids)
        if node is None:
            key = self._key(above, ids)
            node = Node(above, ids, page, above.depth + 1, key)
            above.children[ids] = node
            self._ghosts.pop(key, None)
            self.num_nodes += 1
            self.num_unused += 1
        return node

    def enter(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.num_unused -= node.users == 0
            node.users += 1

    def leave(self, nodes: Iterable[Node]) -> list[int]:
        """A sequence leaves its path; returns the pages that belong to nobody any more."""
        freed = []
        now = next(self._clock)
        for node in nodes:
            node.users -= 1
            node.used = now
            if node.users:
                continue
            if not node.is_cached:
                freed.append(node.page)
                continue
            self.num_unused += 1
            self._note_leaf(node)
        return freed

    def evict(self) -> Node | None:
        """Takes the least recently used leaf without users out of the tree; None without any."""
        while self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if self._is_evictable(node) and node.used == used:
                self._take_out(node)
                self._remember(node.key)
                return node
        return None

    def cut(self, node: Node) -> list[Node]:
        """Takes `node` and all beneath it out of the tree, used or not; returns them."""
        nodes = list(_subtree(node))
        for one in reversed(nodes):
            self._take_out(one)
        return nodes

    def nodes(self) -> Iterator[Node]:
        for child in self.root.children.values():
            yield from _subtree(child)

    def _page(self, tokens: Sequence[int], index: int) -> Page:
        return tuple(tokens[index * self.page_tokens : (index + 1) * self.page_tokens])

    @staticmethod
    def _key(parent: Node, tokens: Page) -> int:
        return hash((parent.key, tokens))

    @staticmethod
    def _is_evictable(node: Node) -> bool:
        return node.is_cached and not node.users and not node.children

    def _note_leaf(self, node: Node) -> None:
        if not self._is_evictable(node):
            return
        if len(self._leaves) > 2 * self.num_nodes + HEAP_SLACK:
            current = {id(n): (n.used, s, n) for _, s, n in self._leaves if self._is_evictable(n)}
            self._leaves = list(current.values())
            heapq.heapify(self._leaves)
        heapq.heappush(self._leaves, (node.used, next(self._clock), node))

    def _take_out(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "the root stays"
        assert not node.children, "a node goes after its children"
        del parent.children[node.tokens]
        node.is_cached = False
        self.num_nodes -= 1
        self.num_unused -= node.users == 0
        if parent is not self.root:
            self._note_leaf(parent)

    def _remember(self, key: int) -> None:
        self._ghosts[key] = None
        self._ghosts.move_to_end(key)
        while len(self._ghosts) > self._num_ghosts:
            self._ghosts.popitem(last=False)

    def check(self) -> None:
        """Raises AssertionError when counts, users or links of the nodes contradict each other."""
        nodes = list(self.nodes())
        assert len(nodes) == self.num_nodes, "nodes were lost"
        assert sum(not n.users for n in nodes) == self.num_unused, "unused nodes are miscounted"
        evictable = {id(n) for n in nodes if self._is_evictable(n)}
        queued = {id(n) for used, _, n in self._leaves if n.used == used}
        assert evictable <= queued, "a leaf can never be evicted"
        for node in nodes:
            assert node.is_cached, "a node in the tree is marked as cut off"
            beneath = sum(child.users for child in node.children.values())
            assert node.users >= beneath, "a sequence is on a child but not on its parent"


def _subtree(node: Node) -> Iterator[Node]:
    """`node` and all beneath it, parents first."""
    stack = [node]
    while stack:
        one = stack.pop()
        yield one
        stack.extend(one.children.values())
