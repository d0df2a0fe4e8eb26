"""The page pool: which KV pages are free. Pages are numbered alike on every rank."""

from __future__ import annotations


class PagePool:
    """Hands out page numbers 0..num_pages-1; the last one freed is used next."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free page, or None when the pool is empty."""
        return self._free.pop() if self._free else None

    def give_back(self, pages: list[int]) -> None:
        self._free.extend(pages)
        assert len(self._free) <= self.num_pages, "a page was freed twice"

    def check(self, held: list[int]) -> None:
        """Raises AssertionError unless free and held pages are exactly the pool."""
        assert sorted(self._free + held) == list(range(self.num_pages)), "pages lost or doubled"
