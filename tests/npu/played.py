"""torch_npu's operators on CPU tensors, written from their documented meaning.

They enforce what the chip would not forgive: ids within range, types alike, whole segments; and
they fill what the real ones leave undefined with NaN.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

HALF = torch.float16


class PlayedLibrary:
    """torch_npu's operators on CPU tensors; every argument's type is one that a 310P has."""

    ALLOWED = (HALF, torch.float32, torch.int8, torch.int32, torch.int64, torch.bool)

    def __getattribute__(self, name: str) -> Any:
        function = object.__getattribute__(self, name)
        if not name.startswith("npu_"):
            return function

        def checked(*arguments: Any, **named: Any) -> Any:
            flat = [*arguments, *named.values()]
            tensors = [t for a in flat for t in (a if isinstance(a, list) else [a])]
            for tensor in tensors:
                if isinstance(tensor, Tensor):
                    assert tensor.dtype in self.ALLOWED, f"{name} got {tensor.dtype}"
            return function(*arguments, **named)

        return checked

    def npu_rms_norm(self, x: Tensor, gamma: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        assert x.dtype == gamma.dtype
        inverse = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
        return (x.float() * inverse * gamma.float()).to(x.dtype), inverse

    def npu_rotary_mul(self, x: Tensor, r1: Tensor, r2: Tensor) -> Tensor:
        assert x.dim() == r1.dim() == r2.dim() == 4
        assert x.shape[-1] == r1.shape[-1]
        assert x.dtype == r1.dtype == r2.dtype
        first, second = x.chunk(2, dim=-1)
        swapped = torch.cat((-second, first), dim=-1)
        return (x.float() * r1.float() + swapped.float() * r2.float()).to(x.dtype)

    def npu_swiglu(self, x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)

    def npu_moe_init_routing_v2(
        self, x: Tensor, ids: Tensor, *, active_num: int, expert_capacity: int, expert_num: int,
        drop_pad_mode: int, expert_tokens_num_type: int, expert_tokens_num_flag: bool,
        quant_mode: int, active_expert_range: list[int], row_idx_type: int,
    ) -> tuple[Tensor, Tensor, Tensor, None]:  # fmt: skip
        assert (drop_pad_mode, quant_mode, row_idx_type, expert_tokens_num_type) == (0, -1, 0, 0)
        assert expert_tokens_num_flag
        assert ids.dtype is torch.int32
        assert active_num == ids.numel(), "a capacity below tokens x top-k"
        assert active_expert_range == [0, expert_num]
        if not ((ids >= 0) & (ids < expert_num)).all():
            raise IndexError("an expert id outside 0..expert_num-1 writes out of bounds")
        order = ids.flatten().argsort(stable=True)
        row_of = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
        counts = torch.bincount(ids.flatten(), minlength=expert_num).cumsum(0)
        return x[order // ids.shape[1]], row_of.int(), counts.int(), None

    def npu_grouped_matmul(
        self, x: list[Tensor], weight: list[Tensor], *, group_list: Tensor, split_item: int,
        group_type: int, group_list_type: int,
    ) -> list[Tensor]:  # fmt: skip
        assert (split_item, group_type, group_list_type) == (2, 0, 0)
        (rows,), (bank,) = x, weight
        assert rows.dtype is HALF
        assert bank.dtype is HALF
        assert group_list.dtype is torch.int64
        assert rows.shape[1] == bank.shape[1]
        out = torch.full((rows.shape[0], bank.shape[2]), math.nan, dtype=HALF)
        begin = 0
        for expert, end in enumerate(group_list.tolist()):
            out[begin:end] = (rows[begin:end].float() @ bank[expert].float()).half()
            begin = end
        return [out]

    def npu_quant_grouped_matmul_dequant(
        self, x: Tensor, bank: Tensor, scale: Tensor, ends: Tensor
    ) -> Tensor:
        assert x.dtype is HALF
        assert bank.dtype is torch.int8
        assert scale.dtype is torch.float32
        assert ends.dtype is torch.int64
        assert scale.shape == bank.shape[:2]
        assert not bank.shape[1] % 16
        assert not bank.shape[2] % 16
        assert x.numel(), "an empty tensor"
        assert bank.numel(), "an empty tensor"
        steps = x.float().abs().amax(1, keepdim=True).clamp_min(1e-8) / 127
        codes = (x.float() / steps).round().clamp(-127, 127)
        out = torch.full((x.shape[0], bank.shape[1]), math.nan, dtype=HALF)
        begin = 0
        for expert, end in enumerate(ends.tolist()):
            product = codes[begin:end] @ bank[expert].float().t() * scale[expert]
            out[begin:end] = (product * steps[begin:end]).half()
            begin = end
        return out

    def npu_quant_matmul_dequant(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ends = torch.tensor([x.shape[0]])
        return self.npu_quant_grouped_matmul_dequant(x, weight[None], scale[None], ends)

    def npu_moe_token_unpermute(self, rows: Tensor, row_of: Tensor, shares: Tensor) -> Tensor:
        assert row_of.dtype is torch.int32
        assert rows.dtype == shares.dtype
        routed = rows[row_of.long()].view(*shares.shape, -1).float()
        return (routed * shares.float()[..., None]).sum(1).to(rows.dtype)

    def npu_scatter_nd_update_(self, target: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
        assert target.dtype == updates.dtype
        assert ((indices >= 0) & (indices < target.shape[0])).all()
        return target.index_copy_(0, indices[:, 0], updates)

    def npu_prompt_flash_attention(
        self, query: Tensor, key: Tensor, value: Tensor, *, atten_mask: Tensor, num_heads: int,
        scale_value: float, input_layout: str, num_key_value_heads: int, sparse_mode: int,
    ) -> Tensor:  # fmt: skip
        assert (input_layout, sparse_mode) == ("BNSD", 0)
        assert query.dtype is key.dtype is value.dtype is HALF
        assert query.shape[1] == num_heads
        assert atten_mask.dtype is torch.bool
        group = num_heads // num_key_value_heads
        key, value = (x.float().repeat_interleave(group, dim=1) for x in (key, value))
        scores = query.float() @ key.transpose(2, 3) * scale_value
        weights = scores.masked_fill(atten_mask, -math.inf).softmax(-1).nan_to_num(0)
        return (weights @ value).half()
