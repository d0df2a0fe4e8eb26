"""Products with packed weights: close to plain ones at real widths, never a bank unpacked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ops.lowbit.convert import codes_of_words, without_fp8, zeros_of_bank
from ops.lowbit.pack import quantise, words_of, zero_words
from ops.lowbit.packed import dequantised
from ops.reference import moe
from ops.reference.packed import rounded_rows
from ops.registry import OpSet
from ops.spec import Capability
from placement import formats
from tests.ops.variant_cases import packed_weight

HIDDEN, INNER = 2560, 640  # of one expert of the 169 GiB model
INT8_SPREAD = 0.03  # of the largest output, in the 2-norm: inputs in 255 steps, twice


@pytest.fixture(scope="module", params=["reference", "cpu"])
def packed_ops(request: pytest.FixtureRequest) -> OpSet:
    return OpSet(Capability(request.param), check_contracts=True)


def routes(tokens: int, experts: int, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    local = torch.rand(tokens, experts).argsort(dim=1)[:, :top_k].contiguous()
    return torch.randn(tokens, HIDDEN), torch.rand(tokens, top_k), local


@pytest.mark.parametrize("tokens", [1, 5, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", [formats.W4G128_ASYM, formats.W4G32, formats.NVFP4],
                         ids=lambda form: form.name)  # fmt: skip
def test_experts_at_production_widths(
    packed_ops: OpSet, form: formats.WeightFormat, tokens: int
) -> None:
    gate_up, down = packed_weight(form, 3, 2 * INNER, HIDDEN), packed_weight(form, 3, HIDDEN, INNER)
    x, weights, local = routes(tokens, 3, 2)
    plain = [torch.stack([dequantised(bank[e]) for e in range(3)]) for bank in (gate_up, down)]
    expected = moe.moe_experts(x, weights, local, *plain)
    got = packed_ops.packed_experts(x, weights, local, gate_up, down, False)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    rounded = packed_ops.packed_experts(x, weights, local, gate_up, down, True)
    spread = (rounded - expected).norm() / expected.norm()
    assert 1e-4 < spread < INT8_SPREAD


@pytest.mark.parametrize("rows", [1, 3, 8, 40])
@pytest.mark.parametrize("form", [formats.W8_SYM, formats.W8, formats.FP8_BLOCK128, formats.W4G32],
                         ids=lambda form: form.name)  # fmt: skip
def test_inputs_in_eight_bits_are_those_of_the_reference(
    form: formats.WeightFormat, rows: int
) -> None:
    """Rounding to integers is exact: both sum the same products."""
    weight, x = packed_weight(form, 64, 2560), torch.randn(rows, 2560)
    both = [OpSet(Capability(name)) for name in ("reference", "cpu")]
    expected, got = (ops.packed_linear(x, weight, True) for ops in both)
    torch.testing.assert_close(got, expected, rtol=0, atol=3e-6 * float(expected.abs().max()))
    exact = both[1].packed_linear(x, weight, False)
    assert 1e-4 < (got - exact).norm() / exact.norm() < INT8_SPREAD


def test_rounded_rows_keep_zeros_and_the_largest_value() -> None:
    x = torch.tensor([[0.0, 0.0], [-3.0, 1.0], [2.0, 0.001]])
    got = rounded_rows(x, True)
    assert torch.equal(got[0], torch.zeros(2))
    assert (float(got[1, 0]), float(got[2, 0]), float(got[2, 1])) == (-3.0, 2.0, 0.0)
    assert torch.equal(rounded_rows(x, False), x)


@pytest.mark.parametrize("int8_activations", [False, True])
def test_a_row_that_is_not_finite_stays_so_and_spoils_no_other(
    packed_ops: OpSet, int8_activations: bool
) -> None:
    weight, x = packed_weight(formats.W4G32, 16, 64), torch.randn(4, 64)
    x[1, 5], x[2, 60] = float("nan"), float("inf")
    got = packed_ops.packed_linear(x, weight, int8_activations)
    assert not got[1:3].isfinite().any()
    clean = packed_ops.packed_linear(x[::3], weight, int8_activations)
    torch.testing.assert_close(got[::3], clean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_of_half_the_width_give_results_of_it(packed_ops: OpSet, dtype: torch.dtype) -> None:
    gate_up, down = packed_weight(formats.W4G32, 3, 64, 32), packed_weight(formats.W4G32, 3, 32, 32)
    x, weights, local = torch.randn(4, 32), torch.rand(4, 2), torch.tensor([[0, 2]] * 4)
    exact = packed_ops.packed_experts(x, weights, local, gate_up, down, False)
    got = packed_ops.packed_experts(x.to(dtype), weights.to(dtype), local, gate_up, down, False)
    assert got.dtype == dtype
    assert (got.float() - exact).norm() / exact.norm() < 0.01


@pytest.mark.parametrize("tokens", [1, 3, 100])
def test_peers_routes_and_empty_banks_give_exact_zeros(packed_ops: OpSet, tokens: int) -> None:
    gate_up, down = packed_weight(formats.W4G32, 2, 64, 32), packed_weight(formats.W4G32, 2, 32, 32)
    x, weights = torch.full((tokens, 32), float("nan")), torch.rand(tokens, 2)
    peers = torch.full((tokens, 2), -1)
    out = packed_ops.packed_experts(x, weights, peers, gate_up, down, False)
    assert torch.equal(out, torch.zeros(tokens, 32))
    none = [
        replace(bank, shape=(0, *bank.shape[1:]), codes=bank.codes[:0], scale=bank.scale[:0])
        for bank in (gate_up, down)
    ]
    assert not packed_ops.packed_experts(torch.ones(tokens, 32), weights, peers, *none, True).any()


class LargestFloats(TorchDispatchMode):
    """Elements of the largest tensor of floats that any call gives."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, Tensor) and value.is_floating_point():
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("tokens", [1, 40, 300])
def test_no_bank_is_ever_unpacked(packed_ops: OpSet, tokens: int) -> None:
    """Of 64 experts no two are wide at a time, however many are busy."""
    gate_up = packed_weight(formats.W4G32, 64, 256, 128)
    down = packed_weight(formats.W4G32, 64, 128, 128)
    x, weights = torch.randn(tokens, 128), torch.rand(tokens, 4)
    local = torch.rand(tokens, 64).argsort(dim=1)[:, :4].contiguous()
    with LargestFloats() as probe:
        packed_ops.packed_experts(x, weights, local, gate_up, down, False)
    assert probe.elements <= max(256 * 128, tokens * 4 * 256)


