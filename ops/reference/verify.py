"""Several tokens a row computed without touching the state, and their commit once it is known
how many of them stay.

A row of Q tokens is one known token and Q - 1 drafts. The forward reads the committed state only;
after sampling, `counts` says how many leading tokens are kept, and exactly those enter the state.
Kept beside the state are the inputs of the Q tokens, not Q states: for a recurrent layer of 48
heads of 128 x 128 that is 80 KB a token against 3 MiB. Meaning: the step operators of
`ops.reference.conv` and `ops.reference.delta`, one token after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.reference.conv import tap_sum
from ops.reference.delta import delta_update, per_value_head


def causal_conv_verify(
    x: Tensor, weight: Tensor, windows: Tensor, slots: Tensor, dilation: int = 1
) -> Tensor:
    """x [B, Q, C] after windows [slots, W, C] at `slots` -> y [B, Q, C]; the windows stay."""
    inputs = torch.cat((windows.index_select(0, slots).to(x.dtype), x), dim=1)
    return tap_sum(inputs, weight, x.shape[1], dilation).to(x.dtype)


def window_commit_(x: Tensor, windows: Tensor, slots: Tensor, counts: Tensor) -> Tensor:
    """Windows [slots, W, ...] at `slots` [B] move on by the first counts[b] rows of x [B, Q, ...].

    What is written are the W entries from offset counts[b] of window and inputs in a row.
    """
    inputs = torch.cat((windows.index_select(0, slots), x.to(windows.dtype)), dim=1)
    length = windows.shape[1]
    at = counts[:, None] + torch.arange(length, device=counts.device)  # [B, W]
    row = torch.arange(x.shape[0], device=counts.device)[:, None]
    return windows.index_copy_(0, slots, inputs[row, at])


def gated_delta_verify(
    q: Tensor,  # [B, Q, Hk, dk]
    k: Tensor,  # [B, Q, Hk, dk]
    v: Tensor,  # [B, Q, Hv, dv]
    g: Tensor,  # [B, Q, Hv] fp32
    beta: Tensor,  # [B, Q, Hv] fp32
    key_head: Tensor,  # [Hv] int64: key head that serves a value head
    states: Tensor,  # [slots, Hv, dk, dv] fp32, left as they are
    slots: Tensor,  # [B] int64
) -> Tensor:
    """Outputs [B, Q, Hv, dv] of Q tokens a row, in the dtype of v."""
    state = states.index_select(0, slots)
    outputs = []
    for at in range(q.shape[1]):
        query, key = per_value_head(q[:, at], k[:, at], key_head)
        state = delta_update(state, key, v[:, at], g[:, at], beta[:, at])
        outputs.append(torch.matmul(query[..., None, :], state)[..., 0, :])
    return torch.stack(outputs, dim=1).to(v.dtype)


def gated_delta_commit_(
    k: Tensor,  # [B, Q, Hk, dk]
    v: Tensor,  # [B, Q, Hv, dv]
    g: Tensor,  # [B, Q, Hv] fp32
    beta: Tensor,  # [B, Q, Hv] fp32
    key_head: Tensor,  # [Hv] int64
    states: Tensor,  # [slots, Hv, dk, dv] fp32, updated in place
    slots: Tensor,  # [B] int64
    counts: Tensor,  # [B] int64, 0..Q
) -> Tensor:
    """Replays the first counts[b] tokens of row b into its state; the others leave no trace.

    Not even a NaN of theirs: a state is selected, not multiplied by zero.
    """
    state = states.index_select(0, slots)
    for at in range(k.shape[1]):
        _, key = per_value_head(k[:, at], k[:, at], key_head)
        after = delta_update(state, key, v[:, at], g[:, at], beta[:, at])
        state = torch.where((counts > at)[:, None, None, None], after, state)
    return states.index_copy_(0, slots, state)
