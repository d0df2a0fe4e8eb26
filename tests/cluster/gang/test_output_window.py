"""Outputs of rank 0: what leaves at once, what waits for more, and for how long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster.output_window import FAST_S, LEAST_S, MOST_S, OutputWindow
from rank_worker.messages import EngineRequest, FinishReason, TokenBatch

STEP_S = 0.004
PATIENCE_S = 1.0


class Steps:
    """A rank that made `batches` at their `time_s`, and the clock that its reader sees."""

    def __init__(self, batches: Sequence[TokenBatch]) -> None:
        self.now_s = 0.0
        self._batches = list(batches)

    def clock(self) -> float:
        return self.now_s

    def poll(self, timeout_s: float) -> tuple[TokenBatch, ...]:
        if not self._batches or self._batches[0].time_s > self.now_s + timeout_s:
            self.now_s += timeout_s
            return ()
        self.now_s = max(self.now_s, self._batches[0].time_s)
        found = tuple(batch for batch in self._batches if batch.time_s <= self.now_s)
        self._batches = self._batches[len(found) :]
        return found


def batch(index: int, name: str = "a", step_s: float = STEP_S, last: bool = False) -> TokenBatch:
    reason = FinishReason.LENGTH if last else None
    return TokenBatch(name, (index,), reason, 1 + index * step_s)


def messages(steps: Steps, window: OutputWindow) -> list[tuple[float, list[int]]]:
    """Until nothing comes: when each message left, and the tokens in it."""
    found = []
    while batches := window.collect(steps.poll, PATIENCE_S):
        found.append((steps.now_s, [batch.token_ids[0] for batch in batches]))
    return found


def announced(steps: Steps, *names: str) -> OutputWindow:
    window = OutputWindow(steps.clock)
    window.announce([EngineRequest(name, (1,), 64) for name in names])
    return window


def test_the_first_token_leaves_at_once_and_the_last_does() -> None:
    batches = [*(batch(index) for index in range(3)), batch(3, last=True)]
    steps = Steps(batches)
    found = messages(steps, announced(steps, "a"))
    assert found[0] == (batches[0].time_s, [0])
    assert found[-1][0] == batches[-1].time_s
    assert [token for _, tokens in found for token in tokens] == [0, 1, 2, 3]


def test_waits_grow_to_the_longest_and_lose_nothing() -> None:
    steps = Steps([*(batch(index) for index in range(200))])
    found = messages(steps, announced(steps, "a"))
    assert [token for _, tokens in found for token in tokens] == list(range(200))
    sizes = [len(tokens) for _, tokens in found]
    assert sizes[0] == 1
    assert sizes[1] <= 1 + LEAST_S / STEP_S
    assert max(sizes) <= 1 + MOST_S / STEP_S
    assert sizes[-3] > 10  # of 4 ms each
    starts = [1 + tokens[0] * STEP_S for _, tokens in found]
    waits = [left_s - start_s for (left_s, _), start_s in zip(found, starts, strict=True)]
    assert max(waits) <= MOST_S + 1e-9


def test_slow_steps_leave_one_by_one_the_moment_they_are_made() -> None:
    slow = [batch(index, step_s=2 * FAST_S) for index in range(9)]
    steps = Steps(slow)
    found = messages(steps, announced(steps, "a"))
    assert found == [(one.time_s, [index]) for index, one in enumerate(slow)]


def test_a_new_request_beside_a_fast_one_is_not_kept_waiting() -> None:
    old = [batch(index) for index in range(100)]
    new = batch(60, "new")
    steps = Steps(sorted([*old, new], key=lambda one: one.time_s))
    window = announced(steps, "a", "new")
    found = messages(steps, window)
    assert new.time_s in [left_s for left_s, _ in found]


def test_a_token_before_a_pause_waits_no_longer_than_a_fast_step_takes() -> None:
    fast = [batch(index) for index in range(44)]
    steps = Steps(fast)
    left_s, tokens = messages(steps, announced(steps, "a"))[-1]
    assert tokens[-1] == 43
    assert left_s - fast[-1].time_s == pytest.approx(FAST_S)


def test_a_request_that_was_aborted_is_not_waited_for() -> None:
    steps = Steps([batch(0), batch(1), batch(2, "gone"), batch(3)])
    window = announced(steps, "a", "gone")
    window.forget(["gone"])
    assert [tokens for _, tokens in messages(steps, window)] == [[0], [1, 2, 3]]
