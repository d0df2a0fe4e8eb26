"""Experts in the layout that the device multiplies fastest with: same values, same memory."""

from __future__ import annotations

import pytest
import torch

from ops.registry import REFERENCES, OpSet
from ops.spec import Capability
from rank_worker.device import open_device, packed_bank


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 5, 7), (2, 16, 16), (1, 1, 4), (0, 8, 4)])
def test_a_packed_bank_has_its_values_in_its_own_memory(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    bank = torch.randn(shape).to(dtype)
    before, memory = bank.clone(), bank.data_ptr()
    packed = packed_bank(bank, open_device("cpu").pack_linear)
    assert torch.equal(packed, before)
    assert packed.data_ptr() == memory
    assert packed.untyped_storage().nbytes() == before.nbytes
    if len(packed):
        assert packed[0].t().is_contiguous()


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_packed_experts_compute_the_same(tokens: int) -> None:
    """Few tokens take the kernel, many the grouped product."""
    gate_up, down = torch.randn(6, 64, 24) * 0.2, torch.randn(6, 24, 32) * 0.2
    x, weights = torch.randn(tokens, 24), torch.rand(tokens, 2)
    local = torch.rand(tokens, 6).argsort(dim=1)[:, :2].contiguous()
    expected = REFERENCES["moe_experts"].function(x, weights, local, gate_up, down)
    pack = open_device("cpu").pack_linear
    banks = packed_bank(gate_up, pack), packed_bank(down, pack)
    got = OpSet(Capability("cpu"), check_contracts=True).moe_experts(x, weights, local, *banks)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