def test_words_become_nibbles_in_their_own_memory() -> None:
    packed = quantise(torch.randn(3, 10, 64), formats.W4G32_ASYM)
    words = torch.stack([words_of(one) for one in packed.codes])
    memory = words.data_ptr()
    codes = codes_of_words(words)
    assert codes.data_ptr() == memory
    assert torch.equal(codes, packed.codes)
    assert packed.zero is not None
    stacked = [torch.cat([zero_words(half) for half in one.split(5)]) for one in packed.zero]
    assert torch.equal(zeros_of_bank(torch.stack(stacked), 10, 2), packed.zero)


@pytest.mark.parametrize("form", [formats.FP8_BLOCK128, formats.FP8_CHANNEL],
                         ids=lambda form: form.name)  # fmt: skip
def test_fp8_becomes_integers_within_half_a_step_of_each_block(form: formats.WeightFormat) -> None:
    bank = quantise(torch.randn(2, 192, 200) * torch.rand(192, 1), form)
    before = [dequantised(one) for one in (bank[0], bank[1])]
    memory = bank.codes.data_ptr()
    packed = without_fp8(bank)
    assert packed.codes.data_ptr() == memory
    assert packed.codes.dtype is torch.int8
    for index, exact in enumerate(before):
        got = dequantised(packed[index])
        step = packed[index].scale.repeat_interleave(form.block_rows or 192, 0)[:192]
        step = step.repeat_interleave(form.group or 200, 1)[:, :200]
        assert ((got - exact).abs() <= 0.5001 * step).all()
        assert (got - exact).norm() / exact.norm() < 0.02


def test_an_fp8_code_that_is_no_number_is_refused() -> None:
    bank = quantise(torch.randn(2, 64, 64), formats.FP8_CHANNEL)
    bank.codes.view(torch.uint8)[1, 3, 5] = 0x7F
    with pytest.raises(ValueError, match="no number"):
        without_fp8(bank)
