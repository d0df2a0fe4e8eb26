"""When a gang counts as silent or stuck, by what its ranks report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.gang import SETTLE_S, ProgressWatch
from rank_worker.messages import RankSnapshot


def snapshot(rank: int, step: int) -> RankSnapshot:
    return RankSnapshot(rank, 0, 0.0, step, 0, 0)


@pytest.fixture
def watch() -> ProgressWatch:
    """Two ranks that committed step 3 at 10 s, with a limit of 5 s."""
    made = ProgressWatch(2, 5.0, 0.0)
    for rank in range(2):
        made.heard(snapshot(rank, 3), 10.0)
    return made


def hear_both(watch: ProgressWatch, now_s: float, steps: tuple[int, int] = (3, 3)) -> None:
    for rank, step in enumerate(steps):
        watch.heard(snapshot(rank, step), now_s)


def test_peers_of_a_stuck_rank_may_name_it_first(watch: ProgressWatch) -> None:
    assert watch.verdict(10.0, True) is None
    hear_both(watch, 15.1)
    assert watch.verdict(15.1, True) is None, "their own deadline is at 15 s"
    hear_both(watch, 15.0 + SETTLE_S + 0.1)
    stuck = watch.verdict(15.0 + SETTLE_S + 0.1, True)
    assert stuck is not None
    assert "step 3 has not ended" in str(stuck)


def test_the_rank_that_lags_is_named(watch: ProgressWatch) -> None:
    hear_both(watch, 11.0, (4, 3))
    hear_both(watch, 20.0, (4, 3))
    stuck = watch.verdict(20.0, True)
    assert stuck is not None
    assert (stuck.rank, stuck.step) == (1, 3)


def test_idle_time_does_not_count(watch: ProgressWatch) -> None:
    hear_both(watch, 100.0)
    assert watch.verdict(100.0, False) is None
    hear_both(watch, 104.0)
    assert watch.verdict(104.0, True) is None


def test_a_silent_rank_is_named_at_once(watch: ProgressWatch) -> None:
    watch.heard(snapshot(0, 3), 15.2)
    silent = watch.verdict(15.2, False)
    assert silent is not None
    assert silent.rank == 1


def test_of_two_silent_ranks_the_one_heard_last_long_ago_is_named(watch: ProgressWatch) -> None:
    watch.heard(snapshot(0, 3), 12.0)
    silent = watch.verdict(18.0, False)
    assert silent is not None
    assert silent.rank == 1


def test_a_rank_that_is_behind_in_its_step_is_named(watch: ProgressWatch) -> None:
    """Both have step 3 before them; rank 0 waits in an exchange that rank 1 has not begun."""
    for rank, entered in enumerate((12, 11)):
        watch.heard(replace(snapshot(rank, 3), entered=entered), 20.0)
    stuck = watch.verdict(20.0, True)
    assert stuck is not None
    assert stuck.rank == 1
