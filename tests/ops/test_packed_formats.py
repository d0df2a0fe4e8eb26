"""Packing: what each format rounds to, and that each writer's tensors hold what was packed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ops.lowbit.pack import Writer, quantise, quantise_table, stored, zero_words, zeros_of_words
from ops.lowbit.packed import Packed, dequantised, join_codes, split_codes
from placement import formats
from placement.formats import WeightFormat

# Largest error of a value as a share of the largest value of its block: half a step, and what
# rounding the scale (fp16: 2^-11, e4m3: 2^-4) adds.
SPREADS: dict[str, float] = {
    "w4g128": 0.5 / 7 + 1e-3, "w4g128_asym": 1.01 / 15 + 1e-3, "w4g32": 0.5 / 7 + 1e-3,
    "w4g32_asym": 1.01 / 15 + 1e-3, "w4b32": 0.5 / 7, "w2": 0.5, "w8": 1.01 / 127,
    "w8_sym": 0.5 / 127, "fp8_block128": 2**-4, "fp8_channel": 2**-4, "nvfp4": 1 / 6 + 0.07,
    "mxfp4": 2 / 6,
}  # fmt: skip


def matrix(rows: int = 256, columns: int = 384) -> Tensor:
    values = torch.randn(rows, columns) * 0.02
    values[3] *= 50  # an outlier row
    values[5, 7:9] = 0.9
    values[-40:] = 0  # whole blocks of zeros
    return values


@pytest.mark.parametrize("name", SPREADS)
def test_values_stay_within_half_a_step(name: str) -> None:
    form, values = formats.FORMATS[name], matrix()
    packed = quantise(values, form)
    got = dequantised(packed)
    rows, columns = form.block_rows or 256, form.group or 384
    blocks = values.view(256 // rows, rows, 384 // columns, columns)
    largest = (blocks.amax(dim=(1, 3)) - blocks.amin(dim=(1, 3)).clamp_max(0)) if form.zero_bytes \
        else blocks.abs().amax(dim=(1, 3))  # fmt: skip
    error = (got - values).view(blocks.shape).abs().amax(dim=(1, 3))
    assert (error <= SPREADS[name] * largest + 1e-9).all()
    assert torch.equal(got[-32:], torch.zeros(32, 384)) or form.block_rows == 128
    assert (packed.scale.float() > 0).all()
    assert packed.nbytes == form.payload_bytes((256, 384)) + form.scale_bytes_of((256, 384))


def test_a_bank_is_its_matrices() -> None:
    values = torch.randn(3, 64, 128)
    for name in ("w4g32_asym", "nvfp4", "w8_sym"):
        bank = quantise(values, formats.FORMATS[name])
        for index in range(3):
            alone = dequantised(quantise(values[index], formats.FORMATS[name]))
            assert torch.equal(dequantised(bank[index]), alone)


def test_two_matrices_above_each_other_keep_their_blocks() -> None:
    """Gate over up of 48 rows each: blocks of 32 rows begin anew, and so does the whole scale."""
    for form, rows in ((formats.W2, 48), (formats.NVFP4, 48), (formats.FP8_BLOCK128, 144)):
        gate, up = (quantise(torch.randn(rows, 256) * s, form) for s in (1.0, 30.0))
        both = Packed(
            form, (2 * rows, 256), torch.cat((gate.codes, up.codes)),
            torch.cat((gate.scale, up.scale)), stacked=2,
            whole=None if gate.whole is None or up.whole is None
            else torch.cat((gate.whole, up.whole)),
        )  # fmt: skip
        expected = torch.cat((dequantised(gate), dequantised(up)))
        assert torch.equal(dequantised(both), expected)
        assert both.nbytes == form.payload_bytes(both.shape) + form.scale_bytes_of(both.shape, 2)


@pytest.mark.parametrize("bits", [2, 4])
def test_the_first_code_is_in_the_lowest_bits(bits: int) -> None:
    codes = torch.arange(-(1 << bits - 1), 1 << bits - 1, dtype=torch.int8).repeat(3, 4)
    joined = join_codes(codes, bits)
    assert joined.dtype == torch.uint8
    assert int(joined[0, 0]) & (1 << bits) - 1 == int(codes[0, 0]) & (1 << bits) - 1
    assert torch.equal(split_codes(joined, bits).to(torch.int8), codes & (1 << bits) - 1)
    with pytest.raises(ValueError, match=r"whole bytes"):
        join_codes(codes[:, :3], bits)


def test_zero_points_of_any_row_count_fill_words() -> None:
    zero = torch.randint(-8, 8, (19, 5), dtype=torch.int8)
    words = zero_words(zero)
    assert (words.dtype, words.shape) == (torch.int32, (3, 5))
    assert torch.equal(zeros_of_words(words, 19), zero)


WRITTEN = [
    ("w4g128", Writer.COMPRESSED, {"weight_packed": torch.int32, "weight_scale": torch.float16,
                                   "weight_shape": torch.int64}),
    ("w4g32_asym", Writer.COMPRESSED, {"weight_packed": torch.int32, "weight_shape": torch.int64,
        "weight_scale": torch.float16, "weight_zero_point": torch.int32}),
    ("w4g128_asym", Writer.NIBBLES, {"weight": torch.int8, "weight_scale": torch.float16,
                                     "weight_offset": torch.int8}),
    ("fp8_block128", Writer.BLOCKS, {"weight": torch.float8_e4m3fn,
                                       "weight_scale_inv": torch.float32}),
    ("fp8_channel", Writer.COMPRESSED, {"weight": torch.float8_e4m3fn,
                                        "weight_scale": torch.float32}),
    ("w8_sym", Writer.COMPRESSED, {"weight": torch.int8, "weight_scale": torch.float32}),
    ("nvfp4", Writer.COMPRESSED, {"weight_packed": torch.uint8,
        "weight_scale": torch.float8_e4m3fn, "weight_global_scale": torch.float32}),
    ("nvfp4", Writer.MODELOPT, {"weight": torch.uint8, "weight_scale": torch.float8_e4m3fn,
                                "weight_scale_2": torch.float32}),
    ("mxfp4", Writer.COMPRESSED, {"weight_packed": torch.uint8, "weight_scale": torch.uint8}),
    ("w2", Writer.CODES, {"_codes": torch.uint8, "_scale": torch.float32}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "writer", "dtypes"), WRITTEN)
def test_each_writer_has_its_names_and_types(
    name: str, writer: Writer, dtypes: dict[str, torch.dtype]
) -> None:
    found = stored("m.x_proj", quantise(matrix(), formats.FORMATS[name]), writer)
    base = "m.x_proj" if writer is Writer.CODES else "m.x_proj."
    assert {key: tensor.dtype for key, tensor in found.items()} == {
        base + suffix: dtype for suffix, dtype in dtypes.items()
    }


def test_a_format_that_a_writer_lacks_is_refused() -> None:
    packed = quantise(matrix(), formats.W4G32)
    for writer in (Writer.CODES, Writer.BLOCKS, Writer.MODELOPT):
        with pytest.raises(ValueError, match=rf"{writer} doesn't store w4g32"):
            stored("m", packed, writer)


def test_the_two_writers_of_float4_give_reciprocal_scales() -> None:
    packed = quantise(matrix(), formats.NVFP4)
    multiplies = stored("m", packed, Writer.MODELOPT)["m.weight_scale_2"]
    divides = stored("m", packed, Writer.COMPRESSED)["m.weight_global_scale"]
    assert (multiplies.shape, divides.shape) == ((), (1,))
    torch.testing.assert_close(multiplies * divides, torch.ones(1))


def test_words_hold_codes_plus_eight_along_the_columns() -> None:
    values = torch.arange(-8, 8).float().repeat(1, 2)
    (word, *_), *_ = stored("m", quantise(values, formats.W4G32), Writer.COMPRESSED).values()
    assert [f"{w & 0xFFFFFFFF:08x}" for w in word.tolist()] == ["76543210", "fedcba98"] * 2


def test_values_that_cannot_be_packed_are_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        quantise(torch.tensor([[1.0, float("nan")]]), formats.W8_SYM)
    with pytest.raises(ValueError, match="100 columns aren't whole groups of 32"):
        quantise(torch.randn(4, 100), formats.W4G32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_fit_the_type_that_stores_them(dtype: torch.dtype) -> None:
    """Tiny values don't make a scale of 0; codes are those of the rounded scale."""
    form: WeightFormat = replace(formats.W4G32, scale_bytes=dtype.itemsize)
    packed = quantise(torch.randn(8, 64) * 1e-7, form, dtype)
    assert packed.scale.dtype == dtype
    assert (packed.scale > 0).all()
    values = torch.randn(8, 64)
    got = dequantised(quantise(values, form, dtype))
    groups = values.view(8, 2, 32).abs().amax(dim=2, keepdim=True)
    assert ((got - values).view(8, 2, 32).abs() <= groups * 0.5 / 7 * 1.06).all()


def test_a_table_keeps_its_values_to_three_bits() -> None:
    values = torch.randn(50, 16)
    codes, scale = quantise_table(values)
    assert scale.shape == (1,)
    largest = float(values.abs().max())
    error = (codes.float() * scale - values).abs()
    assert (error <= values.abs() * 2**-4 + largest * 2**-18).all()
