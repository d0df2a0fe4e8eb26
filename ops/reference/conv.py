"""Causal depthwise convolution followed by silu, over a window of past inputs.

The window holds the raw inputs (before convolution and activation), oldest first,
`(kernel - 1) * dilation` rows. Chunk and step sum the taps in the same order, in fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor


def tap_sum(inputs: Tensor, weight: Tensor, length: int, dilation: int) -> Tensor:
    """silu of the tap sum: inputs [..., W + length, C], weight [C, K] -> [..., length, C] fp32."""
    taps = weight.float()
    total = inputs[..., :length, :].float() * taps[:, 0]
    for tap in range(1, weight.shape[1]):
        start = tap * dilation
        total = total + inputs[..., start : start + length, :].float() * taps[:, tap]
    return torch.nn.functional.silu(total)


def causal_conv_chunk(
    x: Tensor, weight: Tensor, window: Tensor, dilation: int = 1
) -> tuple[Tensor, Tensor]:
    """One sequence: x [T, C] after window [W, C] -> y [T, C] and the new window [W, C]."""
    inputs = torch.cat((window.to(x.dtype), x), dim=0)
    y = tap_sum(inputs, weight, x.shape[0], dilation).to(x.dtype)
    return y, inputs[x.shape[0] :].to(window.dtype)


def causal_conv_step(
    x: Tensor, weight: Tensor, windows: Tensor, slots: Tensor, dilation: int = 1
) -> Tensor:
    """One token a row: x [B, C] -> y [B, C]; windows [slots, W, C] move on in place at `slots`."""
    past = windows.index_select(0, slots).to(x.dtype)
    inputs = torch.cat((past, x[:, None]), dim=1)  # [B, W + 1, C]
    windows.index_copy_(0, slots, inputs[:, 1:].to(windows.dtype))
    return tap_sum(inputs, weight, 1, dilation)[:, 0].to(x.dtype)
