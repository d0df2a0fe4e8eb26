"""The page pool hands out every page once and takes every page back."""

from __future__ import annotations

import pytest

from rank_worker.pages import PagePool


def test_every_page_is_handed_out_once() -> None:
    pool = PagePool(5)
    pages = [pool.take() for _ in range(5)]
    assert sorted(p for p in pages if p is not None) == [0, 1, 2, 3, 4]
    assert pool.take() is None
    assert pool.num_free == 0


def test_pages_come_back() -> None:
    pool = PagePool(3)
    first, second = pool.take(), pool.take()
    assert first is not None
    assert second is not None
    pool.check([first, second])
    pool.give_back([first])
    pool.check([second])
    assert pool.num_free == 2
    assert pool.take() == first, "the page that was freed last is the warmest"


@pytest.mark.parametrize("held", [[], [0, 0], [0, 1], [7]])
def test_the_check_finds_lost_doubled_and_foreign_pages(held: list[int]) -> None:
    pool = PagePool(3)
    assert pool.take() == 0
    with pytest.raises(AssertionError, match="pages lost or doubled"):
        pool.check(held)


def test_a_page_freed_twice_is_noticed() -> None:
    pool = PagePool(2)
    page = pool.take()
    assert page is not None
    pool.give_back([page])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.give_back([page])
