"""Tokens of a row are computed from the committed state, and exactly the kept ones enter it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ops.registry import OpSet
from ops.spec import Capability, ContractError

KEY_HEADS, VALUE_HEADS, DIM, CHANNELS, KERNEL = 2, 6, 16, 24, 4
KEY_HEAD = torch.arange(VALUE_HEADS) // 3
SLOTS = torch.tensor([4, 0, 2])
BATCH = len(SLOTS)


@pytest.fixture(params=["reference", "cpu"])
def checked(request: pytest.FixtureRequest) -> OpSet:
    return OpSet(Capability(request.param), check_contracts=True)


def delta_tokens(tokens: int) -> dict[str, Tensor]:
    return {
        "q": torch.randn(BATCH, tokens, KEY_HEADS, DIM),
        "k": torch.randn(BATCH, tokens, KEY_HEADS, DIM),
        "v": torch.randn(BATCH, tokens, VALUE_HEADS, DIM),
        "g": -torch.rand(BATCH, tokens, VALUE_HEADS) * 3,
        "beta": torch.rand(BATCH, tokens, VALUE_HEADS),
    }


def stepped(ops: OpSet, row: dict[str, Tensor], states: Tensor, count: int) -> list[Tensor]:
    """The first `count` tokens one step after the other, into `states`."""
    outputs = []
    for at in range(count):
        token = [x[:, at].contiguous() for x in row.values()]
        outputs.append(ops.gated_delta_step(*token, KEY_HEAD, states, SLOTS))
    return outputs


@pytest.mark.parametrize("tokens", [2, 3, 5])
def test_verified_tokens_equal_steps_and_leave_the_state(checked: OpSet, tokens: int) -> None:
    row, states = delta_tokens(tokens), torch.randn(5, VALUE_HEADS, DIM, DIM)
    before, after = states.clone(), states.clone()
    got = checked.gated_delta_verify(**row, key_head=KEY_HEAD, states=states, slots=SLOTS)
    assert torch.equal(states, before)
    assert torch.equal(got, torch.stack(stepped(checked, row, after, tokens), dim=1))


@pytest.mark.parametrize("tokens", [2, 3, 5])
def test_a_commit_gives_the_bits_of_as_many_steps(checked: OpSet, tokens: int) -> None:
    row, states = delta_tokens(tokens), torch.randn(5, VALUE_HEADS, DIM, DIM)
    counts = torch.tensor([tokens, 0, tokens - 1])
    expected = states.clone()
    for index, count in enumerate(counts.tolist()):
        alone = states.clone()
        stepped(checked, row, alone, count)
        expected[SLOTS[index]] = alone[SLOTS[index]]
    del row["q"]
    checked.gated_delta_commit_(**row, key_head=KEY_HEAD, states=states, slots=SLOTS, counts=counts)
    assert torch.equal(states, expected)


def test_a_rejected_token_that_is_nan_leaves_no_trace(checked: OpSet) -> None:
    row, counts = delta_tokens(3), torch.tensor([1, 2, 0])
    clean, spoilt = (torch.ones(5, VALUE_HEADS, DIM, DIM) for _ in range(2))
    del row["q"]
    rest = {"key_head": KEY_HEAD, "slots": SLOTS, "counts": counts}
    checked.gated_delta_commit_(**row, states=clean, **rest)
    for index, count in enumerate(counts.tolist()):
        for values in row.values():
            values[index, count:] = float("nan")
    checked.gated_delta_commit_(**row, states=spoilt, **rest)
    assert torch.equal(clean, spoilt)


@pytest.mark.parametrize("dilation", [1, 3])
@pytest.mark.parametrize("tokens", [2, 5])
def test_convolution_of_a_row_equals_steps(checked: OpSet, dilation: int, tokens: int) -> None:
    x, weight = torch.randn(BATCH, tokens, CHANNELS), torch.randn(CHANNELS, KERNEL)
    windows = torch.randn(5, (KERNEL - 1) * dilation, CHANNELS)
    before, after = windows.clone(), windows.clone()
    got = checked.causal_conv_verify(x, weight, windows, SLOTS, dilation)
    assert torch.equal(windows, before)
    steps = []
    for at in range(tokens):
        row = x[:, at].contiguous()
        steps.append(checked.causal_conv_step(row, weight, after, SLOTS, dilation))
        counts = torch.full((BATCH,), at + 1)
        moved = checked.window_commit_(x, windows.clone(), SLOTS, counts)
        assert torch.equal(moved, after)
    torch.testing.assert_close(got, torch.stack(steps, dim=1), rtol=1e-6, atol=1e-6)


def test_a_window_commits_each_row_by_its_own_count(checked: OpSet) -> None:
    """Also token ids, and more tokens than a window is long."""
    for dtype in (torch.float32, torch.int64):
        x = torch.arange(100, 100 + 12).view(3, 4, 1).to(dtype)
        windows = torch.arange(10).view(5, 2, 1).to(dtype)
        checked.window_commit_(x, windows, SLOTS, torch.tensor([0, 1, 4]))
        assert windows.flatten().tolist() == [1, 104, 2, 3, 110, 111, 6, 7, 8, 9]


@pytest.mark.parametrize("count", [-1, 4])
def test_a_count_beyond_the_row_is_refused(checked: OpSet, count: int) -> None:
    counts: dict[str, Any] = {"slots": SLOTS, "counts": torch.tensor([0, count, 3])}
    allowed = f"a value of counts is {count}, allowed is 0..3"
    with pytest.raises(ContractError, match=f"window_commit_: {allowed}"):
        checked.window_commit_(torch.ones(3, 3, 2), torch.ones(5, 2, 2), **counts)
    row, states = delta_tokens(3), torch.ones(5, VALUE_HEADS, DIM, DIM)
    del row["q"]
    with pytest.raises(ContractError, match=f"gated_delta_commit_: {allowed}"):
        checked.gated_delta_commit_(**row, key_head=KEY_HEAD, states=states, **counts)
